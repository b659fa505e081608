-- What only the metrics read: dead letters by handler, and the state of the server as far as
-- it concerns the outbox. Every count ends at a limit, or is an estimate that the server keeps.

-- name: count_dead_letters
-- Of the newest dead letters: to look at all of them would cost more the longer they are left alone. The process of a
-- producer names the handlers whose failures it records: those come first that subscribe to something or that a living
-- worker has, then the largest, and the others have one line together.
WITH known AS MATERIALIZED (
    SELECT s.handler_name FROM core.subscriptions s WHERE s.retired_at IS NULL
    UNION SELECT h.handler_name FROM core.workers w CROSS JOIN unnest(w.handlers) AS h (handler_name)
    WHERE w.stopped_at IS NULL AND core.is_living(w.heartbeat_at)),
counted AS MATERIALIZED (
    SELECT o.channel, o.generation, o.handler_name AS handler, count(*)::int AS failed,
           o.handler_name IN (SELECT known.handler_name FROM known) AS known
    FROM (SELECT channel, generation, handler_name FROM core.outbox
          WHERE failed_at IS NOT NULL AND deleted_at IS NULL
          ORDER BY failed_at DESC LIMIT :most::int) o
    GROUP BY o.channel, o.generation, o.handler_name),
ranked AS (
    SELECT counted.*,
           row_number() OVER (ORDER BY known DESC, failed DESC, channel, generation, handler) <= :most_handlers::int AS shown
    FROM counted)
SELECT channel, generation, handler, failed FROM ranked WHERE shown
UNION ALL
SELECT NULL, NULL, NULL, sum(failed)::int FROM ranked WHERE NOT shown HAVING count(*) > 0;

-- name: read_tables
-- Rows and pages as of the last vacuum or analyze, dead rows as the server counts them: no table is opened, so none
-- that is locked is waited for.
-- Partitions of the outbox count as the outbox.
SELECT coalesce(p.relname, c.relname)::text AS name, sum(greatest(c.reltuples, 0))::float8 AS rows,
       sum(coalesce(pg_stat_get_dead_tuples(c.oid), 0))::float8 AS dead_rows,
       sum(current_setting('block_size')::bigint
        * (c.relpages + coalesce((SELECT t.relpages FROM pg_class t WHERE t.oid = c.reltoastrelid), 0)
           + coalesce((SELECT sum(i.relpages) FROM pg_index x JOIN pg_class i ON i.oid = x.indexrelid
                       WHERE x.indrelid = c.oid), 0)))::float8 AS bytes
FROM pg_class c
JOIN pg_namespace n ON n.oid = c.relnamespace
LEFT JOIN pg_inherits h ON h.inhrelid = c.oid
LEFT JOIN pg_class p ON p.oid = h.inhparent
WHERE n.nspname = 'core' AND c.relkind = 'r'
GROUP BY 1
ORDER BY 1
LIMIT 50;

-- name: read_server
-- Connections of clients, and what is left of the limit for those who are no superusers. The horizon: how old the oldest
-- snapshot is that keeps dead rows from being removed. Of the sessions of others, only members of pg_read_all_stats see
-- how old they are.
SELECT (SELECT count(*) FROM pg_stat_activity a WHERE a.usesysid IS NOT NULL AND a.datid IS NOT NULL)::int AS connections,
       (current_setting('max_connections')::int - current_setting('superuser_reserved_connections')::int
        - coalesce(current_setting('reserved_connections', true)::int, 0)) AS connection_limit,
       CASE WHEN pg_has_role('pg_read_all_stats', 'USAGE') THEN greatest(0, (
           SELECT max(extract(epoch FROM clock_timestamp() - a.xact_start)) FROM pg_stat_activity a
           WHERE a.pid <> pg_backend_pid() AND a.datname = current_database()
             AND a.backend_type IS DISTINCT FROM 'autovacuum worker'
             AND (a.backend_xmin IS NOT NULL OR a.backend_xid IS NOT NULL)), (
           SELECT max(extract(epoch FROM clock_timestamp() - p.prepared)) FROM pg_prepared_xacts p
           WHERE p.database = current_database()))::float8 END AS horizon_seconds,
       CASE WHEN pg_has_role('pg_read_all_stats', 'USAGE') THEN greatest(0, (
           SELECT max(greatest(age(a.backend_xmin), age(a.backend_xid))) FROM pg_stat_activity a
           WHERE a.pid <> pg_backend_pid() AND a.datname = current_database()
             AND a.backend_type IS DISTINCT FROM 'autovacuum worker'), (
           SELECT max(age(p.transaction)) FROM pg_prepared_xacts p WHERE p.database = current_database()), (
           SELECT max(greatest(age(s.xmin), age(s.catalog_xmin))) FROM pg_replication_slots s), (
           SELECT max(age(r.backend_xmin)) FROM pg_stat_replication r)) END AS horizon_transactions;
