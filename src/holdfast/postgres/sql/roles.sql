-- The four roles. None can log in: grant them to your own login roles.
--   GRANT holdfast_producer TO shop;  GRANT holdfast_worker TO shop_worker;  GRANT holdfast_operator TO alice;
-- They belong to the whole cluster, and others of its databases may have made them. One that can log in, or do more than own
-- what is Holdfast's, was made by somebody else, and whoever administers one can take what a superuser installs.
DO $$
DECLARE
    c_roles   CONSTANT text[] := '{holdfast_owner,holdfast_producer,holdfast_worker,holdfast_operator}';
    v_trusted CONSTANT text[] := coalesce(
        nullif(pg_catalog.current_setting('holdfast.trusted_roles', true), ''), '{}')::text[] || ARRAY[current_user, session_user]::text[];
    wanted    text;
    v_found   record;
BEGIN
    FOREACH wanted IN ARRAY c_roles LOOP
        IF NOT EXISTS (SELECT FROM pg_catalog.pg_roles WHERE rolname = wanted) THEN
            BEGIN
                EXECUTE pg_catalog.format('CREATE ROLE %I NOLOGIN', wanted);
            EXCEPTION WHEN duplicate_object OR unique_violation THEN
                NULL;   -- another database of this cluster is being migrated at the same moment
            END;
        END IF;
    END LOOP;

    FOR v_found IN
        SELECT r.rolname AS name, found.attribute
        FROM pg_catalog.pg_roles r
        CROSS JOIN LATERAL (VALUES ('LOGIN', r.rolcanlogin), ('SUPERUSER', r.rolsuper), ('CREATEROLE', r.rolcreaterole),
            ('CREATEDB', r.rolcreatedb), ('REPLICATION', r.rolreplication), ('BYPASSRLS', r.rolbypassrls)) AS found (attribute, has)
        WHERE r.rolname = ANY (c_roles) AND found.has
    LOOP
        RAISE EXCEPTION 'the role % has the attribute %, so Holdfast did not make it as it is', v_found.name, v_found.attribute
            USING ERRCODE = 'HF001', HINT = pg_catalog.format(
                'find out who did; if the role is yours, as an administrator: ALTER ROLE %1$s NO%2$s; else DROP ROLE %1$s',
                v_found.name, v_found.attribute);
    END LOOP;

    FOR v_found IN
        SELECT r.rolname AS name, m.rolname AS member
        FROM pg_catalog.pg_auth_members g
        JOIN pg_catalog.pg_roles r ON r.oid = g.roleid
        JOIN pg_catalog.pg_roles m ON m.oid = g.member
        WHERE r.rolname = ANY (c_roles)
          AND (m.rolname = ANY (c_roles)
               -- For a login that is none itself, it is the rule that another one administers the roles.
               OR g.admin_option AND NOT m.rolsuper AND m.rolname <> ALL (v_trusted)
                  AND (SELECT me.rolsuper FROM pg_catalog.pg_roles me WHERE me.rolname = session_user))
    LOOP
        RAISE EXCEPTION '% can give itself the role %, and with it what is installed here',
                        pg_catalog.quote_ident(v_found.member), v_found.name
            USING ERRCODE = 'HF001', HINT = pg_catalog.format(
                'as an administrator: REVOKE %1$s FROM %2$s CASCADE; or run this with --trusted-role %2$s if you trust it with '
                'what is installed here', v_found.name, pg_catalog.quote_ident(v_found.member));
    END LOOP;
END
$$;
