-- Replay plans: replays of many rows, a canary first and then the rest at a rate. Every change of a plan locks its row, so
-- a step and a pause, or two runners, come one after the other.

-- plan_create: freezes the rows that are named, or else those that a filter finds. The canary is drawn from all of them,
-- because the oldest rows might share one cause; the rest follows, the oldest first. A transaction that will be rolled
-- back, for which holdfast.dry_run is on, gets the number 0: the sequence would not give another one back.
CREATE OR REPLACE FUNCTION core.plan_create(
    p_ids uuid[], p_filter jsonb, p_most int, p_generation bigint, p_canary int, p_rate float8, p_max_failure_ratio float8,
    p_patience interval, p_force boolean, p_actor text, p_reason text)
RETURNS TABLE (id bigint, total int)
LANGUAGE plpgsql SECURITY DEFINER
SET search_path = pg_catalog, pg_temp SET jit = off
AS $$
#variable_conflict use_column
DECLARE
    v_selection jsonb := CASE WHEN p_ids IS NULL THEN p_filter ELSE jsonb_build_object('ids', cardinality(p_ids)) END;
    v_horizon   timestamptz := CASE WHEN p_force THEN '-infinity' ELSE coalesce(core.inbox_horizon(), '-infinity') END;
    v_plan      bigint;
    v_total     int;
BEGIN
    IF p_ids IS NOT NULL THEN
        PERFORM core.require_ids(p_ids);
    END IF;
    v_plan := CASE WHEN current_setting('holdfast.dry_run', true) = 'on' THEN 0
                   ELSE nextval(pg_get_serial_sequence('core.plans', 'id')) END;
    INSERT INTO core.plans (id, created_by, reason, selection, generation, canary, rate, max_failure_ratio, patience, force)
    OVERRIDING SYSTEM VALUE
    VALUES (v_plan, p_actor, p_reason, v_selection, p_generation, p_canary, p_rate, p_max_failure_ratio, p_patience,
            coalesce(p_force, false));

    INSERT INTO core.plan_rows (plan_id, row_id, position, state, why)
    SELECT v_plan, ranked.id, row_number() OVER (ORDER BY ranked.draw > p_canary, ranked.n DESC),
           CASE WHEN ranked.too_old THEN 'skipped' ELSE 'pending' END, CASE WHEN ranked.too_old THEN 'too_old' END
    FROM (SELECT found.id, found.n, found.too_old,
                 row_number() OVER (ORDER BY found.too_old, md5(found.id::text)) AS draw
          FROM (SELECT chosen.id, min(chosen.n) AS n, bool_or(coalesce(o.created_at < v_horizon, false)) AS too_old
                FROM (SELECT t.id, -t.n AS n FROM unnest(p_ids) WITH ORDINALITY AS t (id, n)
                      UNION ALL
                      SELECT * FROM core.failed_select(coalesce(p_filter, '{}'), p_most) WITH ORDINALITY AS t (id, n)
                      WHERE p_ids IS NULL) chosen
                LEFT JOIN LATERAL (SELECT o.created_at FROM core.outbox o WHERE o.id = chosen.id
                                   UNION ALL SELECT a.created_at FROM core.archive a WHERE a.original_id = chosen.id
                                   LIMIT 1) o ON true
                GROUP BY chosen.id) found) ranked;
    GET DIAGNOSTICS v_total = ROW_COUNT;
    PERFORM core.audit_append(
        p_actor, 'plan.create', p_reason,
        jsonb_build_object('plan', v_plan, 'selection', v_selection, 'generation', p_generation, 'canary', p_canary,
                           'rate', p_rate, 'max_failure_ratio', p_max_failure_ratio, 'force', nullif(p_force, false)),
        jsonb_build_object('rows', v_total));
    RETURN QUERY SELECT v_plan, v_total;
END
$$;

-- plan_take: the lease of a plan, for the process that runs it. Answers 'taken'; 'held' while another has it; the state
-- of a plan that must not be run; no row when there is no such plan.
CREATE OR REPLACE FUNCTION core.plan_take(
    p_plan bigint, p_token uuid, p_runner text, p_actor text, p_lease interval, p_reason text DEFAULT NULL)
RETURNS TABLE (answer text, state_reason text, runner text, held_until timestamptz, held_for float8)
LANGUAGE plpgsql SECURITY DEFINER
SET search_path = pg_catalog, pg_temp
AS $$
#variable_conflict use_column
DECLARE
    plan core.plans;
