-- The wake-up mode of a schema: whether a commit notifies when a worker sleeps, always, or never. The trigger, the bell, is
-- made anew with the other word, as migrations/0001_baseline.sql makes it.

-- name: read_wakeup_mode
-- By the catalogs alone, which a login without the right to use the schema may read. The trigger's argument ends in a zero
-- byte.
SELECT CASE t.tgenabled WHEN 'D' THEN 'never'
       ELSE pg_catalog.encode(pg_catalog.substring(t.tgargs, 1, pg_catalog.octet_length(t.tgargs) - 1), 'escape') END AS mode
FROM pg_catalog.pg_trigger t
JOIN pg_catalog.pg_class c ON c.oid = t.tgrelid
JOIN pg_catalog.pg_namespace n ON n.oid = c.relnamespace
WHERE n.nspname = 'core' AND c.relname = 'outbox' AND t.tgname = 'outbox_bell';

-- name: audit_wakeup_mode
SELECT core.audit_append(
    :actor::text, 'notify.set', :reason::text,
    jsonb_build_object('mode', :mode::text, 'before', :before::text), NULL
);

-- name: drop_bell
DROP TRIGGER IF EXISTS outbox_bell ON core.outbox;

-- name: bell_when_idle
CREATE CONSTRAINT TRIGGER outbox_bell AFTER INSERT ON core.outbox
    DEFERRABLE INITIALLY DEFERRED FOR EACH ROW
    EXECUTE FUNCTION core.outbox_notify('when_idle');

-- name: bell_always
CREATE CONSTRAINT TRIGGER outbox_bell AFTER INSERT ON core.outbox
    DEFERRABLE INITIALLY DEFERRED FOR EACH ROW
    EXECUTE FUNCTION core.outbox_notify('always');

-- name: bell_never
-- Kept, but silent: a schema without it would look damaged.
ALTER TABLE core.outbox DISABLE TRIGGER outbox_bell;
