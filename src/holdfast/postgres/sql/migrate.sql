-- What the migration runner asks and writes. The tables themselves are in sql/migrations.

-- name: inspect_server
-- Everything that decides who will own the schema, read from catalogs that every role may read. Postgres 16 made
-- "may become this role" a privilege of its own (SET); before that, being a member was enough.
SELECT current_setting('server_version_num')::int AS version,
       current_setting('server_encoding') AS encoding,
       quote_ident(current_database()) AS database,
       quote_ident(me.rolname) AS login,
       me.rolsuper AS superuser,
       me.rolcreaterole AS may_create_roles,
       has_database_privilege(current_database(), 'CREATE') AS may_create_schema,
       ARRAY(SELECT rolname::text FROM pg_catalog.pg_roles WHERE rolname = ANY (:roles::text[])) AS roles,
       coalesce(pg_has_role(owner.oid, CASE WHEN current_setting('server_version_num')::int >= 160000
                                            THEN 'SET' ELSE 'MEMBER' END), false) AS may_become_owner,
       coalesce(pg_has_role(owner.oid, 'MEMBER WITH ADMIN OPTION'), false) AS may_grant_owner,
       quote_ident(pg_get_userbyid(space.nspowner)) AS schema_owner,
       coalesce(has_schema_privilege(space.oid, 'CREATE'), false) AS may_create_in_schema,
       -- Of every kind: types, operators and collations too depend on their schema.
       (SELECT count(*) FROM pg_catalog.pg_depend
        WHERE refclassid = 'pg_catalog.pg_namespace'::regclass AND refobjid = space.oid AND deptype = 'n') AS schema_objects,
       ledger.oid IS NOT NULL AS has_ledger,
       EXISTS (SELECT FROM pg_catalog.pg_class
               WHERE relnamespace = space.oid AND relname = 'contract' AND relkind = 'r') AS has_contract,
       coalesce(has_schema_privilege(space.oid, 'USAGE')
                AND has_table_privilege(ledger.oid, 'SELECT'), false) AS may_read_ledger
FROM pg_catalog.pg_roles me
LEFT JOIN pg_catalog.pg_roles owner ON owner.rolname = 'holdfast_owner'
LEFT JOIN pg_catalog.pg_namespace space ON space.nspname = 'core'
LEFT JOIN pg_catalog.pg_class ledger ON ledger.relnamespace = space.oid AND ledger.relname = 'migrations'
                                    AND ledger.relkind = 'r'
WHERE me.rolname = current_user

-- name: read_ledger
SELECT version, name, checksum, applied_at, applied_by FROM core.migrations ORDER BY version

-- name: read_contract
SELECT c.provides, c.oldest_code, c.release, c.oldest_release, m.checksum AS baseline
FROM core.contract c JOIN core.migrations m ON m.version OPERATOR(pg_catalog.=) 1

-- name: record_migration
-- Version 0 is not a migration: it holds the checksum of the functions, which are replaced as a whole.
INSERT INTO core.migrations (version, name, checksum) VALUES (:version, :name, :checksum)
ON CONFLICT (version) DO UPDATE
    SET checksum = EXCLUDED.checksum, applied_at = EXCLUDED.applied_at, applied_by = EXCLUDED.applied_by
    WHERE migrations.version = 0

-- name: record_contract
INSERT INTO core.contract (provides, oldest_code, release, oldest_release)
VALUES (:provides, :oldest_code, :release, :oldest_release)
ON CONFLICT (one) DO UPDATE
    SET provides = EXCLUDED.provides, oldest_code = EXCLUDED.oldest_code,
        release = EXCLUDED.release, oldest_release = EXCLUDED.oldest_release

-- name: begin_session
-- Of a connection that is ours alone. A login, or its database, may have set otherwise: backslashes in our texts, NULL in
-- our arrays, and limits that end a transaction between two of its statements. Everything is named in full, because the
-- search path is only set here. transaction_timeout exists since Postgres 17.
SELECT pg_catalog.set_config('search_path', 'pg_catalog, pg_temp', false),
       pg_catalog.set_config('statement_timeout', '0', false),
       pg_catalog.set_config('standard_conforming_strings', 'on', false),
       pg_catalog.set_config('array_nulls', 'on', false),
       pg_catalog.set_config('default_transaction_read_only', 'off', false),
       pg_catalog.set_config('idle_in_transaction_session_timeout', '0', false),
       pg_catalog.set_config('idle_session_timeout', '0', false),
       CASE WHEN pg_catalog.current_setting('server_version_num')::pg_catalog.int4 OPERATOR(pg_catalog.>=) 170000
            THEN pg_catalog.set_config('transaction_timeout', '0', false) END

-- name: begin_reading
-- Of a transaction that only reads, also behind a connection pooler.
SELECT pg_catalog.set_config('search_path', 'pg_catalog, pg_temp', true)

-- name: try_lock
-- Tried again and again instead of waited for: a session that waits inside a statement holds a snapshot, and
-- CREATE INDEX CONCURRENTLY in the session that has the lock would wait for that snapshot for ever.
SELECT pg_catalog.pg_try_advisory_lock(pg_catalog.hashtextextended(pg_catalog.concat('holdfast migrate ', 'core'), 0::bigint))

-- name: unlock
SELECT pg_catalog.pg_advisory_unlock(pg_catalog.hashtextextended(pg_catalog.concat('holdfast migrate ', 'core'), 0::bigint))

