-- What people do with dead letters, besides replaying them: find, discard, restore, correct, note.
--
-- Rows are looked up by primary key, locked in id order, and skipped where another session has them locked: an operator
-- never waits for a worker, a sweep or another operator.

-- failed_select: the dead letters that match every entry of a filter, the newest first, from a place in that order on.
-- With `discarded` it is those that were discarded and can be restored, with `archived` those in the archive, by the ids
-- that they had in the outbox. A name that is not known is refused, because ignoring it would select more than was meant.
CREATE OR REPLACE FUNCTION core.failed_select(
    p_filter jsonb, p_most int, p_before_at timestamptz DEFAULT NULL, p_before_id uuid DEFAULT NULL)
RETURNS SETOF uuid
LANGUAGE plpgsql STABLE SECURITY DEFINER
SET search_path = pg_catalog, pg_temp SET jit = off
SET enable_seqscan = off SET enable_bitmapscan = off
AS $$
DECLARE
    v_handler    text        := p_filter ->> 'handler';
    v_type       text        := p_filter ->> 'event_type';
    v_source     text        := p_filter ->> 'source';
    v_signature  text        := p_filter ->> 'signature';
    v_reason     text        := p_filter ->> 'reason';
    v_generation bigint      := p_filter ->> 'generation';
    v_since      timestamptz := coalesce((p_filter ->> 'since')::timestamptz, '-infinity');
    v_until      timestamptz := coalesce((p_filter ->> 'until')::timestamptz, 'infinity');
    v_discarded  boolean     := coalesce((p_filter ->> 'discarded')::boolean, false);
    v_archived   boolean     := coalesce((p_filter ->> 'archived')::boolean, false);
    v_unknown    text;
BEGIN
    IF jsonb_typeof(p_filter) IS DISTINCT FROM 'object' THEN
        RAISE EXCEPTION 'p_filter must be a JSON object, not %', coalesce(jsonb_typeof(p_filter), 'NULL')
            USING ERRCODE = 'invalid_parameter_value', HINT = 'Write {} for every dead letter.';
    END IF;
    SELECT k INTO v_unknown FROM jsonb_object_keys(p_filter) AS k
    WHERE k <> ALL ('{handler,event_type,source,signature,reason,generation,since,until,discarded,archived}') LIMIT 1;
    IF FOUND THEN
        RAISE EXCEPTION 'p_filter has %, which is not known', quote_literal(v_unknown)
            USING ERRCODE = 'invalid_parameter_value',
                  HINT = 'Use handler, event_type, source, signature, reason, generation, since, until, discarded or archived.';
    END IF;
    IF v_archived THEN
        -- The newest first: numbers grow with the time of the failure.
        RETURN QUERY
        SELECT a.original_id FROM core.archive a
        WHERE (a.deleted_at IS NOT NULL) = v_discarded AND a.payload IS NOT NULL
          AND a.failed_at >= v_since AND a.failed_at < v_until
          AND (v_handler IS NULL OR a.queue = v_handler)
          AND (v_type IS NULL OR a.event_type = v_type)
          AND (v_source IS NULL OR a.source = v_source)
          AND (v_signature IS NULL OR a.error_signature = v_signature)
          AND (v_reason IS NULL OR a.failure_reason = v_reason)
          AND (v_generation IS NULL OR a.generation = v_generation)
        ORDER BY a.id DESC
        LIMIT greatest(p_most, 0);
        RETURN;
    END IF;
    IF v_discarded THEN
        RETURN QUERY
        SELECT o.id FROM core.outbox o
        WHERE o.failed_at IS NOT NULL AND o.deleted_at IS NOT NULL AND o.disposed_at IS NULL
          AND o.failure_reason NOT IN ('cancelled', 'expired') AND o.payload IS NOT NULL
          AND (o.failure_history -> -1 ? 'edited_to') IS NOT TRUE
          AND o.failed_at >= v_since AND o.failed_at < v_until
          AND (o.failed_at, o.id) < (coalesce(p_before_at, 'infinity'),
                                     coalesce(p_before_id, 'ffffffff-ffff-ffff-ffff-ffffffffffff'))
          AND (v_handler IS NULL OR o.handler_name = v_handler)
          AND (v_type IS NULL OR o.event_type = v_type)
          AND (v_source IS NULL OR o.source = v_source)
          AND (v_signature IS NULL OR o.error_signature = v_signature)
          AND (v_reason IS NULL OR o.failure_reason = v_reason)
          AND (v_generation IS NULL OR o.generation = v_generation)
        ORDER BY o.failed_at DESC, o.id DESC
        LIMIT greatest(p_most, 0);
        RETURN;
    END IF;
    RETURN QUERY
    SELECT o.id FROM core.outbox o
    WHERE o.failed_at IS NOT NULL AND o.deleted_at IS NULL
      AND o.failed_at >= v_since AND o.failed_at < v_until
      AND (o.failed_at, o.id) < (coalesce(p_before_at, 'infinity'),
                                 coalesce(p_before_id, 'ffffffff-ffff-ffff-ffff-ffffffffffff'))
      AND (v_handler IS NULL OR o.handler_name = v_handler)
      AND (v_type IS NULL OR o.event_type = v_type)
      AND (v_source IS NULL OR o.source = v_source)
      AND (v_signature IS NULL OR o.error_signature = v_signature)
      AND (v_reason IS NULL OR o.failure_reason = v_reason)
      AND (v_generation IS NULL OR o.generation = v_generation)
    ORDER BY o.failed_at DESC, o.id DESC
    LIMIT greatest(p_most, 0);
