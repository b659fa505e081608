-- Events with a key: in order within an ordering key (ordering.sql), in turn over fairness keys (fairness.sql). Both stand
-- apart from the lanes, in the indexes outbox_keyed and outbox_fair, so that neither costs an event without a key anything.
-- Here is what the two have in common: the lanes in which there are rows with a key, what a claim must be given, and the split.
--
-- The two claims end alike, in the statement that leases the rows: a function for that would cost a claim of one row a
-- quarter of its time.
--
-- No broker carries them to the handlers of this database, whatever carries their other events: none keeps an order over
-- several consumers, and retries, that the claims keep. A relay that subscribes by itself gets them, in order.

-- open_rows: what is open, with and without a key: each part is found by an index of its own. It is merged into the query that
-- asks, with its conditions, because nothing is pinned; who asks needs the right to read the outbox.
CREATE OR REPLACE FUNCTION core.open_rows()
RETURNS TABLE (
    id uuid, origin_id uuid, event_type text, source text, target text, route text, handler_name text, priority smallint,
    status text, attempts int, last_error text, first_failed_at timestamptz, created_at timestamptz,
    available_at timestamptz, claimed_by uuid, lease_expires_at timestamptz, channel text, generation bigint,
    ordering_key text, fairness_key text, seq bigint)
LANGUAGE sql STABLE
AS $$
    SELECT o.id, o.origin_id, o.event_type, o.source, o.target, o.route, o.handler_name, o.priority, o.status, o.attempts,
           o.last_error, o.first_failed_at, o.created_at, o.available_at, o.claimed_by, o.lease_expires_at, o.channel,
           o.generation, o.ordering_key, o.fairness_key, o.seq
    FROM core.outbox o WHERE o.settled_at IS NULL AND o.ordering_key IS NULL
    UNION ALL
    SELECT o.id, o.origin_id, o.event_type, o.source, o.target, o.route, o.handler_name, o.priority, o.status, o.attempts,
           o.last_error, o.first_failed_at, o.created_at, o.available_at, o.claimed_by, o.lease_expires_at, o.channel,
           o.generation, o.ordering_key, o.fairness_key, o.seq
    FROM core.outbox o WHERE o.settled_at IS NULL AND o.ordering_key IS NOT NULL
$$;

-- keyed_lanes: the lanes that have open rows with a key, of every channel and generation, by one index probe each. Backwards:
-- a long key is handled from its first row on, and under a held snapshot its dead index entries cannot be removed; each probe
-- lands behind them, at the last row of a lane.
CREATE OR REPLACE FUNCTION core.keyed_lanes()
RETURNS TABLE (channel text, generation bigint, route text)
LANGUAGE plpgsql STABLE SECURITY DEFINER
SET search_path = pg_catalog, pg_temp SET jit = off
SET enable_seqscan = off SET enable_bitmapscan = off
AS $$
#variable_conflict use_column
BEGIN
    RETURN QUERY
    WITH RECURSIVE lane AS (
        (SELECT o.channel, o.generation, o.route FROM core.outbox o
         WHERE o.settled_at IS NULL AND o.ordering_key IS NOT NULL
         ORDER BY o.channel DESC, o.generation DESC, o.route DESC LIMIT 1)
        UNION ALL
        SELECT next.channel, next.generation, next.route
        FROM lane CROSS JOIN LATERAL (
            SELECT o.channel, o.generation, o.route FROM core.outbox o
            WHERE o.settled_at IS NULL AND o.ordering_key IS NOT NULL
              AND (o.channel, o.generation, o.route) < (lane.channel, lane.generation, lane.route)
            ORDER BY o.channel DESC, o.generation DESC, o.route DESC LIMIT 1) next)
    SELECT lane.channel, lane.generation, lane.route FROM lane;
END
$$;

-- keyed_places: the channels and generations whose rows with a key are looked at for order. All that have some; but a writer
-- names them as it likes, and where there are more than a fleet has, only those that workers serve or have served within a
-- day, those of deployments, and the caller's own.
CREATE OR REPLACE FUNCTION core.keyed_places(p_channel text, p_generation bigint)
RETURNS TABLE (channel text, generation bigint)
LANGUAGE plpgsql STABLE SECURITY DEFINER
SET search_path = pg_catalog, pg_temp SET jit = off
SET enable_seqscan = off SET enable_bitmapscan = off
AS $$
#variable_conflict use_column
DECLARE
    c_most        CONSTANT int := 64;
    v_channels    text[];
    v_generations bigint[];
