-- Partitions of core.outbox: by range of the id, whose first 48 bits are the time at which it was made. An operator asks for
-- them (partition_conversion.sql), and every other function works on both kinds of table.
--
--   outbox_first       the table as it was, with everything before a bound a few days after the conversion
--   outbox_p20260105   a day or a week, from that date on
--   outbox_default     what no other holds: ids of clocks that are wrong, and what was kept of partitions that were dropped
--
-- Every function waits for a lock for a second at most, and gives up: those who queue behind it wait as long.

-- --- ids and times ------------------------------------------------------------------------------------------------

-- first_id: the id below which every one is of an earlier time.
CREATE OR REPLACE FUNCTION core.first_id(p_at timestamptz) RETURNS uuid
LANGUAGE sql IMMUTABLE PARALLEL SAFE
SET search_path = pg_catalog, pg_temp
AS $$
    SELECT rpad(lpad(to_hex(floor(extract(epoch FROM p_at) * 1000)::bigint), 12, '0'), 32, '0')::uuid
$$;

-- id_time: the time in an id.
CREATE OR REPLACE FUNCTION core.id_time(p_id uuid) RETURNS timestamptz
LANGUAGE sql IMMUTABLE PARALLEL SAFE
SET search_path = pg_catalog, pg_temp
AS $$
    SELECT to_timestamp(('x' || substr(replace(p_id::text, '-', ''), 1, 12))::bit(48)::bigint / 1000.0)
$$;

-- period_end: where the period that holds a time ends, in UTC.
CREATE OR REPLACE FUNCTION core.period_end(p_every text, p_at timestamptz) RETURNS timestamptz
LANGUAGE sql IMMUTABLE PARALLEL SAFE
SET search_path = pg_catalog, pg_temp
AS $$
    SELECT (date_trunc(p_every, p_at AT TIME ZONE 'UTC') + ('1 ' || p_every)::interval) AT TIME ZONE 'UTC'
$$;

-- --- what is there ------------------------------------------------------------------------------------------------

-- is_partitioned: whether core.outbox is.
CREATE OR REPLACE FUNCTION core.is_partitioned() RETURNS boolean
LANGUAGE plpgsql STABLE SECURITY DEFINER
SET search_path = pg_catalog, pg_temp
AS $$
BEGIN
    RETURN EXISTS (SELECT FROM pg_class c WHERE c.oid = to_regclass('core.outbox') AND c.relkind = 'p');
END
$$;

-- partitions_list: the partitions of the outbox with their bounds, the oldest first. 'left' is one that an unfinished
-- `partitions disable` has still to empty.
CREATE OR REPLACE FUNCTION core.partitions_list()
RETURNS TABLE (name text, kind text, lower_at timestamptz, upper_at timestamptz, lower_id uuid, upper_id uuid, table_id oid)
LANGUAGE plpgsql STABLE SECURITY DEFINER
SET search_path = pg_catalog, pg_temp
AS $$
BEGIN
    RETURN QUERY
    SELECT c.relname::text,
           CASE WHEN NOT c.relispartition THEN 'left' WHEN b.bound = 'DEFAULT' THEN 'default'
                WHEN b.low IS NULL THEN 'first' ELSE 'period' END,
           core.id_time(b.low), core.id_time(b.high), b.low, b.high, c.oid
    FROM pg_inherits i
    JOIN pg_class c ON c.oid = i.inhrelid
    CROSS JOIN LATERAL (SELECT pg_get_expr(c.relpartbound, c.oid) AS bound) e
    CROSS JOIN LATERAL (SELECT e.bound, substring(e.bound FROM 'FROM \(''([0-9a-f-]{36})''\)')::uuid AS low,
                               substring(e.bound FROM 'TO \(''([0-9a-f-]{36})''\)')::uuid AS high) b
    WHERE i.inhparent = to_regclass('core.outbox')
    ORDER BY b.high NULLS LAST, c.relname;
END
$$;

-- --- tables and rows ----------------------------------------------------------------------------------------------

