-- Searching the outbox by the newest ids first, which is the order of time: ids are UUIDs of version 7, and siblings begin with
-- the time of their event. There is no index for what people search by, because each would cost two entries for every event:
-- one when it is published, one when it is settled. So a page examines so many rows and no more, whatever it finds.

-- name: begin_search
-- By the order of an index, row by row, until there are enough: the other ways begin with all rows.
SELECT pg_catalog.set_config('enable_bitmapscan', 'off', true);

-- name: search_events
-- The filters stand outside of the limit: what does not match is examined, and counts.
SELECT o.id, coalesce(o.origin_id, o.id) AS event_id, o.event_type, o.source, o.target, o.route, o.handler_name,
       CASE WHEN o.deleted_at IS NOT NULL AND o.failed_at IS NOT NULL THEN 'discarded' ELSE o.status END AS state,
       o.attempts, left(o.last_error, :error_length::int) AS last_error, o.created_at, o.available_at, o.settled_at, o.channel,
       o.generation, o.domain_id
FROM (SELECT * FROM core.outbox o
      WHERE o.id < :before::uuid AND o.id >= :first::uuid
      ORDER BY o.id DESC
      LIMIT :most_examined::int) o
WHERE o.handler_name IS DISTINCT FROM '*'
  AND (:state::text IS NULL
       OR :state::text = CASE WHEN o.deleted_at IS NOT NULL AND o.failed_at IS NOT NULL THEN 'discarded' ELSE o.status END)
  AND (:event_type::text IS NULL OR o.event_type = :event_type::text)
  AND (:source::text IS NULL OR o.source = :source::text)
  AND (:generation::bigint IS NULL OR o.generation = :generation::bigint)
  AND (:handler::text IS NULL OR o.handler_name = :handler::text
       OR o.handler_name IS NULL AND EXISTS (
           SELECT FROM core.subscriptions s
           WHERE s.handler_name = :handler::text AND s.retired_at IS NULL AND o.event_type LIKE s.pattern
             AND (o.target IS NULL OR o.target = s.domain_context)))
  AND (:domain_id::uuid IS NULL OR o.domain_id = :domain_id::uuid)
  AND (:key::text IS NULL OR o.idempotency_key = :key::text OR o.dedupe_key = :key::text)
ORDER BY o.id DESC
LIMIT :most::int;

-- name: search_end
-- Where a page ends that has examined as many rows as it may; no line: it has examined all there are.
SELECT o.id FROM core.outbox o
WHERE o.id < :before::uuid AND o.id >= :first::uuid
ORDER BY o.id DESC
OFFSET :most_examined::int - 1 LIMIT 1;

-- name: search_few
-- Open, failed and discarded rows have indexes of their own. While there are not too many of them, all are looked at, and none
-- of those that are kept. `few` is how many there are; with as many as `most_few` the answer is not the whole one.
WITH few AS MATERIALIZED (
    (SELECT o.id FROM core.outbox o
     WHERE :state::text IN ('pending', 'in_flight') AND o.settled_at IS NULL AND o.ordering_key IS NULL LIMIT :most_few::int)
    UNION ALL
    (SELECT o.id FROM core.outbox o
     WHERE :state::text IN ('pending', 'in_flight') AND o.settled_at IS NULL AND o.ordering_key IS NOT NULL
     LIMIT :most_few::int)
    UNION ALL
    (SELECT o.id FROM core.outbox o
     WHERE :state::text = 'failed' AND o.failed_at IS NOT NULL AND o.deleted_at IS NULL LIMIT :most_few::int)
    UNION ALL
    (SELECT o.id FROM core.outbox o
     WHERE :state::text = 'discarded' AND o.deleted_at IS NOT NULL AND o.failed_at IS NOT NULL AND o.disposed_at IS NULL
     LIMIT :most_few::int))
SELECT f.few, o.*
FROM (SELECT count(*)::int AS few FROM few) f
LEFT JOIN LATERAL (
    SELECT o.id, coalesce(o.origin_id, o.id) AS event_id, o.event_type, o.source, o.target, o.route, o.handler_name,
           :state::text AS state, o.attempts, left(o.last_error, :error_length::int) AS last_error, o.created_at,
           o.available_at, o.settled_at, o.channel, o.generation, o.domain_id
    FROM few CROSS JOIN LATERAL (SELECT * FROM core.outbox o WHERE o.id = few.id LIMIT 1) o
    WHERE o.id < :before::uuid AND o.id >= :first::uuid
      AND (:state::text NOT IN ('pending', 'in_flight') OR o.status = :state::text)
      AND (:event_type::text IS NULL OR o.event_type = :event_type::text)
      AND (:source::text IS NULL OR o.source = :source::text)
      AND (:generation::bigint IS NULL OR o.generation = :generation::bigint)
      AND (:handler::text IS NULL OR o.handler_name = :handler::text
           OR o.handler_name IS NULL AND EXISTS (
               SELECT FROM core.subscriptions s
               WHERE s.handler_name = :handler::text AND s.retired_at IS NULL AND o.event_type LIKE s.pattern
                 AND (o.target IS NULL OR o.target = s.domain_context)))
      AND (:domain_id::uuid IS NULL OR o.domain_id = :domain_id::uuid)
      AND (:key::text IS NULL OR o.idempotency_key = :key::text OR o.dedupe_key = :key::text)
    ORDER BY o.id DESC
    LIMIT :most::int) o ON f.few < :most_few::int
