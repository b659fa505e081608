-- What brings a test database back to where it was, in a millisecond or two: tables are looked at, and only those that a
-- test has written to are emptied or filled again. Deleting takes less time than TRUNCATE, which makes new files.

-- The transaction that has last brought the database back: what later ones have written is a test's.
CREATE TABLE holdfast_testing.state (since xid NOT NULL, catalogs bigint NOT NULL);

-- Which transaction has published which event: by it, the events of a request are found.
CREATE TABLE holdfast_testing.published (id uuid PRIMARY KEY, transaction_id xid8 NOT NULL);

CREATE FUNCTION holdfast_testing.note_published() RETURNS trigger
LANGUAGE plpgsql SECURITY DEFINER SET search_path = pg_catalog, pg_temp
AS $$
BEGIN
    INSERT INTO holdfast_testing.published VALUES (NEW.id, pg_current_xact_id()) ON CONFLICT DO NOTHING;
    RETURN NULL;
END
$$;

-- catalogs: how many relations, functions, triggers, constraints and defaults there are, but for temporary ones.
CREATE FUNCTION holdfast_testing.catalogs() RETURNS bigint
LANGUAGE sql STABLE SET search_path = pg_catalog, pg_temp
AS $$
    SELECT (SELECT count(*) FROM pg_class c WHERE c.oid >= 16384 AND c.relpersistence <> 't')
         + (SELECT count(*) FROM pg_proc p WHERE p.oid >= 16384) + (SELECT count(*) FROM pg_trigger t WHERE t.oid >= 16384)
         + (SELECT count(*) FROM pg_constraint c WHERE c.oid >= 16384) + (SELECT count(*) FROM pg_attrdef)
         + (SELECT count(*) FROM pg_namespace n WHERE n.oid >= 16384)
$$;

-- redefined: whether one of those was made or changed since then.
CREATE FUNCTION holdfast_testing.redefined(p_since xid) RETURNS boolean
LANGUAGE sql STABLE SET search_path = pg_catalog, pg_temp
AS $$
    SELECT EXISTS (SELECT FROM pg_class c
                   WHERE c.oid >= 16384 AND c.relpersistence <> 't' AND age(c.xmin) < age(p_since))
        OR EXISTS (SELECT FROM pg_proc p WHERE p.oid >= 16384 AND age(p.xmin) < age(p_since))
        OR EXISTS (SELECT FROM pg_trigger t WHERE t.oid >= 16384 AND age(t.xmin) < age(p_since))
        OR EXISTS (SELECT FROM pg_attrdef d WHERE age(d.xmin) < age(p_since))
$$;

-- keep: notes the database as it is now, and makes holdfast_testing.reset of it, which is as long as there are tables:
-- one plan for each, kept by the session that resets.
CREATE FUNCTION holdfast_testing.keep() RETURNS void
LANGUAGE plpgsql SET search_path = pg_catalog, pg_temp
AS $$
DECLARE
    found   record;
    v_rows  bigint;
    v_called boolean;
    v_columns text;
    v_steps text := '';
BEGIN
    FOR found IN
        SELECT c.oid, c.relkind, format('%I.%I', n.nspname, c.relname) AS name
        FROM pg_class c JOIN pg_namespace n ON n.oid = c.relnamespace
        WHERE c.relkind IN ('r', 'S') AND c.relpersistence <> 't'
          AND n.nspname NOT IN ('pg_catalog', 'information_schema') AND n.nspname NOT LIKE 'pg\_%'
          AND (n.nspname <> 'holdfast_testing' OR c.relname IN ('published', 'clock'))
        ORDER BY c.relkind, c.oid
    LOOP
        IF found.relkind = 'S' THEN
            EXECUTE format('SELECT s.last_value, s.is_called FROM %s s', found.name) INTO v_rows, v_called;
            v_steps := v_steps || format($step$
    IF (SELECT (s.last_value, s.is_called) IS DISTINCT FROM (%2$s::bigint, %3$L::boolean) FROM %1$s s) THEN
        PERFORM setval(%1$L::regclass, %2$s, %3$L);
    END IF;$step$, found.name, v_rows, v_called);
            CONTINUE;
        END IF;
        EXECUTE format('SELECT count(*) FROM %s', found.name) INTO v_rows;
        IF v_rows = 0 THEN
            v_steps := v_steps || format($step$
    IF EXISTS (SELECT FROM %1$s) THEN
        DELETE FROM ONLY %1$s;
    END IF;$step$, found.name);
            CONTINUE;
        END IF;
        EXECUTE format('CREATE TABLE holdfast_testing.%I AS TABLE %s', 'copy_' || found.oid, found.name);
        SELECT string_agg(quote_ident(a.attname), ', ' ORDER BY a.attnum) INTO v_columns
        FROM pg_attribute a
        WHERE a.attrelid = found.oid AND a.attnum > 0 AND NOT a.attisdropped AND a.attgenerated = '';
        v_steps := v_steps || format($step$
    IF (SELECT count(*) <> %3$s OR bool_or(age(t.xmin) < v_age) FROM ONLY %1$s t) THEN
        DELETE FROM ONLY %1$s;
        INSERT INTO %1$s (%4$s) OVERRIDING SYSTEM VALUE SELECT %4$s FROM holdfast_testing.%2$I;
    END IF;$step$, found.name, 'copy_' || found.oid, v_rows, v_columns);
    END LOOP;

    -- reset: returns false when the schema was changed, which only a new copy of the template mends.
    EXECUTE format($function$
CREATE OR REPLACE FUNCTION holdfast_testing.reset() RETURNS boolean
LANGUAGE plpgsql
SET search_path = pg_catalog, pg_temp SET session_replication_role = 'replica' SET jit = off
AS $reset$
#variable_conflict use_column
DECLARE
    v_age int := (SELECT age(s.since) FROM holdfast_testing.state s);
BEGIN
    IF (SELECT holdfast_testing.redefined(s.since) OR holdfast_testing.catalogs() <> s.catalogs
        FROM holdfast_testing.state s) THEN
        RETURN false;
    END IF;%s
    UPDATE holdfast_testing.state SET since = pg_current_xact_id()::text::xid;
    RETURN true;
END
$reset$
$function$, v_steps);
    DELETE FROM holdfast_testing.state;
    INSERT INTO holdfast_testing.state VALUES (pg_current_xact_id()::text::xid, holdfast_testing.catalogs());
END
$$;
