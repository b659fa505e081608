-- Handlers whose events come from a broker. The relay (relay.sql) sends the events there; a worker takes them from there and
-- calls the handler. What the broker carries is first attempts: whatever does not succeed at once becomes a row in the
-- handler's own lane, and is claimed, retried, kept as a dead letter and replayed from there like any other.
--
-- Nothing is acknowledged to the broker before the transaction has committed that remembers it: the inbox row, or the row in
-- the lane. The inbox is the only thing that keeps an event from being handled twice.

-- broker_interests: what those of the handlers that a broker carries events to are owed, and since when. NULL for every
-- handler. draining: it carries no more, and the last ones are still taken from there.
CREATE OR REPLACE FUNCTION core.broker_interests(p_via text, p_handlers text[])
RETURNS TABLE (handler_name text, domain_context text, event_types text[], since timestamptz, draining boolean)
LANGUAGE plpgsql STABLE SECURITY DEFINER
SET search_path = pg_catalog, pg_temp
AS $$
#variable_conflict use_column
BEGIN
    RETURN QUERY
    SELECT s.handler_name, min(s.domain_context), array_agg(s.event_type ORDER BY s.event_type),
           min(coalesce(s.via_since, s.created_at)), bool_and(s.via <> p_via)
    FROM core.subscriptions s
    WHERE s.retired_at IS NULL AND p_via IN (s.via, s.draining)
      AND (p_handlers IS NULL OR s.handler_name = ANY (p_handlers))
    GROUP BY s.handler_name ORDER BY s.handler_name;
END
$$;

-- broker_undecided: what those of the handlers are owed for which nobody has decided what carries their events.
CREATE OR REPLACE FUNCTION core.broker_undecided(p_handlers text[])
RETURNS TABLE (handler_name text, domain_context text, event_types text[])
LANGUAGE plpgsql STABLE SECURITY DEFINER
SET search_path = pg_catalog, pg_temp
AS $$
#variable_conflict use_column
BEGIN
    RETURN QUERY
    SELECT s.handler_name, min(s.domain_context), array_agg(s.event_type ORDER BY s.event_type)
    FROM core.subscriptions s
    WHERE s.handler_name = ANY (p_handlers) AND s.retired_at IS NULL
    GROUP BY s.handler_name HAVING bool_and(s.via_by IS NULL AND s.via = 'outbox') ORDER BY s.handler_name;
END
$$;

-- set_via: lets something else carry the events of handlers, from now on. The version of the subscriptions is raised with it,
-- so each event goes one way: a claim or a split that was worked out before does nothing. A relay has a line among the
-- subscriptions that is retired at once: it is owed nothing by itself, and its rows are found by its name. Returns how many
-- handlers have changed.
CREATE OR REPLACE FUNCTION core.set_via(p_handlers text[], p_via text, p_by text)
RETURNS int
LANGUAGE plpgsql
SET search_path = pg_catalog, pg_temp
AS $$
DECLARE
    v_changed int;
BEGIN
    IF (core.are_names(p_handlers, 10000) AND p_via ~ '^[a-z][a-z0-9_]{0,29}$' AND p_via <> 'in_process') IS NOT TRUE THEN
        PERFORM core.refuse_argument('p_handlers must name handlers, and p_via be outbox or the name of a broker');
    END IF;
    -- Whatever the connection's setting: an event that is owed to a handler must not be lost by a crash of the server.
    PERFORM set_config('synchronous_commit', 'on', true);
    PERFORM FROM core.subscriptions_version FOR UPDATE;   -- before the subscriptions, as in subscribe
    WITH changed AS (
        UPDATE core.subscriptions s
        SET via = p_via, via_since = now(), via_by = p_by,
            draining = nullif(CASE s.via WHEN 'outbox' THEN s.draining ELSE s.via END, p_via)
        WHERE s.handler_name = ANY (p_handlers) AND s.via <> p_via AND NOT starts_with(s.handler_name, 'relay.')
          AND s.retired_at IS DISTINCT FROM s.created_at
        RETURNING s.handler_name)
    SELECT count(DISTINCT handler_name) INTO v_changed FROM changed;
    -- Who has decided it has, also if nothing changes.
    UPDATE core.subscriptions s SET via_by = p_by
    WHERE s.handler_name = ANY (p_handlers) AND s.via_by IS DISTINCT FROM p_by AND p_by IS NOT NULL;
    IF v_changed > 0 THEN
        UPDATE core.subscriptions_version SET version = version + 1;
        IF p_via <> 'outbox' THEN
            INSERT INTO core.subscriptions (domain_context, handler_name, event_type, retired_at)
            VALUES ('relay', 'relay.' || p_via, '*', now()) ON CONFLICT DO NOTHING;
        END IF;
    END IF;
    RETURN v_changed;
