-- Claiming: from a due row to a lease, and what a worker asks before it claims or sleeps.
--
-- The layout of every file in this folder: what the functions have in common, then each function under a comment that
-- begins with its name and says what it does, what it returns, and why it is written the way it is. A migration replaces
-- all of them as a whole. Python calls a function by its name, with its parameters without the p_ (see queries.py).
--
-- Claims skip locked rows, and only settling (settle.sql) waits for row locks, always in id order: so overlapping
-- batches are free of deadlocks.
--
-- The plans are pinned to look-ups by index, whatever the statistics say: a sub-select with FOR UPDATE is never merged
-- into the query around it, so LATERAL makes each lane one look-up.

-- outbox_claim: leases up to p_limits[i] due rows of each lane i under p_token, which is new for each claim. p_routes,
-- p_priorities, p_handlers, p_limits, p_marks_at and p_marks_id run in parallel, one entry for each lane.
-- Rows with an expired lease are due again: there is no reaper that could fail. A lease has expired when it ends before
-- now, and before p_ended_before, which is the caller's reckoning of this clock (see clock.sql).
-- Returns one row with a NULL id, and claims nothing, when the subscriptions are no longer at p_subscriptions_version.
-- With p_keyed, one more row with a NULL id says in its route that there are open rows with a key on the channel, which
-- keyed.sql claims: `ordered`, or `fair` when some of them have a fairness key.
-- Touches core.outbox (update) and core.rollup_journal (insert), and where a handler has a limit, core.handler_slots (insert)
-- and core.handler_flow (see flow.sql); reads core.subscriptions_version, core.event_handled and core.cancel_requests, the
-- requests to cancel (`cancelled`).
-- Of a handler with a limit, the lanes share what is allowed by chance, in proportion to their p_limits: one row at a time
-- would otherwise always come from the same lane.
CREATE OR REPLACE FUNCTION core.outbox_claim(
    p_worker uuid, p_token uuid, p_lease interval, p_subscriptions_version bigint, p_channel text, p_generation bigint,
    p_routes text[], p_priorities smallint[], p_handlers text[], p_limits int[],
    p_marks_at timestamptz[], p_marks_id uuid[], p_ended_before timestamptz DEFAULT NULL, p_keyed boolean DEFAULT false)
RETURNS TABLE (
    id uuid, route text, priority smallint, available_at timestamptz, origin_id uuid,
    event_type text, event_version int, occurred_at timestamptz, source text, target text, domain_id uuid,
    payload jsonb, idempotency_key text, trace_context text, headers jsonb,
    attempts int, failing_for float8, expired boolean, cancelled boolean, handled boolean)
LANGUAGE plpgsql SECURITY DEFINER
SET search_path = pg_catalog, pg_temp SET jit = off
SET enable_seqscan = off SET enable_bitmapscan = off SET enable_hashjoin = off SET enable_mergejoin = off
AS $$
#variable_conflict use_column
DECLARE
    v_cancelling   boolean := EXISTS (SELECT FROM core.cancel_requests);
    v_ended_before timestamptz := least(now(), p_ended_before);
    v_limited      text[];   -- handlers, and how much is allowed of each; NULL without any
    v_allowed      int[];
    v_probe        record;
