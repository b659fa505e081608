-- Order: the rows of an ordering key are handled one after the other, by seq, within one key and one handler. What a handler
-- is owed may stand in several lanes: its own, and those of event types that are not split yet, in each channel and
-- generation. The head of a key is the first row of them all.
--
-- core.ordering_heads says which row of a key a handler has got last. A claim takes a row only if the line still names the
-- row that the claim has seen to be over, or none: so two rows of a key are never in flight for one handler, also when a
-- smaller number is committed late, and the row that was begun is the one to go on with. Nothing is written when a row is
-- settled: that it is over is seen from the row itself.

-- is_dead_letter: whether a row has failed and waits for somebody, in the outbox or in the archive. What was cancelled, has
-- expired or was discarded does not.
CREATE OR REPLACE FUNCTION core.is_dead_letter(p_id uuid)
RETURNS boolean
LANGUAGE plpgsql STABLE SECURITY DEFINER
SET search_path = pg_catalog, pg_temp SET enable_seqscan = off SET enable_bitmapscan = off
AS $$
BEGIN
    RETURN EXISTS (SELECT FROM core.outbox o WHERE o.id = p_id AND o.status = 'failed' AND o.deleted_at IS NULL)
        OR EXISTS (SELECT FROM core.archive a
                   WHERE a.original_id = p_id AND a.deleted_at IS NULL);
END
$$;

-- outbox_claim_ordered: leases the heads of ordering keys, up to p_limits[i] for each of p_handlers, in turn over the keys
-- after p_after[i]. p_blocks[i]: a dead letter at the head keeps the rows behind it back. p_keys, from p_seqs on, of
-- p_key_handlers are keys to go on with; without p_discover no others are looked for. At most p_most_probes keys are looked
-- at for each handler. A head that several handlers want is split first.
-- Returns the claimed rows as outbox_claim does, with handler, key and number; and one row with a NULL id for each handler
-- that has lanes: in ordering_key the key after which the next claim goes on, NULL when the last key was reached; in
-- failing_for the seconds until the next of the heads that were seen is due.
CREATE OR REPLACE FUNCTION core.outbox_claim_ordered(
    p_worker uuid, p_token uuid, p_lease interval, p_channel text, p_generation bigint,
    p_handlers text[], p_limits int[], p_blocks boolean[], p_after text[], p_wanted_by text[], p_wanted text[],
    p_key_handlers text[], p_keys text[], p_seqs bigint[], p_discover boolean, p_most_probes int, p_ended_before timestamptz)
RETURNS TABLE (
    id uuid, route text, priority smallint, available_at timestamptz, origin_id uuid,
    event_type text, event_version int, occurred_at timestamptz, source text, target text, domain_id uuid,
    payload jsonb, idempotency_key text, trace_context text, headers jsonb,
    attempts int, failing_for float8, expired boolean, cancelled boolean, handled boolean,
    handler text, ordering_key text, seq bigint)
LANGUAGE plpgsql SECURITY DEFINER
SET search_path = pg_catalog, pg_temp SET jit = off
SET enable_seqscan = off SET enable_bitmapscan = off SET enable_hashjoin = off SET enable_mergejoin = off
AS $$
#variable_conflict use_column
DECLARE
    v_cancelling   boolean := EXISTS (SELECT FROM core.cancel_requests);
    v_ended_before timestamptz := least(now(), p_ended_before);
    v_limited      text[];   -- handlers that flow.sql limits, and how much is allowed of each; NULL without any
    v_allowed      int[];
    v_handler      text;
    v_types        int;
    v_asked        int;
    v_found        int;
    v_ids          uuid[];
    v_keys         text[];
    v_former       uuid[];
    v_former_at    timestamptz[];
    v_shared       uuid[];
    v_shared_keys  text[];
    v_last         text;
    v_next_at      timestamptz;