-- partition_make: an empty table like core.outbox, with the storage options of p_like, that is no part of it yet.
CREATE OR REPLACE FUNCTION core.partition_make(p_name text, p_like text) RETURNS void
LANGUAGE plpgsql SECURITY DEFINER
SET search_path = pg_catalog, pg_temp
AS $$
BEGIN
    EXECUTE format('CREATE TABLE core.%I (LIKE core.outbox INCLUDING DEFAULTS INCLUDING GENERATED INCLUDING CONSTRAINTS '
                   'INCLUDING STORAGE INCLUDING COMPRESSION) %s', p_name,
                   (SELECT 'WITH (' || array_to_string(c.reloptions, ', ') || ')' FROM pg_class c
                    WHERE c.oid = format('core.%I', p_like)::regclass));
END
$$;

-- partition_copy: rows of one table, which are deleted there, into another that is not part of the outbox, so that no trigger
-- fires: those of the ids, or from p_from until p_to, or all. Returns how many.
CREATE OR REPLACE FUNCTION core.partition_copy(
    p_source text, p_target text, p_ids uuid[] DEFAULT NULL, p_from uuid DEFAULT NULL, p_to uuid DEFAULT NULL)
RETURNS bigint
LANGUAGE plpgsql SECURITY DEFINER
SET search_path = pg_catalog, pg_temp SET jit = off
AS $$
DECLARE
    v_columns text := (SELECT string_agg(quote_ident(a.attname), ', ' ORDER BY a.attnum) FROM pg_attribute a
                       WHERE a.attrelid = 'core.outbox'::regclass AND a.attnum > 0 AND NOT a.attisdropped
                         AND a.attgenerated = '');
    v_rows    bigint;
BEGIN
    EXECUTE format('WITH moved AS (DELETE FROM ONLY core.%I x WHERE %s RETURNING x.*) '
                   'INSERT INTO core.%I (%s) OVERRIDING SYSTEM VALUE SELECT %s FROM moved',
                   p_source, CASE WHEN p_ids IS NOT NULL THEN 'x.id = ANY ($1)'
                                  WHEN p_from IS NOT NULL THEN 'x.id >= $2 AND x.id < $3' ELSE 'true' END,
                   p_target, v_columns, v_columns) USING p_ids, p_from, p_to;
    GET DIAGNOSTICS v_rows = ROW_COUNT;
    RETURN v_rows;
END
$$;

-- --- being partitioned --------------------------------------------------------------------------------------------

-- partitions_extend: makes the next partition, if it will be needed within two periods, and moves there what is of its time in
-- outbox_default. One in each call, and no row when nothing is to be done. Whoever comes first does it; the others
-- find it done.
-- Where outbox_default holds more rows of a period than can be moved in a moment, they stay there, and the next period is made;
-- one that has not begun is made in several parts instead, each with as many rows as can be moved. Such rows have ids that
-- were dated ahead, and whoever writes them must not keep a partition from being there when its time comes.
-- For a week after the clock was set forward by more than an hour none is made: publishing does without.
-- On a plain table it takes back a conversion that was left alone, a day before it would refuse events.
CREATE OR REPLACE FUNCTION core.partitions_extend()
RETURNS TABLE (name text, moved bigint)
LANGUAGE plpgsql SECURITY DEFINER
SET search_path = pg_catalog, pg_temp SET lock_timeout = '500ms' SET jit = off
AS $$
DECLARE
    c_most  CONSTANT int := 20000;
    v_every text;
    v_lower timestamptz;
    v_upper timestamptz;
    v_until timestamptz;
    v_low   uuid;
    v_high  uuid;
    v_rows  bigint;
