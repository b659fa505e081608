-- What operators do with single events: replay and cancel. What their producers do stands in publish.sql.

-- history_with: a failure history and one more cycle. It keeps the last 20 cycles, and of those what fits into 64 KiB.
CREATE OR REPLACE FUNCTION core.history_with(p_history jsonb, p_cycle jsonb)
RETURNS jsonb
LANGUAGE plpgsql IMMUTABLE
SET search_path = pg_catalog, pg_temp
AS $$
BEGIN
    RETURN (
        SELECT coalesce(jsonb_agg(entry ORDER BY n), '[]')
        FROM (SELECT entry, n, sum(octet_length(entry::text) + 2) OVER (ORDER BY n DESC) AS size
              FROM jsonb_array_elements(p_history || p_cycle) WITH ORDINALITY AS t (entry, n)
              ORDER BY n DESC LIMIT 20) kept
        WHERE kept.size <= 65536);
END
$$;

-- outbox_replay_rows: puts failed rows back to pending, in place; those in the archive come back first. The finished cycle moves into failure_history; id and
-- idempotency_key stay, so a handler that already handled the event skips it. Answers for each row 'moved', or what it
-- is instead: pending, in_flight, delivered, discarded, cancelled, expired, stripped, missing; 'busy' when another
-- session has it locked; 'too_old' when the inbox may have forgotten that its handler has handled it, which is moved
-- by force only. An expiry does not outlive a replay: an operator who replays an event has decided that it runs now.
-- The history has 2,000 characters of error for each cycle.
CREATE OR REPLACE FUNCTION core.outbox_replay_rows(p_ids uuid[], p_new_generation bigint, p_replayed_by text, p_force boolean)
RETURNS TABLE (id uuid, outcome text)
LANGUAGE plpgsql SECURITY DEFINER
SET search_path = pg_catalog, pg_temp SET jit = off SET enable_seqscan = off SET enable_bitmapscan = off
AS $$
#variable_conflict use_column
DECLARE
    v_horizon timestamptz := CASE WHEN p_force THEN '-infinity' ELSE coalesce(core.inbox_horizon(), '-infinity') END;
    v_moved   uuid[];
BEGIN
    PERFORM core.archive_return(p_ids, v_horizon);
    WITH free AS MATERIALIZED (
        SELECT o.id
        FROM (SELECT DISTINCT t.id FROM unnest(p_ids) AS t (id) ORDER BY t.id) asked
        CROSS JOIN LATERAL (
            SELECT o.id FROM core.outbox o
            WHERE o.id = asked.id AND o.status = 'failed' AND o.deleted_at IS NULL AND o.created_at >= v_horizon
            FOR UPDATE SKIP LOCKED) o),
    moved AS (
        UPDATE core.outbox o
        SET failure_history = core.history_with(o.failure_history, jsonb_build_object(
                'attempts', o.attempts,
                'last_error', left(o.last_error, 2000),
                'first_failed_at', o.first_failed_at,
                'failed_at', o.failed_at,
                'failure_reason', o.failure_reason,
                'raised_at', core.raised_at(o.traceback),
                'generation', o.generation,
                'replayed_by', p_replayed_by,
                'replayed_at', now())),
            status = 'pending', attempts = 0, last_error = NULL, traceback = NULL, first_failed_at = NULL, failed_at = NULL,
            failure_reason = NULL, error_signature = NULL, settled_at = NULL, claimed_by = NULL, expires_at = NULL,
            generation = p_new_generation,
            -- A generation's own channel follows it; a channel for a processing characteristic stays.
            channel = CASE WHEN o.channel = core.channel_of(o.generation) THEN core.channel_of(p_new_generation) ELSE o.channel END,
            available_at = now()
        WHERE o.id = ANY (ARRAY(SELECT free.id FROM free))
        RETURNING o.id, o.channel),
    -- A request to cancel it that was recorded while its last cycle was being settled.
    withdrawn AS (DELETE FROM core.cancel_requests s USING moved WHERE s.id = moved.id),
    notified AS (SELECT core.wake(c.channel, 'rescan') FROM (SELECT DISTINCT moved.channel FROM moved) c)
    SELECT array_agg(moved.id) INTO v_moved FROM moved WHERE (SELECT count(*) FROM notified) >= 0;
    PERFORM core.replayed_places(v_moved);

    RETURN QUERY
    SELECT r.id, CASE WHEN r.outcome NOT IN ('failed', 'archived') THEN r.outcome WHEN r.created_at < v_horizon THEN 'too_old' ELSE 'busy' END
    FROM core.row_outcomes(p_ids, v_moved) r;
