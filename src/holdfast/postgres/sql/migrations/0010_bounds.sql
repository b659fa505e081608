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

-- A channel is a name that is shown on a line, like the others. Rows that are there keep theirs.
CREATE OR REPLACE TRIGGER outbox_fill BEFORE INSERT ON core.outbox FOR EACH ROW
    WHEN (NEW.idempotency_key IS NULL
          OR jsonb_typeof(NEW.payload) IS DISTINCT FROM 'object'
          OR NEW.event_type !~ '^[^/*[:space:][:cntrl:]]+$' OR char_length(NEW.event_type) > 200
          OR NEW.source !~ '^[^/*[:space:][:cntrl:]]+$' OR char_length(NEW.source) > 200
          OR NEW.target !~ '^[^/*[:space:][:cntrl:]]+$' OR char_length(NEW.target) > 200
          OR NEW.channel ~ '[[:cntrl:]]'
          OR octet_length(NEW.payload::text) > 524288
          OR jsonb_typeof(NEW.headers) <> 'object' OR octet_length(NEW.headers::text) > 65536)
    EXECUTE FUNCTION core.outbox_fill();
