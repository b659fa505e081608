-- What one login can use up or make others believe.

-- The login whose reactions have named the handler and the type; NULL: a worker has subscribed.
ALTER TABLE core.subscriptions ADD COLUMN named_by text;

-- A split reads the subscriptions in force, however many lines are retired.
CREATE INDEX subscriptions_in_force ON core.subscriptions (handler_name, event_type) WHERE retired_at IS NULL;

-- One row: the latest time that a worker's heartbeat has found here, and the last time that it had jumped. A step that a
-- worker tells of is believed if this shows it.
CREATE TABLE core.clock (
    one        boolean     PRIMARY KEY DEFAULT true CHECK (one),
    latest     timestamptz NOT NULL DEFAULT clock_timestamp(),
    jump       interval    NOT NULL DEFAULT '0',
    jumped_at  timestamptz NOT NULL DEFAULT '-infinity'
);
INSERT INTO core.clock DEFAULT VALUES;
