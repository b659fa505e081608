-- Limits and pauses of handlers: how many rows a claim may take of a handler now.
--
-- A line of core.handler_flow is locked by whoever claims rows of its handler, so that claims of one limited handler come
-- one after the other. Nobody waits for it: who finds it locked takes nothing of that handler, and comes back.
--
-- No function that ends a delivery knows of limits. What is in flight is counted by looking at the rows that claims of the
-- handler have taken (core.handler_slots), by primary key: whatever has become of them, a row counts as long as it is in
-- flight under the lease of that claim, and the lease has not expired. There is no counter that could be wrong.

-- flow_tokens: what is in a token bucket that had p_tokens at p_at. It holds what comes in within a quarter of a second, and
-- one token at least. A clock that was set back adds nothing. NULL without a rate.
CREATE OR REPLACE FUNCTION core.flow_tokens(p_tokens float8, p_at timestamptz, p_rate float8, p_now timestamptz)
RETURNS float8
LANGUAGE sql IMMUTABLE PARALLEL SAFE
SET search_path = pg_catalog, pg_temp
AS $$
    SELECT CASE WHEN p_rate IS NULL THEN NULL
           WHEN p_tokens IS NULL OR p_at IS NULL THEN greatest(1, p_rate / 4)
           ELSE least(greatest(1, p_rate / 4), p_tokens + p_rate * greatest(0, extract(epoch FROM p_now - p_at)::float8)) END
$$;

-- flow_ramp: how many rows of a handler may be in flight after its breaker was closed: 1, and twice as many every half
-- second; NULL when the ramp has ended, or the clock was set back. The exponent has a bound of its own: adding an interval
-- depends on the time zone, so a planner that knows the arguments computes the power before it knows the condition.
CREATE OR REPLACE FUNCTION core.flow_ramp(p_resumed_at timestamptz, p_now timestamptz)
RETURNS int
LANGUAGE sql IMMUTABLE PARALLEL SAFE
SET search_path = pg_catalog, pg_temp
AS $$
    SELECT CASE WHEN p_now >= p_resumed_at AND p_now < p_resumed_at + interval '5 seconds'
           THEN power(2, least(10, floor(extract(epoch FROM p_now - p_resumed_at) / 0.5)))::int END
$$;

-- flow_in_flight: how many rows of a handler are in flight, of those that were claimed while it had a limit. Removes what it
-- finds to have ended. A row whose lease has expired counts only while a transaction has it locked: a handler that takes tx
-- holds it longer than the lease, and otherwise it is due again.
CREATE OR REPLACE FUNCTION core.flow_in_flight(p_handler text, p_ended_before timestamptz)
RETURNS int
LANGUAGE plpgsql SECURITY DEFINER
SET search_path = pg_catalog, pg_temp SET jit = off SET enable_seqscan = off SET enable_bitmapscan = off
AS $$
DECLARE
    v_count int;
BEGIN
    WITH slot AS MATERIALIZED (
        SELECT s.token, t.id, o.expired
        FROM core.handler_slots s CROSS JOIN LATERAL unnest(s.ids) AS t (id)
        CROSS JOIN LATERAL (
            SELECT o.lease_expires_at < p_ended_before AS expired FROM core.outbox o
            WHERE o.id = t.id AND o.lease_token = s.token AND o.status = 'in_flight' LIMIT 1) o
        WHERE s.handler_name = p_handler),
    abandoned AS MATERIALIZED (
        SELECT slot.id FROM slot CROSS JOIN LATERAL (
            SELECT FROM core.outbox o WHERE o.id = slot.id AND o.lease_token = slot.token FOR UPDATE SKIP LOCKED) o
        WHERE slot.expired),
    held AS MATERIALIZED (
        SELECT slot.token, array_agg(slot.id) AS ids FROM slot
        WHERE slot.id NOT IN (SELECT abandoned.id FROM abandoned) GROUP BY slot.token),
    ended AS (
        DELETE FROM core.handler_slots s
        WHERE s.handler_name = p_handler AND s.token NOT IN (SELECT held.token FROM held)),
    shrunk AS (
        UPDATE core.handler_slots s SET ids = held.ids FROM held
        WHERE s.handler_name = p_handler AND s.token = held.token AND cardinality(held.ids) * 2 < cardinality(s.ids))
    SELECT coalesce(sum(cardinality(held.ids)), 0)::int INTO v_count FROM held;
    RETURN v_count;
