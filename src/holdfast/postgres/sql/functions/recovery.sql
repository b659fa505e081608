-- What people do with single events: replay, cancel, reschedule.

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

-- outbox_replay_rows: puts failed rows back to pending, in place. The finished cycle moves into failure_history; id and
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
                'generation', o.generation,
                'replayed_by', p_replayed_by,
                'replayed_at', now())),
            status = 'pending', attempts = 0, last_error = NULL, first_failed_at = NULL, failed_at = NULL,
            failure_reason = NULL, error_signature = NULL, settled_at = NULL, claimed_by = NULL, expires_at = NULL,
            generation = p_new_generation,
            -- A generation's own channel follows it; a channel for a processing characteristic stays.
            channel = CASE WHEN o.channel = core.channel_of(o.generation) THEN core.channel_of(p_new_generation) ELSE o.channel END,
            available_at = now()
        WHERE o.id = ANY (ARRAY(SELECT free.id FROM free))
        RETURNING o.id, o.channel),
    -- A request to cancel it that was recorded while its last cycle was being settled.
    withdrawn AS (DELETE FROM core.stop_requests s USING moved WHERE s.id = moved.id),
    notified AS (SELECT pg_notify(c.channel, 'rescan') FROM (SELECT DISTINCT moved.channel FROM moved) c)
    SELECT array_agg(moved.id) INTO v_moved FROM moved WHERE (SELECT count(*) FROM notified) >= 0;

    RETURN QUERY
    SELECT r.id, CASE WHEN r.outcome <> 'failed' THEN r.outcome WHEN r.created_at < v_horizon THEN 'too_old' ELSE 'busy' END
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

-- outbox_replay: one row, callable from psql. Returns how many rows moved: 1, or 0 when the row is not failed (or is
-- discarded, or not there).
CREATE OR REPLACE FUNCTION core.outbox_replay(event_id uuid, p_new_generation bigint, p_replayed_by text)
RETURNS int
LANGUAGE plpgsql SECURITY DEFINER
SET search_path = pg_catalog, pg_temp
AS $$
DECLARE
    v_outcome text;
BEGIN
    SELECT r.outcome INTO v_outcome
    FROM core.outbox_replay_many(ARRAY[outbox_replay.event_id], p_new_generation, p_replayed_by) r;
    IF v_outcome = 'too_old' THEN
        RAISE EXCEPTION 'the event is older than the inbox remembers: its handler may have handled it before'
            USING ERRCODE = 'object_not_in_prerequisite_state',
                  HINT = 'If it may run again: core.outbox_replay_many with p_force => true, or holdfast failed replay --force.';
    END IF;
    RETURN (v_outcome = 'moved')::int;
END
$$;

-- outbox_cancel_event: cancels an event, pending or in flight. Taking the lease away fences the handler's settle, and the
-- worker ends the handler when it is notified, or when it next extends the lease. A handler that runs in a transaction
-- holds the row's lock: then the request is recorded in core.stop_requests, the worker ends the handler, which rolls back,
-- and the worker that claims the row next settles it as cancelled. Returns 1 when the event is or will be cancelled, 0 when
-- it is settled already.
-- Three names say stop for cancel, because running workers of earlier releases rely on them: the table, the word of the
-- notification, and the column `stopped` of outbox_claim, whose prepared statement must not change its result.
CREATE OR REPLACE FUNCTION core.outbox_cancel_event(p_id uuid, p_cancelled_by text, p_reason text DEFAULT NULL)
RETURNS int
LANGUAGE plpgsql SECURITY DEFINER
SET search_path = pg_catalog, pg_temp
AS $$
DECLARE
    v_channel text;