BEGIN
    IF (p_worker IS NOT NULL AND p_token IS NOT NULL
        AND p_lease BETWEEN interval '0' AND interval '1 day') IS NOT TRUE THEN
        PERFORM core.refuse_argument('a claim needs p_worker, p_token and a p_lease of at most a day');
    END IF;
    IF (p_subscriptions_version IS NOT NULL AND p_channel IS NOT NULL AND p_generation IS NOT NULL
        AND core.is_list(p_routes) AND core.is_list(p_priorities) AND core.are_names(p_handlers, 100000) AND core.is_list(p_limits)
        AND core.is_list(p_marks_at) AND core.is_list(p_marks_id) AND 0 <= ALL (p_limits) AND 100000 >= ALL (p_limits)
        AND cardinality(p_routes) = ALL (ARRAY[cardinality(p_priorities), cardinality(p_limits), cardinality(p_handlers),
                                               cardinality(p_marks_at), cardinality(p_marks_id)])) IS NOT TRUE THEN
        PERFORM core.refuse_argument('the arrays must have one entry for each lane, a limit is 0 to 100000, and p_handlers name '
                                     'handlers, in 1 to 200 bytes each');
    END IF;
    IF EXISTS (SELECT FROM core.handler_flow) THEN
        SELECT array_agg(a.handler_name), array_agg(a.allowed) INTO v_limited, v_allowed
        FROM core.flow_allow(p_handlers, v_ended_before) a;
        -- The row that probes is chosen, and not the oldest: the claim begins there, and leaves the other lanes out.
        FOR v_probe IN
            SELECT f.handler_name, p.lane, p.available_at, p.id
            FROM unnest(v_limited, v_allowed) AS t (handler, allowed)
            JOIN core.handler_flow f ON f.handler_name = t.handler AND f.opened_at IS NOT NULL
            CROSS JOIN LATERAL core.breaker_probe(f.handler_name, p_channel, p_generation, p_routes, p_priorities, p_handlers,
                                                  p_limits, v_ended_before) p
            WHERE t.allowed > 0
        LOOP
            p_limits := ARRAY(SELECT CASE WHEN t.handler = v_probe.handler_name THEN (t.place = v_probe.lane)::int ELSE t.n END
                              FROM unnest(p_handlers, p_limits) WITH ORDINALITY AS t (handler, n, place) ORDER BY t.place);
            p_marks_at[v_probe.lane] := v_probe.available_at;
            p_marks_id[v_probe.lane] := v_probe.id;
        END LOOP;
    END IF;
    RETURN QUERY
    WITH seen AS MATERIALIZED (
        SELECT o.id, lane.route, lane.handler, lane.priority, lane.n, o.attempts, o.available_at, o.idempotency_key
        FROM unnest(p_routes, p_priorities, p_handlers, p_limits, p_marks_at, p_marks_id)
             AS lane (route, priority, handler, n, mark_at, mark_id)
        CROSS JOIN LATERAL (
            SELECT o.id, o.attempts, o.available_at, o.idempotency_key FROM core.outbox o
            WHERE o.settled_at IS NULL AND o.ordering_key IS NULL
              AND o.channel = p_channel AND o.generation = p_generation
              AND o.route = lane.route AND o.priority = lane.priority
              AND (o.available_at, o.id) >= (lane.mark_at, lane.mark_id)
              AND o.available_at <= now()
              AND (o.status = 'pending' OR o.lease_expires_at < v_ended_before)
            ORDER BY o.available_at, o.id
            LIMIT least(lane.n, v_allowed[array_position(v_limited, lane.handler)])
            FOR UPDATE SKIP LOCKED) o
        -- Under the snapshot that shows the rows: in a statement before this one the answer could be older than an
        -- event which is owed to a handler that was subscribed in between.
        WHERE EXISTS (SELECT FROM core.subscriptions_version WHERE one AND version = p_subscriptions_version)),
    due AS MATERIALIZED (
        SELECT seen.id, seen.route, seen.handler, seen.attempts, seen.idempotency_key FROM seen
        WHERE v_limited IS NULL OR seen.id NOT IN (
            SELECT ranked.id
            FROM (SELECT lot.id, lot.handler, row_number() OVER (
                      PARTITION BY lot.handler ORDER BY (lot.place + lot.chance) / lot.n, lot.priority, lot.route) AS nth
                  FROM (SELECT drawn.*, row_number() OVER lane - 1 AS place, first_value(drawn.drawn) OVER lane AS chance
                        FROM (SELECT seen.*, - ln(1 - random()) AS drawn FROM seen
                              WHERE seen.handler = ANY (v_limited)) drawn
                        WINDOW lane AS (PARTITION BY drawn.route, drawn.priority ORDER BY drawn.available_at, drawn.id)) lot
                 ) ranked
            WHERE ranked.nth > v_allowed[array_position(v_limited, ranked.handler)])),
    -- All keys of a handler in one pass over the index. OFFSET keeps the planner from pulling the inbox up into a join.
    known AS MATERIALIZED (
        SELECT h.handler_name, h.idempotency_key
        FROM (SELECT due.handler, array_agg(due.idempotency_key) AS keys FROM due GROUP BY due.handler) asked
        CROSS JOIN LATERAL (
            SELECT h.handler_name, h.idempotency_key FROM core.event_handled h
            WHERE h.handler_name = asked.handler AND h.idempotency_key = ANY (asked.keys) OFFSET 0) h),
    counted AS (
        INSERT INTO core.rollup_journal (handler_name, generation, outcome, n)
        SELECT due.handler, p_generation, 'begun', count(*)
        FROM due WHERE due.attempts = 0 GROUP BY due.handler),
    slots AS (
        INSERT INTO core.handler_slots (handler_name, token, ids)
        SELECT due.handler, p_token, array_agg(due.id) FROM due
        WHERE v_limited IS NOT NULL AND due.handler = ANY (v_limited) GROUP BY due.handler)
    UPDATE core.outbox AS o
    SET status = 'in_flight', attempts = least(o.attempts, 2147483646) + 1, claimed_by = p_worker,
        lease_token = p_token, lease_expires_at = now() + p_lease,
        -- As it was. Of an update that changes no column of a generated one, Postgres (18 at least) reads the expression of
        -- that one anew for each row, which takes an eighth of a claim; so it is read once.
        handler_name = o.handler_name
    -- Not UPDATE ... FROM due: a generic plan may hash-join that with a scan of the whole table.
    WHERE o.id = ANY (ARRAY(SELECT due.id FROM due))
    RETURNING o.id, o.route, o.priority, o.available_at, o.origin_id,
        o.event_type, o.event_version, o.occurred_at, o.source, o.target,
        o.domain_id, o.payload, o.idempotency_key, o.trace_context, o.headers,
        o.attempts, extract(epoch FROM now() - o.first_failed_at)::float8, o.expires_at <= now(),
        v_cancelling AND EXISTS (SELECT FROM core.cancel_requests s WHERE s.id = o.id),
        -- Nearly all are new. LIMIT keeps the planner from hashing the whole inbox for an EXISTS.
        (p_handlers[array_position(p_routes, o.route)], o.idempotency_key) IN (SELECT known.* FROM known)
        AND coalesce((SELECT h.source = o.source
                         OR core.inbox_has(h.handler_name, o.idempotency_key, o.source)
                  FROM core.event_handled h
                  WHERE h.handler_name = p_handlers[array_position(p_routes, o.route)]
                    AND h.idempotency_key = o.idempotency_key LIMIT 1), false);
    IF FOUND AND v_limited IS NOT NULL THEN
        PERFORM core.flow_spend(v_limited, p_token);
    ELSIF NOT FOUND AND NOT EXISTS (SELECT FROM core.subscriptions_version WHERE one AND version = p_subscriptions_version) THEN
        RETURN QUERY SELECT NULL::uuid, NULL, NULL::smallint, NULL::timestamptz, NULL::uuid, NULL,
            NULL::int, NULL::timestamptz, NULL, NULL, NULL::uuid, NULL::jsonb, NULL, NULL, NULL::jsonb,
            NULL::int, NULL::float8, NULL::boolean, NULL::boolean, NULL::boolean;
        RETURN;
    END IF;
    -- Backwards, as in keyed_lanes.
    IF p_keyed AND EXISTS (SELECT FROM (SELECT FROM core.outbox o
                                           WHERE o.settled_at IS NULL AND o.ordering_key IS NOT NULL
                                             AND o.channel = p_channel AND o.generation = p_generation
                                           ORDER BY o.route DESC, o.ordering_key DESC, o.seq DESC LIMIT 1) o) THEN
        RETURN QUERY SELECT NULL::uuid, CASE WHEN EXISTS (
                SELECT FROM (SELECT FROM core.outbox o
                             WHERE o.settled_at IS NULL AND o.fairness_key IS NOT NULL
                               AND o.channel = p_channel AND o.generation = p_generation
                             ORDER BY o.route DESC, o.fairness_key DESC, o.available_at DESC, o.id DESC LIMIT 1) o) THEN 'fair' ELSE 'ordered' END,
            NULL::smallint, NULL::timestamptz, NULL::uuid, NULL,
            NULL::int, NULL::timestamptz, NULL, NULL, NULL::uuid, NULL::jsonb, NULL, NULL, NULL::jsonb,
            NULL::int, NULL::float8, NULL::boolean, NULL::boolean, NULL::boolean;
    END IF;