END
$$;

-- flow_allow: how many rows a claim may take of each handler that has a limit now, whose lines it locks. Handlers that are
-- not returned have none. A claim that has taken rows of them records it in core.handler_slots, and calls flow_spend. Which
-- lines were locked by another claim, or allowed nothing, is left in the session's holdfast.busy_handlers, for flow_waits.
CREATE OR REPLACE FUNCTION core.flow_allow(p_handlers text[], p_ended_before timestamptz)
RETURNS TABLE (handler_name text, allowed int)
LANGUAGE plpgsql SECURITY DEFINER
SET search_path = pg_catalog, pg_temp
AS $$
#variable_conflict use_column
DECLARE
    f           core.handler_flow;
    v_now       timestamptz;
    v_in_flight int;
    v_busy      text := '';
BEGIN
    FOR f IN SELECT f.* FROM core.handler_flow f
             WHERE f.handler_name = ANY (p_handlers)
               AND core.flow_is_limited(f.paused_at, f.opened_at, f.resumed_at,
                                        coalesce(f.fleet_concurrency, f.declared_fleet_concurrency),
                                        coalesce(f.rate, f.declared_rate))
             ORDER BY f.handler_name
    LOOP
        handler_name := f.handler_name;
        allowed := 0;
        IF f.paused_at IS NULL THEN
            SELECT x.* INTO f FROM core.handler_flow x WHERE x.handler_name = f.handler_name FOR UPDATE SKIP LOCKED;
            IF NOT FOUND THEN
                v_busy := v_busy || ' ' || handler_name;
            ELSIF f.paused_at IS NULL THEN
                v_now := clock_timestamp();
                IF f.tokens_at > v_now THEN
                    -- The clock was set back: the bucket fills from here on.
                    UPDATE core.handler_flow x SET tokens_at = v_now WHERE x.handler_name = f.handler_name;
                    f.tokens_at := v_now;
                END IF;
                IF coalesce(f.fleet_concurrency, f.declared_fleet_concurrency) IS NULL AND f.opened_at IS NULL
                   AND core.flow_ramp(f.resumed_at, v_now) IS NULL THEN
                    -- Only a rate, for which nothing has to be looked up.
                    DELETE FROM core.handler_slots s WHERE s.handler_name = f.handler_name;
                    v_in_flight := 0;
                ELSE
                    v_in_flight := core.flow_in_flight(f.handler_name, p_ended_before);
                END IF;
                allowed := core.flow_allowance(
                    coalesce(f.fleet_concurrency, f.declared_fleet_concurrency),
                    core.flow_tokens(f.tokens, f.tokens_at, coalesce(f.rate, f.declared_rate), v_now),
                    f.opened_at, f.probe_at, f.resumed_at, v_now, v_in_flight,
                    f.opened_at IS NOT NULL AND core.flow_probes(f.handler_name, f.probe_token, p_ended_before));
                IF allowed = 0 THEN
                    v_busy := v_busy || ' ' || handler_name;
                END IF;
            END IF;
        END IF;
        RETURN NEXT;
    END LOOP;
    IF v_busy <> coalesce(current_setting('holdfast.busy_handlers', true), '') THEN
        PERFORM set_config('holdfast.busy_handlers', v_busy, false);
    END IF;
END
$$;

-- flow_is_limited: whether claims of a handler have to ask. One that has nothing but a closed breaker need not.
CREATE OR REPLACE FUNCTION core.flow_is_limited(
    p_paused_at timestamptz, p_opened_at timestamptz, p_resumed_at timestamptz, p_fleet_concurrency int, p_rate float8)
RETURNS boolean
LANGUAGE sql VOLATILE
SET search_path = pg_catalog, pg_temp
AS $$
    SELECT p_paused_at IS NOT NULL OR p_opened_at IS NOT NULL OR core.flow_ramp(p_resumed_at, clock_timestamp()) IS NOT NULL
        OR p_fleet_concurrency IS NOT NULL OR p_rate IS NOT NULL
