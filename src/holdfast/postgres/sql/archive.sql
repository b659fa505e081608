-- The archive of dead letters, for operators who look into it and workers that make sure that it is there.

-- name: missing_parts
-- Columns and indexes that the archive mode needs and a table lacks. Each table is looked at on its own, by the
-- catalogue, which a worker may read although it has no right to the tables. An index is recognised by its columns.
SELECT needed.relation, needed.kind, p.part
FROM (VALUES
    ('archive', 'column', '{
        id, original_id, queue, payload, headers, deliveries_count, created_at, failed_at, failure_reason, last_exception,
        event_type, event_version, occurred_at, source, target, content_class, channel, generation, domain_id,
        idempotency_key, trace_context, origin_id, priority, ordering_key, dedupe_key, expires_at, first_failed_at,
        error_signature, failure_history, deleted_at, disposed_at, traceback, fairness_key, seq}'::text[]),
    ('archive', 'index', '{"queue, failed_at"}'),
    ('archive', 'table', '{archive}'),
    ('outbox', 'table', '{outbox}'),
    ('outbox', 'column', '{
        id, payload, headers, attempts, created_at, last_error, status, lease_token, lease_expires_at, handler_name,
        event_type, event_version, occurred_at, source, target, content_class, channel, generation, domain_id,
        idempotency_key, trace_context, origin_id, priority, ordering_key, dedupe_key, expires_at, first_failed_at,
        failure_history, available_at, settled_at, deleted_at, disposed_at, traceback, fairness_key, seq}')
) AS needed (relation, kind, parts)
CROSS JOIN LATERAL unnest(needed.parts) AS p (part)
LEFT JOIN pg_catalog.pg_namespace n ON n.nspname = 'core'
LEFT JOIN pg_catalog.pg_class c ON c.relnamespace = n.oid AND c.relname = needed.relation
WHERE CASE
      WHEN needed.kind = 'table' THEN c.oid IS NULL
      WHEN c.oid IS NULL THEN false
      WHEN needed.kind = 'column' THEN NOT EXISTS (
          SELECT FROM pg_catalog.pg_attribute a
          WHERE a.attrelid = c.oid AND a.attname = p.part AND a.attnum > 0 AND NOT a.attisdropped)
      ELSE NOT EXISTS (
          SELECT FROM pg_catalog.pg_index i
          WHERE i.indrelid = c.oid AND i.indisvalid AND i.indpred IS NULL
            AND (SELECT string_agg(a.attname, ', ' ORDER BY k.n)
                 FROM unnest(i.indkey::int2[]) WITH ORDINALITY AS k (attnum, n)
                 JOIN pg_catalog.pg_attribute a ON a.attrelid = i.indrelid AND a.attnum = k.attnum) = p.part) END
ORDER BY 1, 2, 3;

-- name: list_archived
-- The newest first: by the primary key, which grows with the time of the failure; for one handler by its own index, in
-- the order of that. A page goes on after a number; where that row is gone by now, after the one that came before it.
WITH last AS MATERIALIZED (
    SELECT coalesce((SELECT a.failed_at FROM core.archive a WHERE a.id <= :before::bigint ORDER BY a.id DESC LIMIT 1),
                    '-infinity') AS failed_at),
found AS MATERIALIZED (
    (SELECT a.id FROM core.archive a
     WHERE :queue::text IS NULL AND NOT :discarded::boolean AND a.deleted_at IS NULL
       AND (:before::bigint IS NULL OR a.id < :before::bigint)
     ORDER BY a.id DESC LIMIT :most::int)
    UNION ALL
    (SELECT a.id FROM core.archive a
     WHERE :queue::text IS NULL AND :discarded::boolean AND a.deleted_at IS NOT NULL
       AND (:before::bigint IS NULL OR a.id < :before::bigint)
     ORDER BY a.id DESC LIMIT :most::int)
    UNION ALL
    (SELECT a.id FROM core.archive a
     WHERE a.queue = :queue::text AND (a.deleted_at IS NOT NULL) = :discarded::boolean
       AND (:before::bigint IS NULL OR (a.failed_at, a.id) < ((SELECT last.failed_at FROM last), :before::bigint))
     ORDER BY a.failed_at DESC, a.id DESC LIMIT :most::int))
