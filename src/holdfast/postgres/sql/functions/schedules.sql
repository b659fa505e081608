-- Schedules: what workers declare and fire, and what operators do with them.

-- require_generation: no later than the newest deployment, or the newest generation that a worker has said it is of.
-- A declaration stands against all earlier generations, so a number that no worker has would stand for ever.
CREATE OR REPLACE FUNCTION core.require_generation(p_generation bigint)
RETURNS void
LANGUAGE plpgsql STABLE SECURITY DEFINER
SET search_path = pg_catalog, pg_temp
AS $$
BEGIN
    IF (p_generation BETWEEN 0 AND greatest(core.current_generation(), (SELECT max(w.generation) FROM core.workers w)))
       IS NOT TRUE THEN
        RAISE EXCEPTION 'generation % is no deployment, and no worker has said that it is of it', p_generation
            USING ERRCODE = 'invalid_parameter_value', HINT = 'Call core.worker_beat with it first, as workers do.';
    END IF;
END
$$;

-- schedule_declare: writes a declaration down, by who may publish for its source; and who takes a name over, for the
-- source that had it. A newer generation's stands, unless that generation is retired. A timing that changes begins now,
-- and what was due before is fired under the old one first, by the worker that declares: until then the answer is owed,
-- and nothing has changed, unless by p_force. Answers declared, unchanged, owed or older.
CREATE OR REPLACE FUNCTION core.schedule_declare(
    p_name text, p_cron text, p_timezone text, p_every interval, p_missed text, p_event_type text, p_source text,
    p_target text, p_priority smallint, p_payload jsonb, p_generation bigint, p_force boolean)
RETURNS text
LANGUAGE plpgsql SECURITY DEFINER
SET search_path = pg_catalog, pg_temp
AS $$
DECLARE
    old          core.schedules;
    v_generation bigint;
    v_retimed    boolean;
BEGIN
    IF (core.is_name(p_name) AND core.is_name(p_source) AND core.is_name(p_event_type) AND p_force IS NOT NULL) IS NOT TRUE THEN
        PERFORM core.refuse_argument('p_name, p_source and p_event_type must be names of 1 to 200 bytes');
    END IF;
    PERFORM core.require_source(p_source);
    PERFORM core.require_generation(p_generation);
    v_generation := core.counted_generation(p_generation);
    LOOP
        INSERT INTO core.schedules (
            name, cron, timezone, every, missed, event_type, source, target, priority, payload, generation)
        VALUES (p_name, p_cron, p_timezone, p_every, p_missed, p_event_type, p_source, p_target, p_priority, p_payload,
                v_generation)
        ON CONFLICT (name) DO NOTHING;
        IF FOUND THEN
            RETURN 'declared';
        END IF;
        SELECT * INTO old FROM core.schedules s WHERE s.name = p_name FOR UPDATE;
        EXIT WHEN FOUND;   -- else it was removed at this very moment
    END LOOP;
    PERFORM core.require_source(old.source);
    IF old.generation > v_generation AND core.counted_generation(old.generation) = old.generation AND NOT EXISTS (
           SELECT FROM core.deployments d WHERE d.generation = old.generation AND d.retired_at IS NOT NULL) THEN
        RETURN 'older';
    END IF;
    v_retimed := (old.cron, old.timezone, old.every) IS DISTINCT FROM (p_cron, p_timezone, p_every);
    IF NOT v_retimed
       AND (old.missed, old.event_type, old.source, old.target, old.priority, old.payload, old.generation)
           IS NOT DISTINCT FROM (p_missed, p_event_type, p_source, p_target, p_priority, p_payload, v_generation) THEN
        RETURN 'unchanged';
    ELSIF v_retimed AND NOT p_force AND old.paused_at IS NULL
          AND (old.next_slot IS NULL OR old.next_slot <= clock_timestamp()) THEN
        RETURN 'owed';
    END IF;
    UPDATE core.schedules s
    SET cron = p_cron, timezone = p_timezone, every = p_every, missed = p_missed, event_type = p_event_type,
        source = p_source, target = p_target, priority = p_priority, payload = p_payload, generation = v_generation,
        declared_at = clock_timestamp(), version = s.version + 1,
        owed_after = CASE WHEN v_retimed THEN greatest(s.owed_after, clock_timestamp()) ELSE s.owed_after END,
        next_slot = CASE WHEN v_retimed THEN NULL ELSE s.next_slot END
    WHERE s.name = p_name;
    RETURN 'declared';
EXCEPTION WHEN data_exception OR check_violation OR not_null_violation THEN
    PERFORM core.refuse_argument(SQLERRM);
END
$$;

-- schedules_watch: the schedules that a worker declares, with the moment of the look; due_in is the time to the next slot,
-- and NULL when that is still to be worked out. That a worker serves them is recorded now and then, in attended_at.
CREATE OR REPLACE FUNCTION core.schedules_watch(p_names text[])
RETURNS TABLE (name text, cron text, timezone text, every interval, missed text, version bigint, owed_after timestamptz,
               looked_at timestamptz, due_in float8)