BEGIN
    PERFORM core.require_keyed_claim(p_worker, p_token, p_lease, p_channel, p_generation, p_handlers, p_limits, p_after,
                                     p_wanted_by, p_wanted, p_most_probes);
    IF (core.is_list(p_blocks) AND cardinality(p_blocks) = cardinality(p_handlers) AND p_discover IS NOT NULL
        AND core.is_list(p_key_handlers) AND core.is_list(p_keys) AND core.is_list(p_seqs)
        AND cardinality(p_keys) = ALL (ARRAY[cardinality(p_key_handlers), cardinality(p_seqs)])) IS NOT TRUE THEN
        PERFORM core.refuse_argument('p_blocks must have an entry for each handler, p_keys a handler and a number each');
    END IF;
    IF EXISTS (SELECT FROM core.handler_flow) THEN
        SELECT array_agg(a.handler_name), array_agg(a.allowed) INTO v_limited, v_allowed
        FROM core.flow_allow(p_handlers, v_ended_before) a;
        p_limits := ARRAY(SELECT least(t.n, v_allowed[array_position(v_limited, t.handler)])
                          FROM unnest(p_handlers, p_limits) WITH ORDINALITY AS t (handler, n, place) ORDER BY t.place);
    END IF;
    FOR v_handler, v_types IN
        SELECT l.handler, count(*) FILTER (WHERE strpos(l.route, '/') > 0 AND (l.wanted OR l.shared))
        FROM core.keyed_lanes_of(p_handlers, p_wanted_by, p_wanted, p_channel, p_generation) l GROUP BY l.handler
    LOOP
        v_found := p_limits[array_position(p_handlers, v_handler)];
        CONTINUE WHEN v_found = 0;
        IF p_discover AND v_types > 32
           AND core.keyed_gather(v_handler, p_wanted_by, p_wanted, p_channel, p_generation) > 0 THEN
            -- The next claim goes on from the same place, with fewer lanes.
            handler := v_handler;
            ordering_key := p_after[array_position(p_handlers, v_handler)];
            RETURN NEXT;
            CONTINUE;
        END IF;
        v_asked := (SELECT count(*) FROM unnest(p_key_handlers) AS k (handler) WHERE k.handler = v_handler);
        v_found := greatest(v_found - v_asked, (v_found + 3) / 4);

        -- The lanes under the snapshot that shows the rows: a split or a retry moves a head to another lane.
        WITH RECURSIVE lane AS MATERIALIZED (
            SELECT l.channel, l.generation, l.route,
                   CASE WHEN (l.channel, l.generation) <> (p_channel, p_generation) OR NOT (l.wanted OR l.shared) THEN 'leave'
                        WHEN l.shared THEN 'split' ELSE 'claim' END AS way
            FROM core.keyed_lanes_of(ARRAY[v_handler], p_wanted_by, p_wanted, p_channel, p_generation) l),
        walk AS (
            SELECT p_after[array_position(p_handlers, v_handler)] AS key, NULL::uuid AS id, NULL::text AS way,
                   NULL::timestamptz AS at, NULL::boolean AS free, 0 AS n, 0 AS found
            WHERE p_discover
            UNION ALL
            SELECT head.ordering_key, head.id, head.way, head.available_at, head.free, w.n + 1,
                   w.found + (head.free AND head.available_at <= now() AND head.way <> 'leave')::int
            FROM walk w
            CROSS JOIN LATERAL (
                SELECT first.*, lane.way
                FROM lane
                CROSS JOIN LATERAL (
                    SELECT o.id, o.ordering_key, o.seq, o.available_at,
                           o.status = 'pending' OR o.lease_expires_at < v_ended_before AS free
                    FROM core.outbox o
                    WHERE o.settled_at IS NULL AND o.ordering_key IS NOT NULL
                      AND o.channel = lane.channel AND o.generation = lane.generation AND o.route = lane.route
                      AND o.ordering_key > w.key
                    ORDER BY o.ordering_key, o.seq LIMIT 1) first
                ORDER BY first.ordering_key, first.seq, first.id LIMIT 1) head
            WHERE w.n < p_most_probes AND w.found < v_found),
        asked AS (
            SELECT k.key, head.id, head.way, head.available_at AS at, head.free
            FROM unnest(p_key_handlers, p_keys, p_seqs) AS k (handler, key, seq)
            CROSS JOIN LATERAL (
                SELECT first.*, lane.way
                FROM lane
                CROSS JOIN LATERAL (
                    SELECT o.id, o.seq, o.available_at, o.status = 'pending' OR o.lease_expires_at < v_ended_before AS free
                    FROM core.outbox o
                    WHERE o.settled_at IS NULL AND o.ordering_key IS NOT NULL
                      AND o.channel = lane.channel AND o.generation = lane.generation AND o.route = lane.route
                      AND o.ordering_key = k.key AND o.seq >= k.seq
                    ORDER BY o.seq LIMIT 1) first
                ORDER BY first.seq, first.id LIMIT 1) head
            WHERE k.handler = v_handler),
        head AS MATERIALIZED (
            SELECT DISTINCT ON (h.key) h.key, h.id, h.way, h.at, h.free, h.turn
            -- What the walk has found is the head for certain: a smaller number may have been committed late.
            FROM (SELECT w.key, w.id, w.way, w.at, w.free, w.n AS turn FROM walk w WHERE w.id IS NOT NULL
                  UNION ALL SELECT a.key, a.id, a.way, a.at, a.free, 0 FROM asked a) h
            ORDER BY h.key, h.turn DESC),
        candidate AS MATERIALIZED (
            SELECT head.key, CASE WHEN begun.way IS NULL THEN head.id ELSE former.id END AS id,
                   line.head_id AS former, line.claimed_at AS former_at, head.turn,
                   CASE WHEN begun.way IS NULL THEN head.at ELSE former.available_at END AS at,
                   CASE WHEN begun.way IS NULL THEN head.free ELSE former.free END AS free,
                   CASE WHEN begun.way IS NOT NULL THEN begun.way
                        WHEN line.blocks IS TRUE AND line.head_id <> head.id
                             AND CASE WHEN former.id IS NULL THEN core.is_dead_letter(line.head_id) ELSE former.dead END THEN 'leave'
                        ELSE head.way END AS way
            FROM head
            LEFT JOIN LATERAL (
                SELECT h.head_id, h.claimed_at, h.blocks FROM core.ordering_heads h
                WHERE h.handler_name = v_handler AND h.ordering_key = head.key LIMIT 1) line ON true
            -- The row before, if it is still in the outbox: nearly always it is over, and one look says so.
            LEFT JOIN LATERAL (
                SELECT o.id, o.available_at, o.status = 'pending' OR o.lease_expires_at < v_ended_before AS free,
                       o.status = 'failed' AND o.deleted_at IS NULL AS dead,
                       o.settled_at IS NULL AND o.ordering_key IS NOT DISTINCT FROM head.key AS open,
                       o.channel, o.generation, o.route
                FROM core.outbox o WHERE o.id = line.head_id AND line.head_id <> head.id LIMIT 1) former ON true
            -- A row that was begun is gone on with, unless it is no longer owed to the handler.
            LEFT JOIN LATERAL (
                SELECT lane.way FROM lane
                WHERE former.open AND lane.channel = former.channel AND lane.generation = former.generation
                  AND lane.route = former.route LIMIT 1) begun ON true)
        SELECT array_agg(c.id ORDER BY c.turn) FILTER (WHERE c.way = 'claim' AND c.free AND c.at <= now()),
               array_agg(c.key ORDER BY c.turn) FILTER (WHERE c.way = 'claim' AND c.free AND c.at <= now()),
               array_agg(c.former ORDER BY c.turn) FILTER (WHERE c.way = 'claim' AND c.free AND c.at <= now()),
               array_agg(c.former_at ORDER BY c.turn) FILTER (WHERE c.way = 'claim' AND c.free AND c.at <= now()),
               array_agg(c.id) FILTER (WHERE c.way = 'split' AND c.free AND c.at <= now()),
               array_agg(c.key) FILTER (WHERE c.way = 'split' AND c.free AND c.at <= now()),
               min(c.at) FILTER (WHERE c.way <> 'leave' AND c.free AND c.at > now() AND c.at < 'infinity'),
               (SELECT w.key FROM walk w WHERE w.n >= p_most_probes OR w.found >= v_found LIMIT 1)
        INTO v_ids, v_keys, v_former, v_former_at, v_shared, v_shared_keys, v_next_at, v_last
        FROM candidate c;

        IF v_shared IS NOT NULL AND core.split_rows(v_shared) > 0 THEN
            SELECT v_ids || array_agg(o.id), v_keys || array_agg(k.key), v_former || array_agg(h.head_id),
                   v_former_at || array_agg(h.claimed_at)
            INTO v_ids, v_keys, v_former, v_former_at
            FROM unnest(v_shared, v_shared_keys) AS k (origin, key)
            CROSS JOIN LATERAL (
                SELECT o.id, o.origin_id FROM core.outbox o
                WHERE o.settled_at IS NULL AND o.ordering_key IS NOT NULL AND o.channel = p_channel
                  AND o.generation = p_generation AND o.route = v_handler AND o.ordering_key = k.key
                ORDER BY o.seq, o.id LIMIT 1) o
            LEFT JOIN core.ordering_heads h ON h.handler_name = v_handler AND h.ordering_key = k.key
            WHERE o.origin_id = k.origin;
        END IF;

        RETURN QUERY
        WITH due AS MATERIALIZED (
            SELECT o.id, o.attempts, o.idempotency_key, t.key, t.former, t.former_at
            FROM unnest(v_ids, v_keys, v_former, v_former_at) AS t (id, key, former, former_at)
            CROSS JOIN LATERAL (
                SELECT o.id, o.attempts, o.idempotency_key FROM core.outbox o
                -- Compared so that no index but the primary key has it: those of keys would walk all rows of the key.
                WHERE o.id = t.id AND o.settled_at IS NULL
                  AND (o.channel, o.generation) IS NOT DISTINCT FROM (p_channel, p_generation) AND o.available_at <= now()
                  AND (o.status = 'pending' OR o.lease_expires_at < v_ended_before)
                FOR UPDATE SKIP LOCKED) o
            LIMIT p_limits[array_position(p_handlers, v_handler)]),
        known AS MATERIALIZED (
            SELECT h.idempotency_key FROM core.event_handled h
            WHERE h.handler_name = v_handler AND h.idempotency_key = ANY (ARRAY(SELECT due.idempotency_key FROM due))),
        begun AS (
            INSERT INTO core.ordering_heads AS h (handler_name, ordering_key, head_id, former_id, former_at, blocks)
            SELECT v_handler, due.key, due.id, due.former, due.former_at, p_blocks[array_position(p_handlers, v_handler)]
            -- Claims that meet wait for each other in one order.
            FROM due ORDER BY due.key COLLATE "C"
            ON CONFLICT (handler_name, ordering_key) DO UPDATE
                SET head_id = EXCLUDED.head_id, former_id = EXCLUDED.former_id, former_at = EXCLUDED.former_at,
                    blocks = EXCLUDED.blocks, claimed_at = clock_timestamp()
                WHERE h.head_id = EXCLUDED.head_id OR (h.head_id, h.claimed_at) = (EXCLUDED.former_id, EXCLUDED.former_at)
            RETURNING h.head_id),
        counted AS (
            INSERT INTO core.rollup_journal (handler_name, generation, outcome, n)
            SELECT v_handler, p_generation, 'begun', count(*)
            FROM due WHERE due.attempts = 0 AND due.id IN (SELECT begun.head_id FROM begun) HAVING count(*) > 0),
        slots AS (
            INSERT INTO core.handler_slots (handler_name, token, ids)
            SELECT v_handler, p_token, array_agg(begun.head_id) FROM begun
            WHERE v_handler = ANY (v_limited) HAVING count(*) > 0)
        UPDATE core.outbox AS o
        SET status = 'in_flight', attempts = least(o.attempts, 2147483646) + 1, claimed_by = p_worker,
            lease_token = p_token, lease_expires_at = now() + p_lease,
            handler_name = o.handler_name  -- as it was, see outbox_claim
        WHERE o.id = ANY (ARRAY(SELECT begun.head_id FROM begun))
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
            v_handler, o.ordering_key, o.seq;

        -- The row that says where the next claim goes on: its other columns are NULL.
        handler := v_handler;
        ordering_key := v_last;
        failing_for := extract(epoch FROM v_next_at - clock_timestamp());
        RETURN NEXT;
    END LOOP;
    IF v_limited IS NOT NULL THEN
        PERFORM core.flow_spend(v_limited, p_token);
    END IF;