BEGIN
    SELECT p.every INTO v_every FROM core.partitioning p WHERE p.one FOR UPDATE SKIP LOCKED;
    IF NOT FOUND THEN
        RETURN;
    END IF;
    IF NOT core.is_partitioned() THEN
        IF core.partitions_bound() < now() + interval '1 day' AND pg_try_advisory_xact_lock(
               hashtextextended(concat('holdfast migrate ', 'core'), 0::bigint)) THEN
            PERFORM core.partitions_abandon();
        END IF;
        RETURN;
    END IF;
    IF core.clock_jumped() THEN
        RETURN;
    END IF;
    SELECT l.upper_at, l.upper_id INTO v_lower, v_low FROM core.partitions_list() l
    WHERE l.upper_id IS NOT NULL ORDER BY l.upper_id DESC LIMIT 1;
    v_lower := coalesce(v_lower, core.period_end(v_every, now()));
    v_low := coalesce(v_low, core.first_id(v_lower));
    v_until := now() + CASE v_every WHEN 'day' THEN interval '3 days' ELSE interval '14 days' END;
    WHILE v_lower < v_until LOOP
        -- Where nobody made any for long, one for all that is past.
        v_upper := greatest(core.period_end(v_every, v_lower),
                            core.period_end(v_every, now()) - 2 * ('1 ' || v_every)::interval);
        v_high := core.first_id(v_upper);
        SELECT count(*) INTO v_rows
        FROM (SELECT FROM core.outbox_default d WHERE d.id >= v_low AND d.id < v_high LIMIT c_most + 1) d;
        EXIT WHEN v_rows <= c_most;
        IF v_lower > now() THEN
            v_high := (SELECT d.id FROM core.outbox_default d WHERE d.id >= v_low AND d.id < v_high
                       ORDER BY d.id OFFSET c_most LIMIT 1);
            EXIT;
        END IF;
        v_lower := v_upper;
        v_low := v_high;
    END LOOP;
    IF v_lower >= v_until THEN
        RETURN;
    END IF;
    LOCK TABLE core.outbox_default IN ACCESS EXCLUSIVE MODE;
    name := 'outbox_p' || to_char(v_lower AT TIME ZONE 'UTC', 'YYYYMMDD');
    WHILE to_regclass(format('core.%I', name)) IS NOT NULL LOOP
        name := split_part(name, '_', 1) || '_' || split_part(name, '_', 2) || '_'
                || coalesce(nullif(split_part(name, '_', 3), ''), '1')::int + 1;
    END LOOP;
    PERFORM core.partition_make(name, 'outbox_default');
    moved := core.partition_copy('outbox_default', name, NULL, v_low, v_high);
    EXECUTE format('ALTER TABLE core.outbox ATTACH PARTITION core.%I FOR VALUES FROM (%L) TO (%L)', name, v_low, v_high);
    RETURN NEXT;
END
$$;

-- partition_kept: the rows of a partition that retention does not delete yet, up to a limit: open and failed ones, those within
-- their days, those of classes of which something is kept for good, those of unfinished replay plans. By index, whatever
-- the size of the partition; only rows without contents are found by reading it, if there can be any.
CREATE OR REPLACE FUNCTION core.partition_kept(p_name text, p_limit int)
RETURNS uuid[]
LANGUAGE plpgsql STABLE SECURITY DEFINER
SET search_path = pg_catalog, pg_temp SET jit = off SET enable_seqscan = off SET enable_bitmapscan = off
AS $$
DECLARE
    v_kept    uuid[] := '{}';
    v_some    uuid[];
    v_step    text;
    v_set     text;
    v_class   text;
    v_classes int := 0;
    v_policy  core.retention_policies;