END
$$;

-- row_outcomes: 'moved' for the rows that an action moved, and for the others what they are. A row that is not in the
-- outbox may be in the archive: 'archived', or 'discarded' or 'stripped' there.
CREATE OR REPLACE FUNCTION core.row_outcomes(p_ids uuid[], p_moved uuid[])
RETURNS TABLE (id uuid, outcome text, created_at timestamptz, content_class text)
LANGUAGE plpgsql STABLE SECURITY DEFINER
SET search_path = pg_catalog, pg_temp SET jit = off
AS $$
#variable_conflict use_column
BEGIN
    RETURN QUERY
    SELECT asked.id,
           CASE WHEN moved.id IS NOT NULL THEN 'moved'
                WHEN o.id IS NULL AND a.id IS NULL THEN 'missing'
                WHEN o.status <> 'failed' THEN o.status
                WHEN o.deleted_at IS NULL AND a.deleted_at IS NULL THEN CASE WHEN o.id IS NULL THEN 'archived' ELSE 'failed' END
                WHEN o.failure_reason IN ('cancelled', 'expired') THEN o.failure_reason
                WHEN coalesce(o.payload, a.payload) IS NULL THEN 'stripped'
                WHEN o.failure_history -> -1 ? 'edited_to' THEN 'edited'
                ELSE 'discarded' END,
           coalesce(o.created_at, a.created_at), coalesce(o.content_class, a.content_class)
    FROM (SELECT DISTINCT t.id FROM unnest(p_ids) AS t (id)) asked
    LEFT JOIN unnest(p_moved) AS moved (id) ON moved.id = asked.id
    -- LIMIT keeps the planner to one look-up for each row.
    LEFT JOIN LATERAL (SELECT o.id, o.status, o.deleted_at, o.failure_reason, o.payload, o.failure_history, o.created_at,
                              o.content_class
                       FROM core.outbox o WHERE o.id = asked.id LIMIT 1) o ON true
    LEFT JOIN LATERAL (SELECT a.id, a.deleted_at, a.payload, a.created_at, a.content_class
                       FROM core.archive a WHERE o.id IS NULL AND a.original_id = asked.id
                       ORDER BY a.id DESC LIMIT 1) a ON true;
END
$$;

