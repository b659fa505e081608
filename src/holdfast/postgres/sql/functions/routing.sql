-- Who is owed what: interest, lanes, and the split of an event that several handlers want.

-- subscribe: records interest durably. Only additions and changes move the registry's version, so a fleet that
-- restarts unchanged disturbs nobody.
CREATE OR REPLACE FUNCTION core.subscribe(p_context text, p_handler text, p_event_types text[])
RETURNS void
LANGUAGE plpgsql SECURITY DEFINER
SET search_path = pg_catalog, pg_temp
AS $$
DECLARE
    wanted text[] := ARRAY(SELECT DISTINCT t FROM unnest(p_event_types) AS t ORDER BY t);
BEGIN
    -- Most starts change nothing: look before taking the lock that orders changes.
    IF (SELECT count(*) FROM core.subscriptions
        WHERE handler_name = p_handler AND event_type = ANY (wanted)
          AND context = p_context AND retired_at IS NULL) = cardinality(wanted) THEN
        RETURN;
    END IF;
    UPDATE core.registry SET version = version + 1;
    INSERT INTO core.subscriptions AS s (context, handler_name, event_type)
    SELECT p_context, p_handler, t FROM unnest(wanted) AS t
    ON CONFLICT (handler_name, event_type) DO UPDATE SET context = EXCLUDED.context, retired_at = NULL;
END
$$;

-- retire: a handler that is gone for good, or wants an event type no longer, is owed nothing more. What waits in its own
-- lane stays visible. Returns how many interests ended; when it was none, nobody is disturbed.
CREATE OR REPLACE FUNCTION core.retire(
    p_handler text, p_event_type text DEFAULT NULL, p_actor text DEFAULT NULL, p_reason text DEFAULT NULL)
RETURNS int
LANGUAGE plpgsql SECURITY DEFINER
SET search_path = pg_catalog, pg_temp
AS $$
DECLARE
    n int;
BEGIN
    PERFORM FROM core.registry FOR UPDATE;   -- before the interests, as in subscribe
    UPDATE core.subscriptions SET retired_at = now()
    WHERE handler_name = p_handler AND event_type = coalesce(p_event_type, event_type) AND retired_at IS NULL;
    GET DIAGNOSTICS n = ROW_COUNT;
    IF n > 0 THEN
        UPDATE core.registry SET version = version + 1;
    END IF;
    PERFORM core.audit_append(
        coalesce(p_actor, session_user), 'handler.retire', p_reason,
        jsonb_build_object('handler', p_handler, 'event_type', p_event_type), jsonb_build_object('ended', n));
    RETURN n;
END
$$;

-- interest: the registry as one worker needs it, with the version it was read at.
CREATE OR REPLACE FUNCTION core.interest()
RETURNS TABLE (version bigint, context text, handler_name text, event_type text)
LANGUAGE plpgsql STABLE SECURITY DEFINER
SET search_path = pg_catalog, pg_temp
AS $$
#variable_conflict use_column
BEGIN
    RETURN QUERY
    SELECT r.version, s.context, s.handler_name, s.event_type
    FROM core.registry r LEFT JOIN core.subscriptions s ON s.retired_at IS NULL
    ORDER BY s.handler_name, s.event_type;
END
$$;

-- outbox_lanes: the routes that have open rows, by one index probe each (a loose index scan).
CREATE OR REPLACE FUNCTION core.outbox_lanes(p_channel text, p_generation bigint)
RETURNS SETOF text
LANGUAGE plpgsql STABLE SECURITY DEFINER
SET search_path = pg_catalog, pg_temp SET jit = off
SET enable_seqscan = off SET enable_bitmapscan = off
AS $$
BEGIN
    RETURN QUERY
    WITH RECURSIVE lane AS (
        (SELECT o.route FROM core.outbox o
         WHERE o.settled_at IS NULL AND o.ordering_key IS NULL
           AND o.channel = p_channel AND o.generation = p_generation
         ORDER BY o.channel, o.generation, o.route LIMIT 1)
        UNION ALL
        SELECT (SELECT o.route FROM core.outbox o
                WHERE o.settled_at IS NULL AND o.ordering_key IS NULL
                  AND o.channel = p_channel AND o.generation = p_generation AND o.route > lane.route
                ORDER BY o.channel, o.generation, o.route LIMIT 1)
        FROM lane WHERE lane.route IS NOT NULL)
    SELECT lane.route FROM lane WHERE lane.route IS NOT NULL LIMIT 10000;
