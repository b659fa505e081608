-- The sweep: the small steps in which rows that were kept long enough go.
--
-- A sweep is a pass over the steps below, class by class where a step has classes, in batches that a caller makes one
-- after the other from where the last one ended:
--   delivered           tombstones delivered rows past their active days
--   tombstones          disposes of them when their grace is over
--   failed              tombstones failed rows that were not resolved, if there is a policy for failed_row
--   discarded           disposes of failed rows that are not dead letters: discarded, cancelled, expired
--   archived            tombstones archived rows, if there is a policy for archive_row
--   archive_tombstones  disposes of those, and of the discarded ones
--   inbox               forgets what was handled
--   keys                frees producers' keys that no event needs any longer
--   records             forgets idempotency records that have expired
--   rollup              deletes old lines of the roll-up, and adds up its minutes of a day ago (see rollup.sql)
-- Where the outbox is partitioned, partitions_drop (partitions.sql) comes before the first two.
-- Every function decides by the policies and the database's clock alone: no caller can delete anything early.
-- With p_actor a batch is audited, which is for operators; workers sweep without.
-- Nothing here waits for a row lock, and a row of an unfinished replay plan stays.

-- --- one sweeper at a time ---------------------------------------------------------------------------------------

-- sweep_acquire: when p_sweeper is to sweep now, returns the page of the inbox to go on with; else NULL. It is to sweep
-- when it is sweeping already, or when no other is and the last pass ended p_rest ago. A sweeper that has been silent for
-- a minute has lost the pass. With p_force it takes the pass from any other.
-- For a week after the clock was set forward by more than an hour no worker is to sweep: what looks old may not be.
-- An operator, who uses p_force, may.
CREATE OR REPLACE FUNCTION core.sweep_acquire(p_sweeper uuid, p_rest interval, p_force boolean DEFAULT false)
RETURNS bigint
LANGUAGE plpgsql SECURITY DEFINER
SET search_path = pg_catalog, pg_temp
AS $$
DECLARE
    v_page bigint;
BEGIN
    IF (p_sweeper IS NOT NULL AND p_force IS NOT NULL
        AND p_rest BETWEEN interval '0' AND interval '36500 days') IS NOT TRUE THEN
        PERFORM core.refuse_argument('p_sweeper and p_force must not be NULL, p_rest 0 to 36500 days');
    END IF;
    UPDATE core.sweeps s SET sweeper = p_sweeper, seen_at = now()
    WHERE s.one AND (p_force OR s.sweeper = p_sweeper
                     OR ((s.sweeper IS NULL OR s.seen_at < now() - interval '1 minute') AND s.finished_at <= now() - p_rest))
      AND (p_force OR NOT core.clock_jumped())
    RETURNING s.inbox_page INTO v_page;
    RETURN v_page;
END
$$;

-- sweep_finish: ends the pass of p_sweeper.
CREATE OR REPLACE FUNCTION core.sweep_finish(p_sweeper uuid, p_counts jsonb, p_inbox_page bigint)
RETURNS void
LANGUAGE plpgsql SECURITY DEFINER
SET search_path = pg_catalog, pg_temp
AS $$
BEGIN
    IF (p_sweeper IS NOT NULL AND jsonb_typeof(p_counts) = 'object' AND octet_length(p_counts::text) <= 8192
        AND p_inbox_page >= 0) IS NOT TRUE THEN
        PERFORM core.refuse_argument('p_counts must be a JSON object of at most 8 KiB, p_inbox_page a page');
    END IF;
    UPDATE core.sweeps s
    SET sweeper = NULL, seen_at = NULL, finished_at = now(), counts = p_counts, inbox_page = p_inbox_page
    WHERE s.one AND s.sweeper = p_sweeper;
END
$$;

-- --- what is due -------------------------------------------------------------------------------------------------

-- retention_classes: the content classes that a step finds rows of, by one index probe each; a page of them, after
-- p_after, which is the last of the page before. A writer names classes as it likes, and no number of them may hide another.
-- A step without classes has one, of no name; a step without any policy has none.
CREATE OR REPLACE FUNCTION core.retention_classes(p_step text, p_after text DEFAULT '')
RETURNS SETOF text
LANGUAGE plpgsql STABLE SECURITY DEFINER
SET search_path = pg_catalog, pg_temp SET jit = off
SET enable_seqscan = off SET enable_bitmapscan = off SET enable_sort = off
AS $$
DECLARE
    v_class text := coalesce(p_after, '');
    v_found int := 0;
BEGIN
    IF v_class <> '' AND p_step IN ('inbox', 'keys', 'heads', 'failed', 'records', 'rollup') THEN
        RETURN;
    ELSIF p_step IN ('inbox', 'keys', 'heads') OR p_step IN ('failed', 'records', 'rollup') AND EXISTS (
            SELECT FROM core.retention_policies p
            WHERE p.entity = CASE p_step WHEN 'failed' THEN 'failed_row' WHEN 'records' THEN 'idempotency_record'
                             ELSE 'rollup_row' END) THEN
        RETURN NEXT v_class;
        RETURN;
    END IF;
    WHILE v_found < 1000 LOOP
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
            v_found := v_found + 1;
        END IF;
    END LOOP;
