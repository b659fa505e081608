-- Refuses a schema in which somebody else may have left something that would run with the rights of the login that migrates:
-- a trigger on the ledger, a function that ours would call. Trusted are this login, holdfast_owner, superusers, and who is
-- named in holdfast.trusted_roles. Nothing of the schema is read or written before; ownership is read from the catalogue.
DO $$
DECLARE
    v_space   oid;
    v_owner   oid;
    v_trusted oid[];
    v_found   record;
BEGIN
    SELECT n.oid, n.nspowner INTO v_space, v_owner FROM pg_catalog.pg_namespace n WHERE n.nspname = 'core';
    IF v_space IS NULL THEN
        RETURN;
    END IF;
    v_trusted := ARRAY(
        SELECT r.oid FROM pg_catalog.pg_roles r
        WHERE r.rolsuper OR r.rolname IN (current_user, session_user, 'holdfast_owner')
           OR r.rolname = ANY (coalesce(nullif(pg_catalog.current_setting('holdfast.trusted_roles', true), ''), '{}')::text[]));
    -- The role pg_database_owner has one member, the owner of the database.
    v_trusted := v_trusted || ARRAY(
        SELECT r.oid FROM pg_catalog.pg_roles r, pg_catalog.pg_database d
        WHERE r.rolname = 'pg_database_owner' AND d.datname = pg_catalog.current_database() AND d.datdba = ANY (v_trusted));
    IF v_owner <> ALL (v_trusted) THEN
        RAISE EXCEPTION 'the schema % belongs to %, who could have put into it what would run with the rights of %',
                        'core', pg_catalog.quote_ident(pg_catalog.pg_get_userbyid(v_owner)),
                        pg_catalog.quote_ident(session_user)
            USING ERRCODE = 'HF001', HINT = pg_catalog.format(
                'run this as %1$s, or with --trusted-role %1$s if you trust it with your rights; else give Holdfast a schema of '
                'its own: --schema holdfast', pg_catalog.quote_ident(pg_catalog.pg_get_userbyid(v_owner)));
    END IF;

    -- Objects of every kind depend on their schema. What the first superuser owns has no entry in pg_shdepend.
    SELECT pg_catalog.pg_describe_object(d.classid, d.objid, 0) AS object,
           pg_catalog.quote_ident(pg_catalog.pg_get_userbyid(o.refobjid)) AS owner
    INTO v_found
    FROM pg_catalog.pg_depend d
    JOIN pg_catalog.pg_shdepend o ON o.classid = d.classid AND o.objid = d.objid AND o.deptype = 'o'
     AND o.dbid = (SELECT db.oid FROM pg_catalog.pg_database db WHERE db.datname = pg_catalog.current_database())
    WHERE d.refclassid = 'pg_catalog.pg_namespace'::pg_catalog.regclass AND d.refobjid = v_space AND d.deptype = 'n'
      AND o.refobjid <> ALL (v_trusted) AND o.refobjid <> v_owner
    ORDER BY d.classid, d.objid LIMIT 1;
    IF FOUND THEN
        RAISE EXCEPTION 'in the schema %, % belongs to %, and the schema to %', 'core', v_found.object, v_found.owner,
                        pg_catalog.quote_ident(pg_catalog.pg_get_userbyid(v_owner))
            USING ERRCODE = 'HF001', HINT = pg_catalog.format(
                'look at it, and drop it or move it to another schema; or run this with --trusted-role %s if you trust it with '
                'your rights', v_found.owner);
    END IF;

    -- Who has the privilege TRIGGER on a table may put one there without owning anything in the schema.
    SELECT pg_catalog.pg_describe_object('pg_catalog.pg_trigger'::pg_catalog.regclass, t.oid, 0) AS object,
           pg_catalog.quote_ident(pg_catalog.pg_get_userbyid(p.proowner)) AS owner
    INTO v_found
    FROM pg_catalog.pg_trigger t
    JOIN pg_catalog.pg_class c ON c.oid = t.tgrelid AND c.relnamespace = v_space
    JOIN pg_catalog.pg_proc p ON p.oid = t.tgfoid
    WHERE NOT t.tgisinternal AND p.proowner <> ALL (v_trusted) AND p.proowner <> v_owner
    ORDER BY t.oid LIMIT 1;
    IF FOUND THEN
        RAISE EXCEPTION '% calls a function that belongs to %', v_found.object, v_found.owner
            USING ERRCODE = 'HF001', HINT = pg_catalog.format(
                'look at it, and drop it; or run this with --trusted-role %s if you trust it with your rights', v_found.owner);
    END IF;

    -- The ledger and the contract are written by whoever migrates, and are plain tables, whoever owns them.
    SELECT c.relname AS name, found.what,
           pg_catalog.quote_ident(pg_catalog.pg_get_userbyid(c.relowner)) AS owner
    INTO v_found
    FROM pg_catalog.pg_class c
    CROSS JOIN LATERAL (SELECT CASE
        WHEN EXISTS (SELECT FROM pg_catalog.pg_trigger t WHERE t.tgrelid = c.oid AND NOT t.tgisinternal) THEN 'a trigger'
        WHEN EXISTS (SELECT FROM pg_catalog.pg_rewrite r WHERE r.ev_class = c.oid) THEN 'a rule'
        WHEN c.relrowsecurity THEN 'row security'
        WHEN EXISTS (SELECT FROM pg_catalog.pg_inherits i WHERE c.oid IN (i.inhrelid, i.inhparent)) THEN 'a parent or a child'
        WHEN EXISTS (SELECT FROM pg_catalog.pg_depend d
                     JOIN pg_catalog.pg_shdepend o ON o.classid = d.refclassid AND o.objid = d.refobjid AND o.deptype = 'o'
                      AND o.dbid = (SELECT db.oid FROM pg_catalog.pg_database db
                                    WHERE db.datname = pg_catalog.current_database())
                     WHERE o.refobjid <> ALL (v_trusted) AND o.refobjid <> v_owner
                       AND (d.classid = 'pg_catalog.pg_class'::pg_catalog.regclass AND d.objid = c.oid
                            OR d.classid = 'pg_catalog.pg_attrdef'::pg_catalog.regclass
                               AND d.objid IN (SELECT a.oid FROM pg_catalog.pg_attrdef a WHERE a.adrelid = c.oid)
                            OR d.classid = 'pg_catalog.pg_constraint'::pg_catalog.regclass
                               AND d.objid IN (SELECT k.oid FROM pg_catalog.pg_constraint k WHERE k.conrelid = c.oid)
                            OR d.classid = 'pg_catalog.pg_class'::pg_catalog.regclass
                               AND d.objid IN (SELECT i.indexrelid FROM pg_catalog.pg_index i WHERE i.indrelid = c.oid)))
            THEN 'a column, a default, a constraint or an index with a type or a function of another login'
        END AS what) AS found
    WHERE c.relnamespace = v_space AND c.relname IN ('migrations', 'contract') AND found.what IS NOT NULL
    ORDER BY c.relname DESC LIMIT 1;
    IF FOUND THEN
        RAISE EXCEPTION 'the table %.%, which belongs to %, has %, and is not as Holdfast made it',
                        'core', v_found.name, v_found.owner, v_found.what
            USING ERRCODE = 'HF001',
                  HINT = 'find out who did this, and drop what was added; or give Holdfast a schema of its own: --schema holdfast';
    END IF;
END
$$;
