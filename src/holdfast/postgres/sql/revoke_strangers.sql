-- Takes the right to create in the schema from everybody but its owner and who is trusted: a function of theirs could be a
-- better match for a call in ours. Before the first installation every privilege goes, which nobody can have been given for
-- Holdfast's sake; later USAGE stays, which administrators give to readers of their own.
DO $$
DECLARE
    v_space   record;
    v_trusted oid[];
    v_what    text;
    v_grantee text;
    v_again   boolean;
BEGIN
    SELECT n.oid, n.nspowner, EXISTS (SELECT FROM pg_catalog.pg_class c WHERE c.relnamespace = n.oid AND c.relname = 'migrations')
           AS installed
    INTO v_space FROM pg_catalog.pg_namespace n WHERE n.nspname = 'core';
    v_trusted := ARRAY(
        SELECT r.oid FROM pg_catalog.pg_roles r
        WHERE r.oid = v_space.nspowner OR r.rolsuper OR r.rolname IN (current_user, session_user, 'holdfast_owner')
           OR r.rolname = ANY (coalesce(nullif(pg_catalog.current_setting('holdfast.trusted_roles', true), ''), '{}')::text[]));
    v_what := CASE WHEN v_space.installed THEN 'CREATE' ELSE 'ALL' END;
    FOREACH v_again IN ARRAY ARRAY[false, true] LOOP
        FOR v_grantee IN
            SELECT DISTINCT CASE acl.grantee WHEN 0 THEN 'PUBLIC'
                            ELSE pg_catalog.quote_ident(pg_catalog.pg_get_userbyid(acl.grantee)) END
            FROM pg_catalog.pg_namespace n CROSS JOIN LATERAL pg_catalog.aclexplode(n.nspacl) acl
            WHERE n.oid = v_space.oid AND acl.grantee <> ALL (v_trusted)
              AND (acl.privilege_type = 'CREATE' OR NOT v_space.installed)
        LOOP
            IF v_again THEN
                RAISE EXCEPTION '% may create objects in the schema %, which belongs to %',
                                v_grantee, 'core', pg_catalog.quote_ident(pg_catalog.pg_get_userbyid(v_space.nspowner))
                    USING ERRCODE = 'HF001', HINT = pg_catalog.format(
                        'as an administrator: REVOKE ALL ON SCHEMA core FROM %s CASCADE', v_grantee);
            END IF;
            EXECUTE pg_catalog.format('REVOKE %s ON SCHEMA core FROM %s CASCADE', v_what, v_grantee);
        END LOOP;
    END LOOP;
END
$$;
