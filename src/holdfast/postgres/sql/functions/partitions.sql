-- Partitions of core.outbox: by range of the id, whose first 48 bits are the time at which it was made. An operator asks for
-- them (postgres/schema/partitions.py calls the functions in order), and every other function works on both kinds of table.
--
--   outbox_first       the table as it was, with everything before a bound a few days after the conversion
--   outbox_p20260105   a day or a week, from that date on
--   outbox_default     what no other holds: ids of clocks that are wrong, and what was kept of partitions that were dropped
--
-- What has to be done is read from the catalogs, never from a note of what was done: a session that dies leaves a table
-- that works, and the next one goes on. Every function waits for a lock for a second at most, and gives up: those who queue
-- behind it wait as long.

-- --- ids and times -----------------------------------------------------------------------------------------------

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

-- --- what is there -----------------------------------------------------------------------------------------------

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

-- partitions_bound: the end of what outbox_first will hold, while a conversion is under way.
CREATE OR REPLACE FUNCTION core.partitions_bound() RETURNS timestamptz
LANGUAGE plpgsql STABLE SECURITY DEFINER
SET search_path = pg_catalog, pg_temp
AS $$
BEGIN
    RETURN (SELECT core.id_time(substring(pg_get_constraintdef(k.oid) FROM '[0-9a-f]{8}-[0-9a-f-]{27}')::uuid)
            FROM pg_constraint k WHERE k.conrelid = to_regclass('core.outbox') AND k.conname = 'outbox_before');
END
$$;

-- partitions_obstacles: what keeps the table from becoming, or ceasing to be, partitioned: objects of others that would go on
-- meaning the table as it was, and ids that lie beyond the bound.
CREATE OR REPLACE FUNCTION core.partitions_obstacles(p_bound timestamptz)
RETURNS TABLE (problem text, remedy text)
LANGUAGE plpgsql STABLE SECURITY DEFINER
SET search_path = pg_catalog, pg_temp SET enable_seqscan = off
AS $$
DECLARE
    v_table oid := to_regclass('core.outbox');
    v_ids   bigint;
BEGIN
    RETURN QUERY
    SELECT DISTINCT format('the view %s reads core.outbox, and is not Holdfast''s', v.oid::regclass), 'drop it, and make it again afterwards'
    FROM pg_depend d
    JOIN pg_rewrite r ON r.oid = d.objid
    JOIN pg_class v ON v.oid = r.ev_class
    JOIN pg_class t ON t.oid = v_table
    WHERE d.classid = 'pg_rewrite'::regclass AND d.refclassid = 'pg_class'::regclass AND d.refobjid = v_table
      AND v.oid <> v_table AND (v.relnamespace <> t.relnamespace OR v.relowner <> t.relowner OR v.relkind <> 'v');
    RETURN QUERY
    SELECT format('the foreign key %I of %s refers to core.outbox', k.conname, k.conrelid::regclass), 'drop it: retention deletes rows as well'
    FROM pg_constraint k WHERE k.contype = 'f' AND k.confrelid = v_table AND k.conparentid = 0;
    RETURN QUERY
    SELECT format('core.outbox is in the publication %I', p.pubname),
           format('ALTER PUBLICATION %I DROP TABLE core.outbox; and add it again afterwards', p.pubname)
    FROM pg_publication_rel r JOIN pg_publication p ON p.oid = r.prpubid WHERE r.prrelid = v_table;
    RETURN QUERY
    SELECT format('the trigger %I of core.outbox is not Holdfast''s', t.tgname), 'drop it, and make it again afterwards'
    FROM pg_trigger t
    WHERE t.tgrelid = v_table AND NOT t.tgisinternal
      AND t.tgname NOT IN ('outbox_fill', 'outbox_source', 'outbox_changed', 'outbox_bell');
    IF p_bound IS NOT NULL THEN
        SELECT count(*) INTO v_ids
        FROM (SELECT FROM core.outbox o WHERE o.id >= core.first_id(p_bound) LIMIT 100000) o;
        IF v_ids > 0 THEN
            RETURN QUERY
            SELECT format('%s%s rows have ids of a later time than %s, such as version 4 ids, which have none', v_ids,
                          CASE WHEN v_ids = 100000 THEN ' or more' ELSE '' END, p_bound::date),
                   'let writers leave the id out, or make it of version 7; wait until retention has taken these rows';
        END IF;
    END IF;
