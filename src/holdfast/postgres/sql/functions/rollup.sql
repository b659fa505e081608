-- The roll-up of what becomes of deliveries. docs/architecture/counting.md says what is counted where.
--
-- Every function that claims or settles deliveries appends to core.rollup_journal in its own transaction, by the names of
-- core.rollup's columns. A row is `begun` when its attempts go from 0 to 1, and not begun any longer when a release takes
-- that back. So at every moment, and whatever is killed:
--
--   begun = delivered + duplicate + failed + expired + cancelled + open rows that have attempts
--
-- Not counted are rows that are settled without having been claimed: by a cancellation, a split or reactions.

-- rollup_count: appends a line.
CREATE OR REPLACE FUNCTION core.rollup_count(p_handler text, p_generation bigint, p_outcome text, p_n int)
RETURNS void
LANGUAGE sql
SET search_path = pg_catalog, pg_temp
AS $$
    INSERT INTO core.rollup_journal (handler_name, generation, outcome, n)
    VALUES (p_handler, p_generation, p_outcome, p_n)
$$;

-- begun_for: the handler for which a row was claimed, under whose name it was counted as begun. A row that waits in its
-- event's own route names none: then it is the one that subscribes to the event, of those that the worker which claimed
-- it has. The route itself if no handler is known any longer: the sum stays right.
CREATE OR REPLACE FUNCTION core.begun_for(p_handler text, p_target text, p_event_type text, p_claimed_by uuid)
RETURNS text
LANGUAGE sql STABLE
SET search_path = pg_catalog, pg_temp
AS $$
    SELECT coalesce(
        p_handler,
        (SELECT s.owed_to FROM core.subscriptions s
         WHERE p_event_type LIKE s.pattern AND (p_target IS NULL OR p_target = s.domain_context)
         ORDER BY EXISTS (SELECT FROM core.workers w WHERE w.id = p_claimed_by AND s.owed_to = ANY (w.handlers)) DESC,
                  s.retired_at IS NULL DESC, s.created_at, s.handler_name COLLATE "C"
         LIMIT 1),
        coalesce(p_target, '*') || '/' || p_event_type)
$$;

-- add_buckets: the sum of two histograms, element by element.
CREATE OR REPLACE FUNCTION core.add_buckets(p_one bigint[], p_other bigint[])
RETURNS bigint[]
LANGUAGE sql IMMUTABLE PARALLEL SAFE
SET search_path = pg_catalog, pg_temp
AS $$
    SELECT CASE WHEN p_other = '{}' THEN p_one WHEN p_one = '{}' THEN p_other
           ELSE ARRAY(SELECT coalesce(t.one, 0) + coalesce(t.other, 0)
                      FROM unnest(p_one, p_other) WITH ORDINALITY AS t (one, other, n) ORDER BY t.n) END
$$;

-- rollup_write: appends what a worker has counted by itself: for each handler its lost leases and two histograms, whose
-- buckets run one handler after the other.
CREATE OR REPLACE FUNCTION core.rollup_write(
    p_generation bigint, p_handlers text[], p_lost bigint[],
    p_handler_buckets bigint[], p_handler_seconds float8[], p_outbox_buckets bigint[], p_outbox_seconds float8[])
RETURNS void
LANGUAGE plpgsql SECURITY DEFINER
SET search_path = pg_catalog, pg_temp SET jit = off
AS $$
DECLARE
    v_most    int := cardinality(p_handlers);
    v_buckets int := cardinality(p_handler_buckets) / greatest(v_most, 1);