BEGIN
    FOREACH v_set IN ARRAY ARRAY['x.settled_at IS NULL AND x.ordering_key IS NULL',
                                 'x.settled_at IS NULL AND x.ordering_key IS NOT NULL',
                                 'x.failed_at IS NOT NULL AND x.deleted_at IS NULL'] LOOP
        EXECUTE format('SELECT ARRAY(SELECT x.id FROM ONLY core.%I x WHERE %s LIMIT $1)', p_name, v_set)
        INTO v_some USING p_limit;
        v_kept := v_kept || v_some;
    END LOOP;
    FOREACH v_step IN ARRAY '{delivered,tombstones,discarded}'::text[] LOOP
        v_set := CASE v_step
            WHEN 'delivered' THEN 'x.settled_at IS NOT NULL AND x.failed_at IS NULL AND x.deleted_at IS NULL'
            WHEN 'tombstones' THEN 'x.deleted_at IS NOT NULL AND x.failed_at IS NULL AND x.disposed_at IS NULL'
            ELSE 'x.deleted_at IS NOT NULL AND x.failed_at IS NOT NULL AND x.disposed_at IS NULL' END;
        v_class := '';
        LOOP
            EXECUTE format('SELECT x.content_class FROM ONLY core.%I x WHERE %s AND x.content_class > $1 '
                           'ORDER BY x.content_class LIMIT 1', p_name, v_set) INTO v_class USING v_class;
            v_classes := v_classes + 1;
            EXIT WHEN v_class IS NULL OR cardinality(v_kept) >= p_limit;
            IF v_classes > 1000 THEN  -- as many as their writers liked: such a partition is swept row by row
                RETURN array_fill(NULL::uuid, ARRAY[p_limit]);
            END IF;
            v_policy := core.retention_policy(v_step, v_class);
            EXECUTE format('SELECT ARRAY(SELECT x.id FROM ONLY core.%I x WHERE %s AND x.content_class = $1 AND %s LIMIT $4)',
                           p_name, v_set, CASE WHEN v_policy.disposal IS DISTINCT FROM 'HARD_DELETE' THEN 'true'
                               WHEN v_step = 'delivered' THEN 'x.settled_at >= $2'
                               WHEN v_step = 'tombstones' THEN 'x.deleted_at >= $3'
                               ELSE '(x.settled_at >= $2 OR x.deleted_at >= $3)' END)
            INTO v_some
            USING v_class, core.days_ago(v_policy.active_ttl_days + v_policy.tombstoned_grace_days),
                  core.days_ago(v_policy.tombstoned_grace_days), p_limit;
            v_kept := v_kept || v_some;
        END LOOP;
    END LOOP;
    IF EXISTS (SELECT FROM core.plans p WHERE p.finished_at IS NULL) THEN
        EXECUTE format('SELECT ARRAY(SELECT x.id FROM core.plan_rows r JOIN core.plans p ON p.id = r.plan_id '
                       'JOIN core.%I x ON x.id = r.row_id WHERE p.finished_at IS NULL LIMIT $1)', p_name)
        INTO v_some USING p_limit;
        v_kept := v_kept || v_some;
    END IF;
    IF (SELECT p.keeps_metadata FROM core.partitioning p WHERE p.one) THEN
        EXECUTE format('SELECT ARRAY(SELECT x.id FROM ONLY core.%I x WHERE x.disposed_at IS NOT NULL LIMIT $1)', p_name)
        INTO v_some USING p_limit;
        v_kept := v_kept || v_some;
    END IF;
    RETURN v_kept[1:p_limit];
END
$$;

-- partitions_drop: drops the oldest partition whose rows have all been kept long enough, but for a few, which move to
-- outbox_default. One in each call, and no row when there is none. With more than a few, it stays, and is swept row by row.
-- What is kept is looked at once more under the lock.
CREATE OR REPLACE FUNCTION core.partitions_drop()
RETURNS TABLE (name text, dropped bigint, kept bigint)
LANGUAGE plpgsql SECURITY DEFINER
SET search_path = pg_catalog, pg_temp SET lock_timeout = '500ms' SET jit = off
AS $$
DECLARE
    c_most CONSTANT int := 10000;
    v_kept uuid[];
BEGIN
    PERFORM FROM core.partitioning p WHERE p.one FOR UPDATE SKIP LOCKED;
    IF NOT FOUND OR NOT core.is_partitioned() OR core.clock_jumped() THEN
        RETURN;
    END IF;
    FOR name, dropped IN
        SELECT l.name, greatest(c.reltuples, 0)::bigint
        FROM core.partitions_list() l JOIN pg_class c ON c.oid = l.table_id
        WHERE l.upper_at < (SELECT core.days_ago(min(p.active_ttl_days + p.tombstoned_grace_days))
                            FROM core.retention_policies p WHERE p.entity = 'outbox_row')
    LOOP
        CONTINUE WHEN cardinality(core.partition_kept(name, c_most + 1)) > c_most;
        LOCK TABLE core.outbox IN ACCESS EXCLUSIVE MODE;
        v_kept := core.partition_kept(name, c_most + 1);
        CONTINUE WHEN cardinality(v_kept) > c_most;
        EXECUTE format('ALTER TABLE core.outbox DETACH PARTITION core.%I', name);
        kept := 0;
        IF cardinality(v_kept) > 0 THEN
            -- Outside the outbox for a moment, where no trigger takes them for new events.
            ALTER TABLE core.outbox DETACH PARTITION core.outbox_default;
            kept := core.partition_copy(name, 'outbox_default', v_kept);
            ALTER TABLE core.outbox ATTACH PARTITION core.outbox_default DEFAULT;
        END IF;
        EXECUTE format('DROP TABLE core.%I', name);
        dropped := greatest(dropped - kept, 0);
        RETURN NEXT;
        RETURN;
    END LOOP;
END
$$;