END
$$;

-- --- the table, with all that belongs to it ------------------------------------------------------------------------

-- outbox_definition: what core.outbox has beside its columns and rows, as statements that make it again for a table of that
-- name: keys, indexes, triggers, grants, and the views that read it.
CREATE OR REPLACE FUNCTION core.outbox_definition() RETURNS jsonb
LANGUAGE plpgsql STABLE SECURITY DEFINER
SET search_path = pg_catalog, pg_temp
AS $$
DECLARE
    v_table oid := 'core.outbox'::regclass;
BEGIN
    RETURN jsonb_build_object(
        'keys', (SELECT coalesce(jsonb_agg(jsonb_build_object('index', k.conindid::bigint, 'name', k.conname, 'text', format(
                            'ALTER TABLE core.outbox ADD CONSTRAINT %I %s', k.conname, pg_get_constraintdef(k.oid)))), '[]')
                 FROM pg_constraint k
                 WHERE k.conrelid = v_table AND k.contype IN ('p', 'u', 'c') AND k.conname <> 'outbox_before'),
        'indexes', (SELECT coalesce(jsonb_agg(jsonb_build_object('index', i.indexrelid::bigint, 'name', c.relname,
                            'text', replace(pg_get_indexdef(i.indexrelid), ' ON ONLY ', ' ON '))), '[]')
                    FROM pg_index i JOIN pg_class c ON c.oid = i.indexrelid
                    WHERE i.indrelid = v_table AND NOT EXISTS (SELECT FROM pg_constraint k WHERE k.conindid = i.indexrelid)),
        'triggers', (SELECT coalesce(jsonb_agg(jsonb_build_object('name', t.tgname, 'enabled', t.tgenabled,
                            'text', core.bare_trigger(pg_get_triggerdef(t.oid))) ORDER BY t.tgname), '[]')
                     FROM pg_trigger t WHERE t.tgrelid = v_table AND NOT t.tgisinternal),
        'grants', (SELECT coalesce(jsonb_agg(format('GRANT %s ON core.outbox TO %s%s', g.what, CASE g.grantee WHEN 0 THEN 'PUBLIC'
                                           ELSE quote_ident(pg_get_userbyid(g.grantee)) END,
                                           CASE WHEN g.is_grantable THEN ' WITH GRANT OPTION' ELSE '' END)), '[]')
                   FROM (SELECT a.privilege_type AS what, a.grantee, a.is_grantable, c.relowner
                         FROM pg_class c CROSS JOIN LATERAL aclexplode(c.relacl) a WHERE c.oid = v_table
                         UNION ALL
                         SELECT format('%s (%s)', a.privilege_type, string_agg(quote_ident(t.attname), ', ')), a.grantee,
                                a.is_grantable, c.relowner
                         FROM pg_class c JOIN pg_attribute t ON t.attrelid = c.oid AND NOT t.attisdropped
                         CROSS JOIN LATERAL aclexplode(t.attacl) a WHERE c.oid = v_table
                         GROUP BY a.privilege_type, a.grantee, a.is_grantable, c.relowner) g
                   WHERE g.grantee <> g.relowner),
        'views', (SELECT coalesce(jsonb_agg(DISTINCT format('CREATE OR REPLACE VIEW core.%I %s AS %s', v.relname,
                            coalesce('WITH (' || array_to_string(v.reloptions, ', ') || ')', ''), pg_get_viewdef(v.oid))), '[]')
                  FROM pg_depend d JOIN pg_rewrite r ON r.oid = d.objid JOIN pg_class v ON v.oid = r.ev_class
                  WHERE d.classid = 'pg_rewrite'::regclass AND d.refclassid = 'pg_class'::regclass
                    AND d.refobjid = v_table AND v.oid <> v_table));
END
$$;

-- bare_trigger: the definition of a trigger without the condition that partitions_gather needs for a while.
CREATE OR REPLACE FUNCTION core.bare_trigger(p_definition text) RETURNS text
LANGUAGE sql IMMUTABLE PARALLEL SAFE
SET search_path = pg_catalog, pg_temp
AS $$
    SELECT regexp_replace(p_definition, 'WHEN \(+current_setting\(''holdfast[.]gathering''.* EXECUTE', 'EXECUTE')