$$;

-- flow_probes: whether the event that probes is still in flight.
CREATE OR REPLACE FUNCTION core.flow_probes(p_handler text, p_token uuid, p_ended_before timestamptz)
RETURNS boolean
LANGUAGE sql STABLE SECURITY DEFINER
SET search_path = pg_catalog, pg_temp SET enable_seqscan = off SET enable_bitmapscan = off
AS $$
    SELECT EXISTS (
        SELECT FROM core.handler_slots s CROSS JOIN LATERAL unnest(s.ids) AS t (id)
        CROSS JOIN LATERAL (
            SELECT FROM core.outbox o
            WHERE o.id = t.id AND o.lease_token = s.token AND o.status = 'in_flight'
              AND o.lease_expires_at >= p_ended_before LIMIT 1) o
        WHERE s.handler_name = p_handler AND s.token = p_token)
$$;

-- flow_allowance: the number itself, of a handler that is not paused and has so many rows in flight. While its breaker is
-- open that is one row, when it is time to probe; a time that lies hours ahead is of a clock that was set back.
CREATE OR REPLACE FUNCTION core.flow_allowance(
    p_fleet_concurrency int, p_tokens float8, p_opened_at timestamptz, p_probe_at timestamptz, p_resumed_at timestamptz,
    p_now timestamptz, p_in_flight int, p_probes boolean)
RETURNS int
LANGUAGE sql IMMUTABLE PARALLEL SAFE
SET search_path = pg_catalog, pg_temp
AS $$
    SELECT greatest(0, least(
        100000, floor(p_tokens), p_fleet_concurrency - p_in_flight,
        CASE WHEN p_opened_at IS NULL THEN core.flow_ramp(p_resumed_at, p_now) - p_in_flight
             WHEN p_probes OR p_probe_at > p_now AND p_probe_at < p_now + interval '2 hours' THEN 0 ELSE 1 END))::int
$$;

-- flow_spend: what the claim with this token has taken of the handlers, which flow_allow has locked: tokens, and the probe
-- of an open breaker.
CREATE OR REPLACE FUNCTION core.flow_spend(p_handlers text[], p_token uuid)
RETURNS void
LANGUAGE plpgsql SECURITY DEFINER
SET search_path = pg_catalog, pg_temp
AS $$
DECLARE
    v_now timestamptz := clock_timestamp();
BEGIN
    UPDATE core.handler_flow f
    SET tokens = core.flow_tokens(f.tokens, f.tokens_at, coalesce(f.rate, f.declared_rate), v_now) - cardinality(s.ids),
        tokens_at = v_now,
        probe_token = CASE WHEN f.opened_at IS NULL THEN f.probe_token ELSE p_token END,
        probe_source = CASE WHEN f.opened_at IS NOT NULL THEN (SELECT o.source FROM core.outbox o WHERE o.id = s.ids[1] LIMIT 1) END,
        -- If nothing is heard of the probe, the next one may be made after this time.
        probe_at = CASE WHEN f.opened_at IS NULL THEN f.probe_at ELSE v_now + core.probe_interval(f.first_probe, f.longest_wait, f.failed_probes) END
    FROM core.handler_slots s
    WHERE s.handler_name = ANY (p_handlers) AND s.token = p_token AND f.handler_name = s.handler_name
      AND (f.opened_at IS NOT NULL OR coalesce(f.rate, f.declared_rate) IS NOT NULL);
END
$$;

-- flow_waits: which of these handlers a claim could take nothing of now, why, and after how many seconds to ask again; NULL
-- when somebody will say so. A slot may become free at any time in another worker, so that is asked for every second. `busy` is
-- one that the last claim of this session found locked, or held back a moment ago, and may have rows of.
CREATE OR REPLACE FUNCTION core.flow_waits(p_handlers text[], p_ended_before timestamptz DEFAULT NULL)
RETURNS TABLE (handler_name text, cause text, seconds float8)
LANGUAGE plpgsql SECURITY DEFINER
SET search_path = pg_catalog, pg_temp SET jit = off SET enable_seqscan = off SET enable_bitmapscan = off
AS $$
#variable_conflict use_column
DECLARE
    f              core.handler_flow;
    v_now          timestamptz := clock_timestamp();
    v_ended_before timestamptz := least(now(), p_ended_before);
    v_in_flight    int;
    v_probes       boolean;
    v_rate         float8;
    v_busy         text[] := string_to_array(current_setting('holdfast.busy_handlers', true), ' ');