END
$$;

-- outbox_channels: the channels and generations that have open rows, likewise.
CREATE OR REPLACE FUNCTION core.outbox_channels()
RETURNS TABLE (channel text, generation bigint)
LANGUAGE plpgsql STABLE SECURITY DEFINER
SET search_path = pg_catalog, pg_temp SET jit = off
SET enable_seqscan = off SET enable_bitmapscan = off
AS $$
#variable_conflict use_column
BEGIN
    RETURN QUERY
    WITH RECURSIVE open AS (
        (SELECT o.channel, o.generation FROM core.outbox o
         WHERE o.settled_at IS NULL AND o.ordering_key IS NULL
         ORDER BY o.channel, o.generation LIMIT 1)
        UNION ALL
        SELECT next.channel, next.generation
        FROM open CROSS JOIN LATERAL (
            SELECT o.channel, o.generation FROM core.outbox o
            WHERE o.settled_at IS NULL AND o.ordering_key IS NULL
              AND (o.channel, o.generation) > (open.channel, open.generation)
            ORDER BY o.channel, o.generation LIMIT 1) next)
    SELECT open.channel, open.generation FROM open LIMIT 10000;
END
$$;

-- outbox_due_in: how long a worker with nothing to do may sleep: until the first delayed row of its lanes is due. NULL
-- when there is none. Leases that run out are found by the poll. p_since is the time since its last claim began: what
-- became due in between was not claimed, and the answer is negative.
CREATE OR REPLACE FUNCTION core.outbox_due_in(
    p_channel text, p_generation bigint, p_routes text[], p_priorities smallint[], p_since interval DEFAULT '0')
RETURNS float8
LANGUAGE plpgsql STABLE SECURITY DEFINER
SET search_path = pg_catalog, pg_temp SET jit = off
SET enable_seqscan = off SET enable_bitmapscan = off SET enable_hashjoin = off SET enable_mergejoin = off
AS $$
BEGIN
    RETURN (
        SELECT extract(epoch FROM min(next.available_at) - clock_timestamp())
        FROM unnest(p_routes, p_priorities) AS lane (route, priority)
        CROSS JOIN LATERAL (
            SELECT o.available_at FROM core.outbox o
            WHERE o.settled_at IS NULL AND o.ordering_key IS NULL
              AND o.channel = p_channel AND o.generation = p_generation
              AND o.route = lane.route AND o.priority = lane.priority AND o.available_at > now() - p_since
              AND (o.available_at > now() OR o.status = 'pending')
            ORDER BY o.available_at LIMIT 1) next
        WHERE next.available_at < 'infinity');
END
$$;

-- sibling_id: the origin's 48 bits of time and a hash of origin and handler, so that splitting twice is splitting
-- once and siblings sort beside their origin.
CREATE OR REPLACE FUNCTION core.sibling_id(p_origin uuid, p_handler text) RETURNS uuid
LANGUAGE sql IMMUTABLE PARALLEL SAFE
SET search_path = pg_catalog, pg_temp
AS $$
    SELECT (substr(p_origin::text, 1, 13) || '-7' || substr(h, 1, 3) || '-'
            || substr('89ab', 1 + (get_byte(decode(substr(h, 4, 2), 'hex'), 0) & 3), 1)
            || substr(h, 6, 3) || '-' || substr(h, 9, 12))::uuid
    FROM md5(p_origin::text || '/' || p_handler) AS h