$$;

-- outbox_dress: gives what was outbox_definition of the former core.outbox to the present one: triggers, grants and views. With
-- p_gathering the triggers do not fire for rows that partitions_gather moves.
CREATE OR REPLACE FUNCTION core.outbox_dress(p_definition jsonb, p_gathering boolean) RETURNS void
LANGUAGE plpgsql SECURITY DEFINER
SET search_path = pg_catalog, pg_temp SET lock_timeout = '1s'
AS $$
DECLARE
    v_trigger record;
    v_text    text;
BEGIN
    FOR v_trigger IN SELECT t.* FROM jsonb_to_recordset(p_definition -> 'triggers') AS t (name text, enabled text, text text) LOOP
        v_text := v_trigger.text;
        IF p_gathering AND strpos(v_text, ' WHEN ') = 0 THEN
            -- The owner's functions alone: a condition is looked at with the rights of who inserts.
            v_text := replace(v_text, 'FOR EACH ROW EXECUTE', format(
                'FOR EACH ROW WHEN (current_setting(''holdfast.gathering'', true) IS DISTINCT FROM ''on'' '
                'OR current_user <> %L) EXECUTE', current_user));
        END IF;
        EXECUTE v_text;
        IF v_trigger.enabled <> 'O' THEN
            EXECUTE format('ALTER TABLE core.outbox %s TRIGGER %I', CASE v_trigger.enabled WHEN 'D' THEN 'DISABLE'
                           WHEN 'R' THEN 'ENABLE REPLICA' ELSE 'ENABLE ALWAYS' END, v_trigger.name);
        END IF;
    END LOOP;
    FOR v_text IN SELECT jsonb_array_elements_text(p_definition -> 'grants')
                  UNION ALL SELECT jsonb_array_elements_text(p_definition -> 'views') LOOP
        EXECUTE v_text;
    END LOOP;
END
$$;

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

-- --- becoming partitioned ------------------------------------------------------------------------------------------

-- partitions_prepare: from now on nothing of p_bound or later is written to the plain table, so that it can be shown to end
-- there. A conversion that stops here must not be forgotten: see partitions_extend.
CREATE OR REPLACE FUNCTION core.partitions_prepare(p_every text, p_bound timestamptz) RETURNS void
LANGUAGE plpgsql SECURITY DEFINER
SET search_path = pg_catalog, pg_temp SET lock_timeout = '1s'
AS $$
BEGIN
    UPDATE core.partitioning p SET every = p_every WHERE p.one;
    ALTER TABLE core.outbox DROP CONSTRAINT IF EXISTS outbox_before;
    EXECUTE format('ALTER TABLE core.outbox ADD CONSTRAINT outbox_before CHECK (id < %L) NOT VALID', core.first_id(p_bound));
END
$$;

-- partitions_validate: reads the whole table, beside producers and workers, and shows that it ends before the bound.
CREATE OR REPLACE FUNCTION core.partitions_validate() RETURNS void
LANGUAGE plpgsql SECURITY DEFINER
SET search_path = pg_catalog, pg_temp SET lock_timeout = '1s'
AS $$
BEGIN
    ALTER TABLE core.outbox VALIDATE CONSTRAINT outbox_before;
END
$$;

-- partitions_abandon: gives up a conversion before the table was partitioned.
CREATE OR REPLACE FUNCTION core.partitions_abandon() RETURNS void
LANGUAGE plpgsql SECURITY DEFINER
SET search_path = pg_catalog, pg_temp SET lock_timeout = '1s'
AS $$
BEGIN
    ALTER TABLE core.outbox DROP CONSTRAINT IF EXISTS outbox_before;
END
$$;

-- partitions_swap: the table becomes the first partition of a new one of its name. Nothing is read or copied, because
-- outbox_before says what Postgres would look for. Sessions that wait for the table find the new one, and plan anew.
CREATE OR REPLACE FUNCTION core.partitions_swap() RETURNS void
LANGUAGE plpgsql SECURITY DEFINER
SET search_path = pg_catalog, pg_temp SET lock_timeout = '1s'
AS $$
DECLARE
    v_bound      uuid;
    v_definition jsonb;
    v_next       bigint;
    v_obstacle   record;
    v_text       text;
