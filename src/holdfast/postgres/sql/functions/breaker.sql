-- Breakers: when the partner of a handler is down, its rows stay in the database, and no attempt is lost.
--
-- One state for the fleet, in core.handler_flow. Closed: failures in a row are noted. Open: claims take nothing but, now and
-- then, one row that probes (flow_allow). It closes when a probe succeeds, and a ramp follows. Workers report what becomes of
-- attempts only of handlers that declare a breaker.
--
-- Whether the partner is down, or one source writes what nobody can handle, is told apart by whose events fail. Probes take
-- turns over the sources. When an event of a source succeeds that has not failed since the breaker opened, those that have
-- failed are distrusted for a minute: their failures are ordinary ones, with attempts and dead letters, and open nothing.
-- Names of sources without an owner cost nothing, so beside one that has an owner they count as one source.
--
-- Rows are locked before the lines of handlers, in id order, as in settle.sql; claims wait for neither.

-- probe_interval: how long to wait before a probe, after so many that have failed: twice as long each time, give or take a
-- fifth, so that breakers which opened together do not probe together.
CREATE OR REPLACE FUNCTION core.probe_interval(p_first float8, p_longest float8, p_failed int)
RETURNS interval
LANGUAGE sql VOLATILE
SET search_path = pg_catalog, pg_temp
AS $$
    SELECT least(coalesce(p_longest, 30), coalesce(p_first, 1) * power(2, least(p_failed, 20)))
           * (0.8 + 0.4 * random()) * interval '1 second'
$$;

-- outbox_falter: settles attempts that failed with transient errors, of handlers that have a breaker. p_last says of each
-- whether its budget is spent, p_after_success whether the same worker has succeeded with another event since the failure
-- before it. The rows are named in the order in which they failed. Returns what has become of each: `lost`; `retry`, as
-- outbox_retry; `hold`, back to pending without the attempt; or `fail`: nothing has, and the caller is to fail it. `opened`
-- is true for the failure that has opened the breaker, and `open` while it is.
--
-- Several failures in a row of at least two events open it: one event that fails alone fails by its own fault. They are
-- given back the attempts that they have lost. A row whose budget is spent gets one more attempt, because it may be the
-- first to meet an outage that others will show.
--
-- Nothing is given to rows that fail within ten seconds after a probe has succeeded: the partner was there a moment ago, and
-- what fails may fail by its own fault, as the first to be tried again each time. Otherwise a few events that nobody can
-- handle would open the breaker for ever, hold up all others, and never become dead letters. Nor is anything given to rows of
-- distrusted sources, and they open nothing.
CREATE OR REPLACE FUNCTION core.outbox_falter(
    p_ids uuid[], p_tokens uuid[], p_handlers text[], p_delays interval[], p_errors text[], p_last boolean[],
    p_after_success boolean[])
RETURNS TABLE (id uuid, verdict text, open boolean, opened boolean)
LANGUAGE plpgsql SECURITY DEFINER
SET search_path = pg_catalog, pg_temp SET jit = off SET plan_cache_mode = force_custom_plan
SET enable_seqscan = off SET enable_bitmapscan = off SET enable_hashjoin = off SET enable_mergejoin = off
AS $$
#variable_conflict use_column
DECLARE
    f          core.handler_flow;
    v_handler  text;
    v_now      timestamptz;
    v_mine     uuid[];
    v_sources  text[];   -- in parallel to v_mine
    v_source   text;
    v_verdicts text[];
    v_open     boolean[];
    v_opened   boolean[];
    v_since    int;
    v_doubtful boolean;
    v_held_for interval;
    v_waits    interval[] := p_delays;