END
$$;

-- outbox_split: turns an event that several handlers want into one sibling for each, in that handler's own lane, and
-- settles the published row with handler_name '*'. The subscribers come from core.subscriptions and never from the
-- caller, which may serve only some of them. Lanes and marks are those of a claim. Returns, for each lane in which
-- something was split, how many and the first position; one row with a NULL route when the subscriptions have changed.
CREATE OR REPLACE FUNCTION core.outbox_split(
    p_subscriptions_version bigint, p_channel text, p_generation bigint,
    p_routes text[], p_priorities smallint[], p_limits int[], p_marks_at timestamptz[], p_marks_id uuid[],
    p_ended_before timestamptz DEFAULT NULL)
RETURNS TABLE (route text, priority smallint, n int, first_at timestamptz, first_id uuid)
LANGUAGE plpgsql SECURITY DEFINER
SET search_path = pg_catalog, pg_temp SET jit = off
SET enable_seqscan = off SET enable_bitmapscan = off SET enable_hashjoin = off SET enable_mergejoin = off
AS $$
#variable_conflict use_column
DECLARE
    v_secret       bytea := core.secret();
    v_ended_before timestamptz := least(now(), p_ended_before);
BEGIN
    IF (p_subscriptions_version IS NOT NULL AND p_channel IS NOT NULL AND p_generation IS NOT NULL
        AND core.is_list(p_routes) AND core.is_list(p_priorities) AND core.is_list(p_limits)
        AND core.is_list(p_marks_at) AND core.is_list(p_marks_id) AND 0 <= ALL (p_limits) AND 100000 >= ALL (p_limits)
        AND cardinality(p_routes) = ALL (ARRAY[cardinality(p_priorities), cardinality(p_limits),
                                               cardinality(p_marks_at), cardinality(p_marks_id)])) IS NOT TRUE THEN
        PERFORM core.refuse_argument('the arrays must have one entry for each lane, and a limit is 0 to 100000');
    END IF;
    IF NOT EXISTS (SELECT FROM core.subscriptions_version WHERE one AND version = p_subscriptions_version) THEN
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
              AND (o.status = 'pending' OR o.lease_expires_at < v_ended_before)
            ORDER BY o.available_at, o.id
            LIMIT lane.n
            FOR UPDATE SKIP LOCKED) o),
    -- Once for each type, and not for each event: there may be thousands of subscriptions.
    kind AS MATERIALIZED (
        SELECT k.event_type, k.target, array_agg(DISTINCT s.owed_to) AS owed_to
        FROM (SELECT DISTINCT o.event_type, o.target FROM origin o) k
        JOIN core.subscriptions s
          ON s.retired_at IS NULL AND k.event_type LIKE s.pattern AND (k.target IS NULL OR k.target = s.domain_context)
        GROUP BY k.event_type, k.target),
    wanted AS MATERIALIZED (
        SELECT o.*, s.owed_to
        FROM origin o
        JOIN kind k ON k.event_type = o.event_type AND k.target IS NOT DISTINCT FROM o.target
        CROSS JOIN LATERAL unnest(k.owed_to) AS s (owed_to)),
    sibling AS (
        INSERT INTO core.outbox (
            id, origin_id, handler_name, event_type, event_version, occurred_at, source, target, content_class, channel,
            generation, domain_id, payload, headers, idempotency_key, trace_context, created_at, available_at, expires_at,
            priority)
        SELECT core.sibling_id(o.id, o.owed_to, v_secret), o.id, o.owed_to, o.event_type, o.event_version, o.occurred_at,
            o.source, o.target, o.content_class, o.channel, o.generation, o.domain_id, o.payload, o.headers,
            o.idempotency_key, o.trace_context, o.created_at, o.available_at, o.expires_at, o.priority
        FROM wanted o
        ON CONFLICT (id) DO NOTHING
        RETURNING 1),
    -- Where a row of another event has the id, the sibling gets one that such a row cannot have.
    displaced AS (
        INSERT INTO core.outbox (
            id, origin_id, handler_name, event_type, event_version, occurred_at, source, target, content_class, channel,
            generation, domain_id, payload, headers, idempotency_key, trace_context, created_at, available_at, expires_at,
            priority)
        SELECT core.sibling_id(o.id, o.source || '/' || o.owed_to, v_secret), o.id, o.owed_to, o.event_type,
            o.event_version, o.occurred_at, o.source, o.target, o.content_class, o.channel, o.generation, o.domain_id,
            o.payload, o.headers, o.idempotency_key, o.trace_context, o.created_at, o.available_at, o.expires_at, o.priority
        FROM wanted o
        CROSS JOIN LATERAL (
            SELECT FROM core.outbox x
            WHERE x.id = core.sibling_id(o.id, o.owed_to, v_secret)
              AND (x.origin_id, x.source, x.handler_name) IS DISTINCT FROM (o.id, o.source, o.owed_to)
            LIMIT 1) x
        WHERE (SELECT count(*) FROM sibling) < (SELECT count(*) FROM wanted)
        ON CONFLICT (id) DO NOTHING),
    settled AS (
        UPDATE core.outbox o
        SET status = 'delivered', handler_name = '*', delivered_at = now(), settled_at = now(),
            claimed_by = NULL, lease_token = NULL, lease_expires_at = NULL
        -- Never without a sibling: an event whose last subscription was retired this moment waits, unrouted.
        WHERE o.id = ANY (ARRAY(SELECT wanted.id FROM wanted))
        RETURNING o.id),
    -- One that was claimed before it had several handlers: it ends, and its siblings begin.
    counted AS (
        INSERT INTO core.rollup_journal (handler_name, generation, outcome, n)
        SELECT core.begun_for(NULL, o.target, o.event_type, o.claimed_by), p_generation, 'begun', - count(*)
        FROM origin o JOIN settled USING (id) WHERE o.attempts > 0 GROUP BY 1)
    SELECT o.route, o.priority, count(*)::int,
           min(o.available_at), (array_agg(o.id ORDER BY o.available_at, o.id))[1]
    FROM origin o GROUP BY o.route, o.priority;
