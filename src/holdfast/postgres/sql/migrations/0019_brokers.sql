-- Handlers whose events a broker carries: functions/brokers.sql and functions/relay.sql. Only a small table changes.

ALTER TABLE core.subscriptions
    -- What carries the handler's events to it: outbox, or the name of a broker, to which a relay sends them.
    ADD COLUMN via text NOT NULL DEFAULT 'outbox' CHECK (via ~ '^[a-z][a-z0-9_]{0,29}$'),
    -- Since when; NULL: from the first day on.
    ADD COLUMN via_since timestamptz,
    -- The operator who has decided it; NULL: nobody has, and a worker that is started with a broker may.
    ADD COLUMN via_by text,
    -- The broker that carried them before, from which the last ones are still taken; NULL: none, or nothing is left there.
    ADD COLUMN draining text;

-- Under whose name the event waits in the outbox: the handler's, or that of the relay to the broker.
ALTER TABLE core.subscriptions
    ADD COLUMN owed_to text NOT NULL
    GENERATED ALWAYS AS (CASE via WHEN 'outbox' THEN handler_name ELSE 'relay.' || via END) STORED;