END
$$;

-- broker_adopt: lets a broker carry the events of those of the handlers for which nobody has decided anything, when a worker
-- that is started with the broker can reach it. Returns how many have changed.
CREATE OR REPLACE FUNCTION core.broker_adopt(p_handlers text[], p_via text, p_worker text)
RETURNS int
LANGUAGE plpgsql SECURITY DEFINER
SET search_path = pg_catalog, pg_temp
AS $$
DECLARE
    v_undecided text[] := ARRAY(SELECT u.handler_name FROM core.broker_undecided(p_handlers) u);
    v_changed   int;
BEGIN
    -- Most starts change nothing.
    IF v_undecided = '{}' THEN
        RETURN 0;
    END IF;
    v_changed := core.set_via(v_undecided, p_via, NULL);
    PERFORM core.audit_append(
        'system', 'handler.via', 'a worker was started with the broker',
        jsonb_build_object('handlers', v_undecided, 'via', p_via, 'worker', left(p_worker, 200)),
        jsonb_build_object('changed', v_changed));
    RETURN v_changed;
END
$$;

-- handler_via: the same for one handler, or all, by an operator, whose decision stands. Returns how many have changed.
CREATE OR REPLACE FUNCTION core.handler_via(p_handlers text[], p_via text, p_actor text, p_reason text DEFAULT NULL)
RETURNS int
LANGUAGE plpgsql SECURITY DEFINER
SET search_path = pg_catalog, pg_temp
AS $$
DECLARE
    v_unknown text;
    v_changed int;
BEGIN
    SELECT t.handler INTO v_unknown FROM unnest(p_handlers) AS t (handler)
    WHERE NOT EXISTS (SELECT FROM core.subscriptions s WHERE s.handler_name = t.handler AND s.retired_at IS NULL)
    LIMIT 1;
    IF FOUND THEN
        PERFORM core.refuse_argument(v_unknown || ' is no handler that subscribes to anything', 'holdfast handlers list has them.');
    END IF;
    v_changed := core.set_via(p_handlers, p_via, p_actor);
    PERFORM core.audit_append(
        p_actor, 'handler.via', p_reason, jsonb_build_object('handlers', p_handlers, 'via', p_via),
        jsonb_build_object('changed', v_changed));
    RETURN v_changed;
END
$$;

-- handler_drained: notes that a broker has nothing left for a handler that gets its events another way: no worker takes from
-- there any longer. Returns whether it had been noted otherwise.
CREATE OR REPLACE FUNCTION core.handler_drained(p_handler text, p_via text, p_actor text, p_reason text DEFAULT NULL)
RETURNS boolean
LANGUAGE plpgsql SECURITY DEFINER
SET search_path = pg_catalog, pg_temp
AS $$
DECLARE
    v_changed boolean;