END
$$;

-- sibling_id: the origin's 48 bits of time and a hash of origin and handler, so that splitting twice is splitting
-- once and siblings sort beside their origin. The secret keeps a producer from taking the id before the split does.
CREATE OR REPLACE FUNCTION core.sibling_id(p_origin uuid, p_handler text, p_secret bytea) RETURNS uuid
LANGUAGE plpgsql IMMUTABLE PARALLEL SAFE
SET search_path = pg_catalog, pg_temp
AS $$
DECLARE
    h text := encode(sha256(p_secret || convert_to(p_origin::text || '/' || p_handler, 'UTF8')), 'hex');
BEGIN
    RETURN (substr(p_origin::text, 1, 13) || '-7' || substr(h, 1, 3) || '-'
            || substr('89ab', 1 + (get_byte(decode(substr(h, 4, 2), 'hex'), 0) & 3), 1)
            || substr(h, 6, 3) || '-' || substr(h, 9, 12))::uuid;
END
$$;

-- outbox_routes: the routes that have open rows, by one index probe each (a loose index scan).
CREATE OR REPLACE FUNCTION core.outbox_routes(p_channel text, p_generation bigint)
RETURNS SETOF text
LANGUAGE plpgsql STABLE SECURITY DEFINER
SET search_path = pg_catalog, pg_temp SET jit = off
SET enable_seqscan = off SET enable_bitmapscan = off
AS $$
BEGIN
    RETURN QUERY
    WITH RECURSIVE found AS (
        (SELECT o.route FROM core.outbox o
         WHERE o.settled_at IS NULL AND o.ordering_key IS NULL
           AND o.channel = p_channel AND o.generation = p_generation
         ORDER BY o.channel, o.generation, o.route LIMIT 1)
        UNION ALL
        SELECT (SELECT o.route FROM core.outbox o
                WHERE o.settled_at IS NULL AND o.ordering_key IS NULL
                  AND o.channel = p_channel AND o.generation = p_generation AND o.route > found.route
                ORDER BY o.channel, o.generation, o.route LIMIT 1)
        FROM found WHERE found.route IS NOT NULL)
    SELECT found.route FROM found WHERE found.route IS NOT NULL
    UNION SELECT l.route FROM core.keyed_lanes() l WHERE l.channel = p_channel AND l.generation = p_generation
    LIMIT 10000;
