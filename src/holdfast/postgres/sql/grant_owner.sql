-- Lets the login that migrates become holdfast_owner. Since Postgres 16 a role that has CREATEROLE may
-- administer the roles it made, and still has to give itself the right to become one of them. INHERIT FALSE keeps
-- its everyday statements from having the owner's rights; those of the other roles it gets, so that a login that
-- installs Holdfast can also publish, run workers and operate it, as before Postgres 16.
DO $$
DECLARE
    since_16 CONSTANT boolean := pg_catalog.current_setting('server_version_num')::int >= 160000;
BEGIN
    IF NOT pg_catalog.pg_has_role('holdfast_owner', CASE WHEN since_16 THEN 'SET' ELSE 'MEMBER' END) THEN
        EXECUTE 'GRANT holdfast_owner TO CURRENT_USER'
            || CASE WHEN since_16 THEN ' WITH SET TRUE, INHERIT FALSE' ELSE '' END;
        IF since_16 THEN
            BEGIN
                EXECUTE 'GRANT holdfast_producer, holdfast_worker, holdfast_operator TO CURRENT_USER WITH INHERIT TRUE';
            EXCEPTION WHEN insufficient_privilege THEN
                NULL;   -- another login made these roles, and grants them
            END;
        END IF;
    END IF;
END
$$;
