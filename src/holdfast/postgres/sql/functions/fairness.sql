-- Fairness: events with a fairness key, such as the id of a tenant, are claimed in turn over the keys. See keyed.sql.

-- outbox_claim_fair: leases rows that have a fairness key, up to p_limits[i] for each of p_handlers, an equal share of each of
-- the keys after p_after[i] that have something due, and with p_per_key[i] no more of one key at once, those of other
-- workers included. What is in flight is looked for among the first rows of a key: it is the oldest.
-- Half of the room, at most, goes to keys of sources that have an owner, in turn over some of these sources by chance: else a
-- producer with thousands of keys would take as many turns.
-- Returns the claimed rows as outbox_claim does, with handler and key; and one row with a NULL id for each handler, as
-- outbox_claim_ordered does.
CREATE OR REPLACE FUNCTION core.outbox_claim_fair(
    p_worker uuid, p_token uuid, p_lease interval, p_channel text, p_generation bigint,
    p_handlers text[], p_limits int[], p_per_key int[], p_after text[], p_wanted_by text[], p_wanted text[],
    p_most_probes int, p_ended_before timestamptz)
RETURNS TABLE (
    id uuid, route text, priority smallint, available_at timestamptz, origin_id uuid,
    event_type text, event_version int, occurred_at timestamptz, source text, target text, domain_id uuid,
    payload jsonb, idempotency_key text, trace_context text, headers jsonb,
    attempts int, failing_for float8, expired boolean, cancelled boolean, handled boolean,
    handler text, fairness_key text, seq bigint)
LANGUAGE plpgsql SECURITY DEFINER
SET search_path = pg_catalog, pg_temp SET jit = off
SET enable_seqscan = off SET enable_bitmapscan = off SET enable_hashjoin = off SET enable_mergejoin = off
AS $$
#variable_conflict use_column
DECLARE
    v_cancelling   boolean := EXISTS (SELECT FROM core.cancel_requests);
    v_ended_before timestamptz := least(now(), p_ended_before);
    v_limited      text[];
    v_allowed      int[];
    v_handler      text;
    v_routes       text[];
    v_shared       text[];
    v_room         int;
    v_per_key      int;
    v_share        int;
    v_after        text;
    v_last         text;
    v_keys         text[];
    v_owned        text[];
    v_owned_room   int;
    v_ids          uuid[];
    v_next_at      timestamptz;
