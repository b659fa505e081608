-- What operators read. Reads begin with begin_read, end at a limit and never count settled rows. Changes are the functions
-- in functions/, called by their names after begin_action; they write the audit in the same transaction.

-- name: begin_action
SELECT pg_catalog.set_config('search_path', 'pg_catalog, pg_temp', true),
       pg_catalog.set_config('statement_timeout', '60s', true),
       pg_catalog.set_config('lock_timeout', '5s', true), pg_catalog.set_config('jit', 'off', true);

-- name: note_dry_run
-- For plan_create.
SELECT pg_catalog.set_config('holdfast.dry_run', 'on', true);

-- name: note_selection
-- For audit_append.
SELECT pg_catalog.set_config('holdfast.selection', :selection::text, true);

-- name: list_failed
SELECT f.id, coalesce(f.origin_id, f.id) AS event_id, f.event_type, f.event_version, f.source, f.target, f.handler_name,
       f.failure_reason, f.attempts, f.error_signature, left(f.last_error, :error_length::int) AS last_error,
       core.raised_at(f.traceback) AS raised_at,
       f.first_failed_at, f.failed_at, f.deleted_at AS discarded_at, f.occurred_at, f.channel, f.generation, jsonb_array_length(f.failure_history) AS cycles,
       CASE WHEN :payload::boolean THEN f.payload::text END AS payload,
       CASE WHEN :payload::boolean THEN f.headers::text END AS headers
FROM core.failed_select(:filter::text::jsonb, :most::int, :before_at::timestamptz, :before_id::uuid) AS s (id)
CROSS JOIN LATERAL (SELECT * FROM core.outbox f WHERE f.id = s.id AND f.failed_at IS NOT NULL LIMIT 1) f
ORDER BY f.failed_at DESC, f.id DESC;

-- name: select_failed
SELECT s.id FROM core.failed_select(:filter::text::jsonb, :most::int) AS s (id);

-- name: count_discarded
-- Dead letters that can be restored: what failed, was discarded, and is not disposed of.
SELECT count(*) FROM (
    SELECT FROM core.outbox WHERE deleted_at IS NOT NULL AND failed_at IS NOT NULL AND disposed_at IS NULL
    LIMIT :most::int) o;

-- name: list_failure_groups
-- One look at each dead letter, up to a limit; then one more at the newest of each group, for its error.
WITH dead AS MATERIALIZED (
    SELECT f.*
    FROM core.failed_select(:filter::text::jsonb, :most::int) AS s (id)
    CROSS JOIN LATERAL (
        SELECT o.id, o.handler_name, coalesce(o.error_signature, '') AS signature, o.first_failed_at, o.failed_at,
               o.failure_reason, o.event_type, o.generation
        FROM core.outbox o WHERE o.id = s.id AND o.failed_at IS NOT NULL LIMIT 1) f),
grouped AS (
    SELECT handler_name, signature, count(*)::int AS count, min(first_failed_at) AS first_seen, max(failed_at) AS last_seen,
           array_agg(DISTINCT failure_reason) AS reasons, array_agg(DISTINCT event_type) AS event_types,
           array_agg(DISTINCT generation) AS generations, (array_agg(id ORDER BY failed_at DESC))[1] AS sample_id
    FROM dead GROUP BY handler_name, signature)
SELECT g.handler_name, g.signature, g.count, g.first_seen, g.last_seen, g.reasons, g.event_types, g.generations,
       g.sample_id, left(o.last_error, :error_length::int) AS sample_error,
       core.raised_at(o.traceback) AS raised_at, n.note, n.noted_by, n.noted_at,
       (SELECT count(*)::int FROM dead) AS examined, count(*) OVER ()::int AS total
FROM grouped g
LEFT JOIN LATERAL (SELECT o.last_error, o.traceback FROM core.outbox o WHERE o.id = g.sample_id LIMIT 1) o ON true
LEFT JOIN core.failure_notes n ON n.handler_name = g.handler_name AND n.error_signature = g.signature
ORDER BY g.count DESC, g.last_seen DESC
LIMIT :most_groups::int;