BEGIN
    SELECT * INTO plan FROM core.plans p WHERE p.id = p_plan FOR UPDATE;
    IF NOT FOUND THEN
        RETURN;
    ELSIF plan.state <> 'open' THEN
        RETURN QUERY SELECT plan.state, plan.state_reason, plan.runner, NULL::timestamptz, NULL::float8;
    ELSIF plan.lease_expires_at > clock_timestamp() THEN
        RETURN QUERY SELECT 'held', NULL, plan.runner, plan.lease_expires_at,
                            extract(epoch FROM plan.lease_expires_at - clock_timestamp())::float8;
    ELSE
        UPDATE core.plans p
        SET lease_token = p_token, lease_expires_at = clock_timestamp() + p_lease, runner = p_runner, run_by = p_actor,
            waiting_since = clock_timestamp(), state_reason = NULL
        WHERE p.id = p_plan;
        PERFORM core.audit_append(
            p_actor, 'plan.run', p_reason, jsonb_build_object('plan', p_plan, 'runner', p_runner), NULL);
        RETURN QUERY SELECT 'taken', NULL, p_runner, NULL::timestamptz, NULL::float8;
    END IF;
END
$$;

-- plan_release: gives the lease back, so that the next runner need not wait for its end.
CREATE OR REPLACE FUNCTION core.plan_release(p_plan bigint, p_token uuid)
RETURNS void
LANGUAGE plpgsql SECURITY DEFINER
SET search_path = pg_catalog, pg_temp
AS $$
BEGIN
    UPDATE core.plans p
    SET lease_token = NULL, lease_expires_at = NULL, state_reason = CASE p.state WHEN 'open' THEN NULL ELSE p.state_reason END
    WHERE p.id = p_plan AND p.lease_token = p_token;
END
$$;

-- plan_observe: writes down what became of the rows that were replayed. A row that is gone was delivered and is not kept,
-- unless it failed again and was moved to the archive.
CREATE OR REPLACE FUNCTION core.plan_observe(p_plan bigint)
RETURNS void
LANGUAGE plpgsql SECURITY DEFINER
SET search_path = pg_catalog, pg_temp SET jit = off SET enable_seqscan = off SET enable_bitmapscan = off
AS $$
BEGIN
    UPDATE core.plan_rows r SET state = seen.state
    FROM (SELECT r.row_id,
                 CASE WHEN o.status = 'failed' THEN 'failed'
                      WHEN o.status = 'delivered' THEN 'delivered'
                      WHEN EXISTS (SELECT FROM core.archive a WHERE a.original_id = r.row_id AND a.failed_at >= r.replayed_at)
                      THEN 'failed' ELSE 'delivered' END AS state
          FROM core.plan_rows r
          LEFT JOIN LATERAL (SELECT o.status FROM core.outbox o WHERE o.id = r.row_id LIMIT 1) o ON true
          WHERE r.plan_id = p_plan AND r.state = 'replayed' AND (o.status IS NULL OR o.status IN ('delivered', 'failed'))
          LIMIT 10000) seen
    WHERE r.plan_id = p_plan AND r.row_id = seen.row_id;
END
$$;

-- plan_waits_for: the rows of a plan that were replayed and have no outcome yet, by handler and generation.
CREATE OR REPLACE FUNCTION core.plan_waits_for(p_plan bigint)
RETURNS text
LANGUAGE plpgsql STABLE SECURITY DEFINER
SET search_path = pg_catalog, pg_temp SET jit = off SET enable_seqscan = off
AS $$
BEGIN
    RETURN (
        SELECT string_agg(
                   format('%s of %s in generation %s%s', w.count, w.handler_name, w.generation,
                          CASE WHEN w.served THEN '' ELSE ', which no living worker serves' END), '; ' ORDER BY w.count DESC)
        FROM (SELECT open.handler_name, open.generation, sum(open.count) AS count, bool_and(open.served) AS served
              FROM (SELECT o.handler_name, o.generation, o.channel, count(*) AS count,
                           EXISTS (SELECT FROM core.workers w
                                   WHERE w.stopped_at IS NULL AND core.is_living(w.heartbeat_at)
                                     AND w.generation = o.generation AND o.channel = ANY (w.channels)
                                     AND o.handler_name = ANY (w.handlers)) AS served
                    FROM core.plan_rows r
                    CROSS JOIN LATERAL (SELECT o.handler_name, o.generation, o.channel
                                        FROM core.outbox o WHERE o.id = r.row_id LIMIT 1) o
                    WHERE r.plan_id = p_plan AND r.state = 'replayed'
                    GROUP BY o.handler_name, o.generation, o.channel) open
              GROUP BY open.handler_name, open.generation
              ORDER BY 3 DESC LIMIT 5) w);
END
$$;