BEGIN
    PERFORM core.require_batch(p_ids, p_tokens, ARRAY[cardinality(p_handlers), cardinality(p_delays), cardinality(p_errors),
                                                      cardinality(p_last), cardinality(p_after_success)]);
    PERFORM core.require_failures(p_handlers, '{}');
    PERFORM core.require_delays(p_delays);
    IF (core.is_list(p_last) AND core.is_list(p_after_success)) IS NOT TRUE THEN
        PERFORM core.refuse_argument('p_last and p_after_success must have one entry for each row');
    END IF;
    v_verdicts := array_fill('lost'::text, ARRAY[cardinality(p_ids)]);
    v_open := array_fill(false, ARRAY[cardinality(p_ids)]);
    v_opened := v_open;
    SELECT coalesce(array_agg(t.id), '{}'), array_agg(t.source) INTO v_mine, v_sources
    FROM (SELECT t.id, o.source FROM (SELECT * FROM unnest(p_ids, p_tokens) AS t (id, token) ORDER BY id) t
          CROSS JOIN LATERAL (
              SELECT o.source FROM core.outbox o WHERE o.id = t.id AND o.lease_token = t.token AND o.status = 'in_flight'
              FOR NO KEY UPDATE) o) t;
    FOR v_handler IN SELECT DISTINCT h FROM unnest(p_handlers) AS t (h) ORDER BY h LOOP
        SELECT x.* INTO f FROM core.handler_flow x WHERE x.handler_name = v_handler FOR UPDATE;
        v_now := clock_timestamp();
        v_doubtful := coalesce(v_now >= f.resumed_at AND v_now < f.resumed_at + interval '10 seconds', false);
        v_since := 1;
        FOR i IN 1 .. cardinality(p_ids) LOOP
            CONTINUE WHEN p_handlers[i] <> v_handler OR p_ids[i] <> ALL (v_mine);
            v_verdicts[i] := 'retry';
            v_source := v_sources[array_position(v_mine, p_ids[i])];
            IF f.breaker_after IS NULL THEN
                -- It had a breaker when the worker began.
                IF p_last[i] THEN
                    v_verdicts[i] := 'fail';
                END IF;
                CONTINUE;
            ELSIF f.opened_at IS NOT NULL THEN
                v_verdicts[i] := 'hold';
                IF p_tokens[i] = f.probe_token THEN
                    f.failed_probes := least(f.failed_probes, 1000) + 1;
                    f.probe_at := v_now + core.probe_interval(f.first_probe, f.longest_wait, f.failed_probes);
                    f.probe_token := NULL;
                    f.failing_sources := core.breaker_turn(f.failing_sources, v_source);
                END IF;
                CONTINUE;
            ELSIF v_now < f.distrusted_until AND core.is_distrusted(f.distrusted, v_source) THEN
                IF p_last[i] THEN
                    v_verdicts[i] := 'fail';
                END IF;
                CONTINUE;
            END IF;
            IF p_after_success[i] THEN
                f.failing := '{}';
                v_since := i;
            END IF;
            f.failing := (f.failing || p_ids[i])[greatest(1, cardinality(f.failing) + 2 - f.breaker_after):];
            IF cardinality(f.failing) >= f.breaker_after
               AND (f.breaker_after = 1 OR EXISTS (SELECT FROM unnest(f.failing) AS t (id) WHERE t.id <> p_ids[i])) THEN
                f.opened_at := v_now;
                f.failed_probes := 0;
                f.probe_at := v_now + core.probe_interval(f.first_probe, f.longest_wait, 0);
                f.probe_token := NULL;
                f.probe_source := NULL;
                f.failing_sources := ARRAY(
                    SELECT DISTINCT o.source FROM unnest(f.failing) AS t (id)
                    CROSS JOIN LATERAL (SELECT o.source FROM core.outbox o WHERE o.id = t.id LIMIT 1) o LIMIT 100);
                v_opened[i] := true;
                FOR j IN v_since .. i LOOP
                    CONTINUE WHEN p_handlers[j] <> v_handler OR v_verdicts[j] NOT IN ('retry', 'hold');
                    IF NOT v_doubtful THEN
                        v_verdicts[j] := 'hold';
                    ELSIF p_last[j] THEN
                        v_verdicts[j] := 'fail';
                    ELSE
                        v_waits[j] := greatest(v_waits[j], f.probe_at - v_now);
                    END IF;
                END LOOP;
                PERFORM core.breaker_give_back(v_handler, f.failing, p_ids[v_since:i], f.probe_at, v_doubtful);
                PERFORM core.audit_append(
                    'system', 'breaker.open', 'transient failures in a row', jsonb_build_object('handler', v_handler),
                    jsonb_build_object('failures', cardinality(f.failing)));
                f.failing := '{}';
            ELSIF p_last[i] AND v_doubtful THEN
                v_verdicts[i] := 'fail';
            ELSIF p_last[i] AND EXISTS (SELECT FROM unnest(f.failing) AS t (id) WHERE t.id <> p_ids[i]) THEN
                v_verdicts[i] := 'hold';
            ELSIF p_last[i] AND p_ids[i] = ANY (f.last_chances) THEN
                v_verdicts[i] := 'fail';
                f.last_chances := array_remove(f.last_chances, p_ids[i]);
            ELSIF p_last[i] THEN
                v_verdicts[i] := 'hold';
                f.last_chances := (f.last_chances || p_ids[i])[greatest(1, cardinality(f.last_chances) - 98):];
            END IF;
        END LOOP;
        UPDATE core.handler_flow x
        SET failing = f.failing, last_chances = f.last_chances, opened_at = f.opened_at, failed_probes = f.failed_probes,
            probe_at = f.probe_at, probe_token = f.probe_token, probe_source = f.probe_source,
            failing_sources = f.failing_sources
        WHERE x.handler_name = v_handler AND f.breaker_after IS NOT NULL;
        IF f.opened_at IS NOT NULL THEN
            -- Those that are held are due when it is time to probe, behind the rows that have waited longer.
            v_held_for := greatest(interval '0.01 seconds', f.probe_at - v_now);
            FOR i IN 1 .. cardinality(p_ids) LOOP
                IF p_handlers[i] = v_handler THEN
                    v_open[i] := true;
                    v_waits[i] := CASE v_verdicts[i] WHEN 'hold' THEN v_held_for ELSE v_waits[i] END;
                END IF;
            END LOOP;
        END IF;
    END LOOP;

    WITH settling AS MATERIALIZED (
        SELECT t.id, t.handler, t.delay, t.error, t.verdict, t.open
        FROM unnest(p_ids, p_handlers, v_waits, p_errors, v_verdicts, v_open) AS t (id, handler, delay, error, verdict, open)
        WHERE t.verdict IN ('retry', 'hold')),
    done AS (
        UPDATE core.outbox o
        SET status = 'pending', available_at = statement_timestamp() + t.delay,
            attempts = CASE t.verdict WHEN 'hold' THEN greatest(o.attempts - 1, 0) ELSE o.attempts END,
            last_error = core.error_text(t.error), traceback = core.error_traceback(t.error),
            -- The time of an outage does not count against max_total_delay either.
            first_failed_at = CASE WHEN t.verdict = 'hold' AND t.open AND o.attempts <= 1 THEN NULL
                                   ELSE coalesce(o.first_failed_at, statement_timestamp()) END,
            handler_name = t.handler, claimed_by = NULL, lease_token = NULL, lease_expires_at = NULL
        FROM settling t WHERE o.id = t.id
        RETURNING o.handler_name, o.generation, t.verdict, o.attempts)
    INSERT INTO core.rollup_journal (handler_name, generation, outcome, n)
    SELECT d.handler_name, d.generation, 'retried', count(*)
    FROM done d GROUP BY 1, 2
    UNION ALL
    SELECT d.handler_name, d.generation, 'begun', - count(*) FROM done d
    WHERE d.verdict = 'hold' AND d.attempts = 0 GROUP BY 1, 2;

    RETURN QUERY SELECT t.id, t.verdict, t.open, t.opened
                 FROM unnest(p_ids, v_verdicts, v_open, v_opened) WITH ORDINALITY AS t (id, verdict, open, opened, i)
                 ORDER BY t.i;
