-- Sessions of other workers.

-- name: end_silent_sessions
-- A worker that is frozen, or cut off, keeps its transactions: their row locks, and the snapshot that keeps vacuum from
-- its work. While a session waits for its client it does nothing else. The lease of the worker as a whole tells it from
-- one that lives and has a slow handler. With the rights of the login: it ends sessions of its own only.
SELECT w.id AS worker, a.application_name, pg_terminate_backend(a.pid) AS ended
FROM core.silent_workers(:ended_before::timestamptz) AS w (id)
JOIN pg_stat_activity a ON a.application_name ~ ('^holdfast [a-z]+ ' || w.id || '$')
WHERE a.datname = current_database() AND a.usename = session_user
  AND a.wait_event_type = 'Client' AND a.xact_start IS NOT NULL;