-- outbox_discard: discards dead letters. They leave the queue at once, can be restored, and are disposed of when the
-- grace of their retention policy is over. What is in the archive is discarded there. 'busy': another session has the
-- row locked.
CREATE OR REPLACE FUNCTION core.outbox_discard(p_ids uuid[], p_actor text, p_reason text DEFAULT NULL)
RETURNS TABLE (id uuid, outcome text, purge_at timestamptz)
LANGUAGE plpgsql SECURITY DEFINER
SET search_path = pg_catalog, pg_temp SET jit = off SET enable_seqscan = off SET enable_bitmapscan = off
AS $$
#variable_conflict use_column
DECLARE
    v_moved uuid[]; v_numbers bigint[]; v_ids uuid[]; v_outcomes text[]; v_purges timestamptz[];
BEGIN
    PERFORM core.require_ids(p_ids);
    WITH free AS MATERIALIZED (
        SELECT o.id
        FROM (SELECT DISTINCT t.id FROM unnest(p_ids) AS t (id) ORDER BY t.id) asked
        CROSS JOIN LATERAL (
            SELECT o.id FROM core.outbox o
            WHERE o.id = asked.id AND o.status = 'failed' AND o.deleted_at IS NULL
            FOR UPDATE SKIP LOCKED) o),
    moved AS (
        UPDATE core.outbox o SET deleted_at = now()
        WHERE o.id = ANY (ARRAY(SELECT free.id FROM free)) RETURNING o.id)
    SELECT array_agg(moved.id) INTO v_moved FROM moved;
    v_numbers := core.archive_mark(core.archive_numbers(p_ids), false);
    v_moved := v_moved || ARRAY(SELECT a.original_id FROM core.archive a WHERE a.id = ANY (v_numbers));

    SELECT array_agg(r.id), array_agg(CASE WHEN r.outcome IN ('failed', 'archived') THEN 'busy' ELSE r.outcome END),
           array_agg(CASE r.outcome WHEN 'moved' THEN core.discarded_until(r.id) END)
    INTO v_ids, v_outcomes, v_purges
    FROM core.row_outcomes(p_ids, v_moved) r;
    PERFORM core.audit_rows(p_actor, 'discard', p_reason, '{}', v_ids, v_outcomes);
    RETURN QUERY SELECT * FROM unnest(v_ids, v_outcomes, v_purges);
END
$$;

-- discarded_until: when retention may dispose of a row that was discarded: its grace is over, and so is the time for which it
-- would have been kept.
CREATE OR REPLACE FUNCTION core.discarded_until(p_id uuid)
RETURNS timestamptz
LANGUAGE plpgsql STABLE SECURITY DEFINER
SET search_path = pg_catalog, pg_temp
AS $$
BEGIN
    RETURN (SELECT greatest(o.deleted_at + make_interval(hours => 24 * p.tombstoned_grace_days),
                            o.settled_at + make_interval(hours => 24 * (p.active_ttl_days + p.tombstoned_grace_days)))
            FROM core.outbox o CROSS JOIN LATERAL core.retention_policy('discarded', o.content_class) p
            WHERE o.id = p_id);
END
$$;

-- outbox_restore: puts what was discarded back among the dead letters, where it was discarded, while it still has its
-- payload. What was cancelled or has expired was never one of them; in the place of what was edited there is another event.
CREATE OR REPLACE FUNCTION core.outbox_restore(p_ids uuid[], p_actor text, p_reason text DEFAULT NULL)
RETURNS TABLE (id uuid, outcome text)
LANGUAGE plpgsql SECURITY DEFINER
SET search_path = pg_catalog, pg_temp SET jit = off SET enable_seqscan = off SET enable_bitmapscan = off
AS $$
#variable_conflict use_column
DECLARE
    v_moved uuid[]; v_numbers bigint[]; v_ids uuid[]; v_outcomes text[];