BEGIN
    -- Backwards, as in keyed_lanes.
    WITH RECURSIVE place AS (
        (SELECT o.channel, o.generation, 1 AS n FROM core.outbox o
         WHERE o.settled_at IS NULL AND o.ordering_key IS NOT NULL
         ORDER BY o.channel DESC, o.generation DESC LIMIT 1)
        UNION ALL
        SELECT next.channel, next.generation, place.n + 1
        FROM place CROSS JOIN LATERAL (
            SELECT o.channel, o.generation FROM core.outbox o
            WHERE o.settled_at IS NULL AND o.ordering_key IS NOT NULL
              AND (o.channel, o.generation) < (place.channel, place.generation)
            ORDER BY o.channel DESC, o.generation DESC LIMIT 1) next
        WHERE place.n <= c_most)
    SELECT array_agg(place.channel), array_agg(place.generation) INTO v_channels, v_generations FROM place;
    IF cardinality(v_channels) > c_most THEN
        RETURN QUERY
        SELECT served.channel, w.generation FROM core.workers w CROSS JOIN unnest(w.channels) AS served (channel)
        UNION SELECT core.channel_of(d.generation), d.generation FROM core.deployments d
        UNION SELECT core.channel_of(0), 0
        UNION SELECT p_channel, p_generation WHERE p_channel IS NOT NULL;
    ELSE
        RETURN QUERY SELECT t.channel, t.generation FROM unnest(v_channels, v_generations) AS t (channel, generation);
    END IF;
END
$$;

-- keyed_lanes_of: those in which handlers are owed rows, in the places above. shared: other handlers are owed them as well,
-- and they are split first. wanted: the handler's own lane, or one of a type that p_wanted, in parallel with p_wanted_by, says
-- it is registered for; what it is merely subscribed to is left alone, and keeps what is behind it back.
-- A writer names types as it likes, too. Where there are more than are soon walked past, those that subscriptions name in full
-- are looked up; only for one with a "*" all are walked past.
CREATE OR REPLACE FUNCTION core.keyed_lanes_of(
    p_handlers text[], p_wanted_by text[], p_wanted text[], p_channel text, p_generation bigint)
RETURNS TABLE (handler text, channel text, generation bigint, route text, shared boolean, wanted boolean)
LANGUAGE plpgsql STABLE SECURITY DEFINER
SET search_path = pg_catalog, pg_temp SET jit = off
-- The claims that ask have no joins but loops.
SET enable_seqscan = off SET enable_bitmapscan = off SET enable_hashjoin = on
AS $$
#variable_conflict use_column
DECLARE
    c_most        CONSTANT int := 500;
    v_most        bigint := c_most;
    v_places      text[];
    v_numbers     bigint[];
    v_channels    text[];
    v_generations bigint[];
    v_routes      text[];