-- plan_step: what a runner does over and over. It extends the lease, looks at the outcomes so far, decides whether to go
-- on, and moves up to p_most rows: the rows and what the plan remembers of them in one transaction, so that a runner may
-- die at any moment. Without rows to move it extends the runner's lease. A row that another session has locked goes to the plan's end.
-- phase: canary, ramp, waiting (for outcomes, or for a worker: state_reason says which), or over. state 'lost': another
-- runner has the lease.
CREATE OR REPLACE FUNCTION core.plan_step(p_plan bigint, p_token uuid, p_most int, p_lease interval)
RETURNS TABLE (state text, state_reason text, phase text, moved int)
LANGUAGE plpgsql SECURITY DEFINER
SET search_path = pg_catalog, pg_temp SET jit = off SET enable_seqscan = off
AS $$
#variable_conflict use_column
DECLARE
    -- A ratio of fewer outcomes than these says little; the canary is judged as a whole, however small.
    enough    CONSTANT int := 10;
    plan      core.plans;
    v_into    bigint;
    pending   int;   -- of all rows
    unknown   int;   -- of all rows: replayed, with no outcome yet
    tried     int;   -- since judged_from: replayed
    undecided int;   -- of those, without an outcome
    failed    int;   -- of those, failed again
    v_most    int := greatest(coalesce(p_most, 0), 0);
    v_phase   text;
    v_why     text;
    v_ids     uuid[];
    v_states  text[];
BEGIN
    UPDATE core.plans p SET lease_expires_at = clock_timestamp() + p_lease
    WHERE p.id = p_plan AND p.lease_token = p_token
    RETURNING * INTO plan;
    IF NOT FOUND THEN
        RETURN QUERY SELECT 'lost', NULL, 'over', 0;
        RETURN;
    END IF;
    PERFORM core.plan_observe(p_plan);
    IF plan.state <> 'open' THEN
        RETURN QUERY SELECT plan.state, plan.state_reason, CASE plan.state WHEN 'paused' THEN 'waiting' ELSE 'over' END, 0;
        RETURN;
    END IF;

    SELECT count(*) FILTER (WHERE r.state = 'pending'),
           count(*) FILTER (WHERE r.state = 'replayed'),
           count(*) FILTER (WHERE r.replayed_at >= plan.judged_from),
           count(*) FILTER (WHERE r.replayed_at >= plan.judged_from AND r.state = 'replayed'),
           count(*) FILTER (WHERE r.replayed_at >= plan.judged_from AND r.state = 'failed')
    INTO pending, unknown, tried, undecided, failed
    FROM core.plan_rows r WHERE r.plan_id = p_plan;

    v_into := coalesce(plan.generation, core.served_generation());
    IF pending > 0 AND v_into IS NULL AND clock_timestamp() < plan.waiting_since + plan.patience THEN
        v_phase := 'waiting';
    ELSIF pending > 0 AND v_into IS NULL THEN
        v_phase := 'over';
        v_why := format('no worker was heard of for %s', plan.patience);
    ELSIF NOT plan.canary_passed AND tried < plan.canary AND pending > 0 THEN
        v_phase := 'canary';
    ELSIF NOT plan.canary_passed AND undecided > 0 AND clock_timestamp() < plan.waiting_since + plan.patience THEN
        v_phase := 'waiting';
    ELSIF NOT plan.canary_passed AND undecided > 0 THEN
        v_phase := 'over';
        v_why := format('%s of %s canary rows have no outcome after %s; does a worker serve generation %s?',
                        undecided, tried, plan.patience, v_into);
    ELSIF failed > plan.max_failure_ratio * (tried - undecided)
          AND (NOT plan.canary_passed OR tried - undecided >= enough) THEN
        v_phase := 'over';
        v_why := format('%s of %s replayed rows failed again', failed, tried - undecided);
    ELSIF pending > 0 THEN
        v_phase := 'ramp';
    ELSIF unknown > 0 AND clock_timestamp() < plan.waiting_since + plan.patience THEN
        v_phase := 'waiting';
    ELSE
        -- What has no outcome is not done, and a plan that is done could not be resumed.
        v_phase := 'over';
        v_why := CASE WHEN unknown > 0 THEN format(
            '%s replayed rows have no outcome after %s: %s', unknown, plan.patience,
            coalesce(core.plan_waits_for(p_plan), 'their workers are slow')) END;
    END IF;

    IF v_phase = 'waiting' THEN
        v_why := 'waits for ' || CASE WHEN pending > 0 AND v_into IS NULL THEN 'a worker: none that lives serves a generation'
                                      ELSE coalesce(core.plan_waits_for(p_plan), 'the outcome of what was replayed') END;
    END IF;
    IF v_phase <> 'over' THEN
        UPDATE core.plans p SET state_reason = v_why WHERE p.id = p_plan AND p.state_reason IS DISTINCT FROM v_why;
    END IF;

    IF v_phase = 'over' THEN
        UPDATE core.plans p
        SET state = CASE WHEN v_why IS NULL THEN 'done' ELSE 'stopped' END, state_reason = v_why,
            finished_at = CASE WHEN v_why IS NULL THEN clock_timestamp() END
        WHERE p.id = p_plan
        RETURNING p.* INTO plan;
        PERFORM core.audit_append(
            plan.run_by, CASE WHEN v_why IS NULL THEN 'plan.done' ELSE 'plan.stop' END, v_why,
            jsonb_build_object('plan', p_plan),
            (SELECT jsonb_object_agg(c.state, c.n)
             FROM (SELECT r.state, count(*) AS n FROM core.plan_rows r WHERE r.plan_id = p_plan GROUP BY r.state) c));
        RETURN QUERY SELECT plan.state, plan.state_reason, 'over', 0;
        RETURN;
    END IF;
    UPDATE core.plans p SET canary_passed = true WHERE p.id = p_plan AND v_phase = 'ramp' AND NOT p.canary_passed;

    v_ids := ARRAY(
        SELECT r.row_id FROM core.plan_rows r
        WHERE r.plan_id = p_plan AND r.state = 'pending' AND v_phase <> 'waiting'
        ORDER BY r.position
        LIMIT CASE v_phase WHEN 'canary' THEN least(v_most, plan.canary - tried) ELSE v_most END);
    IF cardinality(v_ids) > 0 THEN
        WITH replayed AS (
            UPDATE core.plan_rows r
            SET state = CASE t.outcome WHEN 'moved' THEN 'replayed' WHEN 'busy' THEN 'pending' ELSE 'skipped' END,
                why = CASE WHEN t.outcome NOT IN ('moved', 'busy') THEN t.outcome END,
                replayed_at = CASE t.outcome WHEN 'moved' THEN clock_timestamp() END,
                position = r.position + CASE t.outcome WHEN 'busy' THEN 1000000 ELSE 0 END
            -- A plan may be run weeks after it was made: what was young enough then is judged again.
            FROM core.outbox_replay_rows(v_ids, v_into, left(plan.run_by, 160) || ' (plan ' || p_plan || ')', plan.force) t
            WHERE r.plan_id = p_plan AND r.row_id = t.id
            RETURNING r.row_id, t.outcome)
        SELECT array_agg(replayed.row_id), array_agg(replayed.outcome) INTO v_ids, v_states FROM replayed;
        UPDATE core.plans p SET waiting_since = clock_timestamp() WHERE p.id = p_plan AND 'moved' = ANY (v_states);
        IF array_remove(v_states, 'busy') <> '{}' THEN
            PERFORM core.audit_rows(plan.run_by, 'plan.step', NULL, jsonb_build_object('plan', p_plan), v_ids, v_states);
        END IF;
    END IF;
    RETURN QUERY SELECT 'open', v_why, v_phase, coalesce(cardinality(array_positions(v_states, 'moved')), 0);