-- name: count_failed_by_handler
SELECT f.handler_name, f.generation, count(*)::int AS count
FROM (SELECT o.handler_name, o.generation FROM core.outbox o WHERE o.failed_at IS NOT NULL AND o.deleted_at IS NULL
      ORDER BY o.failed_at DESC LIMIT :most::int) f
GROUP BY f.handler_name, f.generation;

-- name: resolve_rows
-- The deliveries that ids stand for, and their states. No line: there is no such event, or its deliveries are gone.
SELECT d.asked, d.id AS row_id, d.archive_id, d.state
FROM core.deliveries_of(:ids::uuid[]) d ORDER BY d.handler_name, d.id;

-- name: read_trace_contexts
SELECT o.trace_context FROM core.outbox o WHERE o.id = ANY (:ids::uuid[]) AND o.trace_context IS NOT NULL
UNION
SELECT a.trace_context FROM core.archive a
WHERE (a.id = ANY (:numbers::bigint[]) OR a.original_id = ANY (:ids::uuid[])) AND a.trace_context IS NOT NULL
LIMIT :most::int;

-- name: read_event_rows
SELECT o.id, o.origin_id, o.event_type, o.event_version, o.occurred_at, o.source, o.target, o.content_class, o.domain_id,
       o.idempotency_key, o.dedupe_key, o.trace_context, o.handler_name, o.route, o.status, o.attempts, o.last_error,
       CASE WHEN o.handler_name = '*' AND o.status = 'delivered' THEN 'fanned_out' ELSE o.status END AS state,
       o.error_signature, o.traceback,
       o.failure_reason, o.first_failed_at, o.failed_at, o.failure_history::text AS failure_history, o.created_at,
       o.available_at, o.expires_at, o.delivered_at, o.deleted_at, o.lease_expires_at, o.channel, o.generation, o.priority,
       nullif(o.ordering_key, '') AS ordering_key, o.fairness_key, NULL::bigint AS archive_id,
       (SELECT format('%s (%s:%s)', w.name, w.host, w.pid) FROM core.workers w
        WHERE o.status = 'in_flight' AND w.id = o.claimed_by) AS worker,
       -- A worker's token is a UUID of version 7, which begins with a time.
       CASE WHEN substr(o.lease_token::text, 15, 1) = '7' THEN to_timestamp(
           ('x' || left(replace(o.lease_token::text, '-', ''), 12))::bit(48)::bigint / 1000.0) END AS claimed_at,
       CASE WHEN o.handler_name IS NULL THEN ARRAY(
           SELECT DISTINCT s.owed_to FROM core.subscriptions s
           WHERE s.retired_at IS NULL AND o.event_type LIKE s.pattern
             AND (o.target IS NULL OR o.target = s.domain_context)
           ORDER BY s.owed_to) ELSE '{}' END AS owed_to,
       CASE WHEN :payload::boolean THEN o.payload::text END AS payload,
       CASE WHEN :payload::boolean THEN o.headers::text END AS headers
FROM core.event_rows(:id::uuid) AS s (id)
CROSS JOIN LATERAL (SELECT * FROM core.outbox o WHERE o.id = s.id LIMIT 1) o
ORDER BY o.origin_id NULLS FIRST, o.handler_name;

-- name: read_archived_rows
-- The deliveries of an event that are in the archive, named by its own id or by that of one of them.
WITH event AS MATERIALIZED (
    SELECT coalesce((SELECT o.origin_id FROM core.outbox o WHERE o.id = :id::uuid),
                    (SELECT a.origin_id FROM core.archive a WHERE a.original_id = :id::uuid ORDER BY a.id DESC LIMIT 1),
                    :id::uuid) AS id)