END
$$;

-- retention_due: the first p_limit rows of a class that a step would take, from p_start on: the outbox's by id, the
-- archive's by number. It locks nothing, so it is also what a dry run counts.
CREATE OR REPLACE FUNCTION core.retention_due(p_step text, p_content_class text, p_start timestamptz, p_limit int)
RETURNS TABLE (id uuid, number bigint, at timestamptz)
LANGUAGE plpgsql STABLE SECURITY DEFINER
SET search_path = pg_catalog, pg_temp SET jit = off
SET enable_seqscan = off SET enable_bitmapscan = off SET enable_hashjoin = off SET enable_mergejoin = off
SET enable_sort = off
AS $$
#variable_conflict use_column
DECLARE
    v_policy core.retention_policies := core.retention_policy(p_step, p_content_class);
    v_active timestamptz := core.days_ago(v_policy.active_ttl_days);
    v_grace  timestamptz := core.days_ago(v_policy.tombstoned_grace_days);
    v_both   timestamptz := core.days_ago(v_policy.active_ttl_days + v_policy.tombstoned_grace_days);
    v_plans  boolean := EXISTS (SELECT FROM core.plans p WHERE p.finished_at IS NULL);
BEGIN
    IF p_step = 'delivered' AND v_policy.disposal = 'HARD_DELETE' AND core.is_partitioned() THEN
        -- Whole partitions are dropped when both times are over: rows are touched only where that has not happened.
        v_active := v_both - (SELECT ('1 ' || p.every)::interval + interval '1 day' FROM core.partitioning p WHERE p.one);
    END IF;
    CASE p_step
    WHEN 'delivered' THEN
        RETURN QUERY
        SELECT o.id, NULL::bigint, o.settled_at FROM core.outbox o
        WHERE o.settled_at IS NOT NULL AND o.failed_at IS NULL AND o.deleted_at IS NULL
          AND o.content_class = p_content_class AND o.settled_at >= p_start AND o.settled_at < v_active
          AND NOT (v_plans AND core.is_in_replay_plan(o.id))
        ORDER BY o.settled_at LIMIT p_limit;
    WHEN 'tombstones' THEN
        RETURN QUERY
        SELECT o.id, NULL::bigint, o.deleted_at FROM core.outbox o
        WHERE o.deleted_at IS NOT NULL AND o.failed_at IS NULL AND o.disposed_at IS NULL AND o.settled_at IS NOT NULL
          AND o.content_class = p_content_class AND o.deleted_at >= p_start AND o.deleted_at < v_grace
          AND NOT (v_plans AND core.is_in_replay_plan(o.id))
        ORDER BY o.deleted_at LIMIT p_limit;
    WHEN 'failed' THEN
        -- The dead-letter queue has no index by class: it is short, and read as a whole.
        RETURN QUERY
        SELECT o.id, NULL::bigint, o.failed_at FROM core.outbox o
        WHERE o.failed_at IS NOT NULL AND o.deleted_at IS NULL AND o.failed_at >= p_start
          AND o.failed_at < (SELECT max(core.days_ago(p.active_ttl_days)) FROM core.retention_policies p
                             WHERE p.entity = 'failed_row')
          AND o.failed_at < (SELECT core.days_ago(p.active_ttl_days) FROM core.retention_policies p
                             WHERE p.entity = 'failed_row' AND p.content_class IN (o.content_class, '*')
                             ORDER BY p.content_class = '*' LIMIT 1)
          AND NOT (v_plans AND core.is_in_replay_plan(o.id))
        ORDER BY o.failed_at LIMIT p_limit;
    WHEN 'discarded' THEN
        RETURN QUERY
        SELECT o.id, NULL::bigint, o.settled_at FROM core.outbox o
        WHERE o.deleted_at IS NOT NULL AND o.failed_at IS NOT NULL AND o.disposed_at IS NULL
          AND o.content_class = p_content_class AND o.settled_at >= p_start AND o.settled_at < v_both AND o.deleted_at < v_grace
          AND NOT (v_plans AND core.is_in_replay_plan(o.id))
        ORDER BY o.settled_at LIMIT p_limit;
    WHEN 'archived' THEN
        RETURN QUERY
        SELECT NULL::uuid, a.id, a.failed_at FROM core.archive a
        WHERE a.deleted_at IS NULL AND a.content_class = p_content_class AND a.failed_at >= p_start AND a.failed_at < v_active
        ORDER BY a.failed_at LIMIT p_limit;
    WHEN 'archive_tombstones' THEN
        RETURN QUERY
        SELECT NULL::uuid, a.id, a.failed_at FROM core.archive a
        WHERE a.deleted_at IS NOT NULL AND a.disposed_at IS NULL
          AND a.content_class = p_content_class AND a.failed_at >= p_start AND a.failed_at < v_both AND a.deleted_at < v_grace
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
    WHEN 'rollup' THEN
        RETURN QUERY
        SELECT NULL::uuid, NULL::bigint, r.period_start FROM core.rollup r
        WHERE r.period_start < v_both
        ORDER BY r.period_start LIMIT p_limit;
    END CASE;