BEGIN
    IF core.are_names(p_handlers) IS NOT TRUE THEN
        PERFORM core.refuse_argument('p_handlers must name handlers, in 1 to 200 bytes each');
    END IF;
    FOR f IN SELECT f.* FROM core.handler_flow f
             WHERE f.handler_name = ANY (p_handlers)
               AND core.flow_is_limited(f.paused_at, f.opened_at, f.resumed_at,
                                        coalesce(f.fleet_concurrency, f.declared_fleet_concurrency),
                                        coalesce(f.rate, f.declared_rate))
    LOOP
        handler_name := f.handler_name;
        v_rate := coalesce(f.rate, f.declared_rate);
        v_in_flight := (SELECT count(*) FROM core.handler_slots s CROSS JOIN LATERAL unnest(s.ids) AS t (id)
                        CROSS JOIN LATERAL (SELECT FROM core.outbox o
                                            WHERE o.id = t.id AND o.lease_token = s.token AND o.status = 'in_flight'
                                              AND o.lease_expires_at >= v_ended_before LIMIT 1) o
                        WHERE s.handler_name = f.handler_name);
        v_probes := f.opened_at IS NOT NULL AND core.flow_probes(f.handler_name, f.probe_token, v_ended_before);
        IF f.paused_at IS NOT NULL THEN
            cause := 'paused';
            seconds := NULL;
        ELSIF core.flow_allowance(coalesce(f.fleet_concurrency, f.declared_fleet_concurrency),
                                  core.flow_tokens(f.tokens, f.tokens_at, v_rate, v_now),
                                  f.opened_at, f.probe_at, f.resumed_at, v_now, v_in_flight, v_probes) > 0 THEN
            CONTINUE WHEN f.handler_name = ANY (v_busy) IS NOT TRUE;
            cause := 'busy';
            seconds := 0.01;
        ELSIF f.opened_at IS NOT NULL THEN
            cause := 'open';
            seconds := CASE WHEN v_probes THEN 1 ELSE greatest(0.01, extract(epoch FROM f.probe_at - v_now)) END;
        ELSIF coalesce(f.fleet_concurrency, f.declared_fleet_concurrency) <= v_in_flight THEN
            cause := 'concurrency';
            seconds := 1;
        ELSIF core.flow_ramp(f.resumed_at, v_now) <= v_in_flight THEN
            cause := 'ramp';
            seconds := 0.25;
        ELSE
            -- Half of what the bucket holds, so that a claim is worth its round trip.
            cause := 'rate';
            seconds := greatest(0.005, (greatest(1, v_rate / 8)
                                        - core.flow_tokens(f.tokens, f.tokens_at, v_rate, v_now)) / v_rate);
        END IF;
        RETURN NEXT;
    END LOOP;
END
$$;

-- flow_adopt: writes down rows in flight that were claimed before their handler had a limit, so that they count. Workers
-- extend their leases several times before one would expire, and name all that they hold.
CREATE OR REPLACE FUNCTION core.flow_adopt(p_ids uuid[], p_tokens uuid[])
RETURNS void
LANGUAGE plpgsql SECURITY DEFINER
SET search_path = pg_catalog, pg_temp SET jit = off SET enable_seqscan = off SET enable_bitmapscan = off
AS $$
BEGIN
    INSERT INTO core.handler_slots (handler_name, token, ids)
    SELECT o.handler, o.token, array_agg(o.id)
    FROM (SELECT t.id, t.token, core.begun_for(o.handler_name, o.target, o.event_type, o.claimed_by) AS handler
          FROM unnest(p_ids, p_tokens) AS t (id, token)
          CROSS JOIN LATERAL (
              SELECT o.handler_name, o.target, o.event_type, o.claimed_by FROM core.outbox o
              WHERE o.id = t.id AND o.lease_token = t.token AND o.status = 'in_flight' LIMIT 1) o) o
    JOIN core.handler_flow f ON f.handler_name = o.handler
    WHERE coalesce(f.fleet_concurrency, f.declared_fleet_concurrency) IS NOT NULL
      AND NOT EXISTS (SELECT FROM core.handler_slots s WHERE s.handler_name = o.handler AND s.token = o.token)
    GROUP BY o.handler, o.token
    ON CONFLICT DO NOTHING;