BEGIN
    IF (core.are_names(p_handlers)
        AND v_most = ALL (ARRAY[cardinality(p_lost), cardinality(p_handler_seconds), cardinality(p_outbox_seconds)])
        AND cardinality(p_handler_buckets) = v_most * v_buckets AND v_buckets <= 100
        AND cardinality(p_outbox_buckets) = v_most * v_buckets
        AND 0 <= ALL (p_lost) AND 0 <= ALL (p_handler_buckets) AND 0 <= ALL (p_outbox_buckets)
        AND 1e9 >= ALL (p_lost) AND 1e9 >= ALL (p_handler_buckets) AND 1e9 >= ALL (p_outbox_buckets)
        AND 0 <= ALL (p_handler_seconds) AND 0 <= ALL (p_outbox_seconds)
        AND 1e15 >= ALL (p_handler_seconds) AND 1e15 >= ALL (p_outbox_seconds)) IS NOT TRUE THEN
        PERFORM core.refuse_argument('p_lost, the seconds and the buckets must have an entry for each of p_handlers, '
                                     'and none below zero or above all measure');
    ELSIF v_most > (SELECT count(DISTINCT t.handler COLLATE "C") FROM unnest(p_handlers) AS t (handler)) THEN
        PERFORM core.refuse_argument('p_handlers must name each handler once');
    ELSIF (p_generation = 0 OR EXISTS (SELECT FROM core.deployments d WHERE d.generation = p_generation)
           OR EXISTS (SELECT FROM core.workers w WHERE w.generation = p_generation)) IS NOT TRUE THEN
        PERFORM core.refuse_argument('p_generation must be one of a deployment or of a worker',
                                     'Call worker_beat before, as the library does.');
    END IF;
    INSERT INTO core.rollup_reports (handler_name, generation, lost_lease,
                                     handler_buckets, handler_seconds, outbox_buckets, outbox_seconds)
    SELECT t.handler, p_generation, t.lost,
           p_handler_buckets[(t.n - 1) * v_buckets + 1 : t.n * v_buckets], t.handler_seconds,
           p_outbox_buckets[(t.n - 1) * v_buckets + 1 : t.n * v_buckets], t.outbox_seconds
    FROM unnest(p_handlers, p_lost, p_handler_seconds, p_outbox_seconds) WITH ORDINALITY
         AS t (handler, lost, handler_seconds, outbox_seconds, n);
END
$$;

-- rollup_lag: how far folding is behind: lines of the journal, how old the oldest of them is, and the journal's size. Of
-- a large journal it reads the beginning, and at most 100000 lines.
CREATE OR REPLACE FUNCTION core.rollup_lag()
RETURNS TABLE (lines int, seconds float8, bytes bigint)
LANGUAGE sql STABLE SECURITY DEFINER
SET search_path = pg_catalog, pg_temp SET jit = off
AS $$
    SELECT count(*)::int, greatest(0, coalesce(extract(epoch FROM now() - min(j.counted_at)), 0))::float8,
           pg_relation_size('core.rollup_journal')
    FROM (SELECT x.counted_at FROM core.rollup_journal x WHERE x.ctid < '(8192,0)'::tid LIMIT 100000) j
$$;

-- rollup_writer: the number under which this transaction may add to the roll-up without waiting for any other: 0 for one
-- at a time, which has locked the row that stands for it, and the session's own for the others.
CREATE OR REPLACE FUNCTION core.rollup_writer()
RETURNS int
LANGUAGE plpgsql
SET search_path = pg_catalog, pg_temp
AS $$
BEGIN
    PERFORM FROM core.rollup_turn t WHERE t.one FOR UPDATE SKIP LOCKED;
    RETURN CASE WHEN FOUND THEN 0 ELSE pg_backend_pid() END;
END
$$;

-- rollup_fold: moves up to p_most lines of the journal, and as many reports, into the roll-up; how many. One session at
-- a time does: for the others there is nothing to do, unless the journal shows that it does not. Then they fold as well,
-- into lines of their own, and leave out what it has locked. So no session can keep the others from folding, nor can a
-- line: a name that is too long for an index is counted under its beginning.
CREATE OR REPLACE FUNCTION core.rollup_fold(p_most int)
RETURNS int
LANGUAGE plpgsql SECURITY DEFINER
SET search_path = pg_catalog, pg_temp SET jit = off SET lock_timeout = '1s'
AS $$
DECLARE
    v_writer   int;
    v_folded   int;
    v_reported int := 0;
    v_report   core.rollup_reports;
