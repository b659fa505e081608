-- The four roles. None can log in: grant them to your own login roles.
--   GRANT holdfast_producer TO shop;  GRANT holdfast_worker TO shop_worker;  GRANT holdfast_operator TO alice;
DO $$
DECLARE
    wanted text;
BEGIN
    FOREACH wanted IN ARRAY '{holdfast_owner,holdfast_producer,holdfast_worker,holdfast_operator}'::text[] LOOP
        IF NOT EXISTS (SELECT FROM pg_catalog.pg_roles WHERE rolname = wanted) THEN
            BEGIN
                EXECUTE pg_catalog.format('CREATE ROLE %I NOLOGIN', wanted);
            EXCEPTION WHEN duplicate_object OR unique_violation THEN
                NULL;   -- another database of this cluster is being migrated at the same moment
            END;
        END IF;
    END LOOP;
END
$$;