BEGIN
    SELECT array_agg(p.channel), array_agg(p.generation) INTO v_places, v_numbers
    FROM core.keyed_places(p_channel, p_generation) p;
    LOOP
        WITH RECURSIVE lane AS (
            SELECT p.channel, p.generation, first.route
            FROM unnest(v_places, v_numbers) AS p (channel, generation)
            CROSS JOIN LATERAL (
                SELECT o.route FROM core.outbox o
                WHERE o.settled_at IS NULL AND o.ordering_key IS NOT NULL
                  AND o.channel = p.channel AND o.generation = p.generation
                ORDER BY o.channel DESC, o.generation DESC, o.route DESC LIMIT 1) first
            UNION ALL
            SELECT lane.channel, lane.generation, next.route
            FROM lane CROSS JOIN LATERAL (
                SELECT o.route FROM core.outbox o
                WHERE o.settled_at IS NULL AND o.ordering_key IS NOT NULL
                  AND o.channel = lane.channel AND o.generation = lane.generation AND o.route < lane.route
                ORDER BY o.channel DESC, o.generation DESC, o.route DESC LIMIT 1) next)
        SELECT array_agg(l.channel), array_agg(l.generation), array_agg(l.route) INTO v_channels, v_generations, v_routes
        FROM (SELECT lane.channel, lane.generation, lane.route FROM lane LIMIT v_most) l;
        EXIT WHEN coalesce(cardinality(v_routes), 0) < c_most OR v_most > c_most;
        IF EXISTS (SELECT FROM core.subscriptions s
                   WHERE s.handler_name = ANY (p_handlers) AND s.retired_at IS NULL AND strpos(s.event_type, '*') > 0) THEN
            v_most := 9223372036854775807;
            CONTINUE;
        END IF;
        SELECT array_agg(p.channel), array_agg(p.generation), array_agg(r.route) INTO v_channels, v_generations, v_routes
        FROM unnest(v_places, v_numbers) AS p (channel, generation)
        CROSS JOIN (
            SELECT h AS route FROM unnest(p_handlers) AS t (h)
            UNION SELECT t.target || '/' || s.event_type
            FROM core.subscriptions s CROSS JOIN LATERAL (VALUES ('*'), (s.domain_context)) AS t (target)
            WHERE s.handler_name = ANY (p_handlers) AND s.retired_at IS NULL) r
        CROSS JOIN LATERAL (
            SELECT FROM core.outbox o
            WHERE o.settled_at IS NULL AND o.ordering_key IS NOT NULL
              AND o.channel = p.channel AND o.generation = p.generation AND o.route = r.route
            ORDER BY o.ordering_key DESC, o.seq DESC LIMIT 1) o;
        EXIT;
    END LOOP;
    RETURN QUERY
    WITH lane AS MATERIALIZED (
        SELECT l.channel, l.generation, l.route, strpos(l.route, '/') > 0 AS of_type,
               split_part(l.route, '/', 1) AS target, split_part(l.route, '/', 2) AS event_type
        FROM unnest(v_channels, v_generations, v_routes) AS l (channel, generation, route)),
    owed AS MATERIALIZED (
        SELECT o.route, o.handler_name, count(*) OVER (PARTITION BY o.route) > 1 AS shared
        FROM (SELECT DISTINCT lane.route, s.handler_name
              FROM (SELECT DISTINCT lane.route, lane.target, lane.event_type FROM lane WHERE lane.of_type) lane
              JOIN core.subscriptions s ON s.retired_at IS NULL AND lane.event_type LIKE s.pattern
                                           AND lane.target IN ('*', s.domain_context)) o)
    SELECT lane.route, lane.channel, lane.generation, lane.route, false, true
    FROM lane WHERE NOT lane.of_type AND lane.route = ANY (p_handlers)
    UNION ALL
    SELECT owed.handler_name, lane.channel, lane.generation, lane.route, owed.shared,
           EXISTS (SELECT FROM unnest(p_wanted_by, p_wanted) AS w (handler, pattern)
                   WHERE w.handler = owed.handler_name AND lane.event_type LIKE w.pattern)
    FROM lane JOIN owed ON owed.route = lane.route
    WHERE lane.of_type AND owed.handler_name = ANY (p_handlers);
END
$$;

-- keyed_gather: where a handler is owed rows of many types, which a claim would have to compare for each key, has the handler's
-- own lane take them: some in each call, by a split. Returns how many events were split; none when the types are few.
CREATE OR REPLACE FUNCTION core.keyed_gather(
    p_handler text, p_wanted_by text[], p_wanted text[], p_channel text, p_generation bigint)
RETURNS int
LANGUAGE plpgsql SECURITY DEFINER
SET search_path = pg_catalog, pg_temp SET jit = off
SET enable_seqscan = off SET enable_bitmapscan = off SET enable_hashjoin = off SET enable_mergejoin = off
AS $$
BEGIN
    RETURN core.split_rows(ARRAY(
        SELECT o.id
        FROM core.keyed_lanes_of(ARRAY[p_handler], p_wanted_by, p_wanted, p_channel, p_generation) l
        CROSS JOIN LATERAL (
            SELECT o.id FROM core.outbox o
            WHERE o.settled_at IS NULL AND o.ordering_key IS NOT NULL
              AND o.channel = l.channel AND o.generation = l.generation AND o.route = l.route
              AND (o.status = 'pending' OR o.lease_expires_at < now())
            ORDER BY o.ordering_key, o.seq LIMIT 100) o
        WHERE strpos(l.route, '/') > 0 AND (l.wanted OR l.shared)
        LIMIT 500));
END
$$;

-- require_keyed_claim: what both claims must be given.
CREATE OR REPLACE FUNCTION core.require_keyed_claim(
    p_worker uuid, p_token uuid, p_lease interval, p_channel text, p_generation bigint, p_handlers text[], p_limits int[],
    p_after text[], p_wanted_by text[], p_wanted text[], p_most_probes int)