SELECT a.id AS archive_id, a.original_id AS id, a.origin_id, a.event_type, a.event_version, a.occurred_at, a.source, a.target,
       a.content_class, a.domain_id, a.idempotency_key, a.dedupe_key, a.trace_context, a.queue AS handler_name,
       a.queue AS route, 'failed' AS status, 'archived' AS state, a.deliveries_count AS attempts,
       a.last_exception AS last_error, a.error_signature, a.traceback, a.failure_reason, a.first_failed_at, a.failed_at, a.failure_history::text AS failure_history,
       a.created_at, a.failed_at AS available_at, a.expires_at, NULL::timestamptz AS delivered_at, a.deleted_at,
       NULL::timestamptz AS lease_expires_at, a.channel, a.generation, a.priority, NULL::text AS worker,
       nullif(a.ordering_key, '') AS ordering_key, a.fairness_key,
       NULL::timestamptz AS claimed_at, '{}'::text[] AS owed_to,
       CASE WHEN :payload::boolean THEN a.payload::text END AS payload,
       CASE WHEN :payload::boolean THEN a.headers::text END AS headers
FROM event CROSS JOIN LATERAL (
    SELECT * FROM core.archive a WHERE a.original_id = event.id
    UNION ALL
    SELECT * FROM core.archive a WHERE a.origin_id = event.id) a
ORDER BY a.queue, a.id;

-- name: list_heads
-- Which rows of an ordering key have to be settled before a row of it is begun, for each of its handlers: one that is open,
-- or a dead letter that blocks the key.
SELECT h.handler_name, h.head_id AS id, NOT open.yes AS failed
FROM core.ordering_heads h
CROSS JOIN LATERAL (
    SELECT EXISTS (SELECT FROM core.outbox o WHERE o.id = h.head_id AND o.settled_at IS NULL) AS yes) open
WHERE h.handler_name = ANY (:handlers::text[]) AND h.ordering_key = :key::text AND h.head_id <> :id::uuid
  AND (open.yes OR h.blocks AND (
           EXISTS (SELECT FROM core.outbox o WHERE o.id = h.head_id AND o.status = 'failed' AND o.deleted_at IS NULL)
           OR EXISTS (SELECT FROM core.archive a WHERE a.original_id = h.head_id AND a.deleted_at IS NULL)))
ORDER BY h.handler_name;

-- name: list_handled
-- By whom an event was handled: one look-up for each handler that ever wanted something.
SELECT s.handler_name, h.handled_at
FROM (SELECT DISTINCT handler_name FROM core.subscriptions) s
CROSS JOIN LATERAL (
    SELECT h.handled_at FROM core.event_handled h
    WHERE h.handler_name = s.handler_name AND h.idempotency_key = :key::text LIMIT 1) h
ORDER BY h.handled_at;

-- name: list_open
-- Open events. Without an order, because none of the indexes has one that all lanes share. An event that was not claimed
-- yet has no handler's name: it is owed to the handlers that subscribe to it. `alone`: only what is owed to no other handler
-- than the given one.
SELECT o.id, coalesce(o.origin_id, o.id) AS event_id, o.event_type, o.source, o.target, o.route, o.handler_name, o.status,
       o.attempts, left(o.last_error, :error_length::int) AS last_error, o.created_at, o.available_at, o.lease_expires_at,
       o.channel, o.generation
FROM core.outbox_channels() c
CROSS JOIN LATERAL (
    SELECT * FROM core.open_rows() o
    WHERE o.channel = c.channel AND o.generation = c.generation
      AND (:event_type::text IS NULL OR o.event_type = :event_type::text)
      AND (:handler::text IS NULL OR o.handler_name = :handler::text
           OR o.handler_name IS NULL AND EXISTS (
               SELECT FROM core.subscriptions s
               WHERE s.retired_at IS NULL AND o.event_type LIKE s.pattern
                 AND (o.target IS NULL OR o.target = s.domain_context)
               HAVING bool_or(s.handler_name = :handler::text)
                  AND (bool_and(s.handler_name = :handler::text) OR NOT :alone::boolean)))
      AND (:source::text IS NULL OR o.source = :source::text)
      AND (:route::text IS NULL OR o.route = :route::text)
    LIMIT :most::int) o