SELECT a.id, a.original_id, coalesce(a.origin_id, a.original_id) AS event_id, a.event_type, a.source, a.target,
       a.queue, a.failure_reason, a.deliveries_count, a.error_signature,
       left(a.last_exception, :error_length::int) AS last_exception,
       core.raised_at(a.traceback) AS raised_at,
       a.created_at, a.failed_at, a.channel, a.generation, a.deleted_at
FROM found JOIN core.archive a ON a.id = found.id
ORDER BY CASE WHEN :queue::text IS NOT NULL THEN a.failed_at END DESC, a.id DESC;

-- name: list_archive_groups
-- As list_failure_groups: one look at the newest, up to a limit, then one more at the newest of each group.
WITH dead AS MATERIALIZED (
    SELECT a.id, a.queue, coalesce(a.error_signature, '') AS signature, a.first_failed_at, a.failed_at, a.failure_reason,
           a.event_type, a.generation
    FROM core.archive a WHERE a.deleted_at IS NULL ORDER BY a.id DESC LIMIT :most::int),
grouped AS (
    SELECT queue, signature, count(*)::int AS count, min(first_failed_at) AS first_seen, max(failed_at) AS last_seen,
           array_agg(DISTINCT failure_reason) AS reasons, array_agg(DISTINCT event_type) AS event_types,
           array_agg(DISTINCT generation) AS generations, max(id) AS newest
    FROM dead GROUP BY queue, signature)
SELECT g.queue AS handler_name, g.signature, g.count, g.first_seen, g.last_seen, g.reasons, g.event_types, g.generations,
       a.original_id AS sample_id, left(a.last_exception, :error_length::int) AS sample_error,
       core.raised_at(a.traceback) AS raised_at, n.note, n.noted_by, n.noted_at,
       (SELECT count(*)::int FROM dead) AS examined, count(*) OVER ()::int AS total
FROM grouped g
JOIN core.archive a ON a.id = g.newest
LEFT JOIN core.failure_notes n ON n.handler_name = g.queue AND n.error_signature = g.signature
ORDER BY g.count DESC, g.last_seen DESC
LIMIT :most_groups::int;

-- name: count_archived_by_handler
SELECT a.queue AS handler_name, count(*)::int AS count
FROM (SELECT a.queue FROM core.archive a
      WHERE a.deleted_at IS NULL AND (:queue::text IS NULL OR a.queue = :queue::text) LIMIT :most::int) a
GROUP BY a.queue;

-- name: select_archived
-- The archived rows of a handler, or of one of its groups, the newest first.
SELECT a.id FROM core.archive a
WHERE a.queue = :queue::text AND a.deleted_at IS NULL
  AND (:signature::text IS NULL OR coalesce(a.error_signature, '') = :signature::text)
ORDER BY a.failed_at DESC, a.id DESC LIMIT :most::int;

-- name: read_archived
SELECT a.id, a.original_id, coalesce(a.origin_id, a.original_id) AS event_id, a.event_type, a.source, a.target,
       a.queue, a.failure_reason, a.deliveries_count, a.error_signature, a.last_exception,
       core.raised_at(a.traceback) AS raised_at, a.traceback, a.created_at, a.failed_at, a.channel, a.generation, a.deleted_at,
       a.event_version, a.occurred_at, a.content_class, a.domain_id, a.idempotency_key, a.trace_context,
       a.first_failed_at, a.failure_history::text AS failure_history, a.payload::text AS payload, a.headers::text AS headers,
       ARRAY(SELECT o.id FROM core.archive o WHERE o.original_id = coalesce(a.origin_id, a.original_id) AND o.id <> a.id
             UNION
             SELECT o.id FROM core.archive o WHERE o.origin_id = coalesce(a.origin_id, a.original_id) AND o.id <> a.id
             ORDER BY 1 LIMIT 100) AS others
FROM core.archive a WHERE a.id = :id::bigint;

-- name: find_archived
-- The archived rows of events, named by their ids or by those of their deliveries. No number: there is none.
SELECT asked.id AS asked, found.id AS number
FROM unnest(:ids::uuid[]) AS asked (id)
LEFT JOIN LATERAL (
    SELECT a.id FROM core.archive a WHERE a.original_id = asked.id
    UNION
    SELECT a.id FROM core.archive a WHERE a.origin_id = asked.id) found ON true
ORDER BY found.id DESC LIMIT :most::int;
