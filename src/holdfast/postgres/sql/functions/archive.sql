-- The archive of dead letters: how rows are replayed from it, or discarded. outbox_archive (settle.sql) fills it.

-- archive_replay: moves rows back into the outbox, pending, with their ids, keys and histories, and without an expiry: an
-- operator who replays an event has decided that it runs now. Returns 'moved' for each row, or what it is instead:
-- missing, discarded, stripped, busy (another session has it locked), exists (the outbox has a row of that id, and the
-- archived one stays), or too_old: it was published before inbox_horizon, and the inbox may have forgotten that its
-- handler has handled it. p_force moves it all the same.
CREATE OR REPLACE FUNCTION core.archive_replay(
    p_ids bigint[], p_new_generation bigint, p_replayed_by text, p_reason text DEFAULT NULL, p_force boolean DEFAULT false)
RETURNS TABLE (id bigint, original_id uuid, outcome text)
LANGUAGE plpgsql SECURITY DEFINER
SET search_path = pg_catalog, pg_temp SET jit = off SET plan_cache_mode = force_custom_plan
SET enable_seqscan = off SET enable_bitmapscan = off SET enable_hashjoin = off SET enable_mergejoin = off
AS $$
#variable_conflict use_column
DECLARE
    v_horizon  timestamptz := CASE WHEN p_force THEN '-infinity' ELSE core.inbox_horizon() END;
    v_moved    bigint[];
    v_replayed uuid[];
    v_ids      bigint[];
    v_events   uuid[];
    v_outcomes text[];
BEGIN
    PERFORM core.require_archive_ids(p_ids);
    IF p_new_generation IS NULL OR p_new_generation < 0 THEN
        RAISE EXCEPTION 'p_new_generation must be a generation number, not %', coalesce(p_new_generation::text, 'NULL')
            USING ERRCODE = 'invalid_parameter_value', HINT = 'Pass the generation whose workers should handle it; 0 without deployments.';
    END IF;

    WITH free AS MATERIALIZED (
        SELECT a.*
        FROM (SELECT DISTINCT t.id FROM unnest(p_ids) AS t (id) ORDER BY t.id) asked
        CROSS JOIN LATERAL (
            SELECT a.* FROM core.archive a
            WHERE a.id = asked.id AND a.deleted_at IS NULL AND a.created_at >= v_horizon
            FOR UPDATE SKIP LOCKED) a),
    -- Of several that have the same id, the one that failed last.
    chosen AS (SELECT DISTINCT ON (f.original_id) f.* FROM free f ORDER BY f.original_id, f.id DESC),
    back AS (
        INSERT INTO core.outbox (
            id, event_type, event_version, occurred_at, source, target, content_class, channel, generation, domain_id,
            payload, headers, idempotency_key, trace_context, created_at, available_at, handler_name,
            origin_id, priority, ordering_key, dedupe_key, failure_history, fairness_key, seq)
        OVERRIDING SYSTEM VALUE
        SELECT c.original_id, c.event_type, c.event_version, c.occurred_at, c.source, c.target, c.content_class,
            -- A generation's own channel follows it; a channel for a processing characteristic stays.
            CASE WHEN c.channel = core.channel_of(c.generation) THEN core.channel_of(p_new_generation) ELSE c.channel END,
            p_new_generation, c.domain_id, c.payload, c.headers, c.idempotency_key, c.trace_context, c.created_at,
            now(), c.queue, c.origin_id, c.priority, c.ordering_key, c.dedupe_key,
            core.history_with(c.failure_history, jsonb_build_object(
                'attempts', c.deliveries_count,
                'last_error', left(c.last_exception, 2000),
                'first_failed_at', c.first_failed_at,
                'failed_at', c.failed_at,
                'failure_reason', c.failure_reason,
                'raised_at', core.raised_at(c.traceback),
                'generation', c.generation,
                'replayed_by', p_replayed_by,
                'replayed_at', now())),
            c.fairness_key, coalesce(c.seq, nextval(pg_get_serial_sequence('core.outbox', 'seq')))
        FROM chosen c
        ON CONFLICT (id) DO NOTHING
        RETURNING id, channel),
    gone AS (
        DELETE FROM core.archive a USING chosen c, back b
        WHERE a.id = c.id AND b.id = c.original_id
        RETURNING a.id, a.original_id),
    -- Like every replay, whether or not a worker sleeps: the row may lie below the marks of those that do not.
    notified AS (SELECT core.wake(b.channel, 'rescan') FROM (SELECT DISTINCT back.channel FROM back) b)
    SELECT array_agg(gone.id), array_agg(gone.original_id) INTO v_moved, v_replayed
    FROM gone WHERE (SELECT count(*) FROM notified) >= 0;
    PERFORM core.replayed_places(v_replayed);

    -- What was moved is gone from here.
    SELECT array_agg(asked.id), array_agg(coalesce(moved.original_id, a.original_id)),
           array_agg(CASE WHEN moved.id IS NOT NULL THEN 'moved'
                          WHEN a.id IS NULL THEN 'missing'
                          WHEN a.payload IS NULL THEN 'stripped'
                          WHEN a.deleted_at IS NOT NULL THEN 'discarded'
                          WHEN a.created_at < v_horizon THEN 'too_old'
                          WHEN o.id IS NOT NULL THEN 'exists'
                          ELSE 'busy' END)
    INTO v_ids, v_events, v_outcomes
    FROM (SELECT DISTINCT t.id FROM unnest(p_ids) AS t (id)) asked
    LEFT JOIN unnest(v_moved, v_replayed) AS moved (id, original_id) ON moved.id = asked.id
    LEFT JOIN LATERAL (SELECT * FROM core.archive a WHERE a.id = asked.id LIMIT 1) a ON true
    LEFT JOIN LATERAL (SELECT o.id FROM core.outbox o WHERE o.id = a.original_id LIMIT 1) o ON true;
    PERFORM core.audit_rows(
        p_replayed_by, 'archive.replay', p_reason,
        jsonb_build_object('archive_ids', to_jsonb(p_ids), 'generation', p_new_generation, 'force', nullif(p_force, false)),
        v_events, v_outcomes);
    RETURN QUERY SELECT * FROM unnest(v_ids, v_events, v_outcomes);