BEGIN
    PERFORM core.require_keyed_claim(p_worker, p_token, p_lease, p_channel, p_generation, p_handlers, p_limits, p_after,
                                     p_wanted_by, p_wanted, p_most_probes);
    IF (cardinality(p_per_key) = cardinality(p_handlers) AND 0 < ALL (array_remove(p_per_key, NULL))) IS NOT TRUE THEN
        PERFORM core.refuse_argument('p_per_key must have an entry for each handler, NULL or at least 1');
    END IF;
    IF EXISTS (SELECT FROM core.handler_flow) THEN
        SELECT array_agg(a.handler_name), array_agg(a.allowed) INTO v_limited, v_allowed
        FROM core.flow_allow(p_handlers, v_ended_before) a;
        p_limits := ARRAY(SELECT least(t.n, v_allowed[array_position(v_limited, t.handler)])
                          FROM unnest(p_handlers, p_limits) WITH ORDINALITY AS t (handler, n, place) ORDER BY t.place);
    END IF;
    FOR v_handler, v_routes, v_shared IN
        SELECT l.handler, array_agg(l.route), array_agg(l.route) FILTER (WHERE l.shared)
        FROM core.keyed_lanes_of(p_handlers, p_wanted_by, p_wanted, p_channel, p_generation) l
        WHERE l.channel = p_channel AND l.generation = p_generation AND (l.wanted OR l.shared)
        GROUP BY l.handler
    LOOP
        v_room := p_limits[array_position(p_handlers, v_handler)];
        CONTINUE WHEN v_room = 0;
        IF cardinality(v_routes) > 33 AND core.keyed_gather(v_handler, p_wanted_by, p_wanted, p_channel, p_generation) > 0 THEN
            handler := v_handler;
            fairness_key := p_after[array_position(p_handlers, v_handler)];
            RETURN NEXT;
            CONTINUE;
        END IF;
        v_per_key := p_per_key[array_position(p_handlers, v_handler)];
        v_after := p_after[array_position(p_handlers, v_handler)];
        -- Of a single place, half the time.
        v_owned_room := CASE v_room WHEN 1 THEN (random() < 0.5)::int ELSE v_room / 2 END;
        v_owned := NULL;
        IF v_owned_room > 0 AND EXISTS (SELECT FROM core.sources) THEN
            v_owned := core.owned_keys(p_channel, p_generation, v_routes, v_owned_room, v_ended_before);
        END IF;
        v_owned_room := coalesce(cardinality(v_owned), 0);
        WITH RECURSIVE walk AS (
            SELECT v_after AS key, NULL::timestamptz AS at, false AS ready, 0 AS n, 0 AS found
            UNION ALL
            SELECT next.fairness_key, next.at, next.ready, w.n + 1,
                   w.found + (next.ready AND (next.fairness_key = ANY (v_owned)) IS NOT TRUE)::int
            FROM walk w
            CROSS JOIN LATERAL (
                SELECT key.fairness_key, bool_or(due.ready) AS ready, min(later.available_at) AS at
                FROM (SELECT first.fairness_key
                      FROM unnest(v_routes) AS lane (route)
                      CROSS JOIN LATERAL (
                          SELECT o.fairness_key FROM core.outbox o
                          WHERE o.settled_at IS NULL AND o.fairness_key IS NOT NULL
                            AND o.channel = p_channel AND o.generation = p_generation AND o.route = lane.route
                            AND o.fairness_key > w.key
                          ORDER BY o.fairness_key LIMIT 1) first
                      ORDER BY first.fairness_key LIMIT 1) key
                CROSS JOIN unnest(v_routes) AS lane (route)
                CROSS JOIN LATERAL (SELECT EXISTS (
                    SELECT FROM core.outbox o
                    WHERE o.settled_at IS NULL AND o.fairness_key = key.fairness_key
                      AND o.channel = p_channel AND o.generation = p_generation AND o.route = lane.route
                      AND o.available_at <= now() AND (o.status = 'pending' OR o.lease_expires_at < v_ended_before)) AS ready) due
                LEFT JOIN LATERAL (
                    SELECT o.available_at FROM core.outbox o
                    WHERE o.settled_at IS NULL AND o.fairness_key = key.fairness_key
                      AND o.channel = p_channel AND o.generation = p_generation AND o.route = lane.route
                      AND o.available_at > now() AND o.available_at < 'infinity'
                    ORDER BY o.available_at LIMIT 1) later ON true
                GROUP BY key.fairness_key) next
            WHERE w.n < p_most_probes AND w.found < v_room - v_owned_room)
        SELECT array_agg(w.key ORDER BY w.n) FILTER (WHERE w.ready), min(w.at),
               (SELECT l.key FROM walk l WHERE l.n >= p_most_probes OR l.found >= v_room - v_owned_room LIMIT 1)
        INTO v_keys, v_next_at, v_last
        FROM walk w WHERE w.n > 0;
        IF v_owned_room > 0 THEN
            v_keys := v_owned || ARRAY(SELECT k.key FROM unnest(v_keys) WITH ORDINALITY AS k (key, place)
                                       WHERE k.key <> ALL (v_owned) ORDER BY k.place);
        END IF;
        v_share := greatest(1, v_room / greatest(cardinality(v_keys), 1));

        -- What several handlers want becomes siblings, of which this handler's are in its own lane.
        IF v_shared IS NOT NULL THEN
            v_ids := ARRAY(
                SELECT o.id
                FROM unnest(v_keys) AS k (key) CROSS JOIN unnest(v_shared) AS lane (route)
                CROSS JOIN LATERAL (
                    SELECT o.id FROM core.outbox o
                    WHERE o.settled_at IS NULL AND o.fairness_key = k.key
                      AND o.channel = p_channel AND o.generation = p_generation AND o.route = lane.route
                      AND o.available_at <= now() AND (o.status = 'pending' OR o.lease_expires_at < v_ended_before)
                    ORDER BY o.available_at, o.id LIMIT v_share) o);
            PERFORM core.split_rows(v_ids);
            v_routes := ARRAY(SELECT r FROM unnest(v_routes || v_handler) AS t (r) WHERE r <> ALL (v_shared) GROUP BY r);
        END IF;

        RETURN QUERY
        WITH first AS MATERIALIZED (
            SELECT mine.id
            FROM unnest(v_keys) AS k (key)
            CROSS JOIN LATERAL (
                SELECT o.id
                FROM (SELECT o.id, o.free, row_number() OVER (PARTITION BY o.free ORDER BY o.available_at, o.id) AS place,
                             count(*) FILTER (WHERE NOT o.free) OVER () AS running
                      FROM unnest(v_routes) AS lane (route)
                      CROSS JOIN LATERAL (
                          SELECT o.id, o.available_at, o.status = 'pending' OR o.lease_expires_at < v_ended_before AS free
                          FROM core.outbox o
                          WHERE o.settled_at IS NULL AND o.fairness_key = k.key
                            AND o.channel = p_channel AND o.generation = p_generation AND o.route = lane.route
                            AND o.available_at <= now()
                            AND (v_per_key IS NOT NULL OR o.status = 'pending' OR o.lease_expires_at < v_ended_before)
                          ORDER BY o.available_at, o.id
                          LIMIT CASE WHEN v_per_key IS NULL THEN v_share ELSE 2 * v_per_key + 50 END) o) o
                WHERE o.free AND o.place <= v_share AND (v_per_key IS NULL OR o.place <= v_per_key - o.running)) mine),
        due AS MATERIALIZED (
            SELECT o.id, o.attempts, o.idempotency_key
            FROM first CROSS JOIN LATERAL (
                SELECT o.id, o.attempts, o.idempotency_key FROM core.outbox o
                WHERE o.id = first.id AND o.settled_at IS NULL AND o.available_at <= now()
                  AND (o.channel, o.generation) IS NOT DISTINCT FROM (p_channel, p_generation)
                  AND (o.status = 'pending' OR o.lease_expires_at < v_ended_before)
                FOR UPDATE SKIP LOCKED) o
            LIMIT v_room),
        known AS MATERIALIZED (
            SELECT h.idempotency_key FROM core.event_handled h
            WHERE h.handler_name = v_handler AND h.idempotency_key = ANY (ARRAY(SELECT due.idempotency_key FROM due))),
        counted AS (
            INSERT INTO core.rollup_journal (handler_name, generation, outcome, n)
            SELECT v_handler, p_generation, 'begun', count(*) FROM due WHERE due.attempts = 0 HAVING count(*) > 0),
        slots AS (
            INSERT INTO core.handler_slots (handler_name, token, ids)
            SELECT v_handler, p_token, array_agg(due.id) FROM due
            WHERE v_handler = ANY (v_limited) HAVING count(*) > 0)
        UPDATE core.outbox AS o
        SET status = 'in_flight', attempts = least(o.attempts, 2147483646) + 1, claimed_by = p_worker,
            lease_token = p_token, lease_expires_at = now() + p_lease,
            handler_name = o.handler_name  -- as it was, see outbox_claim
        WHERE o.id = ANY (ARRAY(SELECT due.id FROM due))
        RETURNING o.id, o.route, o.priority, o.available_at, o.origin_id,
            o.event_type, o.event_version, o.occurred_at, o.source, o.target,
            o.domain_id, o.payload, o.idempotency_key, o.trace_context, o.headers,
            o.attempts, extract(epoch FROM now() - o.first_failed_at)::float8, o.expires_at <= now(),
            v_cancelling AND EXISTS (SELECT FROM core.cancel_requests s WHERE s.id = o.id),
            o.idempotency_key IN (SELECT known.idempotency_key FROM known)
            AND coalesce((SELECT h.source = o.source
                             OR core.inbox_has(h.handler_name, o.idempotency_key, o.source)
                      FROM core.event_handled h
                      WHERE h.handler_name = v_handler AND h.idempotency_key = o.idempotency_key LIMIT 1), false),
            v_handler, o.fairness_key, o.seq;

        -- The row that says where the next claim goes on: its other columns are NULL.
        handler := v_handler;
        fairness_key := v_last;
        failing_for := extract(epoch FROM v_next_at - clock_timestamp());
        RETURN NEXT;
    END LOOP;
    IF v_limited IS NOT NULL THEN
        PERFORM core.flow_spend(v_limited, p_token);
    END IF;