END
$$;

-- outbox_routes_within: the routes that have rows which are due, or will be before any worker polls again, and lie
-- between p_begins[i] and p_ends[i], which is outside, for some i; a page of at most p_most of them, after p_after. With
-- p_only_next it has those that are due, and of the others the first as its last: it says how long the caller may sleep,
-- and however many there are, they are not in the way of what is due. The ranges are sorted by their characters and do
-- not overlap. When the page ends early, because it is full, p_most_steps lanes were looked at or ten times as many passed
-- by, one row more says where, and is not within. If the database sorts by characters too, what lies between two ranges is
-- skipped, however much it is.
CREATE OR REPLACE FUNCTION core.outbox_routes_within(
    p_channel text, p_generation bigint, p_begins text[], p_ends text[], p_after text, p_most int, p_most_steps int,
    p_only_next boolean DEFAULT false)
RETURNS TABLE (route text, within boolean)
LANGUAGE plpgsql STABLE SECURITY DEFINER
SET search_path = pg_catalog, pg_temp SET jit = off
SET enable_seqscan = off SET enable_bitmapscan = off
AS $$
#variable_conflict use_column
DECLARE
    v_skips boolean := (
        SELECT d.datlocprovider = 'b' OR d.datlocprovider = 'c' AND upper(d.datcollate) IN ('C', 'POSIX', 'C.UTF-8', 'C.UTF8')
        FROM pg_database d WHERE d.datname = current_database());
    v_begins text[] := p_begins;
    v_last int := coalesce(array_length(p_ends, 1), 0);
    v_range int;
    v_from text := NULL;
    v_route text := p_after;
    v_priority smallint := 32767;
    v_at timestamptz;
    -- Workers poll once an hour at least.
    v_soon timestamptz := now() + interval '2 hours';
    v_listed timestamptz := CASE WHEN p_only_next THEN now() ELSE v_soon END;
    v_first_at timestamptz := v_soon;
    v_first_route text;
    v_next record;
    v_passed int := 0;
    v_found int := 0;