END
$$;

-- archive_discard: discards archived rows, or with p_restore undoes that while they still have their payload.
-- Returns for each one 'moved', or what it is instead: missing, archived, discarded, stripped, busy.
CREATE OR REPLACE FUNCTION core.archive_discard(
    p_ids bigint[], p_restore boolean, p_actor text, p_reason text DEFAULT NULL)
RETURNS TABLE (id bigint, original_id uuid, outcome text)
LANGUAGE plpgsql SECURITY DEFINER
SET search_path = pg_catalog, pg_temp SET jit = off
SET enable_seqscan = off SET enable_bitmapscan = off SET enable_hashjoin = off SET enable_mergejoin = off
AS $$
#variable_conflict use_column
DECLARE
    v_moved    bigint[];
    v_ids      bigint[];
    v_events   uuid[];
    v_outcomes text[];
BEGIN
    PERFORM core.require_archive_ids(p_ids);
    v_moved := core.archive_mark(p_ids, p_restore);
    SELECT array_agg(asked.id), array_agg(a.original_id),
           array_agg(CASE WHEN asked.id = ANY (v_moved) THEN 'moved'
                          WHEN a.id IS NULL THEN 'missing'
                          WHEN a.payload IS NULL THEN 'stripped'
                          WHEN (a.deleted_at IS NOT NULL) = p_restore THEN 'busy'
                          WHEN p_restore THEN 'archived'
                          ELSE 'discarded' END)
    INTO v_ids, v_events, v_outcomes
    FROM (SELECT DISTINCT t.id FROM unnest(p_ids) AS t (id)) asked
    LEFT JOIN LATERAL (SELECT * FROM core.archive a WHERE a.id = asked.id LIMIT 1) a ON true;
    PERFORM core.audit_rows(
        p_actor, CASE WHEN p_restore THEN 'archive.restore' ELSE 'archive.discard' END, p_reason,
        jsonb_build_object('archive_ids', to_jsonb(p_ids)), v_events, v_outcomes);
    RETURN QUERY SELECT * FROM unnest(v_ids, v_events, v_outcomes);
END
$$;

-- archive_mark: marks archived rows as discarded, or with p_restore undoes that while they still have their payload. Rows
-- that another session has locked are left out. Returns the numbers of those that were marked.
CREATE OR REPLACE FUNCTION core.archive_mark(p_ids bigint[], p_restore boolean)
RETURNS bigint[]
LANGUAGE plpgsql SECURITY DEFINER
SET search_path = pg_catalog, pg_temp SET jit = off
SET enable_seqscan = off SET enable_bitmapscan = off SET enable_hashjoin = off SET enable_mergejoin = off
AS $$
DECLARE
    v_moved bigint[];
