-- Retention: the small steps in which rows that were kept long enough go (OBX-5).
--
-- A sweep is a pass over the steps below, class by class where a step has classes, in batches that a caller makes one
-- after the other from where the last one ended:
--   delivered           tombstones delivered rows past their active days
--   tombstones          disposes of them when their grace is over
--   failed              tombstones failed rows that nobody resolved, if there is a policy for failed_row
--   discarded           disposes of rows that were set aside: discarded, cancelled, expired
--   archived            tombstones archived rows, if there is a policy for archive_row
--   archive_tombstones  disposes of those, and of the discarded ones
--   inbox               forgets what was handled
--   keys                frees producers' keys that no event needs any more
--   records             forgets idempotency records that have expired
-- Every function decides by the policies and the database's clock alone: whoever may call it can delete nothing early.
-- With p_actor a batch is audited, which is for operators; workers sweep without.
-- Nothing here waits for a row lock, and a row of an unfinished plan stays. Days are 24 hours, in every time zone.

-- days_ago: the moment so many days before this transaction.
CREATE OR REPLACE FUNCTION core.days_ago(p_days int)
RETURNS timestamptz
LANGUAGE plpgsql STABLE
SET search_path = pg_catalog, pg_temp
AS $$
BEGIN
    RETURN now() - make_interval(hours => 24 * p_days);
END
$$;

-- retention_policy: the policy that a step applies to a class: its own, or else the one for all classes. What is set
-- aside has been resolved: without a policy of its entity it follows the outbox's. NULL: it is kept.
CREATE OR REPLACE FUNCTION core.retention_policy(p_step text, p_class text)
RETURNS core.retention_policies
LANGUAGE plpgsql STABLE SECURITY DEFINER
SET search_path = pg_catalog, pg_temp
AS $$
DECLARE
    v_entities text[] := CASE p_step
        WHEN 'delivered' THEN '{outbox_row}'
        WHEN 'tombstones' THEN '{outbox_row}'
        WHEN 'failed' THEN '{failed_row}'
        WHEN 'discarded' THEN '{failed_row,outbox_row}'
        WHEN 'archived' THEN '{archive_row}'
        WHEN 'archive_tombstones' THEN '{archive_row,outbox_row}'
        WHEN 'inbox' THEN '{event_handled}'
        WHEN 'records' THEN '{idempotency_record}' END;
    v_policy core.retention_policies;
BEGIN
    SELECT p.* INTO v_policy FROM core.retention_policies p
    WHERE p.entity = ANY (v_entities) AND p.content_class IN (p_class, '*')
    ORDER BY array_position(v_entities, p.entity), p.content_class = '*' LIMIT 1;
    RETURN v_policy;
END
$$;

-- retention_registry: all policies, for workers, who have no table.
CREATE OR REPLACE FUNCTION core.retention_registry()
RETURNS SETOF core.retention_policies
LANGUAGE plpgsql STABLE SECURITY DEFINER
SET search_path = pg_catalog, pg_temp
AS $$
BEGIN
    RETURN QUERY SELECT p.* FROM core.retention_policies p ORDER BY p.entity, p.content_class;
END
$$;

-- inbox_horizon: what was published before it may have been handled without the inbox knowing any more.
CREATE OR REPLACE FUNCTION core.inbox_horizon()
RETURNS timestamptz
LANGUAGE plpgsql STABLE SECURITY DEFINER
SET search_path = pg_catalog, pg_temp
AS $$
BEGIN
    RETURN (SELECT core.days_ago(min(p.active_ttl_days)) FROM core.retention_policies p WHERE p.entity = 'event_handled');
END
$$;

-- retention_set: adds or changes a policy, or with p_active NULL removes it. Refuses what would let the inbox forget
-- before everything that can be replayed is gone.
CREATE OR REPLACE FUNCTION core.retention_set(
    p_actor text, p_reason text, p_entity text, p_class text, p_active int, p_grace int, p_disposal text)
RETURNS void
LANGUAGE plpgsql SECURITY DEFINER
SET search_path = pg_catalog, pg_temp
AS $$
DECLARE
    v_before jsonb;
    v_inbox  int;
    v_rows   int;