WHERE (:generation::bigint IS NULL OR c.generation = :generation::bigint)
  AND (:channel::text IS NULL OR c.channel = :channel::text)
ORDER BY o.available_at, o.id
LIMIT :most::int;

-- name: cancel_deliveries
-- Each as outbox_cancel_event cancels it; the answer says which were not settled already.
SELECT d.id, core.outbox_cancel_event(d.id, :cancelled_by::text, :reason::text) = 1 AS cancelled
FROM unnest(:ids::uuid[]) AS d (id);

-- name: list_audit
SELECT a.id, a.at, a.actor, a.login, a.action, a.reason, (a.arguments - 'ids')::text AS arguments, a.counts::text AS counts,
       jsonb_array_length(a.arguments -> 'ids') AS rows, a.arguments -> 'ids' ->> 0 AS first_id
FROM core.audit a
WHERE (:before::bigint IS NULL OR a.id < :before::bigint)
  AND (:actor::text IS NULL OR a.actor = :actor::text)
  AND (:action::text IS NULL OR a.action = :action::text OR a.action LIKE :action::text || '.%')
  AND (:since::timestamptz IS NULL OR a.at >= :since::timestamptz)
  AND (:steps::boolean OR a.action <> 'plan.step')
ORDER BY a.id DESC
LIMIT :most::int;

-- name: list_audit_of_row
SELECT a.id, a.at, a.actor, a.login, a.action, a.reason, (a.arguments - 'ids')::text AS arguments, a.counts::text AS counts,
       jsonb_array_length(a.arguments -> 'ids') AS rows, a.arguments -> 'ids' ->> 0 AS first_id
FROM core.audit a
WHERE a.arguments -> 'ids' @> to_jsonb(:id::uuid)
ORDER BY a.id
LIMIT :most::int;

-- name: list_plans
SELECT p.id, p.created_at, p.created_by, p.reason, p.selection::text AS selection, p.generation, p.canary, p.rate,
       p.max_failure_ratio, p.patience, p.force, p.state, p.state_reason, p.finished_at, p.canary_passed, p.runner, p.run_by,
       coalesce(p.lease_expires_at > clock_timestamp() AND p.state = 'open', false) AS running,
       r.total, r.pending, r.replayed, r.delivered, r.failed, r.skipped
FROM core.plans p
CROSS JOIN LATERAL (
    SELECT count(*)::int AS total,
           count(*) FILTER (WHERE r.state = 'pending')::int AS pending,
           count(*) FILTER (WHERE r.state = 'replayed')::int AS replayed,
           count(*) FILTER (WHERE r.state = 'delivered')::int AS delivered,
           count(*) FILTER (WHERE r.state = 'failed')::int AS failed,
           count(*) FILTER (WHERE r.state = 'skipped')::int AS skipped
    FROM core.plan_rows r WHERE r.plan_id = p.id) r
WHERE (:id::bigint IS NULL OR p.id = :id::bigint) AND (:finished::boolean OR p.finished_at IS NULL)
ORDER BY p.id DESC
LIMIT :most::int;

-- name: preview_plan
-- What a plan would do now, by group and generation. A handler that has an event's key in its inbox will skip it.
SELECT coalesce(o.handler_name, '') AS handler_name, coalesce(o.error_signature, '') AS signature, o.generation,
       count(*)::int AS count,
       count(*) FILTER (WHERE o.outcome <> 'failed')::int AS not_failed,
       count(*) FILTER (WHERE o.outcome = 'failed' AND h.handled)::int AS handled
FROM (SELECT r.row_id FROM core.plan_rows r
      WHERE r.plan_id = :plan::bigint AND r.state = 'pending' ORDER BY r.position LIMIT :most::int) r