BEGIN
    WITH free AS MATERIALIZED (
        SELECT a.id
        FROM (SELECT DISTINCT t.id FROM unnest(p_ids) AS t (id) ORDER BY t.id) asked
        CROSS JOIN LATERAL (
            SELECT a.id FROM core.archive a
            WHERE a.id = asked.id AND (a.deleted_at IS NOT NULL) = p_restore AND a.payload IS NOT NULL
            FOR NO KEY UPDATE SKIP LOCKED) a),
    moved AS (
        UPDATE core.archive a SET deleted_at = CASE WHEN NOT p_restore THEN now() END
        WHERE a.id = ANY (ARRAY(SELECT free.id FROM free)) RETURNING a.id)
    SELECT coalesce(array_agg(moved.id), '{}') INTO v_moved FROM moved;
    RETURN v_moved;
END
$$;

-- archive_numbers: the archived rows of ids that the outbox does not have; of several with the same id the one that failed
-- last.
CREATE OR REPLACE FUNCTION core.archive_numbers(p_ids uuid[])
RETURNS bigint[]
LANGUAGE plpgsql STABLE SECURITY DEFINER
SET search_path = pg_catalog, pg_temp SET jit = off
SET enable_seqscan = off SET enable_bitmapscan = off SET enable_hashjoin = off SET enable_mergejoin = off
AS $$
BEGIN
    RETURN ARRAY(
        SELECT a.id
        FROM (SELECT DISTINCT t.id FROM unnest(p_ids) AS t (id)) asked
        CROSS JOIN LATERAL (SELECT a.id FROM core.archive a WHERE a.original_id = asked.id ORDER BY a.id DESC LIMIT 1) a
        WHERE NOT EXISTS (SELECT FROM core.outbox o WHERE o.id = asked.id));
END
$$;

-- archive_return: puts archived rows back into the outbox as the dead letters that they were, so that what is done to dead
-- letters in place can be done to them. Left where they are: what was discarded, what is older than p_horizon, and what
-- another session has locked.
CREATE OR REPLACE FUNCTION core.archive_return(p_ids uuid[], p_horizon timestamptz)
RETURNS void
LANGUAGE plpgsql SECURITY DEFINER
SET search_path = pg_catalog, pg_temp SET jit = off SET plan_cache_mode = force_custom_plan
SET enable_seqscan = off SET enable_bitmapscan = off SET enable_hashjoin = off SET enable_mergejoin = off
AS $$
DECLARE
    v_numbers bigint[] := core.archive_numbers(p_ids);
BEGIN
    IF v_numbers = '{}' THEN
        RETURN;
    END IF;
    WITH free AS MATERIALIZED (
        SELECT a.*
        FROM unnest(v_numbers) AS asked (id)
        CROSS JOIN LATERAL (
            SELECT a.* FROM core.archive a
            WHERE a.id = asked.id AND a.deleted_at IS NULL AND a.created_at >= p_horizon
            FOR UPDATE SKIP LOCKED) a),
    back AS (
        INSERT INTO core.outbox (
            id, event_type, event_version, occurred_at, source, target, content_class, channel, generation, domain_id,
            payload, headers, idempotency_key, trace_context, created_at, handler_name, origin_id, priority, ordering_key,
            dedupe_key, expires_at, status, attempts, last_error, error_signature, failure_reason, first_failed_at,
            failed_at, settled_at, failure_history, traceback, fairness_key, seq)
        OVERRIDING SYSTEM VALUE
        SELECT f.original_id, f.event_type, f.event_version, f.occurred_at, f.source, f.target, f.content_class, f.channel,
            f.generation, f.domain_id, f.payload, f.headers, f.idempotency_key, f.trace_context, f.created_at, f.queue,
            f.origin_id, f.priority, f.ordering_key, f.dedupe_key, f.expires_at, 'failed', f.deliveries_count,
            f.last_exception, f.error_signature, f.failure_reason, f.first_failed_at, f.failed_at, f.failed_at,
            f.failure_history, f.traceback, f.fairness_key,
            coalesce(f.seq, nextval(pg_get_serial_sequence('core.outbox', 'seq')))
        FROM free f
        ON CONFLICT (id) DO NOTHING
        RETURNING id)
    DELETE FROM core.archive a USING free f, back b WHERE a.id = f.id AND b.id = f.original_id;
END
$$;

-- require_archive_ids: refuses none, and more ids than an operator names by hand.
CREATE OR REPLACE FUNCTION core.require_archive_ids(p_ids bigint[])
RETURNS void
LANGUAGE plpgsql IMMUTABLE SECURITY DEFINER
SET search_path = pg_catalog, pg_temp
AS $$
BEGIN
    IF coalesce(cardinality(p_ids), 0) NOT BETWEEN 1 AND 10000 THEN
        RAISE EXCEPTION 'p_ids has % ids, 1 to 10000 are allowed', coalesce(cardinality(p_ids), 0)
            USING ERRCODE = 'invalid_parameter_value', HINT = 'Name the rows of core.archive by their id, in several calls.';
    END IF;
END
$$;