BEGIN
    LOCK TABLE core.retention_policies IN SHARE ROW EXCLUSIVE MODE;
    SELECT to_jsonb(p) INTO v_before FROM core.retention_policies p
    WHERE p.entity = p_entity AND p.content_class = p_class;
    IF p_active IS NULL THEN
        DELETE FROM core.retention_policies p WHERE p.entity = p_entity AND p.content_class = p_class;
    ELSE
        INSERT INTO core.retention_policies AS p
        VALUES (p_entity, p_class, p_active, p_grace, p_disposal)
        ON CONFLICT (entity, content_class) DO UPDATE SET active_ttl_days = EXCLUDED.active_ttl_days,
            tombstoned_grace_days = EXCLUDED.tombstoned_grace_days, disposal = EXCLUDED.disposal;
    END IF;
    SELECT min(p.active_ttl_days) FILTER (WHERE p.entity = 'event_handled'),
           max(p.active_ttl_days + p.tombstoned_grace_days)
               FILTER (WHERE p.entity IN ('outbox_row', 'failed_row', 'archive_row'))
    INTO v_inbox, v_rows FROM core.retention_policies p;
    IF v_inbox IS NULL OR NOT EXISTS (SELECT FROM core.retention_policies p
                                      WHERE p.entity = 'outbox_row' AND p.content_class = '*') THEN
        RAISE EXCEPTION 'outbox_row and event_handled need a policy for all classes'
            USING ERRCODE = 'invalid_parameter_value', HINT = 'Change it instead of removing it.';
    ELSIF v_inbox <= v_rows THEN
        RAISE EXCEPTION 'the inbox would forget after % days what can be replayed for %', v_inbox, v_rows
            USING ERRCODE = 'invalid_parameter_value', HINT = 'Keep event_handled for longer, or the others for less.';
    END IF;
    PERFORM core.audit_append(p_actor, 'retention.set', p_reason,
        jsonb_build_object('entity', p_entity, 'content_class', p_class, 'before', v_before,
                           'after', (SELECT to_jsonb(p) FROM core.retention_policies p
                                     WHERE p.entity = p_entity AND p.content_class = p_class)), '{}');
END
$$;

-- --- whose turn it is --------------------------------------------------------------------------------------------

-- sweep_turn: when p_sweeper is to sweep now, the page of the inbox to go on with; else NULL. It is, when it is at it
-- already, or nobody is and the last pass ended p_rest ago. A sweeper that was not heard of for a minute has lost its turn.
-- With p_force it takes the turn from whoever has it.
CREATE OR REPLACE FUNCTION core.sweep_turn(p_sweeper uuid, p_rest interval, p_force boolean DEFAULT false)
RETURNS bigint
LANGUAGE plpgsql SECURITY DEFINER
SET search_path = pg_catalog, pg_temp
AS $$
DECLARE
    v_page bigint;
BEGIN
    UPDATE core.sweeps s SET sweeper = p_sweeper, seen_at = now()
    WHERE s.one AND (p_force OR s.sweeper = p_sweeper
                     OR ((s.sweeper IS NULL OR s.seen_at < now() - interval '1 minute') AND s.finished_at <= now() - p_rest))
    RETURNING s.inbox_page INTO v_page;
    RETURN v_page;
END
$$;

-- sweep_done: a whole pass has ended.
CREATE OR REPLACE FUNCTION core.sweep_done(p_sweeper uuid, p_counts jsonb, p_inbox_page bigint)
RETURNS void
LANGUAGE plpgsql SECURITY DEFINER
SET search_path = pg_catalog, pg_temp
AS $$
BEGIN
    UPDATE core.sweeps s
    SET sweeper = NULL, seen_at = NULL, finished_at = now(), counts = p_counts, inbox_page = p_inbox_page
    WHERE s.one AND s.sweeper = p_sweeper;
END
$$;

-- --- what is due -------------------------------------------------------------------------------------------------

-- retention_classes: the content classes that a step finds rows of, by one index probe each. A step without classes
-- has one, of no name; a step without any policy has none.
CREATE OR REPLACE FUNCTION core.retention_classes(p_step text)
RETURNS SETOF text
LANGUAGE plpgsql STABLE SECURITY DEFINER
SET search_path = pg_catalog, pg_temp SET jit = off
SET enable_seqscan = off SET enable_bitmapscan = off SET enable_sort = off
AS $$
DECLARE
    v_class text := '';
