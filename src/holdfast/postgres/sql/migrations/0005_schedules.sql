-- Schedules: events that time itself publishes (IDM-4).
--
-- Code declares them, workers write them down when they start, and whoever comes first fires a slot. The slots are worked
-- out by workers, because only they know calendars; which of them are due is decided by this database's clock. Every
-- change of a row raises its version, and a slot is fired only by a worker that names the version it has seen: so each
-- slot is fired once, whoever dies when.
CREATE TABLE core.schedules (
    name           text        PRIMARY KEY,
    -- when
    cron           text,
    timezone       text,
    every          interval,
    missed         text        NOT NULL,
    -- what
    event_type     text        NOT NULL,
    source         text        NOT NULL,
    target         text,
    priority       smallint    NOT NULL,
    payload        jsonb       NOT NULL,
    -- by whom it was declared, and whether it still is
    generation     bigint      NOT NULL CHECK (generation >= 0),
    declared_at    timestamptz NOT NULL DEFAULT clock_timestamp(),
    attended_at    timestamptz NOT NULL DEFAULT clock_timestamp(),  -- when a worker that declares it last looked
    -- how far it is
    version        bigint      NOT NULL DEFAULT 1,
    owed_after     timestamptz NOT NULL DEFAULT clock_timestamp(),  -- slots up to here are dealt with
    next_slot      timestamptz,                                     -- NULL: to be worked out by the next worker that looks
    last_slot      timestamptz,                                     -- that was fired
    last_fired_at  timestamptz,
    fired          bigint      NOT NULL DEFAULT 0,
    paused_at      timestamptz,
    paused_by      text,
    CONSTRAINT schedules_name CHECK (name ~ '^[a-z][a-z0-9_]*([.][a-z][a-z0-9_]*)+$' AND octet_length(name) <= 200),
    CONSTRAINT schedules_timing CHECK ((cron IS NULL) <> (every IS NULL) AND (cron IS NULL) = (timezone IS NULL)
                                       AND every BETWEEN '1 second' AND '366 days'
                                       AND octet_length(cron) <= 1000 AND octet_length(timezone) <= 100),
    CONSTRAINT schedules_missed CHECK (missed IN ('latest', 'all', 'skip')),
    CONSTRAINT schedules_event CHECK (jsonb_typeof(payload) = 'object' AND octet_length(payload::text) <= 524288
                                      AND priority BETWEEN 0 AND 2),
    CONSTRAINT schedules_slots CHECK (next_slot > owed_after AND last_slot <= owed_after),
    CONSTRAINT schedules_paused CHECK ((paused_at IS NULL) = (paused_by IS NULL))
);