BEGIN
    IF (p_most BETWEEN 1 AND 1000000) IS NOT TRUE THEN
        PERFORM core.refuse_argument('p_most must be 1 to 1000000');
    END IF;
    v_writer := core.rollup_writer();
    IF v_writer <> 0 AND (SELECT l.seconds FROM core.rollup_lag() l) < 30 THEN
        RETURN 0;
    END IF;
    WITH taken AS MATERIALIZED (
        DELETE FROM core.rollup_journal j
        WHERE j.ctid = ANY (ARRAY(SELECT x.ctid FROM core.rollup_journal x LIMIT p_most FOR UPDATE SKIP LOCKED))
        RETURNING j.*),
    folded AS (
        INSERT INTO core.rollup AS r (period_start, handler_name, generation, writer, begun, delivered, duplicate, retried,
                                      snoozed, failed, archived, expired, cancelled, released)
        SELECT date_trunc('minute', t.counted_at, 'UTC'),
               CASE WHEN octet_length(t.handler_name) <= 1000 THEN t.handler_name ELSE left(t.handler_name, 200) || '...' END,
               t.generation, v_writer,
               coalesce(sum(t.n) FILTER (WHERE t.outcome = 'begun'), 0),
               coalesce(sum(t.n) FILTER (WHERE t.outcome = 'delivered'), 0),
               coalesce(sum(t.n) FILTER (WHERE t.outcome = 'duplicate'), 0),
               coalesce(sum(t.n) FILTER (WHERE t.outcome = 'retried'), 0),
               coalesce(sum(t.n) FILTER (WHERE t.outcome = 'snoozed'), 0),
               coalesce(sum(t.n) FILTER (WHERE t.outcome IN ('failed', 'archived')), 0),
               coalesce(sum(t.n) FILTER (WHERE t.outcome = 'archived'), 0),
               coalesce(sum(t.n) FILTER (WHERE t.outcome = 'expired'), 0),
               coalesce(sum(t.n) FILTER (WHERE t.outcome = 'cancelled'), 0),
               coalesce(sum(t.n) FILTER (WHERE t.outcome = 'released'), 0)
        FROM taken t
        GROUP BY 1, 2, 3
        ON CONFLICT (period_start, handler_name, generation, hourly, writer) DO UPDATE SET
            begun = r.begun + EXCLUDED.begun, delivered = r.delivered + EXCLUDED.delivered,
            duplicate = r.duplicate + EXCLUDED.duplicate, retried = r.retried + EXCLUDED.retried,
            snoozed = r.snoozed + EXCLUDED.snoozed, failed = r.failed + EXCLUDED.failed,
            archived = r.archived + EXCLUDED.archived, expired = r.expired + EXCLUDED.expired,
            cancelled = r.cancelled + EXCLUDED.cancelled, released = r.released + EXCLUDED.released)
    SELECT count(*)::int INTO v_folded FROM taken;
    FOR v_report IN
        DELETE FROM core.rollup_reports j
        WHERE j.ctid = ANY (ARRAY(SELECT x.ctid FROM core.rollup_reports x LIMIT p_most FOR UPDATE SKIP LOCKED))
        RETURNING j.*
    LOOP
        INSERT INTO core.rollup AS r (period_start, handler_name, generation, writer, lost_lease,
                                      handler_buckets, handler_seconds, outbox_buckets, outbox_seconds)
        VALUES (date_trunc('minute', v_report.counted_at, 'UTC'), v_report.handler_name, v_report.generation, v_writer,
                v_report.lost_lease, v_report.handler_buckets, v_report.handler_seconds,
                v_report.outbox_buckets, v_report.outbox_seconds)
        ON CONFLICT (period_start, handler_name, generation, hourly, writer) DO UPDATE SET
            lost_lease = r.lost_lease + EXCLUDED.lost_lease,
            handler_buckets = core.add_buckets(r.handler_buckets, EXCLUDED.handler_buckets),
            handler_seconds = r.handler_seconds + EXCLUDED.handler_seconds,
            outbox_buckets = core.add_buckets(r.outbox_buckets, EXCLUDED.outbox_buckets),
            outbox_seconds = r.outbox_seconds + EXCLUDED.outbox_seconds;
        v_reported := v_reported + 1;
    END LOOP;
    RETURN greatest(v_folded, v_reported);
