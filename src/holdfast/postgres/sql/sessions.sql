-- Sessions of other workers, and sessions that are in the way.

-- name: end_silent_sessions
-- A worker that is frozen, or cut off, keeps its transactions: their row locks, and the snapshot that keeps vacuum from
-- its work. While a session waits for its client it does nothing else. The lease of the worker as a whole tells it from
-- one that lives and has a slow handler. With the rights of the login: it ends sessions of its own only.
SELECT w.id AS worker, a.application_name, pg_terminate_backend(a.pid) AS ended
FROM core.silent_workers(:ended_before::timestamptz) AS w (id)
JOIN pg_stat_activity a ON a.application_name ~ ('^holdfast [a-z]+ ' || w.id || '$')
WHERE a.datname = current_database() AND a.usename = session_user
  AND a.wait_event_type = 'Client' AND a.xact_start IS NOT NULL;

-- name: list_lock_waits
-- Sessions that wait for a lock, each with those that stand in front of all others and wait for none: what waits behind an
-- ALTER TABLE waits for the transaction that the ALTER TABLE waits for. 0 is the pid of a prepared transaction.
WITH RECURSIVE waiting AS MATERIALIZED (
    SELECT a.pid, a.application_name AS application,
           extract(epoch FROM clock_timestamp() - min(l.waitstart))::float8 AS waited
    FROM pg_catalog.pg_locks l JOIN pg_catalog.pg_stat_activity a ON a.pid = l.pid
    WHERE NOT l.granted AND a.datname = current_database()
      AND (a.pid = :pid::int OR a.application_name ~ :sessions::text)
    GROUP BY a.pid, a.application_name
    HAVING min(l.waitstart) < clock_timestamp() - :waited::interval
    ORDER BY min(l.waitstart) LIMIT 20),
chain AS (
    SELECT w.pid AS waiting, b.pid FROM waiting w CROSS JOIN LATERAL unnest(pg_catalog.pg_blocking_pids(w.pid)) AS b (pid)
    UNION
    SELECT c.waiting, b.pid FROM chain c CROSS JOIN LATERAL unnest(pg_catalog.pg_blocking_pids(c.pid)) AS b (pid))
SELECT w.pid, coalesce(nullif(w.application, ''), '?') AS application, w.waited, c.pid AS blocker_pid,
       coalesce(a.usename::text, '?') AS blocker_login,
       coalesce(nullif(a.application_name, ''), '?') AS blocker_application, coalesce(a.state, '?') AS blocker_state,
       extract(epoch FROM clock_timestamp() - a.xact_start)::float8 AS blocker_seconds
FROM waiting w
JOIN chain c ON c.waiting = w.pid AND cardinality(pg_catalog.pg_blocking_pids(c.pid)) = 0
LEFT JOIN pg_catalog.pg_stat_activity a ON a.pid = c.pid
ORDER BY w.waited DESC, w.pid, c.pid;

-- name: list_denied_functions
-- Of the functions that only workers call, those that this login may not call.
SELECT session_user AS login, n.nspname || '.' || p.proname AS name
FROM pg_catalog.pg_proc p JOIN pg_catalog.pg_namespace n ON n.oid = p.pronamespace
WHERE n.nspname = 'core' AND p.proname IN ('outbox_claim', 'outbox_extend', 'worker_alive', 'worker_beat')
  AND NOT pg_catalog.has_function_privilege(p.oid, 'EXECUTE')
ORDER BY 2;

-- name: list_carried_by_brokers
-- Of a worker's handlers, those that get their events from brokers, and from which.
SELECT i.handler_name, b.via
FROM unnest(:brokers::text[]) AS b (via) CROSS JOIN LATERAL core.broker_interests(b.via, :handlers::text[]) i
ORDER BY 1, 2;

-- name: count_claimers
-- About how many workers there are: sessions of the same login that claim here. Others' sessions have no name for it.
SELECT count(*) FROM pg_catalog.pg_stat_activity
WHERE datname = pg_catalog.current_database() AND application_name LIKE 'holdfast claim %';