LEFT JOIN LATERAL (
    SELECT o.handler_name, o.error_signature, o.generation, o.idempotency_key,
           CASE WHEN o.deleted_at IS NULL THEN o.status ELSE 'discarded' END AS outcome
    FROM core.outbox o WHERE o.id = r.row_id
    UNION ALL
    (SELECT a.queue, a.error_signature, a.generation, a.idempotency_key,
            CASE WHEN a.deleted_at IS NULL THEN 'failed' ELSE 'discarded' END
     FROM core.archive a WHERE a.original_id = r.row_id ORDER BY a.id DESC)
    LIMIT 1) o ON true
LEFT JOIN LATERAL (
    SELECT true AS handled FROM core.event_handled h
    WHERE h.handler_name = o.handler_name AND h.idempotency_key = o.idempotency_key LIMIT 1) h ON true
GROUP BY o.handler_name, o.error_signature, o.generation
ORDER BY count(*) DESC;

-- name: list_skipped
SELECT r.why, count(*)::int AS count FROM core.plan_rows r
WHERE r.plan_id = :plan::bigint AND r.state = 'skipped' GROUP BY r.why ORDER BY r.why;

-- name: list_plans_of_row
SELECT r.plan_id, r.state, r.why, r.replayed_at FROM core.plan_rows r WHERE r.row_id = :id::uuid ORDER BY r.plan_id LIMIT 100;

-- name: list_subscriptions
-- When there are too many, those of living workers are shown first, and then those that are subscribed: a producer names
-- reactions as it likes. `idle` is a relay whose broker carries nothing any more.
WITH living AS MATERIALIZED (
    SELECT DISTINCT unnest(w.handlers) AS handler_name FROM core.workers w
    WHERE w.stopped_at IS NULL AND core.is_living(w.heartbeat_at)),
first AS MATERIALIZED (
    SELECT s.handler_name, s.domain_context,
           array_agg(s.event_type ORDER BY s.event_type) FILTER (WHERE s.retired_at IS NULL) AS event_types,
           max(s.retired_at) AS retired_at, count(*) OVER ()::int AS total,
           coalesce(min(s.via) FILTER (WHERE s.retired_at IS NULL), 'outbox') AS via,
           min(s.draining) FILTER (WHERE s.retired_at IS NULL) AS draining
    FROM core.subscriptions s
    WHERE :only::text IS NULL OR s.handler_name = :only::text
    GROUP BY s.handler_name, s.domain_context
    ORDER BY s.handler_name IN (SELECT living.handler_name FROM living) DESC, bool_or(s.retired_at IS NULL) DESC,
             s.handler_name, s.domain_context
    LIMIT :most::int)
SELECT s.handler_name, s.domain_context, s.event_types, s.retired_at, s.total, s.via, s.draining,
       s.domain_context = 'relay' AND s.event_types IS NULL
         AND NOT EXISTS (SELECT FROM core.subscriptions c
                         WHERE c.retired_at IS NULL AND split_part(s.handler_name, '.', 2) IN (c.via, c.draining)) AS idle,
       ARRAY(SELECT w.name FROM core.workers w
             WHERE w.stopped_at IS NULL AND core.is_living(w.heartbeat_at) AND s.handler_name = ANY (w.handlers)
             ORDER BY w.name) AS workers
FROM first s
ORDER BY s.handler_name, s.domain_context;

-- name: list_handler_flow
-- What holds handlers back. What is in flight is looked up row by row, as claims do (functions/flow.sql).
SELECT f.handler_name, coalesce(f.fleet_concurrency, f.declared_fleet_concurrency) AS fleet_concurrency,
       coalesce(f.rate, f.declared_rate) AS rate,
       array_remove(ARRAY[CASE WHEN f.fleet_concurrency IS NOT NULL THEN 'fleet_concurrency' END,
                          CASE WHEN f.rate IS NOT NULL THEN 'rate' END], NULL) AS set_by_operator,
       s.in_flight, f.paused_at, f.paused_by,
       CASE WHEN f.breaker_after IS NULL THEN NULL
            WHEN f.opened_at IS NOT NULL THEN CASE WHEN s.probes THEN 'probing' ELSE 'open' END
            WHEN clock_timestamp() < f.resumed_at + interval '5 seconds' THEN 'ramp' ELSE 'closed' END AS breaker,
       cardinality(f.failing) AS failures, f.opened_at, f.failed_probes,
       CASE WHEN f.opened_at IS NOT NULL AND NOT s.probes
            THEN greatest(0, extract(epoch FROM f.probe_at - clock_timestamp()))::float8 END AS probe_in