ORDER BY o.id DESC;

-- name: search_ids
-- Deliveries of events that are named by any of their ids.
SELECT o.id, coalesce(o.origin_id, o.id) AS event_id, o.event_type, o.source, o.target, o.route, o.handler_name,
       CASE WHEN o.deleted_at IS NOT NULL AND o.failed_at IS NOT NULL THEN 'discarded' ELSE o.status END AS state,
       o.attempts, left(o.last_error, :error_length::int) AS last_error, o.created_at, o.available_at, o.settled_at, o.channel,
       o.generation, o.domain_id
FROM (SELECT DISTINCT e.id FROM unnest(:ids::uuid[]) AS asked (id) CROSS JOIN LATERAL core.event_rows(asked.id) AS e (id)) e
CROSS JOIN LATERAL (SELECT * FROM core.outbox o WHERE o.id = e.id LIMIT 1) o
WHERE o.handler_name IS DISTINCT FROM '*'
ORDER BY o.id DESC
LIMIT :most::int;

-- name: list_key_holders
-- Pending events that hold a producer's key, of whatever source: the sources are found one after the other, by the index.
WITH RECURSIVE sources AS (
    (SELECT k.source, 1 AS n FROM core.outbox_keys k ORDER BY k.source LIMIT 1)
    UNION ALL
    SELECT k.source, s.n + 1
    FROM sources s CROSS JOIN LATERAL (
        SELECT k.source FROM core.outbox_keys k WHERE k.source > s.source ORDER BY k.source LIMIT 1) k
    WHERE s.n < :most_sources::int)
SELECT k.event_id FROM sources s JOIN core.outbox_keys k ON k.source = s.source AND k.dedupe_key = :key::text;

-- name: read_first_handled
-- When an event with a key was first handled, if the inbox remembers: its id is not much older than that.
SELECT min(h.handled_at) AS handled_at
FROM (SELECT DISTINCT handler_name FROM core.subscriptions) s
CROSS JOIN LATERAL (
    SELECT h.handled_at FROM core.event_handled h
    WHERE h.handler_name = s.handler_name AND h.idempotency_key = :key::text LIMIT 1) h;

-- name: list_ancestors
-- From an event to what caused it, and so on. A producer may name anything as the cause, also what it causes itself.
WITH RECURSIVE chain AS (
    SELECT e.*, 0 AS distance FROM (
        SELECT coalesce(o.origin_id, o.id) AS event_id, o.event_type, o.source, o.occurred_at, o.created_at, o.status,
               o.headers ->> 'causation_id' AS cause
        FROM core.outbox o WHERE o.id = :id::uuid
        UNION ALL
        (SELECT coalesce(a.origin_id, a.original_id), a.event_type, a.source, a.occurred_at, a.created_at, 'archived',
                a.headers ->> 'causation_id'
         FROM core.archive a WHERE a.original_id = :id::uuid OR a.origin_id = :id::uuid ORDER BY a.id DESC LIMIT 1)
        LIMIT 1) e
    UNION ALL
    SELECT e.*, chain.distance + 1
    FROM chain
    CROSS JOIN LATERAL (SELECT CASE WHEN chain.cause ~ '^[0-9a-fA-F]{8}(-[0-9a-fA-F]{4}){3}-[0-9a-fA-F]{12}$'
                                    THEN chain.cause::uuid END AS id) c
    CROSS JOIN LATERAL (
        SELECT coalesce(o.origin_id, o.id), o.event_type, o.source, o.occurred_at, o.created_at, o.status,
               o.headers ->> 'causation_id'
        FROM core.outbox o WHERE o.id = c.id
        UNION ALL
        (SELECT coalesce(a.origin_id, a.original_id), a.event_type, a.source, a.occurred_at, a.created_at, 'archived',
                a.headers ->> 'causation_id'
         FROM core.archive a WHERE a.original_id = c.id OR a.origin_id = c.id ORDER BY a.id DESC LIMIT 1)
        LIMIT 1) e
    WHERE chain.distance < :most::int)
SELECT * FROM chain ORDER BY distance;

-- name: list_children
-- Events that name an event as their cause. They are made after it, while it is handled: the rows after it are examined.
SELECT o.id AS event_id, o.event_type, o.source, o.occurred_at, o.created_at, o.status, o.headers ->> 'causation_id' AS cause,
       1 AS distance
FROM (SELECT o.id, o.origin_id, o.event_type, o.source, o.occurred_at, o.created_at, o.status, o.headers
      FROM core.outbox o
      WHERE o.id > :after::uuid
      ORDER BY o.id
      LIMIT :most_examined::int) o