LANGUAGE plpgsql SECURITY DEFINER
SET search_path = pg_catalog, pg_temp
AS $$
#variable_conflict use_column
BEGIN
    UPDATE core.schedules s SET attended_at = clock_timestamp()
    WHERE s.name IN (SELECT a.name FROM core.schedules a
                     WHERE a.name = ANY (p_names)
                       AND a.attended_at NOT BETWEEN clock_timestamp() - interval '15 seconds' AND clock_timestamp()
                     FOR UPDATE SKIP LOCKED);
    RETURN QUERY
    SELECT s.name, s.cron, s.timezone, s.every, s.missed, s.version, s.owed_after, t.now,
           extract(epoch FROM s.next_slot - t.now)::float8
    FROM core.schedules s CROSS JOIN (SELECT clock_timestamp() AS now) t
    WHERE s.name = ANY (p_names) AND s.paused_at IS NULL
    ORDER BY s.name;
END
$$;

-- schedule_publish: one event for each slot, which it carries as the time at which it occurred. Its key is made of the
-- schedule and the slot. It goes to the newest generation that a living worker serves. p_generation is that of the worker
-- that fires it, which may not have said yet that it lives.
CREATE OR REPLACE FUNCTION core.schedule_publish(
    p_name text, p_slots timestamptz[], p_keys text[], p_headers jsonb, p_generation bigint, p_trace_context text)
RETURNS uuid[]
LANGUAGE plpgsql SECURITY DEFINER
SET search_path = pg_catalog, pg_temp
AS $$
DECLARE
    v_generation bigint := coalesce(
        greatest(core.counted_generation(p_generation), core.served_generation()), core.current_generation());
    v_ids        uuid[];
BEGIN
    WITH published AS (
        INSERT INTO core.outbox (
            event_type, occurred_at, source, target, channel, generation, payload, headers, idempotency_key, priority,
            trace_context)
        SELECT s.event_type, slot.at, s.source, s.target, core.channel_of(v_generation), v_generation, s.payload,
               jsonb_build_object('schedule', s.name) || p_headers, 'schedule:' || s.name || ':' || slot.key, s.priority,
               p_trace_context
        FROM core.schedules s CROSS JOIN unnest(p_slots, p_keys) AS slot (at, key)
        WHERE s.name = p_name
        ORDER BY slot.at
        RETURNING id)
    SELECT array_agg(published.id) INTO v_ids FROM published;
    RETURN v_ids;
END
$$;

-- schedule_fire: publishes the events of slots and moves on, in one statement: slots up to p_until are dealt with and
-- p_next is the first one after. Only by who may publish for its source, only from the version that the caller has
-- seen, and only what is due by this clock; a session that holds the row is doing the same. Returns whether it was done.
CREATE OR REPLACE FUNCTION core.schedule_fire(
    p_name text, p_version bigint, p_slots timestamptz[], p_until timestamptz, p_next timestamptz, p_generation bigint,
    p_trace_context text)
RETURNS boolean
LANGUAGE plpgsql SECURITY DEFINER
SET search_path = pg_catalog, pg_temp
AS $$
DECLARE
    schedule core.schedules;
BEGIN
    IF (core.is_list(p_slots) AND isfinite(p_until) AND coalesce(isfinite(p_next), true) AND p_version IS NOT NULL) IS NOT TRUE
       OR EXISTS (SELECT FROM unnest(p_slots) AS slot (at) WHERE NOT isfinite(slot.at)) THEN
        PERFORM core.refuse_argument('p_slots, p_until and p_next must be times');
    END IF;
    -- Behind a transaction pooler the commit is a statement of its own. Who is frozen before it has not fired anything,
    -- and must not keep others from it.
    PERFORM set_config('idle_in_transaction_session_timeout', '5s', true);
    SELECT * INTO schedule FROM core.schedules s
    WHERE s.name = p_name AND s.version = p_version AND s.paused_at IS NULL
    FOR UPDATE SKIP LOCKED;
    IF NOT FOUND OR p_until > greatest(clock_timestamp(), schedule.owed_after) THEN
        RETURN false;
    END IF;
    PERFORM core.require_source(schedule.source);
    PERFORM core.require_generation(p_generation);
    IF p_until < schedule.owed_after OR p_next <= p_until OR cardinality(p_slots) > 1000
       OR EXISTS (SELECT FROM unnest(p_slots) AS slot (at)
                  WHERE (slot.at > schedule.owed_after AND slot.at <= p_until) IS NOT TRUE)
       OR cardinality(p_slots) <> (SELECT count(DISTINCT slot.at) FROM unnest(p_slots) AS slot (at)) THEN
        RAISE EXCEPTION 'the slots of % must lie after %, and the next one after them', p_name, schedule.owed_after
            USING ERRCODE = 'invalid_parameter_value', HINT = 'Work them out from what schedules_watch answers.';
    END IF;
    IF cardinality(p_slots) > 0 THEN
        PERFORM core.schedule_publish(
            p_name, p_slots,
            ARRAY(SELECT to_char(slot.at AT TIME ZONE 'UTC', 'YYYY-MM-DD"T"HH24:MI:SS"Z"') FROM unnest(p_slots) AS slot (at)),
            '{}', p_generation, p_trace_context);
    END IF;
    UPDATE core.schedules s
    SET version = s.version + 1, owed_after = p_until, next_slot = p_next, fired = s.fired + cardinality(p_slots),
        last_slot = coalesce((SELECT max(slot.at) FROM unnest(p_slots) AS slot (at)), s.last_slot),
        last_fired_at = CASE WHEN cardinality(p_slots) > 0 THEN clock_timestamp() ELSE s.last_fired_at END
    WHERE s.name = p_name;
    RETURN true;