FROM core.handler_flow f
CROSS JOIN LATERAL (
    SELECT count(*)::int AS in_flight, coalesce(bool_or(h.token = f.probe_token), false) AS probes
    FROM core.handler_slots h CROSS JOIN LATERAL unnest(h.ids) AS t (id)
    CROSS JOIN LATERAL (
        SELECT FROM core.outbox o
        WHERE o.id = t.id AND o.lease_token = h.token AND o.status = 'in_flight' AND o.lease_expires_at >= now() LIMIT 1) o
    WHERE h.handler_name = f.handler_name) s
WHERE :only::text IS NULL OR f.handler_name = :only::text
ORDER BY f.handler_name
LIMIT 10000;

-- name: list_generations
-- Every number that something knows: what writers get, events that are open, workers that live, deployments that were
-- begun. The channels are gone through once, however many there are; when there are too many numbers, those of
-- deployments are shown first.
WITH open AS MATERIALIZED (
    SELECT c.channel, c.generation, s.channel IS NULL AS unserved,
           (SELECT count(*) FROM (
                SELECT FROM core.open_rows() o
                WHERE o.channel = c.channel AND o.generation = c.generation
                LIMIT :most::int) o) AS open
    FROM core.outbox_channels() c LEFT JOIN core.served_channels() s USING (channel, generation)),
of_generation AS MATERIALIZED (
    SELECT open.generation, array_agg(open.channel ORDER BY open.channel) AS channels,
           coalesce(array_agg(open.channel ORDER BY open.channel) FILTER (WHERE open.unserved), '{}') AS unserved,
           least(sum(open.open), 2147483647)::int AS open
    FROM open GROUP BY open.generation),
known AS MATERIALIZED (
    SELECT known.generation, count(*) OVER ()::int AS total
    FROM (SELECT g.generation FROM of_generation g
          UNION SELECT w.generation FROM core.workers w WHERE w.stopped_at IS NULL
          UNION SELECT d.generation FROM core.deployments d
          UNION SELECT coalesce(max(c.generation), 0) FROM core.deployments c WHERE c.retired_at IS NULL) known
    LEFT JOIN core.deployments d ON d.generation = known.generation
    ORDER BY d.generation IS NULL AND known.generation <> 0, known.generation DESC
    LIMIT :most_generations::int)
SELECT known.generation, known.total, d.label, d.started_at, d.retired_at,
       ARRAY(SELECT w.name FROM core.workers w
             WHERE w.generation = known.generation AND w.stopped_at IS NULL AND core.is_living(w.heartbeat_at)
             ORDER BY w.name) AS workers,
       coalesce(g.channels, '{}') AS channels, coalesce(g.unserved, '{}') AS unserved, coalesce(g.open, 0) AS open,
       coalesce((SELECT max(c.generation) FROM core.deployments c WHERE c.retired_at IS NULL), 0) = known.generation AS current
FROM known
LEFT JOIN of_generation g ON g.generation = known.generation
LEFT JOIN core.deployments d ON d.generation = known.generation
ORDER BY known.generation DESC;

-- name: count_held
SELECT count(*)
FROM (SELECT FROM core.open_rows() o
      WHERE o.status = 'in_flight' AND o.claimed_by = :worker::uuid
      LIMIT :most::int) held;

-- name: knows_generation
-- Whether something speaks for a generation: it is the current one, a deployment that is not retired, or served.
SELECT :generation::bigint = coalesce((SELECT max(d.generation) FROM core.deployments d WHERE d.retired_at IS NULL), 0)
    OR EXISTS (SELECT FROM core.deployments d WHERE d.generation = :generation::bigint AND d.retired_at IS NULL)
    OR EXISTS (SELECT FROM core.served_channels() s WHERE s.generation = :generation::bigint);