BEGIN
    LOCK TABLE core.outbox IN ACCESS EXCLUSIVE MODE;
    IF core.is_partitioned() THEN
        RETURN;
    END IF;
    FOR v_obstacle IN SELECT o.* FROM core.partitions_obstacles(NULL) o LOOP
        RAISE EXCEPTION '%', v_obstacle.problem USING ERRCODE = 'object_not_in_prerequisite_state', HINT = v_obstacle.remedy;
    END LOOP;
    v_bound := core.first_id(core.partitions_bound());
    v_definition := core.outbox_definition();
    SELECT s.last_value + s.is_called::int INTO v_next FROM core.outbox_seq_seq s;

    FOR v_text IN SELECT format('DROP TRIGGER %I ON core.outbox', t.name)
                  FROM jsonb_to_recordset(v_definition -> 'triggers') AS t (name text) LOOP
        EXECUTE v_text;
    END LOOP;
    ALTER TABLE core.outbox ALTER COLUMN seq DROP IDENTITY;
    ALTER TABLE core.outbox RENAME TO outbox_first;
    FOR v_text IN SELECT format('ALTER INDEX core.%I RENAME TO %I', i.name, 'outbox_first' || substr(i.name, 7))
                  FROM jsonb_to_recordset((v_definition -> 'keys') || (v_definition -> 'indexes'))
                       AS i (index bigint, name text) WHERE i.index > 0 LOOP
        EXECUTE v_text;
    END LOOP;
    CREATE TABLE core.outbox (LIKE core.outbox_first INCLUDING DEFAULTS INCLUDING GENERATED INCLUDING STORAGE
                              INCLUDING COMPRESSION INCLUDING COMMENTS) PARTITION BY RANGE (id);
    FOR v_text IN SELECT i.text FROM jsonb_to_recordset((v_definition -> 'keys') || (v_definition -> 'indexes'))
                                     AS i (text text) LOOP
        EXECUTE v_text;
    END LOOP;
    ALTER TABLE core.outbox ALTER COLUMN seq ADD GENERATED ALWAYS AS IDENTITY (SEQUENCE NAME core.outbox_seq_seq);
    PERFORM setval('core.outbox_seq_seq', v_next, false);
    EXECUTE format('ALTER TABLE core.outbox ATTACH PARTITION core.outbox_first FOR VALUES FROM (MINVALUE) TO (%L)', v_bound);
    ALTER TABLE core.outbox_first DROP CONSTRAINT outbox_before;
    PERFORM core.partition_make('outbox_default', 'outbox_first');
    ALTER TABLE core.outbox ATTACH PARTITION core.outbox_default DEFAULT;
    FOR v_text IN SELECT replace(replace(g.text, 'GRANT ', 'REVOKE '), 'core.outbox TO ', 'core.outbox_first FROM ')
                  FROM (SELECT replace(x, ' WITH GRANT OPTION', '') AS text
                        FROM jsonb_array_elements_text(v_definition -> 'grants') x) g LOOP
        EXECUTE v_text;
    END LOOP;
    PERFORM core.outbox_dress(v_definition, false);
END
$$;

-- --- being partitioned ---------------------------------------------------------------------------------------------