BEGIN
    PERFORM core.require_ids(p_ids);
    WITH free AS MATERIALIZED (
        SELECT o.id
        FROM (SELECT DISTINCT t.id FROM unnest(p_ids) AS t (id) ORDER BY t.id) asked
        CROSS JOIN LATERAL (
            SELECT o.id FROM core.outbox o
            WHERE o.id = asked.id AND o.status = 'failed' AND o.deleted_at IS NOT NULL
              AND o.failure_reason NOT IN ('cancelled', 'expired') AND o.payload IS NOT NULL
              AND (o.failure_history -> -1 ? 'edited_to') IS NOT TRUE
            FOR UPDATE SKIP LOCKED) o),
    moved AS (
        UPDATE core.outbox o SET deleted_at = NULL
        WHERE o.id = ANY (ARRAY(SELECT free.id FROM free)) RETURNING o.id)
    SELECT array_agg(moved.id) INTO v_moved FROM moved;
    v_numbers := core.archive_mark(core.archive_numbers(p_ids), true);
    v_moved := v_moved || ARRAY(SELECT a.original_id FROM core.archive a WHERE a.id = ANY (v_numbers));

    SELECT array_agg(r.id), array_agg(CASE r.outcome WHEN 'discarded' THEN 'busy' ELSE r.outcome END)
    INTO v_ids, v_outcomes
    FROM core.row_outcomes(p_ids, v_moved) r;
    PERFORM core.audit_rows(p_actor, 'restore', p_reason, '{}', v_ids, v_outcomes);
    RETURN QUERY SELECT * FROM unnest(v_ids, v_outcomes);
END
$$;

-- outbox_edit: a corrected event takes the place of a dead letter. It is a new event with an id and a key of its own,
-- owed to the handler that failed and to no other: its siblings may have handled the original. It says what it comes
-- from; in the same transaction the original is discarded for good, and its history ends with what became of it. A
-- header would do for that as well, but producers write those. What is in the archive comes back first. Answers what
-- row_outcomes answers.
CREATE OR REPLACE FUNCTION core.outbox_edit(
    p_id uuid, p_new_id uuid, p_payload jsonb, p_new_generation bigint, p_actor text, p_reason text DEFAULT NULL)
RETURNS text
LANGUAGE plpgsql SECURITY DEFINER
SET search_path = pg_catalog, pg_temp
AS $$
DECLARE
    v_moved   uuid[];
    v_outcome text;
BEGIN
    IF p_new_generation IS NULL OR p_new_generation < 0 THEN
        RAISE EXCEPTION 'p_new_generation must be a generation number, not %', coalesce(p_new_generation::text, 'NULL')
            USING ERRCODE = 'invalid_parameter_value', HINT = 'Pass the generation whose workers should handle it; 0 without deployments.';
    END IF;
    PERFORM core.require_ids(ARRAY[p_id]);
    PERFORM core.archive_return(ARRAY[p_id], '-infinity');
    WITH old AS MATERIALIZED (
        SELECT o.* FROM core.outbox o
        WHERE o.id = p_id AND o.status = 'failed' AND o.deleted_at IS NULL
        FOR UPDATE SKIP LOCKED),
    published AS (
        INSERT INTO core.outbox (
            id, event_type, event_version, occurred_at, source, target, content_class, channel, generation, domain_id,
            payload, headers, idempotency_key, trace_context, handler_name, priority, ordering_key, fairness_key, seq)
        OVERRIDING SYSTEM VALUE  -- in the place of the original
        SELECT p_new_id, o.event_type, o.event_version, o.occurred_at, o.source, o.target, o.content_class,
               CASE WHEN o.channel = core.channel_of(o.generation) THEN core.channel_of(p_new_generation) ELSE o.channel END,
               p_new_generation, o.domain_id, p_payload,
               coalesce(o.headers, '{}') || jsonb_build_object(
                   'correlation_id', coalesce(o.headers ->> 'correlation_id', coalesce(o.origin_id, o.id)::text),
                   'causation_id', coalesce(o.origin_id, o.id), 'edited_from', o.id),
               p_new_id::text, o.trace_context, o.handler_name, o.priority, o.ordering_key, o.fairness_key, o.seq
        FROM old o),
    resolved AS (
        UPDATE core.outbox o
        SET deleted_at = now(),
            failure_history = core.history_with(o.failure_history, jsonb_build_object(
                'attempts', o.attempts,
                'first_failed_at', o.first_failed_at,
                'failed_at', o.failed_at,
                'failure_reason', o.failure_reason,
                'generation', o.generation,
                'replayed_by', p_actor,
                'replayed_at', now(),
                'edited_to', p_new_id))
        FROM old WHERE o.id = old.id
        RETURNING o.id)
    SELECT array_agg(resolved.id) INTO v_moved FROM resolved;

    SELECT CASE WHEN r.outcome IN ('failed', 'archived') THEN 'busy' ELSE r.outcome END INTO v_outcome
    FROM core.row_outcomes(ARRAY[p_id], v_moved) r;
    PERFORM core.audit_rows(
        p_actor, 'edit', p_reason, jsonb_build_object('new_id', p_new_id, 'generation', p_new_generation),
        ARRAY[p_id], ARRAY[v_outcome]);
    RETURN v_outcome;
