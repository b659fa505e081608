-- What one login can use up or make others believe.

-- The login whose reactions have named the handler and the type; NULL: a worker has subscribed.
ALTER TABLE core.subscriptions ADD COLUMN named_by text;

-- A split reads the subscriptions in force, however many lines are retired.
CREATE INDEX subscriptions_in_force ON core.subscriptions (handler_name, event_type) WHERE retired_at IS NULL;