BEGIN
    IF p_step IN ('inbox', 'keys') OR p_step IN ('failed', 'records') AND EXISTS (
            SELECT FROM core.retention_policies p
            WHERE p.entity = CASE p_step WHEN 'failed' THEN 'failed_row' ELSE 'idempotency_record' END) THEN
        RETURN NEXT v_class;
        RETURN;
    END IF;
    FOR n IN 1 .. 10000 LOOP
        CASE p_step
        WHEN 'delivered' THEN
            SELECT o.content_class INTO v_class FROM core.outbox o
            WHERE o.settled_at IS NOT NULL AND o.failed_at IS NULL AND o.deleted_at IS NULL AND o.content_class > v_class
            ORDER BY o.content_class, o.settled_at LIMIT 1;
        WHEN 'tombstones' THEN
            SELECT o.content_class INTO v_class FROM core.outbox o
            WHERE o.deleted_at IS NOT NULL AND o.failed_at IS NULL AND o.disposed_at IS NULL AND o.content_class > v_class
            ORDER BY o.content_class, o.deleted_at LIMIT 1;
        WHEN 'discarded' THEN
            SELECT o.content_class INTO v_class FROM core.outbox o
            WHERE o.deleted_at IS NOT NULL AND o.failed_at IS NOT NULL AND o.disposed_at IS NULL
              AND o.content_class > v_class
            ORDER BY o.content_class, o.settled_at LIMIT 1;
        WHEN 'archived' THEN
            SELECT a.content_class INTO v_class FROM core.archive a
            WHERE a.deleted_at IS NULL AND a.content_class > v_class
            ORDER BY a.content_class, a.failed_at LIMIT 1;
        WHEN 'archive_tombstones' THEN
            SELECT a.content_class INTO v_class FROM core.archive a
            WHERE a.deleted_at IS NOT NULL AND a.disposed_at IS NULL AND a.content_class > v_class
            ORDER BY a.content_class, a.failed_at LIMIT 1;
        ELSE
            RETURN;
        END CASE;
        EXIT WHEN v_class IS NULL;
        IF (core.retention_policy(p_step, v_class)).entity IS NOT NULL THEN
            RETURN NEXT v_class;
        END IF;
    END LOOP;
END
$$;

-- retention_due: the first p_limit rows of a class that a step would take, from p_from on: the outbox's by id, the
-- archive's by number. It locks nothing, so it is also what a dry run counts.
CREATE OR REPLACE FUNCTION core.retention_due(p_step text, p_class text, p_from timestamptz, p_limit int)
RETURNS TABLE (id uuid, number bigint, at timestamptz)
LANGUAGE plpgsql STABLE SECURITY DEFINER
SET search_path = pg_catalog, pg_temp SET jit = off
SET enable_seqscan = off SET enable_bitmapscan = off SET enable_hashjoin = off SET enable_mergejoin = off
SET enable_sort = off
AS $$
#variable_conflict use_column
DECLARE
    v_policy core.retention_policies := core.retention_policy(p_step, p_class);
    v_active timestamptz := core.days_ago(v_policy.active_ttl_days);
    v_grace  timestamptz := core.days_ago(v_policy.tombstoned_grace_days);
    v_both   timestamptz := core.days_ago(v_policy.active_ttl_days + v_policy.tombstoned_grace_days);
    v_plans  boolean := EXISTS (SELECT FROM core.plans p WHERE p.finished_at IS NULL);