END
$$;

-- failure_note: notes what was found out about a group of failures; without a text it removes the note. Returns
-- whether there is one now.
CREATE OR REPLACE FUNCTION core.failure_note(p_handler text, p_signature text, p_note text, p_actor text)
RETURNS boolean
LANGUAGE plpgsql SECURITY DEFINER
SET search_path = pg_catalog, pg_temp
AS $$
BEGIN
    PERFORM core.audit_append(
        p_actor, 'note', NULL, jsonb_build_object('handler', p_handler, 'signature', p_signature, 'note', p_note), NULL);
    IF coalesce(p_note, '') = '' THEN
        DELETE FROM core.failure_notes n WHERE n.handler_name = p_handler AND n.error_signature = p_signature;
        RETURN false;
    END IF;
    INSERT INTO core.failure_notes (handler_name, error_signature, note, noted_by)
    VALUES (p_handler, p_signature, p_note, p_actor)
    ON CONFLICT (handler_name, error_signature)
        DO UPDATE SET note = EXCLUDED.note, noted_by = EXCLUDED.noted_by, noted_at = now();
    RETURN true;
END
$$;

-- event_rows: the rows of an event, named by any of them: the published one and its siblings. Their ids are computed
-- from the handlers that ever wanted something, because no index leads from an event to its siblings. So an event is
-- found by its own id also when retention has taken its published row; then without a dead letter that was made after
-- that, if its source has no owner.
CREATE OR REPLACE FUNCTION core.event_rows(p_id uuid)
RETURNS SETOF uuid
LANGUAGE plpgsql STABLE SECURITY DEFINER
SET search_path = pg_catalog, pg_temp
AS $$
DECLARE
    v_origin uuid := coalesce((SELECT o.origin_id FROM core.outbox o WHERE o.id = p_id),
                              (SELECT a.origin_id FROM core.archive a WHERE a.original_id = p_id ORDER BY a.id DESC LIMIT 1),
                              p_id);
    v_secret bytea := core.secret();
    v_sources text[] := ARRAY(SELECT o.source FROM core.outbox o WHERE o.id IN (p_id, v_origin)
                              UNION SELECT s.source FROM core.sources s);
BEGIN
    RETURN QUERY
    SELECT o.id
    FROM (SELECT v_origin AS id
          UNION SELECT p_id
          UNION SELECT unnest(core.sibling_id(v_origin, s.handler_name, v_secret)
                              || ARRAY(SELECT core.sibling_id(v_origin, source || '/' || s.handler_name, v_secret)
                                       FROM unnest(v_sources) AS source))
                FROM (SELECT DISTINCT handler_name FROM core.subscriptions) s) named
    CROSS JOIN LATERAL (SELECT o.id FROM core.outbox o
                        WHERE o.id = named.id AND (o.id = v_origin OR o.origin_id = v_origin) LIMIT 1) o;