END
$$;

-- replayed_places: after a replay. A dead letter that blocks its key is still its head, and keeps its place; any other takes a
-- new one, behind all that were published meanwhile, because its followers may have been handled.
CREATE OR REPLACE FUNCTION core.replayed_places(p_ids uuid[])
RETURNS void
LANGUAGE plpgsql SECURITY DEFINER
SET search_path = pg_catalog, pg_temp SET jit = off
SET enable_seqscan = off SET enable_bitmapscan = off SET enable_hashjoin = off SET enable_mergejoin = off
AS $$
DECLARE
    v_ids  uuid[];
    v_kept uuid[];
BEGIN
    v_ids := ARRAY(SELECT o.id FROM core.outbox o
                   WHERE o.id = ANY (p_ids) AND o.settled_at IS NULL AND o.ordering_key > '');
    IF v_ids = '{}' THEN
        RETURN;
    END IF;
    v_kept := ARRAY(
        SELECT line.head_id
        FROM (SELECT o.id, o.handler_name, o.ordering_key FROM core.outbox o WHERE o.id = ANY (v_ids)
              ORDER BY o.handler_name COLLATE "C", o.ordering_key COLLATE "C") o
        CROSS JOIN LATERAL (
            SELECT h.head_id FROM core.ordering_heads h
            WHERE h.handler_name = o.handler_name AND h.ordering_key = o.ordering_key AND h.head_id = o.id AND h.blocks
            FOR UPDATE) line);
    UPDATE core.outbox o SET seq = DEFAULT WHERE o.id = ANY (v_ids) AND o.id <> ALL (v_kept);
    DELETE FROM core.ordering_heads h
    USING core.outbox o
    WHERE o.id = ANY (v_ids) AND o.id <> ALL (v_kept)
      AND h.handler_name = o.handler_name AND h.ordering_key = o.ordering_key AND h.head_id = o.id;