BEGIN
    CASE p_step
    WHEN 'delivered' THEN
        RETURN QUERY
        SELECT o.id, NULL::bigint, o.settled_at FROM core.outbox o
        WHERE o.settled_at IS NOT NULL AND o.failed_at IS NULL AND o.deleted_at IS NULL
          AND o.content_class = p_class AND o.settled_at >= p_from AND o.settled_at < v_active
          AND NOT (v_plans AND core.is_planned(o.id))
        ORDER BY o.settled_at LIMIT p_limit;
    WHEN 'tombstones' THEN
        RETURN QUERY
        SELECT o.id, NULL::bigint, o.deleted_at FROM core.outbox o
        WHERE o.deleted_at IS NOT NULL AND o.failed_at IS NULL AND o.disposed_at IS NULL AND o.settled_at IS NOT NULL
          AND o.content_class = p_class AND o.deleted_at >= p_from AND o.deleted_at < v_grace
          AND NOT (v_plans AND core.is_planned(o.id))
        ORDER BY o.deleted_at LIMIT p_limit;
    WHEN 'failed' THEN
        -- The dead-letter queue has no index by class: it is short, and read as a whole.
        RETURN QUERY
        SELECT o.id, NULL::bigint, o.failed_at FROM core.outbox o
        WHERE o.failed_at IS NOT NULL AND o.deleted_at IS NULL AND o.failed_at >= p_from
          AND o.failed_at < (SELECT max(core.days_ago(p.active_ttl_days)) FROM core.retention_policies p
                             WHERE p.entity = 'failed_row')
          AND o.failed_at < (SELECT core.days_ago(p.active_ttl_days) FROM core.retention_policies p
                             WHERE p.entity = 'failed_row' AND p.content_class IN (o.content_class, '*')
                             ORDER BY p.content_class = '*' LIMIT 1)
          AND NOT (v_plans AND core.is_planned(o.id))
        ORDER BY o.failed_at LIMIT p_limit;
    WHEN 'discarded' THEN
        RETURN QUERY
        SELECT o.id, NULL::bigint, o.settled_at FROM core.outbox o
        WHERE o.deleted_at IS NOT NULL AND o.failed_at IS NOT NULL AND o.disposed_at IS NULL
          AND o.content_class = p_class AND o.settled_at >= p_from AND o.settled_at < v_both AND o.deleted_at < v_grace
          AND NOT (v_plans AND core.is_planned(o.id))
        ORDER BY o.settled_at LIMIT p_limit;
    WHEN 'archived' THEN
        RETURN QUERY
        SELECT NULL::uuid, a.id, a.failed_at FROM core.archive a
        WHERE a.deleted_at IS NULL AND a.content_class = p_class AND a.failed_at >= p_from AND a.failed_at < v_active
        ORDER BY a.failed_at LIMIT p_limit;
    WHEN 'archive_tombstones' THEN
        RETURN QUERY
        SELECT NULL::uuid, a.id, a.failed_at FROM core.archive a
        WHERE a.deleted_at IS NOT NULL AND a.disposed_at IS NULL
          AND a.content_class = p_class AND a.failed_at >= p_from AND a.failed_at < v_both AND a.deleted_at < v_grace
        ORDER BY a.failed_at LIMIT p_limit;
    WHEN 'inbox' THEN
        -- Only what the first 100 MB hold, for people who want to know whether there is something: see sweep_inbox.
        RETURN QUERY
        SELECT NULL::uuid, NULL::bigint, h.handled_at FROM core.event_handled h
        WHERE h.ctid < '(12800,0)' AND h.handled_at < v_both
        LIMIT p_limit;
    WHEN 'records' THEN
        RETURN QUERY
        SELECT NULL::uuid, NULL::bigint, r.expires_at FROM core.idempotency_records r
        WHERE r.expires_at < v_both
        ORDER BY r.expires_at LIMIT p_limit;
    END CASE;
END
$$;

-- is_planned: whether an unfinished plan holds the row.
CREATE OR REPLACE FUNCTION core.is_planned(p_id uuid)
RETURNS boolean
LANGUAGE plpgsql STABLE SECURITY DEFINER
SET search_path = pg_catalog, pg_temp
AS $$
BEGIN
    RETURN EXISTS (SELECT FROM core.plan_rows r JOIN core.plans p ON p.id = r.plan_id
                   WHERE r.row_id = p_id AND p.finished_at IS NULL);
END
$$;

-- --- one batch ---------------------------------------------------------------------------------------------------

-- retention_sweep: takes at most p_limit rows of a class, and never more than 5,000, from p_from on. Says how many it took,
-- where to go on, and whether there may be more. What it takes is looked at once more under its lock: it may have
-- been replayed or restored since it was found. Audited when it is an operator's.
CREATE OR REPLACE FUNCTION core.retention_sweep(
    p_step text, p_class text, p_from timestamptz, p_limit int, p_actor text DEFAULT NULL, p_reason text DEFAULT NULL)
RETURNS TABLE (swept int, upto timestamptz, more boolean)
LANGUAGE plpgsql SECURITY DEFINER
SET search_path = pg_catalog, pg_temp SET jit = off
SET enable_seqscan = off SET enable_bitmapscan = off SET enable_hashjoin = off SET enable_mergejoin = off
AS $$
#variable_conflict use_column
DECLARE
    v_policy  core.retention_policies := core.retention_policy(p_step, p_class);
    v_grace   timestamptz := core.days_ago(v_policy.tombstoned_grace_days);
    v_limit   int := least(greatest(p_limit, 1), 5000);
    v_ids     uuid[];
    v_numbers bigint[];
    v_found   int := 0;