BEGIN
    UPDATE core.subscriptions s SET draining = NULL WHERE s.handler_name = p_handler AND s.draining = p_via;
    v_changed := FOUND;
    PERFORM core.audit_append(
        p_actor, 'handler.drained', p_reason, jsonb_build_object('handler', p_handler, 'via', p_via),
        jsonb_build_object('changed', v_changed::int));
    RETURN v_changed;
END
$$;

-- broker_parked: whether an event stands in the outbox for a handler, open or settled, or as a dead letter in the archive:
-- then it is handled from there.
CREATE OR REPLACE FUNCTION core.broker_parked(p_handler text, p_event uuid, p_source text)
RETURNS boolean
LANGUAGE plpgsql STABLE SECURITY DEFINER
SET search_path = pg_catalog, pg_temp SET jit = off SET enable_seqscan = off SET enable_bitmapscan = off
AS $$
DECLARE
    v_secret bytea  := core.secret();
    v_ids    uuid[] := ARRAY[p_event, core.sibling_id(p_event, p_handler, v_secret),
                             core.sibling_id(p_event, p_source || '/' || p_handler, v_secret)];
BEGIN
    RETURN EXISTS (SELECT FROM core.outbox o
                   WHERE o.id = ANY (v_ids) AND o.handler_name = p_handler AND o.source = p_source)
        OR EXISTS (SELECT FROM core.archive a
                   WHERE a.original_id = ANY (v_ids) AND a.queue = p_handler AND a.source = p_source);
END
$$;

-- broker_look: of messages for one handler, which are to run, and which are duplicates: handled, or parked in the outbox.
-- Mostly none is: then two index scans over all keys and ids answer for all of them. Otherwise as broker_parked, written
-- out for many: an id that a row of another event has taken is looked into by that.
CREATE OR REPLACE FUNCTION core.broker_look(p_handler text, p_events uuid[], p_sources text[], p_keys text[])
RETURNS text[]
LANGUAGE plpgsql STABLE SECURITY DEFINER
SET search_path = pg_catalog, pg_temp SET jit = off
SET enable_seqscan = off SET enable_bitmapscan = off SET enable_hashjoin = off SET enable_mergejoin = off
AS $$
DECLARE
    v_secret   bytea   := core.secret();
    v_archived boolean := EXISTS (SELECT FROM core.archive);
    v_siblings uuid[];
BEGIN
    PERFORM core.require_messages(p_handler, p_events, p_sources, p_keys);
    v_siblings := ARRAY(SELECT core.sibling_id(t.event, p_handler, v_secret)
                        FROM unnest(p_events) WITH ORDINALITY AS t (event, n) ORDER BY t.n);
    IF NOT (v_archived
            OR EXISTS (SELECT FROM core.event_handled h
                       WHERE h.handler_name = p_handler AND h.idempotency_key = ANY (p_keys))
            OR EXISTS (SELECT FROM core.outbox o WHERE o.id = ANY (p_events) AND o.handler_name = p_handler)
            OR EXISTS (SELECT FROM core.outbox o WHERE o.id = ANY (v_siblings))) THEN
        RETURN array_fill('run'::text, ARRAY[cardinality(p_events)]);
    END IF;
    RETURN ARRAY(
        SELECT CASE WHEN (SELECT h.source = m.source OR core.inbox_has(p_handler, m.key, m.source)
                          FROM core.event_handled h
                          WHERE h.handler_name = p_handler AND h.idempotency_key = m.key LIMIT 1) IS TRUE
                    OR (SELECT true FROM core.outbox o
                        WHERE o.id = m.event AND o.handler_name = p_handler AND o.source = m.source LIMIT 1) IS TRUE
                    OR (SELECT core.broker_parked(p_handler, m.event, m.source) FROM core.outbox o
                        WHERE o.id = m.sibling LIMIT 1) IS TRUE
                    OR v_archived AND core.broker_parked(p_handler, m.event, m.source)
               THEN 'duplicate' ELSE 'run' END
        FROM unnest(p_events, p_sources, p_keys, v_siblings) WITH ORDINALITY AS m (event, source, key, sibling, n)
        ORDER BY m.n);
