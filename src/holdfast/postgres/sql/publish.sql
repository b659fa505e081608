-- Publishing, in the application's transaction and under its search_path: every function has its full name, and there is
-- no operator. `unnest` of several arrays is part of the grammar.

-- name: publish_one
-- Values travel as text and are cast here, so that every driver sends the same thing. Delays are added to the
-- database's clock: a producer whose own clock is wrong must not decide when an event is due.
INSERT INTO core.outbox (
    id, event_type, event_version, occurred_at, source, target, content_class, channel, generation, domain_id,
    payload, headers, idempotency_key, trace_context, priority, ordering_key, fairness_key, dedupe_key,
    available_at, expires_at)
VALUES (
    :id::text::uuid, :event_type::text, :event_version::text::int, :occurred_at::text::timestamptz, :source::text,
    :target::text, :content_class::text, :channel::text, :generation::text::bigint, :domain_id::text::uuid,
    :payload::text::jsonb, :headers::text::jsonb, :idempotency_key::text, :trace_context::text,
    :priority::text::smallint, :ordering_key::text, :fairness_key::text, :dedupe_key::text,
    coalesce(:available_at::text::timestamptz, pg_catalog.timestamptz_pl_interval(
        pg_catalog.now(), pg_catalog.make_interval(secs => coalesce(:delay::text::float8, 0)))),
    coalesce(:expires_at::text::timestamptz, pg_catalog.timestamptz_pl_interval(
        pg_catalog.now(), pg_catalog.make_interval(secs => :expires_in::text::float8))));

-- name: publish_plain
-- The same for an event that has nothing but a type and a payload, as most do: the database fills in the rest.
INSERT INTO core.outbox (id, event_type, occurred_at, source, channel, generation, payload, idempotency_key)
VALUES (:id::text::uuid, :event_type::text, :occurred_at::text::timestamptz, :source::text, :channel::text,
        :generation::text::bigint, :payload::text::jsonb, :id::text);

-- name: publish_many
-- One statement for thousands: the trigger's deferred event is made once, and the rows share one round trip. A column
-- that has its default in every row is not sent at all: unnest fills it up with NULL.
INSERT INTO core.outbox (
    id, event_type, event_version, occurred_at, source, target, content_class, channel, generation, domain_id,
    payload, headers, idempotency_key, trace_context, priority, ordering_key, fairness_key, dedupe_key,
    available_at, expires_at)
SELECT
    id::uuid, event_type, coalesce(event_version::int, 1), coalesce(occurred_at, :now::text)::timestamptz, :source::text,
    target, coalesce(content_class, 'operations'), coalesce(channel, :default_channel::text), :generation::text::bigint,
    domain_id::uuid, payload::jsonb, headers::jsonb, coalesce(idempotency_key, id), trace_context,
    coalesce(priority::smallint, 1), ordering_key, fairness_key, dedupe_key,
    coalesce(available_at::timestamptz, pg_catalog.timestamptz_pl_interval(
        pg_catalog.now(), pg_catalog.make_interval(secs => coalesce(delay::float8, 0)))),
    coalesce(expires_at::timestamptz, pg_catalog.timestamptz_pl_interval(
        pg_catalog.now(), pg_catalog.make_interval(secs => expires_in::float8)))
FROM unnest(
    :id::text[], :event_type::text[], :event_version::text[], :occurred_at::text[],
    :target::text[], :content_class::text[], :channel::text[], :domain_id::text[],
    :payload::text[], :headers::text[], :idempotency_key::text[], :trace_context::text[],
    :priority::text[], :ordering_key::text[], :fairness_key::text[], :dedupe_key::text[],
    :available_at::text[], :delay::text[], :expires_at::text[], :expires_in::text[])
AS e (
    id, event_type, event_version, occurred_at,
    target, content_class, channel, domain_id,
    payload, headers, idempotency_key, trace_context,
    priority, ordering_key, fairness_key, dedupe_key,
    available_at, delay, expires_at, expires_in);

-- name: publish_many_plain
-- The same for events that have nothing but a type and a payload.
INSERT INTO core.outbox (id, event_type, occurred_at, source, channel, generation, payload, idempotency_key)
SELECT id::uuid, event_type, :now::text::timestamptz, :source::text, :channel::text, :generation::text::bigint,
       payload::jsonb, id
FROM unnest(:id::text[], :event_type::text[], :payload::text[]) AS e (id, event_type, payload);

-- name: publish_given
-- The same for events whose ids the caller has chosen: one that is taken is left out, and counted as missing, because an
-- error would abort the caller's transaction. Without a conflict target, which would need the privilege to read the column.
-- A statement of its own, because ON CONFLICT and the count make large batches slower, and few callers choose ids.
WITH published AS (
INSERT INTO core.outbox (
    id, event_type, event_version, occurred_at, source, target, content_class, channel, generation, domain_id,
    payload, headers, idempotency_key, trace_context, priority, ordering_key, fairness_key, dedupe_key,
    available_at, expires_at)
SELECT
    id::uuid, event_type, coalesce(event_version::int, 1), coalesce(occurred_at, :now::text)::timestamptz, :source::text,
    target, coalesce(content_class, 'operations'), coalesce(channel, :default_channel::text), :generation::text::bigint,
    domain_id::uuid, payload::jsonb, headers::jsonb, coalesce(idempotency_key, id), trace_context,
    coalesce(priority::smallint, 1), ordering_key, fairness_key, dedupe_key,
    coalesce(available_at::timestamptz, pg_catalog.timestamptz_pl_interval(
        pg_catalog.now(), pg_catalog.make_interval(secs => coalesce(delay::float8, 0)))),
    coalesce(expires_at::timestamptz, pg_catalog.timestamptz_pl_interval(
        pg_catalog.now(), pg_catalog.make_interval(secs => expires_in::float8)))
FROM unnest(
    :id::text[], :event_type::text[], :event_version::text[], :occurred_at::text[],
    :target::text[], :content_class::text[], :channel::text[], :domain_id::text[],
    :payload::text[], :headers::text[], :idempotency_key::text[], :trace_context::text[],
    :priority::text[], :ordering_key::text[], :fairness_key::text[], :dedupe_key::text[],
    :available_at::text[], :delay::text[], :expires_at::text[], :expires_in::text[])
AS e (
    id, event_type, event_version, occurred_at,
    target, content_class, channel, domain_id,
    payload, headers, idempotency_key, trace_context,
    priority, ordering_key, fairness_key, dedupe_key,
    available_at, delay, expires_at, expires_in)
ON CONFLICT DO NOTHING RETURNING true)
SELECT pg_catalog.count(*) FROM published;

-- name: read_current_generation
-- For publishers that are given no generation; they ask once a second at most.
SELECT core.current_generation()::text;

-- name: hold_key
-- Who holds a producer's key: the new event, or a pending one that is already there.
SELECT core.outbox_hold_key(
    :source::text, :key::text, :id::text::uuid, :reschedule::text::boolean,
    coalesce(:available_at::text::timestamptz, pg_catalog.timestamptz_pl_interval(
        pg_catalog.now(), pg_catalog.make_interval(secs => coalesce(:delay::text::float8, 0)))))::text;

-- name: reschedule_key
SELECT core.outbox_reschedule(
    :source::text, :key::text,
    coalesce(:available_at::text::timestamptz, pg_catalog.timestamptz_pl_interval(
        pg_catalog.now(), pg_catalog.make_interval(secs => coalesce(:delay::text::float8, 0)))));
