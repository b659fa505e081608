-- What one producer can do to the events of another: nothing.

-- One row. What others must not be able to compute is made with it: the ids of siblings, and keys of the inbox that
-- belong to one source. Only functions of the owner read it.
CREATE TABLE core.secrets (
    one     boolean PRIMARY KEY DEFAULT true CHECK (one),
    secret  bytea   NOT NULL DEFAULT decode(replace(gen_random_uuid()::text || gen_random_uuid()::text, '-', ''), 'hex')
);
INSERT INTO core.secrets DEFAULT VALUES;

-- Whose event was handled. The pair of handler and key stays unique; NULL: handled before this column was there.
ALTER TABLE core.event_handled ADD COLUMN source text;

-- A source that has a role in core.sources is written to by that role alone, by a plain INSERT as well. What functions
-- insert, as the owner, they have asked about already.
-- Every name is qualified instead of pinning the search_path, which would cost more than the rest. Where no source has an
-- owner, the table has no pages, and asking for its size is all that an insert pays.
CREATE FUNCTION core.outbox_source() RETURNS trigger
LANGUAGE plpgsql SECURITY DEFINER
AS $$
BEGIN
    IF EXISTS (SELECT FROM core.sources s WHERE s.source OPERATOR(pg_catalog.=) NEW.source) THEN
        PERFORM core.require_source(NEW.source);
    END IF;
    RETURN NEW;
END
$$;
CREATE TRIGGER outbox_source BEFORE INSERT ON core.outbox FOR EACH ROW
    WHEN (current_user <> 'holdfast_owner' AND pg_relation_size('core.sources'::regclass) > 0)
    EXECUTE FUNCTION core.outbox_source();

-- The bell says that there is something to look for, and not what: every login of the database may listen.
CREATE OR REPLACE FUNCTION core.outbox_notify() RETURNS trigger
LANGUAGE plpgsql
AS $$
BEGIN
    -- For two-phase commit, which refuses NOTIFY.
    IF pg_catalog.texteq(pg_catalog.current_setting('holdfast.notify', true), 'off') THEN
        RETURN NULL;
    END IF;
    IF pg_catalog.texteq(TG_ARGV[0], 'when_idle')
       AND pg_catalog.pg_try_advisory_xact_lock_shared(
               pg_catalog.hashtextextended(pg_catalog.concat('core.', NEW.channel), 0)) THEN
        RETURN NULL;
    END IF;
    -- Once per transaction and channel, however many rows it writes.
    IF pg_catalog.texteq(pg_catalog.current_setting('holdfast.rung', true), NEW.channel) THEN
        RETURN NULL;
    END IF;
    PERFORM pg_catalog.set_config('holdfast.rung', NEW.channel, true), pg_catalog.pg_notify(NEW.channel, '');
    RETURN NULL;
END
$$;