END
$$;

-- flow_limited: the handlers that have a line, for workers, who ask when the version of the subscriptions has changed.
CREATE OR REPLACE FUNCTION core.flow_limited(p_handlers text[])
RETURNS SETOF text
LANGUAGE plpgsql STABLE SECURITY DEFINER
SET search_path = pg_catalog, pg_temp
AS $$
BEGIN
    RETURN QUERY SELECT f.handler_name FROM core.handler_flow f WHERE f.handler_name = ANY (p_handlers);
END
$$;

-- flow_declare: what a worker that starts has declared for its handlers; NULL for none. Only changes are written, and raise
-- the version of the subscriptions, so that other workers learn which handlers have limits.
CREATE OR REPLACE FUNCTION core.flow_declare(
    p_handlers text[], p_fleet_concurrencies int[], p_rates float8[],
    p_breakers int[], p_first_probes float8[], p_longest_waits float8[])
RETURNS void
LANGUAGE plpgsql SECURITY DEFINER
SET search_path = pg_catalog, pg_temp
AS $$
BEGIN
    IF (core.are_names(p_handlers) AND cardinality(p_handlers) = ALL (ARRAY[
            cardinality(p_fleet_concurrencies), cardinality(p_rates), cardinality(p_breakers),
            cardinality(p_first_probes), cardinality(p_longest_waits)])) IS NOT TRUE THEN
        PERFORM core.refuse_argument('the arrays must have one entry for each handler');
    ELSIF EXISTS (SELECT FROM unnest(p_fleet_concurrencies, p_rates, p_breakers, p_first_probes, p_longest_waits)
                  AS t (fleet, rate, breaker, first, longest)
                  WHERE core.is_limit(t.fleet) IS FALSE OR core.is_rate(t.rate) IS FALSE
                     OR t.breaker IS NOT NULL AND (t.breaker BETWEEN 1 AND 1000 AND t.first BETWEEN 0.01 AND 3600
                                                   AND t.longest BETWEEN t.first AND 3600) IS NOT TRUE) THEN
        PERFORM core.refuse_argument('a concurrency must be 1 to 100000, a rate 0.00001 to 1000000 a second; a breaker opens '
                                     'after 1 to 1000 failures, and probes within an hour');
    END IF;
    IF NOT EXISTS (
        SELECT FROM unnest(p_handlers, p_fleet_concurrencies, p_rates, p_breakers, p_first_probes, p_longest_waits)
             AS t (handler, fleet, rate, breaker, first, longest)
        LEFT JOIN core.handler_flow f ON f.handler_name = t.handler
        WHERE (t.fleet, t.rate, t.breaker, t.first, t.longest) IS DISTINCT FROM
              (f.declared_fleet_concurrency, f.declared_rate, f.breaker_after, f.first_probe, f.longest_wait)) THEN
        RETURN;
    END IF;
    UPDATE core.subscriptions_version SET version = version + 1;
    INSERT INTO core.handler_flow AS f (
        handler_name, declared_fleet_concurrency, declared_rate, breaker_after, first_probe, longest_wait)
    SELECT DISTINCT ON (t.handler) t.handler, t.fleet, t.rate, t.breaker, t.first, t.longest
    FROM unnest(p_handlers, p_fleet_concurrencies, p_rates, p_breakers, p_first_probes, p_longest_waits)
         AS t (handler, fleet, rate, breaker, first, longest)
    WHERE coalesce(t.fleet, t.rate, t.breaker) IS NOT NULL
       OR EXISTS (SELECT FROM core.handler_flow f WHERE f.handler_name = t.handler)
    ORDER BY t.handler
    ON CONFLICT (handler_name) DO UPDATE
        SET declared_fleet_concurrency = EXCLUDED.declared_fleet_concurrency, declared_rate = EXCLUDED.declared_rate,
            breaker_after = EXCLUDED.breaker_after, first_probe = EXCLUDED.first_probe, longest_wait = EXCLUDED.longest_wait,
            -- Nobody would report that a probe has succeeded.
            opened_at = CASE WHEN EXCLUDED.breaker_after IS NOT NULL THEN f.opened_at END,
            failing = CASE WHEN EXCLUDED.breaker_after IS NOT NULL THEN f.failing ELSE '{}' END;
    PERFORM core.flow_forget(p_handlers);
    PERFORM core.flow_wake();