END
$$;

-- sweep_heads: removes the lines of ordering keys, of p_limit after (p_handler, p_key), whose last row is over. That of a dead
-- letter that blocks stays. Says how many it removed and where to go on, NULL at the end.
CREATE OR REPLACE FUNCTION core.sweep_heads(
    p_handler text, p_key text, p_limit int, p_actor text DEFAULT NULL, p_reason text DEFAULT NULL)
RETURNS TABLE (swept int, next_handler text, next_key text)
LANGUAGE plpgsql SECURITY DEFINER
SET search_path = pg_catalog, pg_temp SET jit = off
SET enable_seqscan = off SET enable_bitmapscan = off SET enable_hashjoin = off SET enable_mergejoin = off
AS $$
#variable_conflict use_column
DECLARE
    v_limit    int := least(greatest(p_limit, 1), 5000);
    v_handlers text[];
    v_keys     text[];
    v_heads    uuid[];
BEGIN
    PERFORM core.require_operator(p_actor);
    SELECT array_agg(h.handler_name), array_agg(h.ordering_key), array_agg(h.head_id) INTO v_handlers, v_keys, v_heads
    FROM (SELECT h.handler_name, h.ordering_key, h.head_id FROM core.ordering_heads h
          WHERE (h.handler_name, h.ordering_key) > (coalesce(p_handler, ''), coalesce(p_key, ''))
          ORDER BY h.handler_name, h.ordering_key LIMIT v_limit) h;
    IF cardinality(v_heads) = v_limit THEN
        next_handler := v_handlers[v_limit];
        next_key := v_keys[v_limit];
    END IF;
    -- Only while the line still names the row: a claim may have gone on with the key.
    DELETE FROM core.ordering_heads h
    USING unnest(v_handlers, v_keys, v_heads) AS t (handler, key, head)
    WHERE h.handler_name = t.handler AND h.ordering_key = t.key AND h.head_id = t.head
      AND NOT EXISTS (SELECT FROM core.outbox o WHERE o.id = t.head AND o.settled_at IS NULL)
      AND NOT (h.blocks AND core.is_dead_letter(t.head));
    GET DIAGNOSTICS swept = ROW_COUNT;
    PERFORM core.audit_sweep(p_actor, p_reason, 'heads', '', swept);
    RETURN NEXT;