END
$$;

-- sweep_rollup: deletes what was kept as long as its policy says, and adds up the minutes of a day ago to hours, at most
-- p_limit rows of each. Says how many it took, and whether there may be more.
CREATE OR REPLACE FUNCTION core.sweep_rollup(p_limit int, p_actor text DEFAULT NULL, p_reason text DEFAULT NULL)
RETURNS TABLE (swept int, more boolean)
LANGUAGE plpgsql SECURITY DEFINER
SET search_path = pg_catalog, pg_temp SET jit = off SET lock_timeout = '1s'
SET enable_seqscan = off SET enable_bitmapscan = off SET enable_hashjoin = off SET enable_mergejoin = off
AS $$
DECLARE
    v_policy core.retention_policies := core.retention_policy('rollup', '');
    v_before timestamptz := core.days_ago(v_policy.active_ttl_days + v_policy.tombstoned_grace_days);
    v_limit  int := least(greatest(p_limit, 1), 5000);
    v_writer int := core.rollup_writer();
    v_minute core.rollup;
    v_folded int := 0;
BEGIN
    PERFORM core.require_operator(p_actor);
    DELETE FROM core.rollup r
    WHERE r.ctid = ANY (ARRAY(
        SELECT x.ctid FROM core.rollup x
        WHERE x.period_start < v_before
        ORDER BY x.period_start LIMIT v_limit
        FOR UPDATE SKIP LOCKED));
    GET DIAGNOSTICS swept = ROW_COUNT;
    FOR v_minute IN
        DELETE FROM core.rollup r
        WHERE r.ctid = ANY (ARRAY(
            SELECT x.ctid FROM core.rollup x
            WHERE NOT x.hourly AND x.period_start < date_trunc('hour', now() - interval '1 day', 'UTC')
            ORDER BY x.period_start LIMIT v_limit
            FOR UPDATE SKIP LOCKED))
        RETURNING r.*
    LOOP
        v_minute.period_start := date_trunc('hour', v_minute.period_start, 'UTC');
        v_minute.hourly := true;
        v_minute.writer := v_writer;
        INSERT INTO core.rollup AS r SELECT v_minute.*
        ON CONFLICT (period_start, handler_name, generation, hourly, writer) DO UPDATE SET
            begun = r.begun + EXCLUDED.begun, delivered = r.delivered + EXCLUDED.delivered,
            duplicate = r.duplicate + EXCLUDED.duplicate, retried = r.retried + EXCLUDED.retried,
            snoozed = r.snoozed + EXCLUDED.snoozed, failed = r.failed + EXCLUDED.failed,
            archived = r.archived + EXCLUDED.archived, expired = r.expired + EXCLUDED.expired,
            cancelled = r.cancelled + EXCLUDED.cancelled, released = r.released + EXCLUDED.released,
            lost_lease = r.lost_lease + EXCLUDED.lost_lease,
            handler_buckets = core.add_buckets(r.handler_buckets, EXCLUDED.handler_buckets),
            handler_seconds = r.handler_seconds + EXCLUDED.handler_seconds,
            outbox_buckets = core.add_buckets(r.outbox_buckets, EXCLUDED.outbox_buckets),
            outbox_seconds = r.outbox_seconds + EXCLUDED.outbox_seconds;
        v_folded := v_folded + 1;
    END LOOP;
    more := swept = v_limit OR v_folded = v_limit;
    PERFORM core.audit_sweep(p_actor, p_reason, 'rollup', '', swept);
    RETURN NEXT;
END
$$;