END
$$;

-- require_messages: what the functions for messages must be given.
CREATE OR REPLACE FUNCTION core.require_messages(p_handler text, p_events uuid[], p_sources text[], p_keys text[])
RETURNS void
LANGUAGE plpgsql IMMUTABLE
SET search_path = pg_catalog, pg_temp
AS $$
BEGIN
    IF (core.is_name(p_handler) AND p_handler ~ '^[a-z][a-z0-9_]*([.][a-z][a-z0-9_]*)+$'
        AND core.is_list(p_events) AND core.is_list(p_sources) AND core.is_list(p_keys)
        AND cardinality(p_events) <= 10000
        AND cardinality(p_events) = ALL (ARRAY[cardinality(p_sources), cardinality(p_keys)])
        AND NOT EXISTS (SELECT FROM unnest(p_keys) AS t (key) WHERE octet_length(t.key) NOT BETWEEN 1 AND 1020)) IS NOT TRUE THEN
        PERFORM core.refuse_argument('p_handler must name a handler, and each message have an event, a source and a key');
    END IF;
END
$$;

-- broker_enter: the first statement in the transaction of a handler that has a message, as outbox_enter is with a row. It
-- writes the inbox ahead of the handler. A second copy waits for the first, not for long, and is then a duplicate. Returns run
-- or duplicate; that is also what is parked in the outbox, and handled from there.
CREATE OR REPLACE FUNCTION core.broker_enter(
    p_handler text, p_event uuid, p_source text, p_key text, p_generation bigint, p_idle interval)
RETURNS text
LANGUAGE plpgsql SECURITY DEFINER
SET search_path = pg_catalog, pg_temp SET lock_timeout = '0.2s'
AS $$
DECLARE
    v_idle  text;
    v_first boolean;
BEGIN
    IF core.is_silence(p_idle) IS NOT TRUE THEN
        PERFORM core.refuse_argument('p_idle must be 0.1 seconds to 24 days');
    ELSIF (core.is_name(p_handler) AND p_handler ~ '^[a-z][a-z0-9_]*([.][a-z][a-z0-9_]*)+$' AND p_event IS NOT NULL
           AND p_source IS NOT NULL AND octet_length(p_key) BETWEEN 1 AND 1020 AND p_generation >= 0) IS NOT TRUE THEN
        PERFORM core.refuse_argument('p_handler must name a handler, and the message have an event, a source and a key');
    END IF;
    v_idle := set_config(
        'idle_in_transaction_session_timeout', (extract(epoch FROM p_idle) * 1000)::bigint::text, true);
    IF current_setting('server_version_num')::int >= 170000 THEN
        v_idle := set_config('transaction_timeout', v_idle, true);
    END IF;
    INSERT INTO core.event_handled (handler_name, idempotency_key, source) VALUES (p_handler, p_key, p_source)
    ON CONFLICT DO NOTHING;
    v_first := FOUND OR core.inbox_add(p_handler, p_key, p_source);
    -- After the inbox row: who has parked it had that row until its commit. As broker_look, in a look that is cheap.
    IF v_first AND (EXISTS (SELECT FROM core.outbox o
                            WHERE o.id = p_event AND o.handler_name = p_handler AND o.source = p_source)
                    OR EXISTS (SELECT FROM core.outbox o
                               WHERE o.id = core.sibling_id(p_event, p_handler, (SELECT s.secret FROM core.secrets s)))
                    OR EXISTS (SELECT FROM core.archive))
       AND core.broker_parked(p_handler, p_event, p_source) THEN
        v_first := NOT core.inbox_take_back(p_handler, p_key, p_source);
    END IF;
    INSERT INTO core.rollup_journal (handler_name, generation, outcome, n)
    VALUES (p_handler, p_generation, 'begun', 1),
           (p_handler, p_generation, CASE WHEN v_first THEN 'delivered' ELSE 'duplicate' END, 1);
    RETURN CASE WHEN v_first THEN 'run' ELSE 'duplicate' END;