END
$$;

-- forget_heads: removes the lines of rows that are about to lose their keys.
CREATE OR REPLACE FUNCTION core.forget_heads(p_handlers text[], p_keys text[], p_ids uuid[])
RETURNS void
LANGUAGE plpgsql SECURITY DEFINER
SET search_path = pg_catalog, pg_temp SET jit = off
SET enable_seqscan = off SET enable_bitmapscan = off SET enable_hashjoin = off SET enable_mergejoin = off
AS $$
BEGIN
    DELETE FROM core.ordering_heads h
    USING unnest(p_handlers, p_keys, p_ids) AS t (handler, key, head)
    WHERE h.handler_name = t.handler AND h.ordering_key = t.key AND h.head_id = t.head;
END
$$;

-- keys_blocked: the ordering keys that a dead letter blocks, the longest blocked first: up to p_most of them, with the number
-- of rows behind each, counted up to p_most_followers; of one handler, or of one key, if they are given.
CREATE OR REPLACE FUNCTION core.keys_blocked(p_handler text, p_key text, p_most int, p_most_followers int)
RETURNS TABLE (
    handler_name text, ordering_key text, head_id uuid, event_id uuid, event_type text, blocked_at timestamptz,
    failure_reason text, last_error text, archived boolean, followers int)
LANGUAGE plpgsql STABLE SECURITY DEFINER
SET search_path = pg_catalog, pg_temp SET jit = off
SET enable_seqscan = off SET enable_bitmapscan = off SET enable_hashjoin = off SET enable_mergejoin = off
AS $$
#variable_conflict use_column
BEGIN
    IF (p_most BETWEEN 1 AND 10000 AND p_most_followers BETWEEN 1 AND 1000000) IS NOT TRUE THEN
        PERFORM core.refuse_argument('p_most must be 1 to 10000, p_most_followers 1 to 1000000');
    END IF;
    RETURN QUERY
    WITH blocked AS MATERIALIZED (
        SELECT b.* FROM (
            SELECT h.handler_name, h.ordering_key, h.head_id, coalesce(o.origin_id, o.id) AS event_id, o.event_type,
                   o.failed_at, o.failure_reason, o.last_error, false AS archived
            FROM core.ordering_heads h
            CROSS JOIN LATERAL (SELECT o.* FROM core.outbox o WHERE o.id = h.head_id
                                AND o.status = 'failed' AND o.deleted_at IS NULL LIMIT 1) o
            WHERE h.blocks
              AND h.handler_name = coalesce(p_handler, h.handler_name) AND h.ordering_key = coalesce(p_key, h.ordering_key)
            UNION ALL
            SELECT h.handler_name, h.ordering_key, h.head_id, coalesce(a.origin_id, a.original_id), a.event_type,
                   a.failed_at, a.failure_reason, a.last_exception, true
            FROM core.ordering_heads h
            CROSS JOIN LATERAL (SELECT a.* FROM core.archive a WHERE a.original_id = h.head_id
                                AND a.deleted_at IS NULL ORDER BY a.id DESC LIMIT 1) a
            WHERE h.blocks
              AND h.handler_name = coalesce(p_handler, h.handler_name) AND h.ordering_key = coalesce(p_key, h.ordering_key)) b
        ORDER BY b.failed_at, b.handler_name, b.ordering_key LIMIT p_most),
    lane AS MATERIALIZED (
        SELECT l.* FROM core.keyed_lanes_of(ARRAY(SELECT DISTINCT b.handler_name FROM blocked b), '{}', '{}', NULL, NULL) l)
    SELECT b.handler_name, b.ordering_key, b.head_id, b.event_id, b.event_type, b.failed_at, b.failure_reason, b.last_error,
           b.archived,
           (SELECT count(*)::int FROM (
                SELECT FROM lane CROSS JOIN LATERAL (
                    SELECT FROM core.outbox o
                    WHERE o.settled_at IS NULL AND o.ordering_key IS NOT NULL
                      AND o.channel = lane.channel AND o.generation = lane.generation AND o.route = lane.route
                      AND o.ordering_key = b.ordering_key
                    LIMIT p_most_followers) o
                WHERE lane.handler = b.handler_name LIMIT p_most_followers) o)
    FROM blocked b ORDER BY b.failed_at, b.handler_name, b.ordering_key;