BEGIN
    IF (core.is_list(p_begins) AND core.is_list(p_ends) AND cardinality(p_begins) = cardinality(p_ends)
        AND octet_length(p_after) <= 10000 AND p_most BETWEEN 1 AND 10000 AND p_most_steps BETWEEN 1 AND 100000) IS NOT TRUE THEN
        PERFORM core.refuse_argument('p_begins and p_ends must have one entry for each range, p_after must be a route, '
            'p_most 1 to 10000, p_most_steps 1 to 100000');
    END IF;
    FOR v_step IN 1 .. p_most_steps LOOP
        IF v_from IS NULL THEN
            -- What is left of a lane after its first row is due later still.
            SELECT o.route, o.priority, o.available_at INTO v_route, v_priority, v_at FROM core.outbox o
            WHERE o.settled_at IS NULL AND o.ordering_key IS NULL
              AND o.channel = p_channel AND o.generation = p_generation
              AND (o.route, o.priority, o.available_at) > (v_route, v_priority, 'infinity'::timestamptz)
            ORDER BY o.channel, o.generation, o.route, o.priority, o.available_at LIMIT 1;
        ELSE
            SELECT o.route, o.priority, o.available_at INTO v_route, v_priority, v_at FROM core.outbox o
            WHERE o.settled_at IS NULL AND o.ordering_key IS NULL
              AND o.channel = p_channel AND o.generation = p_generation AND o.route >= v_from
            ORDER BY o.channel, o.generation, o.route, o.priority, o.available_at LIMIT 1;
            v_from := NULL;
        END IF;
        IF v_route IS NULL THEN
            EXIT;
        END IF;
        -- The first range that ends after the route.
        v_range := 1 + width_bucket(v_route COLLATE "C", p_ends);
        IF v_range <= v_last AND v_route COLLATE "C" >= v_begins[v_range] THEN
            IF v_at > v_listed AND v_at < v_first_at THEN
                v_first_at := v_at;
                v_first_route := v_route;
            END IF;
            IF v_at > v_listed AND v_step < p_most_steps AND v_passed < 10 * p_most_steps THEN
                -- More like it may follow. To walk past them takes less than to look for each, if they are not many.
                FOR v_next IN
                    SELECT o.route, o.priority, o.available_at FROM core.outbox o
                    WHERE o.settled_at IS NULL AND o.ordering_key IS NULL
                      AND o.channel = p_channel AND o.generation = p_generation
                      AND (o.route, o.priority, o.available_at) > (v_route, v_priority, 'infinity'::timestamptz)
                    ORDER BY o.channel, o.generation, o.route, o.priority, o.available_at LIMIT 100
                LOOP
                    EXIT WHEN v_next.available_at <= v_listed OR v_next.route COLLATE "C" >= p_ends[v_range];
                    IF v_next.available_at < v_first_at THEN
                        v_first_at := v_next.available_at;
                        v_first_route := v_next.route;
                    END IF;
                    v_route := v_next.route;
                    v_priority := v_next.priority;
                    v_passed := v_passed + 1;
                END LOOP;
                CONTINUE;
            END IF;
            -- The last one also if it is not due: the next page begins after it, and not with its other lanes.
            route := v_route;
            within := true;
            RETURN NEXT;
            v_found := v_found + 1;
            EXIT WHEN v_found >= p_most OR v_passed >= 10 * p_most_steps;
        ELSIF v_skips THEN
            IF v_range > v_last THEN
                v_route := NULL;
                EXIT;
            END IF;
            v_from := v_begins[v_range];
        END IF;
        v_priority := 32767;
    END LOOP;
    IF v_first_route IS NOT NULL THEN
        route := v_first_route;
        within := true;
        RETURN NEXT;
    END IF;
    IF v_route IS NOT NULL THEN
        route := v_route;
        within := false;
        RETURN NEXT;
    END IF;