BEGIN
    IF coalesce(p_cancelled_by, '') = '' OR octet_length(p_cancelled_by) > 200 THEN
        RAISE EXCEPTION 'p_cancelled_by must name who cancels, in 1 to 200 bytes'
            USING ERRCODE = 'invalid_parameter_value', HINT = 'Pass an e-mail address, or sql-direct.';
    END IF;
    WITH free AS (
        SELECT o.id FROM core.outbox o WHERE o.id = p_id AND o.settled_at IS NULL FOR UPDATE SKIP LOCKED)
    UPDATE core.outbox o
    SET status = 'failed', failure_reason = 'cancelled', failed_at = now(), settled_at = now(), deleted_at = now(),
        last_error = 'cancelled by ' || p_cancelled_by, lease_token = NULL, lease_expires_at = NULL
    FROM free WHERE o.id = free.id
    RETURNING o.channel INTO v_channel;
    IF NOT FOUND THEN
        SELECT o.channel INTO v_channel FROM core.outbox o WHERE o.id = p_id AND o.settled_at IS NULL;
        IF NOT FOUND THEN
            PERFORM core.audit_rows(p_cancelled_by, 'cancel', p_reason, '{}', ARRAY[p_id], ARRAY['settled']);
            RETURN 0;
        END IF;
        INSERT INTO core.stop_requests (id, requested_by) VALUES (p_id, p_cancelled_by) ON CONFLICT DO NOTHING;
    END IF;
    PERFORM core.audit_rows(p_cancelled_by, 'cancel', p_reason, '{}', ARRAY[p_id], ARRAY['moved']);
    -- A digest of the id, which the worker that holds the event recognises and no other listener learns anything from.
    PERFORM pg_notify(v_channel, 'stop ' || left(encode(sha256(convert_to(p_id::text, 'UTF8')), 'hex'), 16));
    RETURN 1;
END
$$;

-- require_source: a source that no role owns is open to every producer; an owned one only to its roles, and to
-- the owner of the schema. Inside a
-- SECURITY DEFINER function current_user is its owner; who called is the role that was SET, or else the login.
CREATE OR REPLACE FUNCTION core.require_source(p_source text)
RETURNS void
LANGUAGE plpgsql STABLE SECURITY DEFINER
SET search_path = pg_catalog, pg_temp
AS $$
DECLARE
    caller name := coalesce(nullif(current_setting('role'), 'none'), session_user);
BEGIN
    IF EXISTS (SELECT FROM core.sources s WHERE s.source = p_source)
       AND NOT EXISTS (SELECT FROM core.sources s WHERE s.source = p_source
                       AND pg_has_role(caller, to_regrole(quote_ident(s.role_name)), 'MEMBER'))
       AND NOT pg_has_role(caller, current_user, 'MEMBER') THEN
        RAISE EXCEPTION 'source % belongs to another role', p_source
            USING ERRCODE = 'insufficient_privilege', HINT = 'Ask the owner of the schema for a line in core.sources.';
    END IF;
END
$$;

-- require_key: a producer's key, and the source it belongs to.
CREATE OR REPLACE FUNCTION core.require_key(p_source text, p_key text)
RETURNS void
LANGUAGE plpgsql IMMUTABLE
SET search_path = pg_catalog, pg_temp
AS $$
BEGIN
    IF (octet_length(p_key) BETWEEN 1 AND 1020 AND octet_length(p_source) BETWEEN 1 AND 800) IS NOT TRUE THEN
        PERFORM core.refuse_argument('p_key must have 1 to 1020 bytes, p_source 1 to 800');
    END IF;
END
$$;

-- The functions below lock the key before the event, so that they never wait for each other in a circle; and they move
-- only events of the source that was asked about, because a caller chooses the id that a key is held for.

-- outbox_hold_key: a producer's key belongs to one pending event. Answers the id of the event that holds it: the new
-- one, which the caller then inserts, or the one that is there, which p_available_at (if given) reschedules.
CREATE OR REPLACE FUNCTION core.outbox_hold_key(p_source text, p_key text, p_id uuid, p_reschedule boolean, p_available_at timestamptz)
RETURNS uuid
LANGUAGE plpgsql SECURITY DEFINER
SET search_path = pg_catalog, pg_temp
AS $$
DECLARE
    holder uuid;