-- partitions_extend: makes the next partition, if it will be needed within two periods, and moves there what is of its time in
-- outbox_default. One in each call, and no row when nothing is to be done. Whoever comes first does it; the others
-- find it done.
-- Where outbox_default holds more rows of a period than can be moved in a moment, they stay there, and the next period is made.
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
    IF EXISTS (SELECT FROM core.clock_steps c
               WHERE c.step > interval '1 hour' AND c.seen_at BETWEEN now() - interval '7 days' AND now()) THEN
        RETURN;
    END IF;
    SELECT max(l.upper_at) INTO v_lower FROM core.partitions_list() l;
    v_lower := coalesce(v_lower, core.period_end(v_every, now()));
    v_until := now() + CASE v_every WHEN 'day' THEN interval '3 days' ELSE interval '14 days' END;
    WHILE v_lower < v_until LOOP
        -- Where nobody made any for long, one for all that is past.
        v_upper := greatest(core.period_end(v_every, v_lower),
                            core.period_end(v_every, now()) - 2 * ('1 ' || v_every)::interval);
        SELECT count(*) INTO v_rows
        FROM (SELECT FROM core.outbox_default d
              WHERE d.id >= core.first_id(v_lower) AND d.id < core.first_id(v_upper) LIMIT c_most + 1) d;
        EXIT WHEN v_rows <= c_most;
        v_lower := v_upper;
    END LOOP;
    IF v_lower >= v_until THEN
        RETURN;
    END IF;
    LOCK TABLE core.outbox_default IN ACCESS EXCLUSIVE MODE;
    name := 'outbox_p' || to_char(v_lower AT TIME ZONE 'UTC', 'YYYYMMDD');
    PERFORM core.partition_make(name, 'outbox_default');
    moved := core.partition_copy('outbox_default', name, NULL, core.first_id(v_lower), core.first_id(v_upper));
    EXECUTE format('ALTER TABLE core.outbox ATTACH PARTITION core.%I FOR VALUES FROM (%L) TO (%L)', name,
                   core.first_id(v_lower), core.first_id(v_upper));
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
    IF NOT FOUND OR NOT core.is_partitioned() OR EXISTS (
            SELECT FROM core.clock_steps c
            WHERE c.step > interval '1 hour' AND c.seen_at BETWEEN now() - interval '7 days' AND now()) THEN
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

-- --- becoming plain again ------------------------------------------------------------------------------------------

-- partitions_unswap: the largest partition becomes the table, and the others inherit from it, so that every statement goes on
-- seeing all rows. Small ones are emptied into it at once.
CREATE OR REPLACE FUNCTION core.partitions_unswap() RETURNS void
LANGUAGE plpgsql SECURITY DEFINER
SET search_path = pg_catalog, pg_temp SET lock_timeout = '1s'
AS $$
DECLARE
    c_most       CONSTANT int := 5000;
    v_definition jsonb;
    v_obstacle   record;
    v_parts      text[];
    v_part       text;
    v_names      jsonb;
    v_text       text;
    v_root       text;
    v_next       bigint;
    v_rows       bigint;
BEGIN
    PERFORM FROM core.partitioning p WHERE p.one FOR UPDATE;
    LOCK TABLE core.outbox IN ACCESS EXCLUSIVE MODE;
    IF NOT core.is_partitioned() THEN
        RETURN;
    END IF;
    FOR v_obstacle IN SELECT o.* FROM core.partitions_obstacles(NULL) o LOOP
        RAISE EXCEPTION '%', v_obstacle.problem USING ERRCODE = 'object_not_in_prerequisite_state', HINT = v_obstacle.remedy;
    END LOOP;
    v_definition := core.outbox_definition();
    SELECT s.last_value + s.is_called::int INTO v_next FROM core.outbox_seq_seq s;
    SELECT l.name INTO v_root FROM core.partitions_list() l ORDER BY pg_relation_size(l.table_id) DESC, l.name LIMIT 1;
    -- The names that the indexes of the new table will have, by those they have now.
    SELECT jsonb_object_agg(c.relname, i.name) INTO v_names
    FROM jsonb_to_recordset((v_definition -> 'keys') || (v_definition -> 'indexes')) AS i (index bigint, name text)
    JOIN pg_inherits h ON h.inhparent = i.index::oid
    JOIN pg_class c ON c.oid = h.inhrelid
    JOIN pg_index x ON x.indexrelid = c.oid AND x.indrelid = format('core.%I', v_root)::regclass;

    v_parts := ARRAY(SELECT l.name FROM core.partitions_list() l);
    FOREACH v_part IN ARRAY v_parts LOOP
        EXECUTE format('ALTER TABLE core.outbox DETACH PARTITION core.%I', v_part);
    END LOOP;
    ALTER TABLE core.outbox RENAME TO outbox_parent;
    FOR v_text IN SELECT format('ALTER INDEX core.%I RENAME TO %I', n.value, 'outbox_parent' || substr(n.value, 7))
                  FROM jsonb_each_text(v_names) n LOOP
        EXECUTE v_text;
    END LOOP;
    ALTER TABLE core.outbox_parent ALTER COLUMN seq DROP IDENTITY;
    EXECUTE format('ALTER TABLE core.%I RENAME TO outbox', v_root);
    FOR v_text IN SELECT format('ALTER INDEX core.%I RENAME TO %I', n.key, n.value) FROM jsonb_each_text(v_names) n LOOP
        EXECUTE v_text;
    END LOOP;
    ALTER TABLE core.outbox ALTER COLUMN seq ADD GENERATED ALWAYS AS IDENTITY (SEQUENCE NAME core.outbox_seq_seq);
    PERFORM setval('core.outbox_seq_seq', v_next, false);
    FOREACH v_part IN ARRAY array_remove(v_parts, v_root) LOOP
        EXECUTE format('SELECT count(*) FROM (SELECT FROM core.%I LIMIT $1) x', v_part) INTO v_rows USING c_most + 1;
        IF v_rows > c_most THEN
            EXECUTE format('ALTER TABLE core.%I INHERIT core.outbox', v_part);
        ELSE
            PERFORM core.partition_copy(v_part, 'outbox');
            EXECUTE format('DROP TABLE core.%I', v_part);
        END IF;
    END LOOP;
    PERFORM core.outbox_dress(v_definition, EXISTS (SELECT FROM core.partitions_list()));
    DROP TABLE core.outbox_parent;