BEGIN
    PERFORM core.require_operator(p_actor);
    swept := 0;
    upto := p_from;
    IF p_step NOT IN ('inbox', 'records') AND (v_policy.entity IS NOT NULL OR p_step = 'failed') THEN
        SELECT array_agg(d.id), array_agg(d.number), count(*), coalesce(max(d.at), p_from)
        INTO v_ids, v_numbers, v_found, upto
        FROM core.retention_due(p_step, p_class, p_from, v_limit) d;
    END IF;

    CASE
    WHEN v_found = 0 THEN
        NULL;
    WHEN p_step IN ('delivered', 'failed') THEN
        UPDATE core.outbox o SET deleted_at = now()
        WHERE o.id = ANY (ARRAY(
            SELECT x.id FROM core.outbox x
            WHERE x.id = ANY (v_ids) AND x.deleted_at IS NULL AND coalesce(x.failed_at, x.settled_at) <= upto
            FOR NO KEY UPDATE SKIP LOCKED));
        GET DIAGNOSTICS swept = ROW_COUNT;
    WHEN p_step IN ('tombstones', 'discarded') THEN
        swept := core.outbox_dispose(ARRAY(
            SELECT x.id FROM core.outbox x
            WHERE x.id = ANY (v_ids) AND x.deleted_at < v_grace AND x.settled_at IS NOT NULL
            FOR UPDATE SKIP LOCKED), v_policy.disposal);
    WHEN p_step = 'archived' THEN
        UPDATE core.archive a SET deleted_at = now()
        WHERE a.id = ANY (ARRAY(
            SELECT x.id FROM core.archive x
            WHERE x.id = ANY (v_numbers) AND x.deleted_at IS NULL
            FOR NO KEY UPDATE SKIP LOCKED));
        GET DIAGNOSTICS swept = ROW_COUNT;
    WHEN p_step = 'archive_tombstones' THEN
        swept := core.archive_dispose(ARRAY(
            SELECT x.id FROM core.archive x
            WHERE x.id = ANY (v_numbers) AND x.deleted_at < v_grace
            FOR UPDATE SKIP LOCKED), v_policy.disposal);
    END CASE;

    IF swept > 0 AND p_actor IS NOT NULL THEN
        PERFORM core.audit_append(p_actor, 'retention.sweep', p_reason,
            jsonb_build_object('step', p_step, 'content_class', p_class), jsonb_build_object('swept', swept));
    END IF;
    -- A page of rows that share one moment, and are all locked, would be found again and again.
    more := v_found = v_limit AND (swept > 0 OR upto > p_from);
    RETURN NEXT;
END
$$;

-- sweep_inbox: forgets what has been remembered long enough, at most p_limit rows in p_pages pages from p_page on. An index
-- by time would be one more write for every delivery, so the table is read as it lies, and by workers a part of it at a
-- time. A row counts until it is gone, so there is no tombstone: active days and grace are one time. Says how many it took,
-- the page to go on with (NULL at the end), and how many pages there are.
CREATE OR REPLACE FUNCTION core.sweep_inbox(
    p_page bigint, p_pages int, p_limit int, p_actor text DEFAULT NULL, p_reason text DEFAULT NULL)
RETURNS TABLE (swept int, next_page bigint, pages bigint)
LANGUAGE plpgsql SECURITY DEFINER
SET search_path = pg_catalog, pg_temp SET jit = off SET enable_seqscan = off SET enable_bitmapscan = off
AS $$
#variable_conflict use_column
DECLARE
    v_policy core.retention_policies := core.retention_policy('inbox', '');
    v_before timestamptz := core.days_ago(v_policy.active_ttl_days + v_policy.tombstoned_grace_days);
    v_limit  int := least(greatest(p_limit, 1), 5000);
    v_old    tid[];
BEGIN
    PERFORM core.require_operator(p_actor);
    v_old := ARRAY(
        SELECT h.ctid FROM core.event_handled h
        WHERE h.ctid >= format('(%s,0)', p_page)::tid AND h.ctid < format('(%s,0)', p_page + p_pages)::tid
          AND h.handled_at < v_before
        LIMIT v_limit
        FOR UPDATE SKIP LOCKED);
    DELETE FROM core.event_handled h WHERE h.ctid = ANY (v_old);
    GET DIAGNOSTICS swept = ROW_COUNT;
    pages := pg_relation_size('core.event_handled') / current_setting('block_size')::int;
    next_page := CASE WHEN swept = v_limit THEN (v_old[v_limit]::text::point)[0]::bigint ELSE p_page + p_pages END;
    IF next_page >= pages THEN
        next_page := NULL;
    END IF;
    IF swept > 0 AND p_actor IS NOT NULL THEN
        PERFORM core.audit_append(p_actor, 'retention.sweep', p_reason,
            jsonb_build_object('step', 'inbox', 'content_class', ''), jsonb_build_object('swept', swept));
    END IF;
    RETURN NEXT;