-- name: try_transaction_lock
-- Behind a connection pooler a session's lock may stay on a server connection that is no longer ours.
SELECT pg_catalog.pg_try_advisory_xact_lock(pg_catalog.hashtextextended(pg_catalog.concat('holdfast migrate ', 'core'), 0::bigint))

-- name: lock_holder
-- Who has the lock, and whether it is one who may change the schema: any login can take it.
SELECT l.pid, coalesce(a.usename::text, '?') AS login, coalesce(nullif(a.application_name, ''), '?') AS application,
       a.application_name = 'holdfast migrate'
       AND (a.usename = current_user OR coalesce(r.rolsuper, false) OR coalesce(pg_has_role(
               a.usesysid, coalesce((SELECT n.nspowner FROM pg_catalog.pg_namespace n WHERE n.nspname = 'core'),
                                    to_regrole('holdfast_owner')), 'MEMBER'), false)) AS entitled
FROM pg_catalog.pg_locks l
JOIN pg_catalog.pg_stat_activity a ON a.pid = l.pid
LEFT JOIN pg_catalog.pg_roles r ON r.oid = a.usesysid
WHERE l.locktype = 'advisory' AND l.granted AND l.objsubid = 1 AND l.pid <> pg_backend_pid()
  AND l.database = (SELECT d.oid FROM pg_catalog.pg_database d WHERE d.datname = current_database())
  AND (l.classid::bigint << 32) | l.objid::bigint = hashtextextended('holdfast migrate ' || 'core', 0)
ORDER BY l.pid LIMIT 1

-- name: begin_change
-- A waiting ALTER TABLE stops everybody who comes after it, so it waits two seconds and then lets them pass.
-- The search path holds nothing that another role could write to, and no policy of another role is run.
SELECT pg_catalog.set_config('search_path', 'pg_catalog, pg_temp', true),
       pg_catalog.set_config('row_security', 'off', true),
       pg_catalog.set_config('standard_conforming_strings', 'on', true),
       pg_catalog.set_config('array_nulls', 'on', true),
       pg_catalog.set_config('lock_timeout', '2s', true),
       pg_catalog.set_config('statement_timeout', '0', true),
       pg_catalog.set_config('idle_in_transaction_session_timeout', '60s', true),
       pg_catalog.set_config('client_min_messages', 'warning', true)

-- name: trust_roles
-- Whom trusted.sql, revoke_strangers.sql and roles.sql trust beside this login and superusers.
SELECT pg_catalog.set_config('holdfast.trusted_roles', :trusted, true)

-- name: tell_baseline
-- The migration 0001 that baseline.sql wants.
SELECT pg_catalog.set_config('holdfast.baseline', :baseline, true)

-- name: begin_without_transaction
-- CREATE INDEX CONCURRENTLY blocks no other session while it waits for old transactions, so it may wait.
SELECT pg_catalog.set_config('lock_timeout', '0', false), pg_catalog.set_config('statement_timeout', '0', false),
       pg_catalog.set_config('client_min_messages', 'warning', false)

-- name: become_owner
SET LOCAL ROLE holdfast_owner

-- name: become_owner_for_session
SET ROLE holdfast_owner

-- name: become_oneself
RESET ROLE

-- name: create_schema
CREATE SCHEMA core

-- name: create_owned_schema
CREATE SCHEMA core AUTHORIZATION holdfast_owner

-- name: oldest_transaction
-- Who most likely holds the lock that a migration could not get.
SELECT pid, coalesce(nullif(application_name, ''), '?') AS application, coalesce(usename::text, '?') AS login,
       coalesce(extract(epoch FROM clock_timestamp() - xact_start), 0)::int AS seconds
FROM pg_catalog.pg_stat_activity
WHERE datname = current_database() AND pid <> pg_backend_pid() AND xact_start IS NOT NULL
ORDER BY xact_start
LIMIT 1

-- name: count_events
-- Events, not rows: one that several handlers wanted has a row for each.
SELECT count(DISTINCT coalesce(origin_id, id)) FROM core.outbox

-- name: list_tables
SELECT relname::text FROM pg_catalog.pg_class
WHERE relnamespace = (SELECT oid FROM pg_catalog.pg_namespace WHERE nspname = 'core') AND relkind IN ('r', 'p')
ORDER BY relname

-- name: drop_schema
DROP SCHEMA core CASCADE

-- name: owner_has_other_schemas
SELECT EXISTS (SELECT FROM pg_catalog.pg_namespace WHERE pg_get_userbyid(nspowner) = 'holdfast_owner')

-- name: drop_owned
-- Default privileges are kept outside the schema. Without CASCADE: what others built on it stays.
DROP OWNED BY holdfast_owner

-- name: unused_roles
-- Of our roles, those that own nothing and hold no privilege in any database of the cluster. Membership alone is
-- no use: a role without privileges gives its members nothing.
SELECT r.rolname::text
FROM pg_catalog.pg_roles r
WHERE r.rolname = ANY (:roles::text[])
  AND NOT EXISTS (SELECT FROM pg_catalog.pg_shdepend d
                  WHERE d.refclassid = 'pg_catalog.pg_authid'::regclass AND d.refobjid = r.oid
                    AND d.classid <> 'pg_catalog.pg_auth_members'::regclass)

-- name: drop_producer
DROP ROLE holdfast_producer

-- name: drop_worker
DROP ROLE holdfast_worker

-- name: drop_operator
DROP ROLE holdfast_operator

-- name: drop_owner
DROP ROLE holdfast_owner