END
$$;

-- breaker_turn: the sources that have failed, with one more. It becomes the last; probes prefer those that are not there, and
-- then the one that has failed first.
CREATE OR REPLACE FUNCTION core.breaker_turn(p_sources text[], p_source text)
RETURNS text[]
LANGUAGE sql IMMUTABLE PARALLEL SAFE
SET search_path = pg_catalog, pg_temp
AS $$
    SELECT (array_remove(p_sources, p_source) || p_source)[greatest(1, cardinality(array_remove(p_sources, p_source)) - 98):]
$$;

-- is_distrusted: whether a source is one of those whose failures say nothing about the partner.
CREATE OR REPLACE FUNCTION core.is_distrusted(p_distrusted text[], p_source text)
RETURNS boolean
LANGUAGE sql STABLE SECURITY DEFINER
SET search_path = pg_catalog, pg_temp
AS $$
    SELECT p_source = ANY (p_distrusted)
        OR '' = ANY (p_distrusted) AND NOT EXISTS (SELECT FROM core.sources s WHERE s.source = p_source)
$$;

-- breaker_probe: the row that probes, and its place among the lanes, which are those of a claim of one handler; nothing when
-- no row is due. Sources take turns: those with an owner and, as one, all without, and among these likewise. One that has not
-- failed since the breaker opened comes first. Of a source, a row that has not failed comes before one that has. Looks at the oldest and the newest rows of each lane, some thousands in all, because no index has sources:
-- one source's thousands of rows hide those of others only if they are both older and newer.
CREATE OR REPLACE FUNCTION core.breaker_probe(
    p_handler text, p_channel text, p_generation bigint, p_routes text[], p_priorities smallint[], p_handlers text[],
    p_limits int[], p_ended_before timestamptz)