END
$$;

-- partitions_gather: moves at most p_limit rows from a former partition into the table, and drops it when it is empty. Rows in
-- flight stay until they are settled. Returns how many it moved, and what is left to do: 'rows', or 'none' at the end.
CREATE OR REPLACE FUNCTION core.partitions_gather(p_limit int)
RETURNS TABLE (moved bigint, todo text)
LANGUAGE plpgsql SECURITY DEFINER
SET search_path = pg_catalog, pg_temp SET lock_timeout = '1s' SET jit = off
AS $$
DECLARE
    v_name    text;
    v_channel text;
    v_ids     uuid[];
    v_filled  boolean;
BEGIN
    SELECT l.name INTO v_name FROM core.partitions_list() l WHERE l.kind = 'left' ORDER BY l.name LIMIT 1;
    moved := 0;
    IF v_name IS NOT NULL THEN
        todo := 'rows';
        EXECUTE format('SELECT ARRAY(SELECT x.id FROM ONLY core.%I x WHERE x.status <> ''in_flight'' LIMIT $1 FOR UPDATE SKIP LOCKED)', v_name)
        INTO v_ids USING least(greatest(p_limit, 1), 5000);
        -- Workers look again: a claim may have passed over a row while it was locked here.
        FOR v_channel IN EXECUTE format('SELECT DISTINCT x.channel FROM ONLY core.%I x WHERE x.id = ANY ($1) '
                                        'AND x.settled_at IS NULL LIMIT 100', v_name) USING v_ids LOOP
            PERFORM pg_notify(v_channel, 'rescan');
        END LOOP;
        PERFORM set_config('holdfast.gathering', 'on', true);
        moved := core.partition_copy(v_name, 'outbox', v_ids);
        PERFORM set_config('holdfast.gathering', '', true);
        EXECUTE format('SELECT EXISTS (SELECT FROM ONLY core.%I)', v_name) INTO v_filled;
        IF NOT v_filled THEN
            EXECUTE format('LOCK TABLE core.%I IN ACCESS EXCLUSIVE MODE', v_name);
            EXECUTE format('SELECT EXISTS (SELECT FROM ONLY core.%I)', v_name) INTO v_filled;
            IF NOT v_filled THEN
                EXECUTE format('DROP TABLE core.%I', v_name);
            END IF;
        END IF;
    ELSE
        todo := 'none';
    END IF;
    RETURN NEXT;
END
$$;

-- partitions_settle: the last step back: the triggers as they were before.
CREATE OR REPLACE FUNCTION core.partitions_settle() RETURNS void
LANGUAGE plpgsql SECURITY DEFINER
SET search_path = pg_catalog, pg_temp SET lock_timeout = '1s'
AS $$
DECLARE
    v_definition jsonb;
    v_text       text;
BEGIN
    LOCK TABLE core.outbox IN ACCESS EXCLUSIVE MODE;
    v_definition := jsonb_build_object('triggers', core.outbox_definition() -> 'triggers');
    FOR v_text IN SELECT format('DROP TRIGGER %I ON core.outbox', t.name)
                  FROM jsonb_to_recordset(v_definition -> 'triggers') AS t (name text) LOOP
        EXECUTE v_text;
    END LOOP;
    PERFORM core.outbox_dress(v_definition, false);
END
$$;
