-- Gives a schema that one login owns, with everything in it, to holdfast_owner. The schema itself comes last:
-- until then the old owner needs it to name what it gives away. The old owners get the three other roles: they are the
-- logins that publish, run workers and operate Holdfast, and would be locked out of the schema from this moment on.
-- They do not get holdfast_owner, which the separation is for.
DO $$
DECLARE
    change text;
    member record;
BEGIN
    IF (SELECT pg_catalog.pg_get_userbyid(nspowner) FROM pg_catalog.pg_namespace WHERE nspname = 'core')
       = 'holdfast_owner' THEN
        RETURN;
    END IF;
    GRANT USAGE, CREATE ON SCHEMA core TO holdfast_owner;
    FOR member IN
        SELECT pg_catalog.pg_get_userbyid(owner.oid) AS name, wanted.role
        FROM (SELECT n.nspowner FROM pg_catalog.pg_namespace n WHERE n.nspname = 'core'
              UNION
              SELECT c.relowner FROM pg_catalog.pg_class c
              WHERE c.relnamespace = (SELECT oid FROM pg_catalog.pg_namespace WHERE nspname = 'core')) AS owner (oid),
             pg_catalog.unnest('{holdfast_producer,holdfast_worker,holdfast_operator}'::text[]) AS wanted (role)
        WHERE NOT pg_catalog.pg_has_role(owner.oid, 'holdfast_owner', 'USAGE')
          AND NOT pg_catalog.pg_has_role(owner.oid, wanted.role, 'USAGE')
    LOOP
        EXECUTE pg_catalog.format('GRANT %I TO %I', member.role, member.name);
    END LOOP;
    FOR change IN
        SELECT pg_catalog.format('ALTER %s %I.%I OWNER TO holdfast_owner',
                                 CASE c.relkind WHEN 'v' THEN 'VIEW' WHEN 'm' THEN 'MATERIALIZED VIEW'
                                                WHEN 'S' THEN 'SEQUENCE' ELSE 'TABLE' END, 'core', c.relname)
        FROM pg_catalog.pg_class c
        WHERE c.relnamespace = (SELECT oid FROM pg_catalog.pg_namespace WHERE nspname = 'core')
          AND c.relkind IN ('r', 'p', 'v', 'm', 'S')
          -- A sequence behind an identity column follows its table, and refuses to go alone.
          AND NOT EXISTS (SELECT FROM pg_catalog.pg_depend d
                          WHERE d.classid = 'pg_catalog.pg_class'::pg_catalog.regclass AND d.objid = c.oid
                            AND c.relkind = 'S' AND d.deptype IN ('a', 'i'))
        UNION ALL
        SELECT pg_catalog.format('ALTER ROUTINE %I.%I(%s) OWNER TO holdfast_owner', 'core', p.proname,
                                 pg_catalog.pg_get_function_identity_arguments(p.oid))
        FROM pg_catalog.pg_proc p
        WHERE p.pronamespace = (SELECT oid FROM pg_catalog.pg_namespace WHERE nspname = 'core')
        UNION ALL
        SELECT pg_catalog.format('ALTER TYPE %I.%I OWNER TO holdfast_owner', 'core', t.typname)
        FROM pg_catalog.pg_type t
        LEFT JOIN pg_catalog.pg_class c ON c.oid = t.typrelid
        WHERE t.typnamespace = (SELECT oid FROM pg_catalog.pg_namespace WHERE nspname = 'core')
          AND (t.typtype IN ('e', 'd', 'r') OR c.relkind = 'c')
    LOOP
        EXECUTE change;
    END LOOP;
    ALTER SCHEMA core OWNER TO holdfast_owner;
END
$$;