RETURNS TABLE (lane int, available_at timestamptz, id uuid)
LANGUAGE plpgsql SECURITY DEFINER
SET search_path = pg_catalog, pg_temp SET jit = off
SET enable_seqscan = off SET enable_bitmapscan = off SET enable_hashjoin = off SET enable_mergejoin = off
AS $$
#variable_conflict use_column
DECLARE
    v_failing text[] := (SELECT f.failing_sources FROM core.handler_flow f WHERE f.handler_name = p_handler);
    v_most    int;
BEGIN
    v_most := greatest(10, 3000 / (SELECT count(*) FROM unnest(p_handlers, p_limits) AS t (handler, n)
                                   WHERE t.handler = p_handler AND t.n > 0));
    RETURN QUERY
    WITH sample AS MATERIALIZED (
        SELECT lane.place, o.*
        FROM unnest(p_routes, p_priorities, p_handlers, p_limits) WITH ORDINALITY AS lane (route, priority, handler, n, place)
        CROSS JOIN LATERAL (
            (SELECT o.id, o.available_at, o.source, o.last_error IS NOT NULL AS failed FROM core.outbox o
             WHERE o.settled_at IS NULL AND o.ordering_key IS NULL
               AND o.channel = p_channel AND o.generation = p_generation
               AND o.route = lane.route AND o.priority = lane.priority AND o.available_at <= now()
               AND (o.status = 'pending' OR o.lease_expires_at < p_ended_before)
             ORDER BY o.available_at, o.id LIMIT v_most)
            UNION ALL
            (SELECT o.id, o.available_at, o.source, o.last_error IS NOT NULL FROM core.outbox o
             WHERE o.settled_at IS NULL AND o.ordering_key IS NULL
               AND o.channel = p_channel AND o.generation = p_generation
               AND o.route = lane.route AND o.priority = lane.priority AND o.available_at <= now()
               AND (o.status = 'pending' OR o.lease_expires_at < p_ended_before)
             ORDER BY o.available_at DESC, o.id DESC LIMIT v_most)) o
        WHERE lane.handler = p_handler AND lane.n > 0),
    source AS MATERIALIZED (
        SELECT DISTINCT ON (sample.source) sample.*,
               coalesce(array_position(v_failing, sample.source), 0) AS turn,
               CASE WHEN EXISTS (SELECT FROM core.sources s WHERE s.source = sample.source) THEN sample.source ELSE '' END AS owner
        FROM sample ORDER BY sample.source, sample.failed, sample.available_at, sample.id),
    owner AS (
        SELECT DISTINCT ON (source.owner) source.*, coalesce((
                   SELECT max(t.place) FROM unnest(v_failing) WITH ORDINALITY AS t (source, place)
                   WHERE CASE WHEN source.owner <> '' THEN t.source = source.owner
                         ELSE NOT EXISTS (SELECT FROM core.sources s WHERE s.source = t.source) END), 0) AS owners_turn
        FROM source ORDER BY source.owner, source.turn, random())
    SELECT owner.place::int, owner.available_at, owner.id FROM owner ORDER BY owner.owners_turn, random() LIMIT 1;
