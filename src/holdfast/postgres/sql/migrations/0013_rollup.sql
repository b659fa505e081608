-- The roll-up: what has become of deliveries, by minute, handler and generation.

-- What claims and settles append, in their own transactions. No index and no update: sessions never wait for each other
-- here, and what a worker that was killed has settled is counted. Workers fold the lines into core.rollup.
CREATE TABLE core.rollup_journal (
    counted_at    timestamptz NOT NULL DEFAULT now(),
    generation    bigint      NOT NULL,
    n             int         NOT NULL,                        -- below zero: taken back
    outcome       text        NOT NULL,                        -- a column of core.rollup
    handler_name  text        NOT NULL
) WITH (autovacuum_vacuum_scale_factor = 0, autovacuum_vacuum_threshold = 2000, autovacuum_vacuum_insert_threshold = -1,
        vacuum_truncate = off);

-- What workers append every few seconds, of what they count by themselves; folded likewise.
CREATE TABLE core.rollup_reports (
    counted_at       timestamptz NOT NULL DEFAULT now(),
    generation       bigint      NOT NULL,
    handler_name     text        NOT NULL,
    lost_lease       bigint      NOT NULL,
    handler_buckets  bigint[]    NOT NULL,
    handler_seconds  float8      NOT NULL,
    outbox_buckets   bigint[]    NOT NULL,
    outbox_seconds   float8      NOT NULL
) WITH (autovacuum_vacuum_scale_factor = 0, autovacuum_vacuum_threshold = 2000, autovacuum_vacuum_insert_threshold = -1);

-- Whose turn it is to fold: the session's that has locked the row. Only functions of the schema can.
CREATE TABLE core.rollup_turn (one boolean PRIMARY KEY DEFAULT true CHECK (one));
INSERT INTO core.rollup_turn DEFAULT VALUES;

-- Periods begin at whole minutes and hours of UTC, whatever the time zone of a session.
CREATE TABLE core.rollup (
    period_start     timestamptz NOT NULL,
    hourly           boolean     NOT NULL DEFAULT false,       -- of an hour, and not of a minute
    handler_name     text        NOT NULL,
    generation       bigint      NOT NULL,
    writer           int         NOT NULL DEFAULT 0,           -- another than 0: folded out of turn, by a session of this number
    begun            bigint      NOT NULL DEFAULT 0,           -- deliveries that were claimed for the first time
    delivered        bigint      NOT NULL DEFAULT 0,
    duplicate        bigint      NOT NULL DEFAULT 0,
    retried          bigint      NOT NULL DEFAULT 0,
    snoozed          bigint      NOT NULL DEFAULT 0,
    failed           bigint      NOT NULL DEFAULT 0,
    archived         bigint      NOT NULL DEFAULT 0,           -- of the failed
    expired          bigint      NOT NULL DEFAULT 0,
    cancelled        bigint      NOT NULL DEFAULT 0,
    released         bigint      NOT NULL DEFAULT 0,
    -- What workers report every few seconds; a worker that is killed does not report its last ones.
    lost_lease       bigint      NOT NULL DEFAULT 0,
    handler_buckets  bigint[]    NOT NULL DEFAULT '{}',        -- of the bounds in handler_tally.py; empty: none
    handler_seconds  float8      NOT NULL DEFAULT 0,
    outbox_buckets   bigint[]    NOT NULL DEFAULT '{}',
    outbox_seconds   float8      NOT NULL DEFAULT 0,
    PRIMARY KEY (period_start, handler_name, generation, hourly, writer)
) WITH (fillfactor = 70, autovacuum_vacuum_scale_factor = 0.05);
-- A handler's series.
CREATE INDEX rollup_handler ON core.rollup (handler_name, period_start);
-- What becomes hours next.
CREATE INDEX rollup_minutes ON core.rollup (period_start) WHERE NOT hourly;
-- A week's failures, without reading a week.
CREATE INDEX rollup_failures ON core.rollup (period_start) INCLUDE (handler_name, failed) WHERE failed > 0;

ALTER TABLE core.retention_policies
    DROP CONSTRAINT retention_policies_entity_check,
    ADD CONSTRAINT retention_policies_entity_check CHECK (
        entity IN ('outbox_row', 'failed_row', 'archive_row', 'event_handled', 'idempotency_record', 'rollup_row')),
    ADD CONSTRAINT retention_policies_rollup CHECK (entity <> 'rollup_row'
                                                    OR (content_class = '*' AND disposal = 'HARD_DELETE'));
INSERT INTO core.retention_policies VALUES ('rollup_row', '*', 14, 0, 'HARD_DELETE');

-- Which tells what a settle without an inbox row was. In the transaction that makes the ones with the argument.
DROP FUNCTION IF EXISTS core.outbox_deliver(uuid[], uuid[], text[], text[], boolean);
DROP FUNCTION IF EXISTS core.outbox_deliver_and_delete(uuid[], uuid[], text[], text[], boolean);
-- And whose deliveries were released.
DROP FUNCTION IF EXISTS core.outbox_release(uuid[], uuid[], interval[]);

-- Both as one: what is counted, folded or not; of the journal's first pages, so that a large one costs no more to read.
CREATE VIEW core.rollup_counts AS
    SELECT period_start, hourly, handler_name, generation, begun, delivered, duplicate, retried, snoozed, failed, archived,
           expired, cancelled, released, lost_lease, handler_buckets, handler_seconds, outbox_buckets, outbox_seconds
    FROM core.rollup
    UNION ALL
    SELECT date_trunc('minute', counted_at, 'UTC'), false, handler_name, generation,
           CASE outcome WHEN 'begun' THEN n ELSE 0 END, CASE outcome WHEN 'delivered' THEN n ELSE 0 END,
           CASE outcome WHEN 'duplicate' THEN n ELSE 0 END, CASE outcome WHEN 'retried' THEN n ELSE 0 END,
           CASE outcome WHEN 'snoozed' THEN n ELSE 0 END, CASE WHEN outcome IN ('failed', 'archived') THEN n ELSE 0 END,
           CASE outcome WHEN 'archived' THEN n ELSE 0 END, CASE outcome WHEN 'expired' THEN n ELSE 0 END,
           CASE outcome WHEN 'cancelled' THEN n ELSE 0 END, CASE outcome WHEN 'released' THEN n ELSE 0 END,
           0, '{}', 0, '{}', 0
    FROM (SELECT * FROM core.rollup_journal j WHERE j.ctid < '(8192,0)'::tid LIMIT 50000) j;