END
$$;

-- is_limit, is_rate: what a limit may be.
CREATE OR REPLACE FUNCTION core.is_limit(p_limit int)
RETURNS boolean
LANGUAGE sql IMMUTABLE PARALLEL SAFE
SET search_path = pg_catalog, pg_temp
AS $$
    SELECT p_limit BETWEEN 1 AND 100000
$$;
CREATE OR REPLACE FUNCTION core.is_rate(p_rate float8)
RETURNS boolean
LANGUAGE sql IMMUTABLE PARALLEL SAFE
SET search_path = pg_catalog, pg_temp
AS $$
    SELECT p_rate BETWEEN 0.00001 AND 1000000
$$;

-- flow_forget: deletes the lines of handlers that have neither limits nor a breaker, nor are paused.
CREATE OR REPLACE FUNCTION core.flow_forget(p_handlers text[])
RETURNS void
LANGUAGE plpgsql SECURITY DEFINER
SET search_path = pg_catalog, pg_temp
AS $$
BEGIN
    DELETE FROM core.handler_flow f
    WHERE f.handler_name = ANY (p_handlers) AND f.paused_at IS NULL AND f.breaker_after IS NULL
      AND coalesce(f.fleet_concurrency, f.declared_fleet_concurrency) IS NULL AND coalesce(f.rate, f.declared_rate) IS NULL;
    DELETE FROM core.handler_slots s
    WHERE s.handler_name = ANY (p_handlers)
      AND NOT EXISTS (SELECT FROM core.handler_flow f WHERE f.handler_name = s.handler_name);
END
$$;

-- flow_wake: has every worker look again.
CREATE OR REPLACE FUNCTION core.flow_wake()
RETURNS void
LANGUAGE plpgsql SECURITY DEFINER
SET search_path = pg_catalog, pg_temp
AS $$
BEGIN
    PERFORM core.wake(c.channel, 'rescan') FROM (SELECT DISTINCT s.channel FROM core.served_channels() s) c;
END
$$;

-- flow_change: takes the line of a handler for an operator, makes it if there is none, and raises the version of the
-- subscriptions: a claim that was worked out before takes nothing once this is committed.
CREATE OR REPLACE FUNCTION core.flow_change(p_handler text)
RETURNS core.handler_flow
LANGUAGE plpgsql SECURITY DEFINER
SET search_path = pg_catalog, pg_temp
AS $$
DECLARE
    f core.handler_flow;
BEGIN
    IF NOT EXISTS (SELECT FROM core.subscriptions s WHERE s.handler_name = p_handler) THEN
        PERFORM core.refuse_argument('p_handler must be a handler that has, or had, a subscription', 'holdfast handlers list');
    END IF;
    UPDATE core.subscriptions_version SET version = version + 1;
    INSERT INTO core.handler_flow (handler_name) VALUES (p_handler) ON CONFLICT DO NOTHING;
    SELECT x.* INTO f FROM core.handler_flow x WHERE x.handler_name = p_handler FOR UPDATE;
    RETURN f;
END
$$;

-- handler_limit: sets limits of a handler, which win over what its code declares. NULL: as before. p_clear names what goes
-- back to what the code declares: fleet_concurrency, rate. Returns whether something has changed.
CREATE OR REPLACE FUNCTION core.handler_limit(
    p_handler text, p_fleet_concurrency int, p_rate float8, p_clear text[], p_actor text, p_reason text DEFAULT NULL)