END
$$;

-- breaker_give_back: gives rows back the attempts that failures in a row have cost them, one for each time they are named in
-- p_failing, and makes them due with the next probe at the latest. With p_doubtful it gives nothing back, and makes them due
-- with that probe at the earliest, behind rows that have not failed. Not those that are being settled (p_settling).
CREATE OR REPLACE FUNCTION core.breaker_give_back(
    p_handler text, p_failing uuid[], p_settling uuid[], p_probe_at timestamptz, p_doubtful boolean)
RETURNS void
LANGUAGE plpgsql SECURITY DEFINER
SET search_path = pg_catalog, pg_temp SET jit = off SET plan_cache_mode = force_custom_plan
SET enable_seqscan = off SET enable_bitmapscan = off SET enable_hashjoin = off SET enable_mergejoin = off
AS $$
BEGIN
    WITH lost AS MATERIALIZED (
        SELECT t.id, count(*)::int AS n FROM unnest(p_failing) AS t (id) WHERE t.id <> ALL (p_settling) GROUP BY t.id),
    mine AS MATERIALIZED (
        SELECT lost.id, lost.n, o.attempts FROM lost CROSS JOIN LATERAL (
            SELECT o.attempts FROM core.outbox o
            WHERE o.id = lost.id AND o.status = 'pending' AND o.settled_at IS NULL AND o.handler_name = p_handler
            FOR NO KEY UPDATE SKIP LOCKED) o),
    given AS (
        UPDATE core.outbox o
        SET attempts = CASE WHEN p_doubtful THEN o.attempts ELSE greatest(o.attempts - mine.n, 0) END,
            available_at = CASE WHEN p_doubtful THEN greatest(o.available_at, p_probe_at)
                                ELSE least(o.available_at, p_probe_at) END,
            first_failed_at = CASE WHEN p_doubtful OR o.attempts > mine.n THEN o.first_failed_at END
        FROM mine WHERE o.id = mine.id
        RETURNING o.generation, o.attempts, mine.attempts AS before)
    INSERT INTO core.rollup_journal (handler_name, generation, outcome, n)
    SELECT p_handler, g.generation, 'begun', - count(*) FROM given g WHERE g.attempts = 0 AND g.before > 0 GROUP BY g.generation;
END
$$;

-- breaker_succeed: notes that handlers with a breaker have succeeded, with rows under these leases, in parallel. A probe that
-- has succeeded closes the breaker, and wakes the workers. Returns the handlers whose breaker is open or has closed with
-- this call (`closed`).
CREATE OR REPLACE FUNCTION core.breaker_succeed(p_handlers text[], p_tokens uuid[])
RETURNS TABLE (handler_name text, closed boolean)
LANGUAGE plpgsql SECURITY DEFINER
SET search_path = pg_catalog, pg_temp
AS $$
#variable_conflict use_column
DECLARE
    f       core.handler_flow;
    v_woken boolean := false;
BEGIN
    IF (core.are_names(p_handlers, 100000) AND core.is_list(p_tokens) AND cardinality(p_handlers) = cardinality(p_tokens))
       IS NOT TRUE THEN
        PERFORM core.refuse_argument('p_handlers and p_tokens must have one entry for each success');
    END IF;
    FOR f IN SELECT f.* FROM core.handler_flow f
             WHERE f.handler_name = ANY (p_handlers) AND (f.opened_at IS NOT NULL OR f.failing <> '{}')
             ORDER BY f.handler_name FOR UPDATE
    LOOP
        IF f.opened_at IS NULL THEN
            UPDATE core.handler_flow x SET failing = '{}' WHERE x.handler_name = f.handler_name;
            CONTINUE;
        END IF;
        handler_name := f.handler_name;
        closed := EXISTS (SELECT FROM unnest(p_handlers, p_tokens) AS t (handler, token)
                          WHERE t.handler = f.handler_name AND t.token = f.probe_token);
        IF closed THEN
            PERFORM core.breaker_close(f.handler_name, 'system', 'a probe has succeeded');
            PERFORM core.breaker_distrust(f.handler_name, f.probe_source, f.failing_sources);
            v_woken := true;
        END IF;
        RETURN NEXT;
    END LOOP;
    IF v_woken THEN
        PERFORM core.flow_wake();
    END IF;
