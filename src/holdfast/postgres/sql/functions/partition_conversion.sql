-- From a plain core.outbox to a partitioned one, and back. postgres/schema/partitions.py calls the functions in order.
--
-- What has to be done is read from the catalogs, never from a note of what was done: a session that dies leaves a table
-- that works, and the next one goes on. Every function waits for a lock for a second at most, and gives up: those who queue
-- behind it wait as long.

-- --- what is there ------------------------------------------------------------------------------------------------

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

-- partitions_refuse: an error for the first obstacle that has come up since the operator was told of none.
CREATE OR REPLACE FUNCTION core.partitions_refuse() RETURNS void
LANGUAGE plpgsql SECURITY DEFINER
SET search_path = pg_catalog, pg_temp
AS $$
DECLARE
    v_obstacle record;
BEGIN
    FOR v_obstacle IN SELECT o.* FROM core.partitions_obstacles(NULL) o LOOP
        RAISE EXCEPTION '%', v_obstacle.problem USING ERRCODE = 'object_not_in_prerequisite_state', HINT = v_obstacle.remedy;
    END LOOP;
END
$$;

-- --- the table, with all that belongs to it -----------------------------------------------------------------------

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

-- --- becoming partitioned -----------------------------------------------------------------------------------------

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
    v_text       text;
BEGIN
    LOCK TABLE core.outbox IN ACCESS EXCLUSIVE MODE;
    IF core.is_partitioned() THEN
        RETURN;
    END IF;
    PERFORM core.partitions_refuse();
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

-- --- becoming plain again -----------------------------------------------------------------------------------------

-- partitions_unswap: the largest partition becomes the table, and the others inherit from it, so that every statement goes on
-- seeing all rows. Small ones are emptied into it at once.
CREATE OR REPLACE FUNCTION core.partitions_unswap() RETURNS void
LANGUAGE plpgsql SECURITY DEFINER
SET search_path = pg_catalog, pg_temp SET lock_timeout = '1s'
AS $$
DECLARE
    c_most       CONSTANT int := 5000;
    v_definition jsonb;
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
    PERFORM core.partitions_refuse();
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
            PERFORM core.wake(v_channel, 'rescan');
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
