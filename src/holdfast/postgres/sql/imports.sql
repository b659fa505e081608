-- Taking what waits in the table of another library, in the transaction that publishes it: an event is in one of the two
-- places at any time. The tables' names are the user's, so each statement is composed by the server, which quotes them.
-- `due` names the rows first: what the library's own workers hold is left to them.

-- name: enter_peer_schema
-- Triggers of the other library look for its own types and functions where its table is.
SELECT pg_catalog.set_config('search_path', pg_catalog.format('pg_catalog, %s, pg_temp', found.relnamespace::regnamespace), true)
FROM pg_catalog.pg_class AS found WHERE found.oid OPERATOR(pg_catalog.=) :table::text::regclass;

-- name: is_key_column
-- Whether one column tells all rows of a table apart.
SELECT EXISTS (SELECT FROM pg_catalog.pg_index i
               JOIN pg_catalog.pg_attribute a ON a.attrelid = i.indrelid AND a.attnum = i.indkey[0]
               WHERE i.indrelid = :table::text::regclass AND i.indisunique AND i.indisvalid AND i.indpred IS NULL
                 AND i.indnkeyatts = 1 AND a.attnotnull AND a.attname = :id::text::name);

-- name: compose_pgqueuer
SELECT pg_catalog.format($take$
    WITH due AS MATERIALIZED (SELECT id FROM %1$s WHERE status = 'queued' ORDER BY id LIMIT $1 FOR UPDATE SKIP LOCKED)
    DELETE FROM %1$s AS job WHERE job.id = ANY (ARRAY(SELECT due.id FROM due)) RETURNING pg_catalog.to_jsonb(job)
$take$, :table::text::regclass) AS take,
pg_catalog.format($busy$SELECT pg_catalog.count(*) FROM %1$s WHERE status = 'picked'$busy$, :table::text::regclass) AS busy;

-- name: compose_procrastinate
-- Cancelled, not deleted: its other tables refer to jobs, and its history keeps them.
SELECT pg_catalog.format($take$
    WITH due AS MATERIALIZED (SELECT id FROM %1$s WHERE status = 'todo' ORDER BY id LIMIT $1 FOR UPDATE SKIP LOCKED)
    UPDATE %1$s AS job SET status = 'cancelled' WHERE job.id = ANY (ARRAY(SELECT due.id FROM due))
    RETURNING pg_catalog.to_jsonb(job)
$take$, :table::text::regclass) AS take,
pg_catalog.format($busy$SELECT pg_catalog.count(*) FROM %1$s WHERE status = 'doing'$busy$, :table::text::regclass) AS busy;

-- name: compose_faststream_outbox
SELECT pg_catalog.format($take$
    WITH due AS MATERIALIZED (
        SELECT id FROM %1$s WHERE acquired_token IS NULL ORDER BY id LIMIT $1 FOR UPDATE SKIP LOCKED)
    DELETE FROM %1$s AS job WHERE job.id = ANY (ARRAY(SELECT due.id FROM due)) RETURNING pg_catalog.to_jsonb(job)
$take$, :table::text::regclass) AS take,
pg_catalog.format(
    $busy$SELECT pg_catalog.count(*) FROM %1$s WHERE acquired_token IS NOT NULL$busy$, :table::text::regclass) AS busy;

-- name: compose_table
-- A table of one's own: rows whose column `done` is NULL are due, and get the time when they were taken.
SELECT pg_catalog.format($take$
    WITH due AS MATERIALIZED (
        SELECT %2$I AS id FROM %1$s WHERE %3$I IS NULL ORDER BY %2$I LIMIT $1 FOR UPDATE SKIP LOCKED)
    UPDATE %1$s AS event SET %3$I = pg_catalog.now() WHERE event.%2$I = ANY (ARRAY(SELECT due.id FROM due))
    RETURNING pg_catalog.to_jsonb(event)
$take$, :table::text::regclass, :id::text, :done::text) AS take, 'SELECT 0' AS busy;