RETURNS boolean
LANGUAGE plpgsql SECURITY DEFINER
SET search_path = pg_catalog, pg_temp
AS $$
DECLARE
    f         core.handler_flow;
    v_fleet   int;
    v_rate    float8;
    v_changed boolean;
BEGIN
    IF core.is_limit(p_fleet_concurrency) IS FALSE THEN
        PERFORM core.refuse_argument('p_fleet_concurrency must be 1 to 100000', 'To stop a handler, pause it.');
    ELSIF core.is_rate(p_rate) IS FALSE THEN
        PERFORM core.refuse_argument('p_rate must be 0.00001 to 1000000 a second', 'To stop a handler, pause it.');
    ELSIF NOT coalesce(p_clear, '{}') <@ ARRAY['fleet_concurrency', 'rate'] THEN
        PERFORM core.refuse_argument('p_clear may name fleet_concurrency and rate');
    END IF;
    f := core.flow_change(p_handler);
    v_fleet := coalesce(p_fleet_concurrency, CASE WHEN 'fleet_concurrency' = ANY (p_clear) THEN NULL ELSE f.fleet_concurrency END);
    v_rate := coalesce(p_rate, CASE WHEN 'rate' = ANY (p_clear) THEN NULL ELSE f.rate END);
    v_changed := (v_fleet, v_rate) IS DISTINCT FROM (f.fleet_concurrency, f.rate);
    UPDATE core.handler_flow x SET fleet_concurrency = v_fleet, rate = v_rate WHERE x.handler_name = p_handler;
    PERFORM core.audit_append(
        p_actor, 'handler.limit', p_reason,
        jsonb_build_object('handler', p_handler, 'fleet_concurrency', v_fleet, 'rate', v_rate,
                           'clear', CASE WHEN cardinality(p_clear) > 0 THEN to_jsonb(p_clear) END),
        jsonb_build_object('changed', v_changed::int));
    PERFORM core.flow_forget(ARRAY[p_handler]);
    PERFORM core.flow_wake();
    RETURN v_changed;
END
$$;

-- handler_pause: claims nothing more of a handler, until it is resumed. What runs may finish. Returns whether it was not
-- paused before. A claim that the server has begun before this commits may still take rows; none that begins after it does.
CREATE OR REPLACE FUNCTION core.handler_pause(p_handler text, p_actor text, p_reason text DEFAULT NULL)
RETURNS boolean
LANGUAGE plpgsql SECURITY DEFINER
SET search_path = pg_catalog, pg_temp
AS $$
DECLARE
    f core.handler_flow := core.flow_change(p_handler);
BEGIN
    UPDATE core.handler_flow x
    SET paused_at = coalesce(x.paused_at, now()), paused_by = coalesce(x.paused_by, left(p_actor, 200))
    WHERE x.handler_name = p_handler;
    PERFORM core.audit_append(p_actor, 'handler.pause', p_reason, jsonb_build_object('handler', p_handler),
                              jsonb_build_object('changed', (f.paused_at IS NULL)::int));
    RETURN f.paused_at IS NULL;
END
$$;

-- handler_resume: ends a pause, and wakes the workers. Returns whether it was paused.
CREATE OR REPLACE FUNCTION core.handler_resume(p_handler text, p_actor text, p_reason text DEFAULT NULL)
RETURNS boolean
LANGUAGE plpgsql SECURITY DEFINER
SET search_path = pg_catalog, pg_temp
AS $$
DECLARE
    f core.handler_flow := core.flow_change(p_handler);
BEGIN
    UPDATE core.handler_flow x SET paused_at = NULL, paused_by = NULL WHERE x.handler_name = p_handler;
    PERFORM core.audit_append(p_actor, 'handler.resume', p_reason, jsonb_build_object('handler', p_handler),
                              jsonb_build_object('changed', (f.paused_at IS NOT NULL)::int));
    PERFORM core.flow_forget(ARRAY[p_handler]);
    PERFORM core.flow_wake();
    RETURN f.paused_at IS NOT NULL;
END
$$;