WHERE o.origin_id IS NULL AND o.headers ->> 'causation_id' = :cause::text
ORDER BY o.id
LIMIT :most::int;

-- name: children_end
SELECT o.id FROM core.outbox o WHERE o.id > :after::uuid ORDER BY o.id OFFSET :most_examined::int - 1 LIMIT 1;

-- name: list_failed_again
-- Rows of a plan that have failed after it replayed them, in its order, as they are now: what was replayed once more since then
-- may be delivered.
SELECT r.position, r.row_id AS id, r.replayed_at, o.event_id, o.event_type, o.handler_name, o.state, o.error_signature,
       left(o.last_error, :error_length::int) AS last_error, left(o.previous_error, :error_length::int) AS previous_error,
       o.failed_at
FROM (SELECT r.position, r.row_id, r.replayed_at FROM core.plan_rows r
      WHERE r.plan_id = :plan::bigint AND r.state = 'failed' AND r.position > :after::bigint
      ORDER BY r.position LIMIT :most::int) r
LEFT JOIN LATERAL (
    SELECT coalesce(o.origin_id, o.id) AS event_id, o.event_type, o.handler_name,
           CASE WHEN o.deleted_at IS NOT NULL AND o.failed_at IS NOT NULL THEN 'discarded' ELSE o.status END AS state,
           o.error_signature, o.last_error, o.failure_history -> -1 ->> 'last_error' AS previous_error, o.failed_at
    FROM core.outbox o WHERE o.id = r.row_id
    UNION ALL
    (SELECT coalesce(a.origin_id, a.original_id), a.event_type, a.queue, 'archived', a.error_signature, a.last_exception,
            a.failure_history -> -1 ->> 'last_error', a.failed_at
     FROM core.archive a WHERE a.original_id = r.row_id ORDER BY a.id DESC LIMIT 1)
    LIMIT 1) o ON true
ORDER BY r.position;

-- name: count_plan_outcomes
-- What became of the rows that a plan has replayed, in steps of when it replayed them; a step is a second at least. A plan
-- has 100,000 rows at most, all of which are read, as for its progress.
SELECT p.first_at + t.number * p.step AS start, p.step,
       count(*) FILTER (WHERE t.state = 'delivered')::int AS delivered,
       count(*) FILTER (WHERE t.state = 'failed')::int AS failed,
       count(*) FILTER (WHERE t.state = 'replayed')::int AS waiting
FROM (SELECT min(r.replayed_at) AS first_at,
             greatest(max(r.replayed_at) - min(r.replayed_at), interval '0') / :steps::int + interval '1 second' AS step
      FROM core.plan_rows r WHERE r.plan_id = :plan::bigint) p
CROSS JOIN LATERAL (
    SELECT r.state, floor(extract(epoch FROM r.replayed_at - p.first_at) / extract(epoch FROM p.step))::int AS number
    FROM core.plan_rows r WHERE r.plan_id = :plan::bigint AND r.replayed_at IS NOT NULL) t
GROUP BY 1, 2
ORDER BY 1;

-- name: read_time
SELECT now() AS now;

-- name: count_failures_over_time
-- Dead letters of each group, by steps of time.
SELECT o.handler_name, coalesce(o.error_signature, '') AS signature,
       floor(extract(epoch FROM o.failed_at - :since::timestamptz) / :step::float8)::int AS step, count(*)::int AS count
FROM core.failed_select(:filter::text::jsonb, :most_examined::int) AS s (id)
CROSS JOIN LATERAL (
    SELECT o.handler_name, o.error_signature, o.failed_at FROM core.outbox o
    WHERE o.id = s.id AND o.failed_at IS NOT NULL LIMIT 1) o
GROUP BY 1, 2, 3;

-- name: list_audit_of_event
-- What was done to any of an event's deliveries.
SELECT DISTINCT ON (a.id) a.id, a.at, a.actor, a.login, a.action, a.reason, (a.arguments - 'ids')::text AS arguments,
       a.counts::text AS counts, jsonb_array_length(a.arguments -> 'ids') AS rows, a.arguments -> 'ids' ->> 0 AS first_id
FROM (SELECT e.id FROM core.event_rows(:id::uuid) AS e (id) UNION SELECT :id::uuid
      UNION SELECT x.original_id FROM core.archive x WHERE x.origin_id = :id::uuid) e
CROSS JOIN LATERAL (
    SELECT * FROM core.audit a WHERE a.arguments -> 'ids' @> to_jsonb(e.id)
    ORDER BY a.id DESC LIMIT :most::int) a
ORDER BY a.id DESC
LIMIT :most::int;

-- name: list_requests
SELECT r.scope, r.key_hint, r.key_bytes, r.state, r.status_code, r.body_bytes, r.body_omitted, r.created_at, r.expires_at,
       r.examined, r.last_at, r.last_mark
FROM core.requests_read(:scope::text, :key::text, :since::timestamptz, :until::timestamptz, :state::text,
                        :before_at::timestamptz, :before_mark::text, :most::int, :most_examined::int) r;