END
$$;

-- sweep_keys: frees the keys, of p_limit after (p_source, p_key), whose event is gone, delivered or set aside. A failed
-- event keeps its key: it may be pending again. Says how many it freed and where to go on, NULL at the end.
-- In two statements: the second one sees what whoever held the key until now has published with it.
CREATE OR REPLACE FUNCTION core.sweep_keys(
    p_source text, p_key text, p_limit int, p_actor text DEFAULT NULL, p_reason text DEFAULT NULL)
RETURNS TABLE (swept int, next_source text, next_key text)
LANGUAGE plpgsql SECURITY DEFINER
SET search_path = pg_catalog, pg_temp SET jit = off
SET enable_seqscan = off SET enable_bitmapscan = off SET enable_hashjoin = off SET enable_mergejoin = off
AS $$
#variable_conflict use_column
DECLARE
    v_limit   int := least(greatest(p_limit, 1), 5000);
    v_sources text[];
    v_keys    text[];
BEGIN
    PERFORM core.require_operator(p_actor);
    -- The end of the page first: a key that is locked is passed over, and must not make the page seem shorter.
    SELECT k.source, k.dedupe_key INTO next_source, next_key FROM core.outbox_keys k
    WHERE (k.source, k.dedupe_key) > (p_source, p_key)
    ORDER BY k.source, k.dedupe_key OFFSET v_limit - 1 LIMIT 1;
    SELECT array_agg(free.source), array_agg(free.dedupe_key) INTO v_sources, v_keys FROM (
        SELECT k.source, k.dedupe_key FROM core.outbox_keys k
        WHERE (k.source, k.dedupe_key) > (p_source, p_key)
          AND (next_key IS NULL OR (k.source, k.dedupe_key) <= (next_source, next_key))
        ORDER BY k.source, k.dedupe_key LIMIT v_limit
        FOR UPDATE SKIP LOCKED) free;
    DELETE FROM core.outbox_keys k
    USING unnest(v_sources, v_keys) AS free (source, dedupe_key)
    WHERE k.source = free.source AND k.dedupe_key = free.dedupe_key
      AND NOT EXISTS (SELECT FROM core.outbox o
                      WHERE o.id = k.event_id
                        AND (o.settled_at IS NULL OR (o.failed_at IS NOT NULL AND o.deleted_at IS NULL)));
    GET DIAGNOSTICS swept = ROW_COUNT;
    IF swept > 0 AND p_actor IS NOT NULL THEN
        PERFORM core.audit_append(p_actor, 'retention.sweep', p_reason,
            jsonb_build_object('step', 'keys', 'content_class', ''), jsonb_build_object('swept', swept));
    END IF;
    RETURN NEXT;
END
$$;

-- outbox_dispose: what is left of rows whose time is over. ERASE leaves the metadata like RETAIN_METADATA, but not for
-- good: what the policy says is still to be done when the time comes.
CREATE OR REPLACE FUNCTION core.outbox_dispose(p_ids uuid[], p_disposal text)
RETURNS int
LANGUAGE plpgsql SECURITY DEFINER
SET search_path = pg_catalog, pg_temp SET jit = off
SET enable_seqscan = off SET enable_bitmapscan = off SET enable_hashjoin = off SET enable_mergejoin = off
AS $$
DECLARE
    n int;
BEGIN
    CASE p_disposal
    WHEN 'HARD_DELETE' THEN
        DELETE FROM core.outbox o WHERE o.id = ANY (p_ids);
    WHEN 'STRIP_PAYLOAD' THEN
        UPDATE core.outbox o SET payload = NULL, headers = NULL, disposed_at = now() WHERE o.id = ANY (p_ids);
    WHEN 'RETAIN_METADATA', 'ERASE' THEN
        -- The id, the type, where from and where to, the times and the outcome. A key may say more than that.
        UPDATE core.outbox o
        SET payload = NULL, headers = NULL, domain_id = NULL, trace_context = NULL, idempotency_key = o.id::text,
            ordering_key = NULL, dedupe_key = NULL, last_error = NULL, error_signature = NULL, failure_history = '[]',
            claimed_by = NULL, deleted_at = coalesce(o.deleted_at, now()),
            disposed_at = CASE p_disposal WHEN 'ERASE' THEN o.disposed_at ELSE now() END
        WHERE o.id = ANY (p_ids);
    END CASE;
    GET DIAGNOSTICS n = ROW_COUNT;
    RETURN n;