$$;

-- outbox_split: an event that several handlers want becomes one sibling for each, in that handler's own lane, and the
-- published row is settled with handler_name '*'. The subscribers come from the registry and never from the caller,
-- who may serve only some of them. Lanes and marks are those of a claim. Returns, for each lane in which something was
-- split, how many and the first position; one row with a NULL route when the registry has changed.
CREATE OR REPLACE FUNCTION core.outbox_split(
    p_registry bigint, p_channel text, p_generation bigint,
    p_routes text[], p_priorities smallint[], p_limits int[], p_marks_at timestamptz[], p_marks_id uuid[])
RETURNS TABLE (route text, priority smallint, n int, first_at timestamptz, first_id uuid)
LANGUAGE plpgsql SECURITY DEFINER
SET search_path = pg_catalog, pg_temp SET jit = off
SET enable_seqscan = off SET enable_bitmapscan = off SET enable_hashjoin = off SET enable_mergejoin = off
AS $$
#variable_conflict use_column
BEGIN
    IF NOT EXISTS (SELECT FROM core.registry WHERE one AND version = p_registry) THEN
        RETURN QUERY SELECT NULL, NULL::smallint, NULL::int, NULL::timestamptz, NULL::uuid;
        RETURN;
    END IF;
    RETURN QUERY
    WITH origin AS MATERIALIZED (
        SELECT o.*
        FROM unnest(p_routes, p_priorities, p_limits, p_marks_at, p_marks_id) AS lane (route, priority, n, mark_at, mark_id)
        CROSS JOIN LATERAL (
            SELECT o.* FROM core.outbox o
            WHERE o.settled_at IS NULL AND o.ordering_key IS NULL
              AND o.channel = p_channel AND o.generation = p_generation
              AND o.route = lane.route AND o.priority = lane.priority
              AND (o.available_at, o.id) >= (lane.mark_at, lane.mark_id)
              AND o.available_at <= now()
              AND (o.status = 'pending' OR o.lease_expires_at < now())
            ORDER BY o.available_at, o.id
            LIMIT lane.n
            FOR UPDATE SKIP LOCKED) o),
    wanted AS MATERIALIZED (
        SELECT o.*, s.handler_name AS owed_to
        FROM origin o
        CROSS JOIN LATERAL (
            SELECT DISTINCT s.handler_name FROM core.subscriptions s
            WHERE s.retired_at IS NULL AND o.event_type LIKE s.pattern
              AND (o.target IS NULL OR o.target = s.context)) s),
    sibling AS (
        INSERT INTO core.outbox (
            id, origin_id, handler_name, event_type, event_version, occurred_at, source, target, content_class, channel,
            generation, domain_id, payload, headers, idempotency_key, trace_context, created_at, available_at, expires_at,
            priority)
        SELECT core.sibling_id(o.id, o.owed_to), o.id, o.owed_to, o.event_type, o.event_version, o.occurred_at,
            o.source, o.target, o.content_class, o.channel, o.generation, o.domain_id, o.payload, o.headers,
            o.idempotency_key, o.trace_context, o.created_at, o.available_at, o.expires_at, o.priority
        FROM wanted o
        ON CONFLICT (id) DO NOTHING
        RETURNING 1),
    settled AS (
        UPDATE core.outbox o
        SET status = 'delivered', handler_name = '*', delivered_at = now(), settled_at = now(),
            claimed_by = NULL, lease_token = NULL, lease_expires_at = NULL
        -- Never without a sibling: an event whose last interest ended this moment waits, unrouted.
        WHERE o.id = ANY (ARRAY(SELECT wanted.id FROM wanted))
        RETURNING 1)
    SELECT o.route, o.priority, count(*)::int,
           min(o.available_at), (array_agg(o.id ORDER BY o.available_at, o.id))[1]
    FROM origin o GROUP BY o.route, o.priority;
END
$$;