BEGIN
    PERFORM core.require_key(p_source, p_key);
    IF (p_id IS NOT NULL AND p_reschedule IS NOT NULL
        AND coalesce(p_available_at BETWEEN '0001-01-02 00:00:00+00' AND '9999-12-30 00:00:00+00'
                     OR p_available_at = 'infinity', true)) IS NOT TRUE THEN
        PERFORM core.refuse_argument('p_id and p_reschedule must not be NULL, p_available_at a time until the year 9999');
    END IF;
    PERFORM core.require_source(p_source);
    INSERT INTO core.outbox_keys AS k (source, dedupe_key, event_id) VALUES (p_source, p_key, p_id)
    ON CONFLICT (source, dedupe_key) DO UPDATE SET event_id = k.event_id   -- takes the row lock: one producer at a time
    RETURNING k.event_id INTO holder;
    IF holder = p_id THEN
        RETURN p_id;
    END IF;
    IF p_reschedule AND core.outbox_retime(holder, p_source, coalesce(p_available_at, now())) > 0 THEN
        RETURN holder;
    END IF;
    IF EXISTS (SELECT FROM core.outbox o WHERE o.id = holder AND o.source = p_source AND o.status = 'pending') THEN
        RETURN holder;
    END IF;
    UPDATE core.outbox_keys k SET event_id = p_id WHERE k.source = p_source AND k.dedupe_key = p_key;
    RETURN p_id;
END
$$;

-- outbox_cancel: cancels an event by its producer's key, while it is pending. Returns how many rows moved.
CREATE OR REPLACE FUNCTION core.outbox_cancel(p_source text, p_key text)
RETURNS int
LANGUAGE plpgsql SECURITY DEFINER
SET search_path = pg_catalog, pg_temp
AS $$
DECLARE
    holder uuid;
BEGIN
    PERFORM core.require_key(p_source, p_key);
    PERFORM core.require_source(p_source);
    SELECT k.event_id INTO holder FROM core.outbox_keys k
    WHERE k.source = p_source AND k.dedupe_key = p_key FOR UPDATE;
    UPDATE core.outbox o
    SET status = 'failed', failure_reason = 'cancelled', failed_at = now(), settled_at = now(), deleted_at = now(),
        last_error = 'cancelled by its producer'
    WHERE o.id = holder AND o.source = p_source AND o.status = 'pending';
    IF NOT FOUND THEN
        RETURN 0;   -- a running event keeps its key: it may be pending again
    END IF;
    DELETE FROM core.outbox_keys k WHERE k.source = p_source AND k.dedupe_key = p_key;
    RETURN 1;
END
$$;

-- outbox_reschedule: likewise, to another time.
CREATE OR REPLACE FUNCTION core.outbox_reschedule(p_source text, p_key text, p_available_at timestamptz)
RETURNS int
LANGUAGE plpgsql SECURITY DEFINER
SET search_path = pg_catalog, pg_temp
AS $$
DECLARE
    holder uuid;
BEGIN
    PERFORM core.require_key(p_source, p_key);
    PERFORM core.require_source(p_source);
    IF (p_available_at BETWEEN '0001-01-02 00:00:00+00' AND '9999-12-30 00:00:00+00') IS NOT TRUE THEN
        PERFORM core.refuse_argument('p_available_at must be a time until the year 9999');
    END IF;
    SELECT k.event_id INTO holder FROM core.outbox_keys k
    WHERE k.source = p_source AND k.dedupe_key = p_key FOR UPDATE;
    RETURN core.outbox_retime(holder, p_source, p_available_at);
END
$$;

-- outbox_retime: a pending event to another time. Workers look again: it may be due earlier than they sleep, or lie below
-- their marks. Like the bell, it is silent in a transaction that opted out for two-phase commit.
CREATE OR REPLACE FUNCTION core.outbox_retime(p_id uuid, p_source text, p_available_at timestamptz)
RETURNS int
LANGUAGE plpgsql SECURITY DEFINER
SET search_path = pg_catalog, pg_temp
AS $$
DECLARE
    v_channel text;
BEGIN
    UPDATE core.outbox o SET available_at = p_available_at
    WHERE o.id = p_id AND o.source = p_source AND o.status = 'pending'
    RETURNING o.channel INTO v_channel;
    IF NOT FOUND THEN
        RETURN 0;
    END IF;
    IF current_setting('holdfast.notify', true) IS DISTINCT FROM 'off' THEN
        PERFORM pg_notify(v_channel, 'rescan');
    END IF;
    RETURN 1;
END
$$;