END
$$;

-- schedule_trigger: publishes the event of a schedule now, beside its slots, paused or not. Answers the id of the
-- event; NULL when there is no such schedule.
CREATE OR REPLACE FUNCTION core.schedule_trigger(p_name text, p_actor text, p_reason text DEFAULT NULL)
RETURNS uuid
LANGUAGE plpgsql SECURITY DEFINER
SET search_path = pg_catalog, pg_temp
AS $$
DECLARE
    v_ids uuid[];
BEGIN
    v_ids := core.schedule_publish(
        p_name, ARRAY[clock_timestamp()], ARRAY['trigger:' || gen_random_uuid()],
        jsonb_build_object('triggered_by', p_actor), NULL, NULL);
    IF v_ids IS NULL THEN
        RETURN NULL;
    END IF;
    PERFORM core.audit_append(
        p_actor, 'schedule.trigger', p_reason, jsonb_build_object('schedule', p_name, 'ids', to_jsonb(v_ids)),
        jsonb_build_object('fired', 1));
    RETURN v_ids[1];
END
$$;

-- schedule_change_state: pause or resume. Slots that come while it is paused are left out for good, whatever `missed` says.
-- Answers whether it was paused before and is now; nothing when there is no such schedule.
CREATE OR REPLACE FUNCTION core.schedule_change_state(p_name text, p_verb text, p_actor text, p_reason text DEFAULT NULL)
RETURNS TABLE (before boolean, after boolean)
LANGUAGE plpgsql SECURITY DEFINER
SET search_path = pg_catalog, pg_temp
AS $$
DECLARE
    schedule core.schedules;
BEGIN
    IF p_verb NOT IN ('pause', 'resume') OR p_verb IS NULL THEN
        RAISE EXCEPTION 'p_verb must be pause or resume' USING ERRCODE = 'invalid_parameter_value';
    END IF;
    SELECT * INTO schedule FROM core.schedules s WHERE s.name = p_name FOR UPDATE;
    IF NOT FOUND THEN
        RETURN;
    END IF;
    before := schedule.paused_at IS NOT NULL;
    after := p_verb = 'pause';
    IF before <> after THEN
        UPDATE core.schedules s
        -- A resume begins now, also where the clock of the server was ahead when the last slot was fired: then it is not
        -- the last one any longer, and comes again in its time, with the same key.
        SET version = s.version + 1, next_slot = NULL,
            last_slot = CASE WHEN after OR s.last_slot <= clock_timestamp() THEN s.last_slot END,
            owed_after = CASE WHEN after THEN greatest(s.owed_after, clock_timestamp()) ELSE clock_timestamp() END,
            paused_at = CASE WHEN after THEN clock_timestamp() END, paused_by = CASE WHEN after THEN p_actor END
        WHERE s.name = p_name;
        PERFORM core.audit_append(
            p_actor, 'schedule.' || p_verb, p_reason, jsonb_build_object('schedule', p_name), NULL);
    END IF;
    RETURN NEXT;
END
$$;

-- schedule_remove: takes away a schedule that no living worker declares: one that does would bring it back at its next
-- start. Answers removed, declared, or unknown.
CREATE OR REPLACE FUNCTION core.schedule_remove(p_name text, p_actor text, p_reason text DEFAULT NULL)
RETURNS text
LANGUAGE plpgsql SECURITY DEFINER
SET search_path = pg_catalog, pg_temp
AS $$
DECLARE
    schedule core.schedules;
BEGIN
    SELECT * INTO schedule FROM core.schedules s WHERE s.name = p_name FOR UPDATE;
    IF NOT FOUND THEN
        RETURN 'unknown';
    ELSIF core.is_living(schedule.attended_at) THEN
        RETURN 'declared';
    END IF;
    DELETE FROM core.schedules s WHERE s.name = p_name;
    PERFORM core.audit_append(
        p_actor, 'schedule.remove', p_reason,
        jsonb_build_object('schedule', p_name, 'cron', schedule.cron, 'timezone', schedule.timezone,
                           'every', schedule.every::text, 'event_type', schedule.event_type),
        jsonb_build_object('fired', schedule.fired));
    RETURN 'removed';
END
$$;