END
$$;

-- deliveries_of: what ids from alerts, log lines and lists stand for. The id of a delivery that was split off is that
-- delivery; the id of an event is all its deliveries, in the outbox and in the archive. `state` is what row_outcomes says.
CREATE OR REPLACE FUNCTION core.deliveries_of(p_ids uuid[])
RETURNS TABLE (asked uuid, id uuid, handler_name text, state text, archive_id bigint)
LANGUAGE plpgsql STABLE SECURITY DEFINER
SET search_path = pg_catalog, pg_temp SET jit = off
SET enable_seqscan = off SET enable_bitmapscan = off
AS $$
#variable_conflict use_column
DECLARE
    v_secret   bytea  := core.secret();
    v_handlers text[] := ARRAY(SELECT DISTINCT s.handler_name FROM core.subscriptions s);
    v_sources  text[] := ARRAY(SELECT DISTINCT s.source FROM core.sources s);
    v_asked    uuid[];
    v_ids      uuid[];
BEGIN
    WITH named AS MATERIALIZED (
        SELECT t.id, coalesce(o.origin_id, a.origin_id) IS NOT NULL AS split, coalesce(o.source, a.source) AS source
        FROM (SELECT DISTINCT t.id FROM unnest(p_ids) AS t (id)) t
        LEFT JOIN LATERAL (SELECT o.id, o.origin_id, o.source FROM core.outbox o WHERE o.id = t.id LIMIT 1) o ON true
        LEFT JOIN LATERAL (SELECT a.origin_id, a.source FROM core.archive a WHERE o.id IS NULL AND a.original_id = t.id
                           ORDER BY a.id DESC LIMIT 1) a ON true),
    -- As event_rows finds them: by computing what their ids would be.
    siblings AS (
        SELECT n.id AS asked, o.id
        FROM named n CROSS JOIN unnest(v_handlers) AS h (name)
        CROSS JOIN LATERAL (
            SELECT core.sibling_id(n.id, h.name, v_secret) AS id
            UNION ALL SELECT core.sibling_id(n.id, source || '/' || h.name, v_secret)
                      FROM unnest(v_sources || n.source) AS source WHERE source IS NOT NULL) s
        CROSS JOIN LATERAL (SELECT o.id FROM core.outbox o WHERE o.id = s.id AND o.origin_id = n.id LIMIT 1) o
        WHERE NOT n.split),
    every AS (
        SELECT n.id AS asked, n.id FROM named n
        UNION SELECT * FROM siblings
        UNION SELECT n.id, a.original_id FROM named n
              CROSS JOIN LATERAL (SELECT a.original_id FROM core.archive a WHERE a.origin_id = n.id) a WHERE NOT n.split)
    SELECT array_agg(e.asked), array_agg(e.id) INTO v_asked, v_ids FROM every e;

    RETURN QUERY
    WITH judged AS MATERIALIZED (SELECT r.id, r.outcome FROM core.row_outcomes(v_ids, '{}') r)
    SELECT e.asked, e.id, coalesce(o.handler_name, a.queue), j.outcome, a.id
    FROM judged j JOIN unnest(v_asked, v_ids) AS e (asked, id) ON e.id = j.id
    LEFT JOIN LATERAL (SELECT o.id, o.handler_name FROM core.outbox o WHERE o.id = e.id LIMIT 1) o ON true
    LEFT JOIN LATERAL (SELECT a.id, a.queue FROM core.archive a WHERE o.id IS NULL AND a.original_id = e.id
                       ORDER BY a.id DESC LIMIT 1) a ON true
    WHERE o.handler_name IS DISTINCT FROM '*' AND (o.id IS NOT NULL OR a.id IS NOT NULL);
END
$$;
