-- The bell of a schema: whether a commit notifies when a worker sleeps, always, or never. The trigger is made anew with
-- the other word, as migrations/0001_core.sql makes it.

-- name: read_bell
-- The trigger's argument ends in a zero byte.
SELECT CASE t.tgenabled WHEN 'D' THEN 'never'
       ELSE encode(substring(t.tgargs FROM 1 FOR octet_length(t.tgargs) - 1), 'escape') END
FROM pg_catalog.pg_trigger t
WHERE t.tgrelid = 'core.outbox'::regclass AND t.tgname = 'outbox_bell';

-- name: audit_bell
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