END
$$;

-- inbox_take_back: removes what inbox_add has written in this transaction. False when it has written nothing.
CREATE OR REPLACE FUNCTION core.inbox_take_back(p_handler text, p_key text, p_source text)
RETURNS boolean
LANGUAGE plpgsql SECURITY DEFINER
SET search_path = pg_catalog, pg_temp
AS $$
BEGIN
    DELETE FROM core.event_handled h
    WHERE h.handler_name = p_handler AND h.idempotency_key = ANY (ARRAY[p_key, core.scoped_key(p_source, p_key)])
      AND h.xmin = pg_current_xact_id()::xid;
    RETURN FOUND;
END
$$;

-- broker_enter_at_once: broker_enter in the message that begins the transaction, as outbox_enter_at_once.
CREATE OR REPLACE FUNCTION core.broker_enter_at_once(
    p_handler text, p_event uuid, p_source text, p_key text, p_generation bigint, p_idle interval, p_look boolean)
RETURNS void
LANGUAGE plpgsql
AS $$
BEGIN
    IF p_look AND (EXISTS (SELECT FROM pg_catalog.pg_prepared_statements p
                           WHERE p.from_sql OR NOT pg_catalog.starts_with(p.name, '__asyncpg_'))
                   OR EXISTS (SELECT FROM pg_catalog.pg_listening_channels())
                   OR pg_catalog.pg_advisory_unlock_all() IS NULL)
       OR pg_catalog.textne(core.broker_enter(p_handler, p_event, p_source, p_key, p_generation, p_idle), 'run') THEN
        RAISE EXCEPTION 'the handler cannot begin at once'
            USING ERRCODE = 'object_not_in_prerequisite_state', HINT = 'Call broker_enter in a statement of its own.';
    END IF;
END
$$;

-- broker_enter_batch: broker_enter for several messages of one handler, in the order of their keys, so that batches which
-- share keys do not deadlock. Returns run or duplicate for each, in their own order. Of two with one key the first runs.
CREATE OR REPLACE FUNCTION core.broker_enter_batch(
    p_handler text, p_events uuid[], p_sources text[], p_keys text[], p_generation bigint, p_idle interval)
RETURNS text[]
LANGUAGE plpgsql SECURITY DEFINER
SET search_path = pg_catalog, pg_temp
AS $$
DECLARE
    v_found text[];
    v_n     int;
BEGIN
    PERFORM core.require_messages(p_handler, p_events, p_sources, p_keys);
    v_found := array_fill('duplicate'::text, ARRAY[cardinality(p_events)]);
    FOR v_n IN SELECT t.n FROM unnest(p_keys) WITH ORDINALITY AS t (key, n) ORDER BY t.key COLLATE "C", t.n LOOP
        v_found[v_n] := core.broker_enter(p_handler, p_events[v_n], p_sources[v_n], p_keys[v_n], p_generation, p_idle);
    END LOOP;
    RETURN v_found;
END
$$;

-- broker_leave: undoes broker_enter, in the same transaction, for a handler that has failed: what is left of the message is
-- then parked. Returns false when this transaction has not entered one of them.
CREATE OR REPLACE FUNCTION core.broker_leave(p_handler text, p_sources text[], p_keys text[], p_generation bigint)
RETURNS boolean
LANGUAGE plpgsql SECURITY DEFINER
SET search_path = pg_catalog, pg_temp
AS $$
DECLARE
    v_left int;
