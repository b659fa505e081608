-- What an insert pays for the owners of sources, only where a source has one.

-- The condition of a trigger is compiled for each statement, which costs a tenth of an insert. So the trigger is enabled
-- with the first line in core.sources.
CREATE FUNCTION core.sources_owned() RETURNS trigger
LANGUAGE plpgsql SECURITY DEFINER
SET search_path = pg_catalog, pg_temp SET lock_timeout = '5s'
AS $$
BEGIN
    IF EXISTS (SELECT FROM pg_trigger t
               WHERE t.tgrelid = 'core.outbox'::regclass AND t.tgname = 'outbox_source' AND t.tgenabled = 'D') THEN
        ALTER TABLE core.outbox ENABLE TRIGGER outbox_source;
    END IF;
    RETURN NULL;
END
$$;
CREATE TRIGGER sources_owned AFTER INSERT OR UPDATE ON core.sources FOR EACH STATEMENT
    EXECUTE FUNCTION core.sources_owned();

DO $$
BEGIN
    IF NOT EXISTS (SELECT FROM core.sources) THEN
        ALTER TABLE core.outbox DISABLE TRIGGER outbox_source;
    END IF;
END
$$;
