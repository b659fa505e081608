-- Ordering keys and fairness keys: functions/keyed.sql. Only the catalogue changes, and a table is added.

-- Whose turn it is, among events that need no order. Such a row has the ordering key '', which no producer can write, and so
-- it is not in outbox_lane. NULL: the event stands in its lane like most.
ALTER TABLE core.outbox ADD COLUMN fairness_key text;

-- The place among the events of its ordering key, which a dead letter keeps while it blocks the key.
ALTER TABLE core.archive ADD COLUMN seq bigint, ADD COLUMN fairness_key text;

-- Which row of an ordering key a handler has got last. While that row is open no other row of the key is claimed for the
-- handler; nor, with blocks, while it is a dead letter. One line for each key, and not a unique index on the outbox, which
-- a table in partitions cannot have. former_id and former_at are the line that the claim has seen: an id alone may come back after a
-- replay.
CREATE TABLE core.ordering_heads (
    handler_name  text        NOT NULL,
    ordering_key  text        NOT NULL,
    head_id       uuid        NOT NULL,
    former_id     uuid,
    former_at     timestamptz,
    blocks        boolean     NOT NULL,
    claimed_at    timestamptz NOT NULL DEFAULT clock_timestamp(),
    PRIMARY KEY (handler_name, ordering_key)
) WITH (fillfactor = 70, autovacuum_vacuum_scale_factor = 0.02);