END
$$;

-- outbox_replay_many: the rows that an operator names, up to 10,000 of them. Answers what outbox_replay_rows answers.
CREATE OR REPLACE FUNCTION core.outbox_replay_many(
    p_ids uuid[], p_new_generation bigint, p_replayed_by text, p_reason text DEFAULT NULL, p_force boolean DEFAULT false)
RETURNS TABLE (id uuid, outcome text)
LANGUAGE plpgsql SECURITY DEFINER
SET search_path = pg_catalog, pg_temp
AS $$
#variable_conflict use_column
DECLARE
    v_ids uuid[]; v_outcomes text[];
BEGIN
    PERFORM core.require_ids(p_ids);
    IF p_new_generation IS NULL OR p_new_generation < 0 THEN
        RAISE EXCEPTION 'p_new_generation must be a generation number, not %', coalesce(p_new_generation::text, 'NULL')
            USING ERRCODE = 'invalid_parameter_value', HINT = 'Pass the generation whose workers should handle it; 0 without deployments.';
    ELSIF coalesce(p_replayed_by, '') = '' OR octet_length(p_replayed_by) > 200 THEN
        RAISE EXCEPTION 'p_replayed_by must name who replays, in 1 to 200 bytes'
            USING ERRCODE = 'invalid_parameter_value', HINT = 'Pass an e-mail address, or sql-direct.';
    END IF;
    SELECT array_agg(r.id), array_agg(r.outcome) INTO v_ids, v_outcomes
    FROM core.outbox_replay_rows(p_ids, p_new_generation, p_replayed_by, coalesce(p_force, false)) r;
    PERFORM core.audit_rows(
        p_replayed_by, 'replay', p_reason,
        jsonb_build_object('generation', p_new_generation, 'force', nullif(p_force, false)), v_ids, v_outcomes);
    RETURN QUERY SELECT * FROM unnest(v_ids, v_outcomes);
END
$$;

-- outbox_replay: the dead letters that an id names, callable from psql: a delivery's own id, or the id of an event, as in
-- an alert, for all its failed deliveries; in the outbox and in the archive. Returns how many rows moved. Where that is
-- fewer than were named, a notice says what the others are.
CREATE OR REPLACE FUNCTION core.outbox_replay(event_id uuid, p_new_generation bigint, p_replayed_by text)
RETURNS int
LANGUAGE plpgsql SECURITY DEFINER
SET search_path = pg_catalog, pg_temp
AS $$
DECLARE
    v_failed   uuid[] := ARRAY(SELECT d.id FROM core.deliveries_of(ARRAY[outbox_replay.event_id]) d
                               WHERE d.state IN ('failed', 'archived'));
    v_ids      uuid[];
    v_outcomes text[];
    v_moved    int;
    v_left     text;
BEGIN
    -- Where none has failed, the audit has a line about the id as it was given.
    SELECT array_agg(r.id), array_agg(r.outcome), count(*) FILTER (WHERE r.outcome = 'moved')
    INTO v_ids, v_outcomes, v_moved
    FROM core.outbox_replay_many(
        CASE WHEN v_failed = '{}' THEN ARRAY[outbox_replay.event_id] ELSE v_failed END, p_new_generation, p_replayed_by) r;
    IF 'too_old' = ALL (v_outcomes) THEN
        RAISE EXCEPTION 'the event is older than the inbox remembers: its handler may have handled it before'
            USING ERRCODE = 'object_not_in_prerequisite_state',
                  HINT = 'If it may run again: core.outbox_replay_many with p_force => true, or holdfast failed replay --force.';
    ELSIF v_moved < cardinality(v_ids) THEN
        SELECT string_agg(coalesce('the delivery to ' || d.handler_name, 'the event') || ' is '
                          || CASE coalesce(r.outcome, d.state) WHEN 'busy' THEN 'locked by another session'
                                  WHEN 'too_old' THEN 'older than the inbox remembers'
                                  ELSE replace(coalesce(r.outcome, d.state), '_', ' ') END,
                          '; ' ORDER BY d.handler_name, d.id)
        INTO v_left
        FROM core.deliveries_of(ARRAY[outbox_replay.event_id]) d
        LEFT JOIN unnest(v_ids, v_outcomes) AS r (id, outcome) ON r.id = d.id
        WHERE r.outcome IS DISTINCT FROM 'moved';
        RAISE NOTICE '% replayed: %', CASE v_moved WHEN 0 THEN 'nothing was' ELSE 'not everything was' END,
            coalesce(v_left, CASE v_outcomes[1] WHEN 'missing' THEN 'no event and no delivery has the id ' || outbox_replay.event_id
                                  ELSE 'retention has removed the deliveries of the event' END)
            USING HINT = 'holdfast events show ' || outbox_replay.event_id || ' tells more.';
    END IF;
    RETURN v_moved;