END
$$;

-- outbox_channels: the channels and generations that have open rows, likewise. All of them: a writer names channels as it
-- likes, and no number of them may hide another. Who shows them shows some.
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
    SELECT open.channel, open.generation FROM open
    UNION SELECT l.channel, l.generation FROM core.keyed_lanes() l;
END
$$;

-- open_channels: up to p_most of them, in order, and beside them, however many there are, those that workers have served
-- and those of deployments.
CREATE OR REPLACE FUNCTION core.open_channels(p_most int)
RETURNS TABLE (channel text, generation bigint)
LANGUAGE plpgsql STABLE SECURITY DEFINER
SET search_path = pg_catalog, pg_temp SET jit = off
SET enable_seqscan = off SET enable_bitmapscan = off
AS $$
#variable_conflict use_column
BEGIN
    IF (p_most BETWEEN 1 AND 100000) IS NOT TRUE THEN
        PERFORM core.refuse_argument('p_most must be 1 to 100000');
    END IF;
    IF NOT EXISTS (SELECT FROM core.open_rows()) THEN
        RETURN;
    END IF;
    RETURN QUERY
    WITH RECURSIVE known AS MATERIALIZED (
        SELECT served.channel, w.generation FROM core.workers w CROSS JOIN unnest(w.channels) AS served (channel)
        UNION SELECT core.channel_of(d.generation), d.generation FROM core.deployments d
        UNION SELECT core.channel_of(0), 0),
    open AS (
        (SELECT o.channel, o.generation, 1 AS n FROM core.outbox o
         WHERE o.settled_at IS NULL AND o.ordering_key IS NULL
         ORDER BY o.channel, o.generation LIMIT 1)
        UNION ALL
        SELECT next.channel, next.generation, open.n + 1
        FROM open CROSS JOIN LATERAL (
            SELECT o.channel, o.generation FROM core.outbox o
            WHERE o.settled_at IS NULL AND o.ordering_key IS NULL
              AND (o.channel, o.generation) > (open.channel, open.generation)
            ORDER BY o.channel, o.generation LIMIT 1) next
        WHERE open.n < p_most)
    SELECT known.channel, known.generation FROM known
    CROSS JOIN LATERAL (
        SELECT FROM core.outbox o
        WHERE o.settled_at IS NULL AND o.ordering_key IS NULL
          AND o.channel = known.channel AND o.generation = known.generation LIMIT 1) o
    UNION SELECT open.channel, open.generation FROM open
    UNION (SELECT DISTINCT l.channel, l.generation FROM core.keyed_lanes() l LIMIT p_most);