END
$$;

-- is_in_replay_plan: whether an unfinished replay plan holds the row.
CREATE OR REPLACE FUNCTION core.is_in_replay_plan(p_id uuid)
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

-- retention_sweep: takes at most p_limit rows of a class, and never more than 5,000, from p_start on. Says how many it took,
-- where to go on, and whether there may be more. What it takes is looked at once more under its lock: it may have
-- been replayed or restored since it was found. Audited when it is an operator's.
CREATE OR REPLACE FUNCTION core.retention_sweep(
    p_step text, p_content_class text, p_start timestamptz, p_limit int, p_actor text DEFAULT NULL, p_reason text DEFAULT NULL)
RETURNS TABLE (swept int, upto timestamptz, more boolean)
LANGUAGE plpgsql SECURITY DEFINER
SET search_path = pg_catalog, pg_temp SET jit = off
SET enable_seqscan = off SET enable_bitmapscan = off SET enable_hashjoin = off SET enable_mergejoin = off
AS $$
#variable_conflict use_column
DECLARE
    v_policy  core.retention_policies := core.retention_policy(p_step, p_content_class);
    v_grace   timestamptz := core.days_ago(v_policy.tombstoned_grace_days);
    v_limit   int := least(greatest(p_limit, 1), 5000);
    v_ids     uuid[];
    v_numbers bigint[];
    v_found   int := 0;
BEGIN
    IF (p_step IN ('delivered', 'tombstones', 'failed', 'discarded', 'archived', 'archive_tombstones', 'inbox', 'records')
        AND p_content_class IS NOT NULL AND p_start IS NOT NULL AND p_limit IS NOT NULL) IS NOT TRUE THEN
        PERFORM core.refuse_argument('p_step must name a step; p_content_class, p_start and p_limit must not be NULL');
    END IF;
    PERFORM core.require_operator(p_actor);
    swept := 0;
    upto := p_start;
    IF p_step NOT IN ('inbox', 'records') AND (v_policy.entity IS NOT NULL OR p_step = 'failed') THEN
        SELECT array_agg(d.id), array_agg(d.number), count(*), coalesce(max(d.at), p_start)
        INTO v_ids, v_numbers, v_found, upto
        FROM core.retention_due(p_step, p_content_class, p_start, v_limit) d;
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

    PERFORM core.audit_sweep(p_actor, p_reason, p_step, p_content_class, swept);
    -- A page of rows that share one moment, and are all locked, would be found again and again.
    more := v_found = v_limit AND (swept > 0 OR upto > p_start);
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
    IF (p_page BETWEEN 0 AND 4294000000 AND p_pages BETWEEN 1 AND 100000 AND p_limit IS NOT NULL) IS NOT TRUE THEN
        PERFORM core.refuse_argument('p_page must be a page of the inbox, p_pages 1 to 100000');
    END IF;
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
    PERFORM core.audit_sweep(p_actor, p_reason, 'inbox', '', swept);
    RETURN NEXT;
END
$$;

-- sweep_keys: frees the keys, of p_limit after (p_source, p_key), whose event is gone, delivered or discarded. A failed
-- event keeps its key: it may be pending again. Says how many it freed and where to go on, NULL at the end.
-- In two statements: the second one sees what the session that held the key until now has published with it.
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
    PERFORM core.audit_sweep(p_actor, p_reason, 'keys', '', swept);
    RETURN NEXT;
END
$$;

-- sweep_records: forgets records that have expired for as long as their policy says, at most p_limit. Says how many it
-- took, and whether there may be more.
CREATE OR REPLACE FUNCTION core.sweep_records(p_limit int, p_actor text DEFAULT NULL, p_reason text DEFAULT NULL)
RETURNS TABLE (swept int, more boolean)
LANGUAGE plpgsql SECURITY DEFINER
SET search_path = pg_catalog, pg_temp SET jit = off
SET enable_seqscan = off SET enable_bitmapscan = off SET enable_hashjoin = off SET enable_mergejoin = off
AS $$
DECLARE
    v_policy core.retention_policies := core.retention_policy('records', '');
    v_before timestamptz := core.days_ago(v_policy.active_ttl_days + v_policy.tombstoned_grace_days);
    v_limit  int := least(greatest(p_limit, 1), 5000);
BEGIN
    PERFORM core.require_operator(p_actor);
    DELETE FROM core.idempotency_records r
    WHERE r.ctid = ANY (ARRAY(
        SELECT x.ctid FROM core.idempotency_records x
        WHERE x.expires_at < v_before
        ORDER BY x.expires_at LIMIT v_limit
        FOR UPDATE SKIP LOCKED));
    GET DIAGNOSTICS swept = ROW_COUNT;
    more := swept = v_limit;
    PERFORM core.audit_sweep(p_actor, p_reason, 'records', '', swept);
    RETURN NEXT;
END
$$;