END
$$;

-- outbox_cancel_event: cancels an event, pending or in flight. Taking the lease away fences the handler's settle, and the
-- worker ends the handler when it is notified, or when it next extends the lease. A handler that runs in a transaction
-- holds the row's lock: then the request is recorded in core.cancel_requests, the worker ends the handler, which rolls back,
-- and the worker that claims the row next settles it as cancelled. The id of an event that was split cancels its open
-- deliveries. Returns how many are or will be cancelled, 0 when all are settled already.
CREATE OR REPLACE FUNCTION core.outbox_cancel_event(p_id uuid, p_cancelled_by text, p_reason text DEFAULT NULL)
RETURNS int
LANGUAGE plpgsql SECURITY DEFINER
SET search_path = pg_catalog, pg_temp
AS $$
DECLARE
    v_channel    text;
    v_open       uuid[];
    v_handler    text;
    v_generation bigint;
    v_attempts   int;
BEGIN
    IF coalesce(p_cancelled_by, '') = '' OR octet_length(p_cancelled_by) > 200 THEN
        RAISE EXCEPTION 'p_cancelled_by must name who cancels, in 1 to 200 bytes'
            USING ERRCODE = 'invalid_parameter_value', HINT = 'Pass an e-mail address, or sql-direct.';
    END IF;
    WITH free AS (
        SELECT o.id FROM core.outbox o WHERE o.id = p_id AND o.settled_at IS NULL FOR UPDATE SKIP LOCKED)
    UPDATE core.outbox o
    SET status = 'failed', failure_reason = 'cancelled', failed_at = now(), settled_at = now(), deleted_at = now(),
        last_error = 'cancelled by ' || p_cancelled_by, traceback = NULL, lease_token = NULL, lease_expires_at = NULL
    FROM free WHERE o.id = free.id
    RETURNING o.channel, core.begun_for(o.handler_name, o.target, o.event_type, o.claimed_by), o.generation, o.attempts
    INTO v_channel, v_handler, v_generation, v_attempts;
    IF v_attempts > 0 THEN
        PERFORM core.rollup_count(v_handler, v_generation, 'cancelled', 1);
    END IF;
    IF v_attempts IS NULL THEN
        SELECT o.channel INTO v_channel FROM core.outbox o WHERE o.id = p_id AND o.settled_at IS NULL;
        IF NOT FOUND THEN
            v_open := ARRAY(SELECT d.id FROM core.deliveries_of(ARRAY[p_id]) d
                            WHERE d.state IN ('pending', 'in_flight') AND d.id <> p_id);
            IF v_open <> '{}' THEN
                RETURN (SELECT sum(core.outbox_cancel_event(d.id, p_cancelled_by, p_reason)) FROM unnest(v_open) AS d (id));
            END IF;
            PERFORM core.audit_rows(p_cancelled_by, 'cancel', p_reason, '{}', ARRAY[p_id], ARRAY['settled']);
            RETURN 0;
        END IF;
        INSERT INTO core.cancel_requests (id, requested_by) VALUES (p_id, p_cancelled_by) ON CONFLICT DO NOTHING;
    END IF;
    PERFORM core.audit_rows(p_cancelled_by, 'cancel', p_reason, '{}', ARRAY[p_id], ARRAY['moved']);
    -- A digest of the id, which the worker that holds the event recognises and no other listener learns anything from.
    PERFORM core.wake(v_channel, 'cancel ' || left(encode(sha256(convert_to(p_id::text, 'UTF8')), 'hex'), 16));
    RETURN 1;
END
$$;
