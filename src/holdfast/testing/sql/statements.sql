-- What holdfast.testing reads, and what its faults do, in a database that was made for tests.

-- name: published
-- Every event that was published, in the order of publishing: rows that were split from another are deliveries of it, and
-- one that was archived has left the outbox.
SELECT o.id AS event_id, o.event_type, o.event_version, o.occurred_at, o.source, o.target, o.domain_id,
       o.payload::text AS payload, o.idempotency_key, o.trace_context, o.headers::text AS headers, o.available_at,
       o.created_at, o.seq AS place
FROM core.outbox o WHERE o.origin_id IS NULL
UNION ALL
SELECT a.original_id, a.event_type, a.event_version, a.occurred_at, a.source, a.target, a.domain_id,
       a.payload::text, a.idempotency_key, a.trace_context, a.headers::text, NULL, a.created_at, 0
FROM core.archive a WHERE a.origin_id IS NULL
ORDER BY created_at, place;

-- name: deliveries
-- What became of each event at each handler. Without a handler's name, it is not known yet who wants the event.
SELECT coalesce(o.origin_id, o.id) AS event_id, o.id AS delivery_id, o.handler_name, o.status, o.attempts, o.failure_reason,
       o.last_error, o.available_at, false AS archived, o.seq AS place
FROM core.outbox o WHERE o.handler_name IS DISTINCT FROM '*'
UNION ALL
SELECT coalesce(a.origin_id, a.original_id), a.original_id, a.queue, 'failed', a.deliveries_count, a.failure_reason,
       a.last_exception, NULL, true, a.id
FROM core.archive a
ORDER BY place;

-- name: handled
-- The inbox, with the events whose keys it has. Reactions in the producer's process are in it as well.
SELECT h.handler_name, h.idempotency_key, h.source FROM core.event_handled h ORDER BY h.handled_at, h.handler_name;

-- name: due
-- The first delivery of each lane that was not due when the last look for deliveries began.
SELECT DISTINCT ON (o.handler_name, o.event_type, o.target)
       o.id, o.handler_name, o.event_type, o.target, o.available_at
FROM core.outbox o
WHERE o.settled_at IS NULL AND o.status = 'pending' AND o.available_at > :since::timestamptz
  AND o.available_at < 'infinity'
ORDER BY o.handler_name, o.event_type, o.target, o.available_at;

-- name: left_due
-- The first delivery of each lane that was due when the last look for deliveries began, and is pending all the same.
SELECT DISTINCT ON (o.handler_name, o.event_type, o.target)
       o.id, o.handler_name, o.event_type, o.target
FROM core.outbox o
WHERE o.settled_at IS NULL AND o.status = 'pending' AND o.available_at <= :since::timestamptz
ORDER BY o.handler_name, o.event_type, o.target, o.available_at;

-- name: next_slot
SELECT min(s.next_slot) FROM core.schedules s WHERE s.name = ANY (:names::text[]) AND s.paused_at IS NULL;

-- name: request
-- What a request with an idempotency key left.
SELECT r.scope, r.status, r.response_status_code, r.response_headers::text AS response_headers, r.response_body,
       ARRAY(SELECT p.id FROM holdfast_testing.published p WHERE p.transaction_id = r.transaction_id) AS events
FROM core.idempotency_records r WHERE r.key = :key::text AND (:scope::text IS NULL OR r.scope = :scope::text)
ORDER BY r.scope;

-- name: requests
SELECT r.scope, r.key, r.response_status_code FROM core.idempotency_records r ORDER BY r.created_at LIMIT 20;

-- name: expire_leases
-- As if the workers that hold them had been silent for too long. A row that a transactional handler has locked is its own
-- until it ends its transaction, however long ago its lease expired.
UPDATE core.outbox o SET lease_expires_at = clock_timestamp() - interval '1 second'
WHERE o.id IN (
    SELECT l.id FROM core.outbox l
    WHERE l.status = 'in_flight' AND (:handler::text IS NULL OR l.handler_name IS NULL OR l.handler_name = :handler::text)
    FOR UPDATE SKIP LOCKED)
RETURNING o.id;

-- name: lose_settlement
-- Puts a delivery in flight under the lease of nobody, so that what its worker settles matches nothing. It stays in flight,
-- and keeps its ordering key back, until `redeliver`.
UPDATE core.outbox o SET lease_token = gen_random_uuid()
WHERE o.id IN (
    SELECT l.id FROM core.outbox l
    WHERE l.status = 'in_flight' AND (l.handler_name IS NULL OR l.handler_name = :handler::text)
      AND coalesce(l.origin_id, l.id) = :event_id::uuid)
RETURNING o.id;

-- name: redeliver
-- Opens a delivery again whose settlement was lost. That of a transactional handler has committed with what the handler
-- wrote, the inbox row among it; that of a plain one has not happened, and its lease expires.
WITH opened AS (
    UPDATE core.outbox o
    SET status = 'pending', settled_at = NULL, delivered_at = NULL, attempts = 0, available_at = now()
    WHERE o.handler_name = :handler::text AND o.status = 'delivered'
      AND coalesce(o.origin_id, o.id) = :event_id::uuid
    RETURNING o.id),
expired AS (
    UPDATE core.outbox o SET attempts = 0, lease_expires_at = clock_timestamp() - interval '1 second'
    WHERE o.status = 'in_flight' AND (o.handler_name IS NULL OR o.handler_name = :handler::text)
      AND coalesce(o.origin_id, o.id) = :event_id::uuid
    RETURNING o.id)
SELECT (SELECT count(*) FROM opened) + (SELECT count(*) FROM expired);

-- name: events_before
SELECT count(*) FROM core.outbox o WHERE o.origin_id IS NULL AND o.created_at <= :at::timestamptz;

-- name: sessions
-- The sessions of a worker that are still there: the server notices a moment later that its client is gone.
SELECT count(*) FROM pg_stat_activity a
WHERE a.datname = current_database() AND a.application_name LIKE :owner::text;

-- name: locked
-- The deliveries of a killed worker that a session still has locked: its transaction may be on a connection of the
-- application's, under a name of its own, and the next worker would pass over them.
WITH free AS MATERIALIZED (
    SELECT o.id FROM core.outbox o WHERE o.status = 'in_flight' FOR UPDATE SKIP LOCKED)
SELECT count(*) FROM core.outbox o WHERE o.status = 'in_flight' AND o.id NOT IN (SELECT f.id FROM free f);

-- name: blockers
-- The sessions that keep a reset from changing rows.
SELECT a.pid, a.application_name, coalesce(a.state, '') AS state, left(coalesce(a.query, ''), 200) AS query
FROM pg_stat_activity a
WHERE a.datname = current_database() AND a.pid <> pg_backend_pid() AND a.backend_type = 'client backend'
  AND a.xact_start IS NOT NULL
ORDER BY a.xact_start;

-- name: now
SELECT clock_timestamp();

-- name: freeze
UPDATE holdfast_testing.clock SET frozen = coalesce(:at::timestamptz, clock_timestamp()), shift = '0' RETURNING frozen;

-- name: move
-- To a moment that is not before the present one. A frozen clock stays frozen.
UPDATE holdfast_testing.clock
SET frozen = CASE WHEN frozen IS NOT NULL THEN greatest(frozen, :to::timestamptz) END,
    shift = CASE WHEN frozen IS NOT NULL THEN shift
                 ELSE greatest(shift, :to::timestamptz - holdfast_clock_timestamp()) END
RETURNING clock_timestamp();

-- name: reset
SELECT holdfast_testing.reset();