END
$$;

-- open_lanes: the channels, generations and routes that have open rows, likewise.
CREATE OR REPLACE FUNCTION core.open_lanes()
RETURNS TABLE (channel text, generation bigint, route text)
LANGUAGE plpgsql STABLE SECURITY DEFINER
SET search_path = pg_catalog, pg_temp SET jit = off
SET enable_seqscan = off SET enable_bitmapscan = off
AS $$
#variable_conflict use_column
BEGIN
    RETURN QUERY
    WITH RECURSIVE open AS (
        (SELECT o.channel, o.generation, o.route FROM core.outbox o
         WHERE o.settled_at IS NULL AND o.ordering_key IS NULL
         ORDER BY o.channel, o.generation, o.route LIMIT 1)
        UNION ALL
        SELECT next.channel, next.generation, next.route
        FROM open CROSS JOIN LATERAL (
            SELECT o.channel, o.generation, o.route FROM core.outbox o
            WHERE o.settled_at IS NULL AND o.ordering_key IS NULL
              AND (o.channel, o.generation, o.route) > (open.channel, open.generation, open.route)
            ORDER BY o.channel, o.generation, o.route LIMIT 1) next)
    SELECT open.channel, open.generation, open.route FROM open;
END
$$;

-- outbox_due_in: how long a worker with nothing to do may sleep: until the first delayed row of its lanes is due. NULL
-- when there is none. Leases that expire are found by the poll. p_since is the time since its last claim began: what
-- became due in between was not claimed, and the answer is negative.
CREATE OR REPLACE FUNCTION core.outbox_due_in(
    p_channel text, p_generation bigint, p_routes text[], p_priorities smallint[], p_since interval DEFAULT '0')
RETURNS float8
LANGUAGE plpgsql STABLE SECURITY DEFINER
SET search_path = pg_catalog, pg_temp SET jit = off
SET enable_seqscan = off SET enable_bitmapscan = off SET enable_hashjoin = off SET enable_mergejoin = off
AS $$
BEGIN
    IF (core.is_list(p_routes) AND core.is_list(p_priorities) AND cardinality(p_routes) = cardinality(p_priorities)
        AND p_since BETWEEN interval '-1 day' AND interval '3650 days') IS NOT TRUE THEN
        PERFORM core.refuse_argument('p_routes and p_priorities must have one entry for each lane, p_since at most ten years');
    END IF;
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