-- name: read_handler
SELECT o.handler_name FROM core.outbox o WHERE o.id = :id::uuid;

-- name: count_movable
SELECT count(*)::int AS count
FROM (SELECT FROM core.outbox_channels() c
      CROSS JOIN LATERAL (
          SELECT FROM core.open_rows() o
          WHERE o.channel = c.channel AND o.generation = c.generation
            AND (o.status = 'pending' OR o.lease_expires_at < now())) o
      WHERE c.generation = :generation::bigint
      LIMIT :most::int) o;

-- name: list_carried
-- Handlers that have to do with a broker. A worker that is started with one has its relay among its handlers.
WITH living AS MATERIALIZED (
    SELECT w.name, w.handlers FROM core.workers w WHERE w.stopped_at IS NULL AND core.is_living(w.heartbeat_at))
SELECT s.handler_name, min(s.domain_context) AS domain_context, array_agg(s.event_type ORDER BY s.event_type) AS event_types,
       min(s.via) AS via, min(s.via_since) AS since, min(s.via_by) AS decided_by, min(s.draining) AS draining,
       ARRAY(SELECT living.name FROM living
             WHERE 'relay.' || coalesce(nullif(min(s.via), 'outbox'), min(s.draining)) = ANY (living.handlers)
             ORDER BY living.name LIMIT 20) AS relayed_by,
       ARRAY(SELECT living.name FROM living
             WHERE 'relay.' || coalesce(nullif(min(s.via), 'outbox'), min(s.draining)) = ANY (living.handlers)
               AND s.handler_name = ANY (living.handlers) ORDER BY living.name LIMIT 20) AS taken_by
FROM core.subscriptions s
WHERE s.retired_at IS NULL AND (s.via <> 'outbox' OR s.draining IS NOT NULL)
  AND (:only::text IS NULL OR s.handler_name = :only::text)
GROUP BY s.handler_name
ORDER BY s.handler_name
LIMIT 1000;

-- name: count_relayed
-- How many events were relayed between two times, up to a limit; and whether anything ever is relayed to the broker, which
-- has a row of its own among the subscriptions from the first handler on.
SELECT EXISTS (SELECT FROM core.subscriptions s WHERE s.handler_name = 'relay.' || :via::text) AS known,
       (SELECT count(*) FROM core.relayed_rows(:via::text, :since::timestamptz, :until::timestamptz, NULL, NULL, :most::int)
       ) AS rows;

-- name: count_unrelayed
-- Events that a broker still has to be given for a handler that has left it, up to a limit: those from before the move, and
-- of the minute after it, in which a claim that began before may still have handed some to the relay.
SELECT count(*) FROM (
    SELECT FROM core.open_rows() o
    WHERE o.route = 'relay.' || :via::text
      AND EXISTS (SELECT FROM core.subscriptions s
                  WHERE s.handler_name = :handler::text AND s.draining = :via::text AND o.event_type LIKE s.pattern
                    AND (o.target IS NULL OR o.target = s.domain_context)
                    AND o.created_at <= s.via_since + interval '1 minute')
    LIMIT :most::int) o;

-- name: list_served_channels
SELECT DISTINCT c.channel
FROM core.workers w CROSS JOIN unnest(w.channels) AS c (channel)
WHERE w.stopped_at IS NULL AND core.is_living(w.heartbeat_at)
UNION SELECT core.channel_of(0)
ORDER BY 1 LIMIT 1000;

-- name: list_wanted
SELECT s.handler_name, min(s.domain_context) AS domain_context, array_agg(s.event_type ORDER BY s.event_type) AS event_types,
       now() AS since
FROM core.subscriptions s
WHERE s.retired_at IS NULL AND s.handler_name = ANY (:handlers::text[])
GROUP BY s.handler_name ORDER BY s.handler_name;