END
$$;

-- breaker_distrust: what a probe of p_source that has succeeded says about the sources that failed while the breaker was open:
-- nothing if it is one of them, because the partner may have come back.
CREATE OR REPLACE FUNCTION core.breaker_distrust(p_handler text, p_source text, p_failing text[])
RETURNS void
LANGUAGE plpgsql SECURITY DEFINER
SET search_path = pg_catalog, pg_temp
AS $$
DECLARE
    v_owned boolean := EXISTS (SELECT FROM core.sources s WHERE s.source = p_source);
BEGIN
    IF p_source IS NULL OR p_source = ANY (p_failing) THEN
        RETURN;
    END IF;
    UPDATE core.handler_flow x
    SET distrusted_until = clock_timestamp() + interval '1 minute',
        distrusted = ARRAY(
            SELECT DISTINCT CASE WHEN v_owned AND NOT EXISTS (SELECT FROM core.sources s WHERE s.source = t.source)
                            THEN '' ELSE t.source END
            FROM unnest(p_failing || CASE WHEN x.distrusted_until > clock_timestamp() THEN x.distrusted ELSE '{}' END)
                 AS t (source)
            LIMIT 200)
    WHERE x.handler_name = p_handler;
END
$$;

-- breaker_close: closes it, if it is open, and begins the ramp.
CREATE OR REPLACE FUNCTION core.breaker_close(p_handler text, p_actor text, p_reason text)
RETURNS void
LANGUAGE plpgsql SECURITY DEFINER
SET search_path = pg_catalog, pg_temp
AS $$
DECLARE
    f core.handler_flow;
BEGIN
    SELECT x.* INTO f FROM core.handler_flow x WHERE x.handler_name = p_handler FOR UPDATE;
    UPDATE core.handler_flow x
    SET opened_at = NULL, failing = '{}', failed_probes = 0, probe_at = NULL, probe_token = NULL, resumed_at = clock_timestamp(),
        failing_sources = '{}', probe_source = NULL
    WHERE x.handler_name = p_handler AND x.opened_at IS NOT NULL;
    PERFORM core.audit_append(
        p_actor, 'breaker.close', p_reason, jsonb_build_object('handler', p_handler),
        jsonb_build_object('changed', (f.opened_at IS NOT NULL)::int, 'failed_probes', f.failed_probes));
END
$$;

-- handler_breaker: opens or closes the breaker of a handler, for an operator. One that is opened probes, and closes by
-- itself when a probe succeeds. Returns whether it has changed.
CREATE OR REPLACE FUNCTION core.handler_breaker(p_handler text, p_open boolean, p_actor text, p_reason text DEFAULT NULL)
RETURNS boolean
LANGUAGE plpgsql SECURITY DEFINER
SET search_path = pg_catalog, pg_temp
AS $$
DECLARE
    f core.handler_flow := core.flow_change(p_handler);
BEGIN
    IF f.breaker_after IS NULL THEN
        PERFORM core.refuse_argument('p_handler must have a breaker', 'Pause the handler, or declare on_outage="pause".');
    ELSIF NOT p_open THEN
        PERFORM core.breaker_close(p_handler, p_actor, p_reason);
        PERFORM core.flow_wake();
        RETURN f.opened_at IS NOT NULL;
    END IF;
    UPDATE core.handler_flow x
    SET opened_at = clock_timestamp(), failed_probes = 0, probe_at = clock_timestamp() + core.probe_interval(x.first_probe, x.longest_wait, 0),
        probe_token = NULL, probe_source = NULL, failing_sources = '{}'
    WHERE x.handler_name = p_handler AND x.opened_at IS NULL;
    PERFORM core.audit_append(p_actor, 'breaker.open', p_reason, jsonb_build_object('handler', p_handler),
                              jsonb_build_object('changed', (f.opened_at IS NULL)::int));
    RETURN f.opened_at IS NULL;
END
$$;