BEGIN
    IF (core.are_names(ARRAY[p_handler], 1) AND core.is_list(p_sources) AND core.is_list(p_keys)
        AND cardinality(p_sources) = cardinality(p_keys) AND p_generation >= 0) IS NOT TRUE THEN
        PERFORM core.refuse_argument('p_handler must name a handler, and each message have a source and a key');
    END IF;
    v_left := (SELECT count(*) FROM unnest(p_keys, p_sources) AS t (key, source)
               WHERE core.inbox_take_back(p_handler, t.key, t.source));
    IF v_left < cardinality(p_keys) THEN
        RETURN false;
    END IF;
    INSERT INTO core.rollup_journal (handler_name, generation, outcome, n)
    VALUES (p_handler, p_generation, 'begun', - v_left), (p_handler, p_generation, 'delivered', - v_left);
    RETURN true;
END
$$;

-- broker_deliver: writes the inbox for messages that handlers without a transaction have handled, in parallel, and counts
-- them; without p_record it only counts. p_outcome is delivered or duplicate.
CREATE OR REPLACE FUNCTION core.broker_deliver(
    p_handlers text[], p_sources text[], p_keys text[], p_generation bigint, p_record boolean, p_outcome text)
RETURNS void
LANGUAGE plpgsql SECURITY DEFINER
SET search_path = pg_catalog, pg_temp
AS $$
BEGIN
    IF (core.are_names(p_handlers, 100000) AND core.is_list(p_sources) AND core.is_list(p_keys)
        AND cardinality(p_handlers) = ALL (ARRAY[cardinality(p_sources), cardinality(p_keys)])
        AND p_generation >= 0 AND p_record IS NOT NULL AND p_outcome IN ('delivered', 'duplicate')) IS NOT TRUE THEN
        PERFORM core.refuse_argument('each message must have a handler, a source and a key, p_outcome be delivered or duplicate');
    END IF;
    WITH written AS (
        INSERT INTO core.event_handled (handler_name, idempotency_key, source)
        SELECT DISTINCT ON (t.handler COLLATE "C", t.key COLLATE "C") t.handler, t.key, t.source
        FROM unnest(p_handlers, p_keys, p_sources) AS t (handler, key, source)
        WHERE p_record ORDER BY t.handler COLLATE "C", t.key COLLATE "C"
        ON CONFLICT DO NOTHING
        RETURNING handler_name, idempotency_key),
    counted AS (
        INSERT INTO core.rollup_journal (handler_name, generation, outcome, n)
        SELECT t.handler, p_generation, o.outcome, count(*)
        FROM unnest(p_handlers) AS t (handler) CROSS JOIN (VALUES ('begun'), (p_outcome)) AS o (outcome)
        GROUP BY t.handler, o.outcome)
    -- A pair that was there may be another source's.
    SELECT count(core.inbox_add(t.handler, t.key, t.source)) INTO p_generation
    FROM unnest(p_handlers, p_keys, p_sources) AS t (handler, key, source)
    WHERE p_record AND (t.handler, t.key) NOT IN (SELECT w.handler_name, w.idempotency_key FROM written w);
END
$$;

-- broker_park: makes rows in the lane of a handler from messages, each an event as a JSON text: the event may be another
-- database's, or removed by retention. One with a token is as if this worker had claimed it for its first attempt, for the
-- settle that follows in the same transaction; without, it waits to be claimed. Where the event itself is here, the row has
-- its number, and so its place in the order of its key. Returns the id of each row, NULL for what is parked already.
CREATE OR REPLACE FUNCTION core.broker_park(
    p_handler text, p_channel text, p_generation bigint, p_worker uuid, p_lease interval, p_events text[], p_tokens uuid[])
RETURNS uuid[]
LANGUAGE plpgsql SECURITY DEFINER
SET search_path = pg_catalog, pg_temp SET jit = off SET plan_cache_mode = force_custom_plan
SET enable_seqscan = off SET enable_bitmapscan = off SET enable_hashjoin = off SET enable_mergejoin = off
AS $$
#variable_conflict use_column
DECLARE
    v_secret bytea := core.secret();
    v_event  jsonb;
    v_id     uuid;
    v_ids    uuid[] := '{}';
    v_begun  int := 0;