END
$$;

-- plan_change_state: pause, resume or cancel, from any process. Returns the state before and after, which are the same
-- when the plan does not allow the change. A plan that had stopped begins anew with a canary, and is judged by what comes now.
CREATE OR REPLACE FUNCTION core.plan_change_state(p_plan bigint, p_verb text, p_actor text, p_reason text DEFAULT NULL)
RETURNS TABLE (before text, after text, running boolean)
LANGUAGE plpgsql SECURITY DEFINER
SET search_path = pg_catalog, pg_temp
AS $$
#variable_conflict use_column
DECLARE
    plan    core.plans;
    v_after text;
BEGIN
    SELECT * INTO plan FROM core.plans p WHERE p.id = p_plan FOR UPDATE;
    IF NOT FOUND THEN
        RETURN;
    END IF;
    v_after := CASE WHEN p_verb = 'pause' AND plan.state = 'open' THEN 'paused'
                    WHEN p_verb = 'resume' AND plan.state IN ('paused', 'stopped') THEN 'open'
                    WHEN p_verb = 'cancel' AND plan.state IN ('open', 'paused', 'stopped') THEN 'cancelled'
                    ELSE plan.state END;
    IF v_after <> plan.state THEN
        UPDATE core.plans p
        SET state = v_after,
            state_reason = CASE v_after WHEN 'open' THEN NULL ELSE v_after || ' by ' || p_actor || coalesce(': ' || p_reason, '') END,
            finished_at = CASE v_after WHEN 'cancelled' THEN clock_timestamp() END,
            judged_from = CASE p.state WHEN 'stopped' THEN clock_timestamp() ELSE p.judged_from END,
            canary_passed = p.canary_passed AND p.state <> 'stopped',
            waiting_since = clock_timestamp()
        WHERE p.id = p_plan;
        PERFORM core.audit_append(p_actor, 'plan.' || p_verb, p_reason, jsonb_build_object('plan', p_plan), NULL);
    END IF;
    RETURN QUERY SELECT plan.state, v_after, coalesce(plan.lease_expires_at > clock_timestamp(), false);
END
$$;