END
$$;

-- archive_dispose: likewise.
CREATE OR REPLACE FUNCTION core.archive_dispose(p_ids bigint[], p_disposal text)
RETURNS int
LANGUAGE plpgsql SECURITY DEFINER
SET search_path = pg_catalog, pg_temp SET jit = off
SET enable_seqscan = off SET enable_bitmapscan = off SET enable_hashjoin = off SET enable_mergejoin = off
AS $$
DECLARE
    n int;
BEGIN
    CASE p_disposal
    WHEN 'HARD_DELETE' THEN
        DELETE FROM core.archive a WHERE a.id = ANY (p_ids);
    WHEN 'STRIP_PAYLOAD' THEN
        UPDATE core.archive a SET payload = NULL, headers = NULL, disposed_at = now() WHERE a.id = ANY (p_ids);
    WHEN 'RETAIN_METADATA', 'ERASE' THEN
        UPDATE core.archive a
        SET payload = NULL, headers = NULL, domain_id = NULL, trace_context = NULL, idempotency_key = a.original_id::text,
            ordering_key = NULL, dedupe_key = NULL, last_exception = NULL, error_signature = NULL, failure_history = '[]',
            deleted_at = coalesce(a.deleted_at, now()),
            disposed_at = CASE p_disposal WHEN 'ERASE' THEN a.disposed_at ELSE now() END
        WHERE a.id = ANY (p_ids);
    END CASE;
    GET DIAGNOSTICS n = ROW_COUNT;
    RETURN n;
END
$$;

-- --- settling what is not kept at all -----------------------------------------------------------------------------

-- is_brief: whether delivered rows of a class are deleted at once, having neither active days nor a grace.
CREATE OR REPLACE FUNCTION core.is_brief(p_class text)
RETURNS boolean
LANGUAGE plpgsql STABLE SECURITY DEFINER
SET search_path = pg_catalog, pg_temp
AS $$
DECLARE
    v_policy core.retention_policies := core.retention_policy('delivered', p_class);
BEGIN
    RETURN v_policy.active_ttl_days + v_policy.tombstoned_grace_days = 0 AND v_policy.disposal = 'HARD_DELETE';
END
$$;

-- outbox_consume: outbox_deliver where rows of some class are not kept: the settle deletes those. The others are
-- delivered as ever. Returns the ids whose lease was lost.
CREATE OR REPLACE FUNCTION core.outbox_consume(
    p_ids uuid[], p_tokens uuid[], p_routes text[], p_handlers text[], p_record boolean)
RETURNS SETOF uuid
LANGUAGE plpgsql SECURITY DEFINER
SET search_path = pg_catalog, pg_temp SET jit = off SET plan_cache_mode = force_custom_plan
SET enable_seqscan = off SET enable_bitmapscan = off SET enable_hashjoin = off SET enable_mergejoin = off
AS $$
DECLARE
    v_gone uuid[];
BEGIN
    WITH gone AS (
        DELETE FROM core.outbox o
        WHERE o.id = ANY (p_ids) AND o.status = 'in_flight'
          AND ((o.id, o.lease_token) IN (SELECT * FROM unnest(p_ids, p_tokens))) IS TRUE
          AND core.is_brief(o.content_class)
        RETURNING o.id, coalesce(o.handler_name, p_handlers[array_position(p_routes, o.route)]) AS handler_name,
                  o.idempotency_key),
    noted AS (
        INSERT INTO core.event_handled (handler_name, idempotency_key)
        SELECT g.handler_name, g.idempotency_key FROM gone g WHERE p_record
        ORDER BY g.handler_name COLLATE "C", g.idempotency_key COLLATE "C"
        ON CONFLICT DO NOTHING)
    SELECT coalesce(array_agg(g.id), '{}') INTO v_gone FROM gone g;
    IF cardinality(v_gone) < cardinality(p_ids) THEN
        RETURN QUERY
        SELECT core.outbox_deliver(array_agg(t.id), array_agg(t.token), p_routes, p_handlers, p_record)
        FROM unnest(p_ids, p_tokens) AS t (id, token) WHERE t.id <> ALL (v_gone);
    END IF;