END
$$;

-- key_release: lets the rows behind a dead letter go on. The dead letter stays one; if it is replayed later, it takes a place at
-- the end. Returns the id of the dead letter, or NULL when the key is not blocked.
CREATE OR REPLACE FUNCTION core.key_release(p_handler text, p_key text, p_actor text, p_reason text DEFAULT NULL)
RETURNS uuid
LANGUAGE plpgsql SECURITY DEFINER
SET search_path = pg_catalog, pg_temp
AS $$
DECLARE
    v_head uuid;
BEGIN
    IF (core.is_name(p_handler) AND octet_length(p_key) BETWEEN 1 AND 800) IS NOT TRUE THEN
        PERFORM core.refuse_argument('p_handler must name a handler, p_key an ordering key of 1 to 800 bytes');
    END IF;
    DELETE FROM core.ordering_heads h
    WHERE h.handler_name = p_handler AND h.ordering_key = p_key AND h.blocks AND core.is_dead_letter(h.head_id)
    RETURNING h.head_id INTO v_head;
    IF v_head IS NOT NULL THEN
        PERFORM core.audit_append(
            p_actor, 'key.release', p_reason, jsonb_build_object('handler', p_handler, 'ordering_key', p_key),
            jsonb_build_object('head', v_head));
        PERFORM core.wake(l.channel, 'rescan')
        FROM (SELECT DISTINCT l.channel FROM core.keyed_lanes_of(ARRAY[p_handler], '{}', '{}', NULL, NULL) l) l;
    END IF;
    RETURN v_head;
END
$$;
