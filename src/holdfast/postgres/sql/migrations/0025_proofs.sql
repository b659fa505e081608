-- What a caller cannot forge.

-- The functions of this schema check what they write by themselves. They run as its owner, with this search_path; either of
-- the two is no proof alone, since everybody may set a search_path. Only the owner may change core.secrets.
DROP TRIGGER outbox_changed ON core.outbox;
CREATE TRIGGER outbox_changed AFTER UPDATE ON core.outbox FOR EACH ROW
    WHEN (current_setting('search_path') <> 'pg_catalog, pg_temp'
          OR NOT has_table_privilege('core.secrets'::regclass, 'UPDATE'))
    EXECUTE FUNCTION core.outbox_changed();