END
$$;

-- outbox_forget: the same for a handler's transaction, which settled the row when it began.
CREATE OR REPLACE FUNCTION core.outbox_forget(p_id uuid, p_handler text)
RETURNS void
LANGUAGE plpgsql SECURITY DEFINER
SET search_path = pg_catalog, pg_temp
AS $$
BEGIN
    -- Only a version that this transaction wrote.
    DELETE FROM core.outbox o
    WHERE o.id = p_id AND o.status = 'delivered' AND o.handler_name = p_handler
      AND o.xmin = pg_current_xact_id()::xid AND core.is_brief(o.content_class);
END
$$;

-- --- erasure -----------------------------------------------------------------------------------------------------

-- erase_archived: leaves only the metadata of at most p_limit archived rows of a domain. Returns how many.
CREATE OR REPLACE FUNCTION core.erase_archived(p_domain uuid, p_actor text, p_reason text, p_limit int)
RETURNS int
LANGUAGE plpgsql SECURITY DEFINER
SET search_path = pg_catalog, pg_temp SET jit = off
SET enable_seqscan = off SET enable_bitmapscan = off SET enable_hashjoin = off SET enable_mergejoin = off
AS $$
DECLARE
    v_erased int;
BEGIN
    v_erased := core.archive_dispose(ARRAY(
        SELECT a.id FROM core.archive a WHERE a.domain_id = p_domain
        LIMIT least(greatest(p_limit, 1), 5000)
        FOR UPDATE SKIP LOCKED), 'ERASE');
    IF v_erased > 0 THEN
        PERFORM core.audit_append(p_actor, 'retention.erase', p_reason,
            jsonb_build_object('domain_id', p_domain, 'table', 'archive'), jsonb_build_object('erased', v_erased));
    END IF;
    RETURN v_erased;
END
$$;

-- erase_outbox: the same for the settled rows of a domain among the p_limit rows after p_after. There is no index by
-- domain, which every publish would pay for: the whole table is read, a page at a time, in the order of its primary key.
-- What is open is left alone, and counted; with p_cancel it is cancelled first. The last page is audited in any case:
-- somebody asked for this, and may have to prove that it was done.
CREATE OR REPLACE FUNCTION core.erase_outbox(
    p_domain uuid, p_actor text, p_reason text, p_cancel boolean, p_limit int, p_after uuid)
RETURNS TABLE (examined int, erased int, open int, next_id uuid)
LANGUAGE plpgsql SECURITY DEFINER
SET search_path = pg_catalog, pg_temp SET jit = off
SET enable_seqscan = off SET enable_bitmapscan = off SET enable_hashjoin = off SET enable_mergejoin = off
AS $$
#variable_conflict use_column
DECLARE
    v_limit int := least(greatest(p_limit, 1), 100000);
    v_ids   uuid[];
    v_done  uuid[];
BEGIN
    SELECT count(*), max(page.id::text COLLATE "C")::uuid,
           coalesce(array_agg(page.id) FILTER (WHERE page.domain_id = p_domain), '{}')
    INTO examined, next_id, v_ids
    FROM (SELECT o.id, o.domain_id FROM core.outbox o WHERE o.id > p_after ORDER BY o.id LIMIT v_limit) page;
    IF p_cancel THEN
        PERFORM core.outbox_stop(o.id, p_actor, p_reason) FROM core.outbox o WHERE o.id = ANY (v_ids) AND o.settled_at IS NULL;
    END IF;
    v_done := ARRAY(SELECT o.id FROM core.outbox o WHERE o.id = ANY (v_ids) AND o.settled_at IS NOT NULL
                    FOR UPDATE SKIP LOCKED);
    erased := core.outbox_dispose(v_done, 'ERASE');
    open := cardinality(v_ids) - erased;
    IF examined < v_limit THEN
        next_id := NULL;
    END IF;
    IF erased > 0 OR next_id IS NULL THEN
        PERFORM core.audit_append(p_actor, 'retention.erase', p_reason,
            jsonb_build_object('domain_id', p_domain, 'table', 'outbox', 'ids', to_jsonb(v_done), 'cancel', p_cancel),
            jsonb_build_object('erased', erased, 'open', open));
    END IF;
    RETURN NEXT;
END
$$;