RETURNS void
LANGUAGE plpgsql IMMUTABLE
SET search_path = pg_catalog, pg_temp
AS $$
BEGIN
    IF (p_worker IS NOT NULL AND p_token IS NOT NULL AND p_lease BETWEEN interval '0' AND interval '1 day'
        AND p_channel IS NOT NULL AND p_generation IS NOT NULL AND p_most_probes BETWEEN 1 AND 100000) IS NOT TRUE THEN
        PERFORM core.refuse_argument('a claim needs p_worker, p_token, a p_lease of at most a day, and 1 to 100000 p_most_probes');
    ELSIF (core.are_names(p_handlers, 100000) AND core.is_list(p_limits) AND core.is_list(p_after)
           AND 0 <= ALL (p_limits) AND 100000 >= ALL (p_limits)
           AND cardinality(p_handlers) = ALL (ARRAY[cardinality(p_limits), cardinality(p_after)])
           AND core.is_list(p_wanted_by) AND core.is_list(p_wanted)
           AND cardinality(p_wanted_by) = cardinality(p_wanted)) IS NOT TRUE THEN
        PERFORM core.refuse_argument('the arrays must have one entry for each handler or type, and a limit is 0 to 100000');
    END IF;
END
$$;

-- split_rows: outbox_split for rows that have a key, named by their ids. A sibling has its event's number, and so its place in
-- the order of each handler. Returns how many events were split.
CREATE OR REPLACE FUNCTION core.split_rows(p_ids uuid[])
RETURNS int
LANGUAGE plpgsql SECURITY DEFINER
SET search_path = pg_catalog, pg_temp SET jit = off
SET enable_seqscan = off SET enable_bitmapscan = off SET enable_hashjoin = off SET enable_mergejoin = off
AS $$
DECLARE
    v_secret bytea := core.secret();
    v_split  int;
BEGIN
    WITH origin AS MATERIALIZED (
        SELECT o.*
        FROM unnest(p_ids) AS t (id)
        CROSS JOIN LATERAL (
            SELECT o.* FROM core.outbox o
            WHERE o.id = t.id AND o.settled_at IS NULL AND o.handler_name IS NULL
              AND (o.status = 'pending' OR o.lease_expires_at < now())
            FOR UPDATE SKIP LOCKED) o),
    wanted AS MATERIALIZED (
        SELECT o.*, s.handler_name AS owed_to
        FROM origin o
        CROSS JOIN LATERAL (
            SELECT DISTINCT s.handler_name FROM core.subscriptions s
            WHERE s.retired_at IS NULL AND o.event_type LIKE s.pattern
              AND (o.target IS NULL OR o.target = s.domain_context)) s),
    named AS MATERIALIZED (
        -- Where a row of another event has the id, the sibling gets one that such a row cannot have.
        SELECT w.*, CASE WHEN EXISTS (
                   SELECT FROM core.outbox x
                   WHERE x.id = core.sibling_id(w.id, w.owed_to, v_secret)
                     AND (x.origin_id, x.source, x.handler_name) IS DISTINCT FROM (w.id, w.source, w.owed_to))
               THEN core.sibling_id(w.id, w.source || '/' || w.owed_to, v_secret)
               ELSE core.sibling_id(w.id, w.owed_to, v_secret) END AS sibling
        FROM wanted w),
    sibling AS (
        INSERT INTO core.outbox (
            id, origin_id, handler_name, event_type, event_version, occurred_at, source, target, content_class, channel,
            generation, domain_id, payload, headers, idempotency_key, trace_context, created_at, available_at, expires_at,
            priority, ordering_key, fairness_key, seq)
        OVERRIDING SYSTEM VALUE
        SELECT n.sibling, n.id, n.owed_to, n.event_type, n.event_version, n.occurred_at,
            n.source, n.target, n.content_class, n.channel, n.generation, n.domain_id, n.payload, n.headers,
            n.idempotency_key, n.trace_context, n.created_at, n.available_at, n.expires_at, n.priority, n.ordering_key,
            n.fairness_key, n.seq
        FROM named n
        ON CONFLICT (id) DO NOTHING),
    settled AS (
        UPDATE core.outbox o
        SET status = 'delivered', handler_name = '*', delivered_at = now(), settled_at = now(),
            claimed_by = NULL, lease_token = NULL, lease_expires_at = NULL
        -- Never without a sibling: an event whose last subscription was retired this moment waits, unrouted.
        WHERE o.id = ANY (ARRAY(SELECT wanted.id FROM wanted))
        RETURNING o.id),
    counted AS (
        INSERT INTO core.rollup_journal (handler_name, generation, outcome, n)
        SELECT core.begun_for(NULL, o.target, o.event_type, o.claimed_by), o.generation, 'begun', - count(*)
        FROM origin o JOIN settled USING (id) WHERE o.attempts > 0 GROUP BY 1, 2)
    SELECT count(*) INTO v_split FROM settled;
    RETURN v_split;
END
$$;