BEGIN
    IF (core.is_name(p_handler) AND p_handler ~ '^[a-z][a-z0-9_]*([.][a-z][a-z0-9_]*)+$' AND core.is_name(p_channel, 63)
        AND p_generation >= 0 AND p_worker IS NOT NULL AND p_lease BETWEEN interval '0' AND interval '1 day'
        AND core.is_list(p_events) AND cardinality(p_events) <= 10000
        AND cardinality(p_events) = cardinality(p_tokens)) IS NOT TRUE THEN
        PERFORM core.refuse_argument('p_handler, p_channel, p_generation, p_worker and p_lease must be those of a worker, and '
                                     'each event have an entry in p_tokens');
    END IF;
    -- Whatever the connection's setting: the broker is told that the event is here.
    PERFORM set_config('synchronous_commit', 'on', true);
    FOR i IN 1 .. cardinality(p_events) LOOP
        v_event := p_events[i]::jsonb;
        v_id := NULL;
        IF NOT core.broker_parked(p_handler, (v_event ->> 'event_id')::uuid, v_event ->> 'source') THEN
            INSERT INTO core.outbox (
                id, origin_id, handler_name, event_type, event_version, occurred_at, source, target, content_class, channel,
                generation, domain_id, payload, headers, idempotency_key, trace_context, created_at, expires_at, priority,
                ordering_key, fairness_key, seq)
            OVERRIDING SYSTEM VALUE
            SELECT CASE WHEN EXISTS (SELECT FROM core.outbox x WHERE x.id = s.id) THEN s.displaced ELSE s.id END,
                e.event_id, p_handler, e.event_type, e.event_version, e.occurred_at, e.source, e.target,
                coalesce(o.content_class, e.content_class, 'operations'), p_channel, p_generation, e.domain_id, e.payload,
                e.headers, e.idempotency_key, e.trace_context, coalesce(o.created_at, now()), e.expires_at,
                coalesce(o.priority, e.priority, 1), e.ordering_key, e.fairness_key,
                coalesce(o.seq, nextval(pg_get_serial_sequence('core.outbox', 'seq')))
            FROM jsonb_to_record(v_event) AS e (
                event_id uuid, event_type text, event_version int, occurred_at timestamptz, source text, target text,
                content_class text, domain_id uuid, payload jsonb, headers jsonb, idempotency_key text, trace_context text,
                expires_at timestamptz, priority smallint, ordering_key text, fairness_key text)
            CROSS JOIN LATERAL (
                SELECT core.sibling_id(e.event_id, p_handler, v_secret) AS id,
                       core.sibling_id(e.event_id, e.source || '/' || p_handler, v_secret) AS displaced) s
            LEFT JOIN LATERAL (
                SELECT o.content_class, o.created_at, o.priority, o.seq FROM core.outbox o
                WHERE o.id = e.event_id AND o.source = e.source LIMIT 1) o ON true
            ON CONFLICT (id) DO NOTHING
            RETURNING id INTO v_id;
        END IF;
        IF v_id IS NOT NULL AND p_tokens[i] IS NOT NULL THEN
            UPDATE core.outbox o
            SET status = 'in_flight', attempts = 1, claimed_by = p_worker, lease_token = p_tokens[i],
                lease_expires_at = now() + p_lease
            WHERE o.id = v_id;
            v_begun := v_begun + 1;
        END IF;
        v_ids := v_ids || v_id;
    END LOOP;
    IF v_begun > 0 THEN
        PERFORM core.rollup_count(p_handler, p_generation, 'begun', v_begun);
    END IF;
    RETURN v_ids;
EXCEPTION WHEN data_exception OR check_violation OR not_null_violation OR program_limit_exceeded THEN
    PERFORM core.refuse_argument('p_events: ' || SQLERRM, 'Pass events as JSON objects.');
END
$$;