END
$$;

-- owned_keys: fairness keys that have something due, up to p_room, of at most ten sources that have an owner, whose keys begin
-- with its name: as many of each. Which sources, and where among their keys to begin, is left to chance: no claim has to know
-- where the one before it stopped.
CREATE OR REPLACE FUNCTION core.owned_keys(
    p_channel text, p_generation bigint, p_routes text[], p_room int, p_ended_before timestamptz)
RETURNS text[]
LANGUAGE plpgsql SECURITY DEFINER
SET search_path = pg_catalog, pg_temp SET jit = off
SET enable_seqscan = off SET enable_bitmapscan = off SET enable_hashjoin = off SET enable_mergejoin = off
AS $$
BEGIN
    RETURN ARRAY(
        WITH RECURSIVE walk AS (
            SELECT s.prefix, s.prefix || CASE begins.way WHEN 1 THEN chr(33 + floor(random() * 94)::int) ELSE '' END AS key,
                   false AS ready, 0 AS n, begins.way
            FROM (SELECT d.source || '/' AS prefix FROM (SELECT DISTINCT s.source FROM core.sources s) d
                  ORDER BY random() LIMIT 10) s
            -- From anywhere among the keys, and from the first one, in case there is nothing after that.
            CROSS JOIN (VALUES (1), (2)) AS begins (way)
            UNION ALL
            SELECT w.prefix, next.fairness_key, next.ready, w.n + 1, w.way
            FROM walk w
            CROSS JOIN LATERAL (
                SELECT key.fairness_key, EXISTS (
                    SELECT FROM unnest(p_routes) AS lane (route)
                    CROSS JOIN LATERAL (
                        SELECT FROM core.outbox o
                        WHERE o.settled_at IS NULL AND o.fairness_key = key.fairness_key
                          AND o.channel = p_channel AND o.generation = p_generation AND o.route = lane.route
                          AND o.available_at <= now() AND (o.status = 'pending' OR o.lease_expires_at < p_ended_before)
                        LIMIT 1) o) AS ready
                FROM (SELECT first.fairness_key
                      FROM unnest(p_routes) AS lane (route)
                      CROSS JOIN LATERAL (
                          SELECT o.fairness_key FROM core.outbox o
                          WHERE o.settled_at IS NULL AND o.fairness_key IS NOT NULL
                            AND o.channel = p_channel AND o.generation = p_generation AND o.route = lane.route
                            AND o.fairness_key > w.key
                          ORDER BY o.fairness_key LIMIT 1) first
                      ORDER BY first.fairness_key LIMIT 1) key) next
            WHERE w.n < least(p_room, 20) AND starts_with(w.key, w.prefix))
        SELECT turn.key
        FROM (SELECT found.key, row_number() OVER (PARTITION BY found.prefix ORDER BY found.way, found.n) AS place
              FROM (SELECT DISTINCT ON (w.key) w.* FROM walk w
                    WHERE w.ready AND starts_with(w.key, w.prefix) ORDER BY w.key, w.way) found) turn
        ORDER BY turn.place, random() LIMIT p_room);
END
$$;
