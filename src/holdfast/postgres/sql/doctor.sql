-- What `holdfast doctor` reads. Descriptions come from the catalogs alone, which every role may read, so that a schema can
-- be compared by a login that may use nothing in it. Each statement runs in a read-only transaction of its own.

-- name: begin_examination
-- Whatever the login or the database sets: definitions are printed with every name of the schema qualified, and times
-- and intervals in one style. A look waits for nobody, and must not become a burden: no scan of a whole table.
SELECT pg_catalog.set_config('search_path', 'pg_catalog, pg_temp', true),
       pg_catalog.set_config('statement_timeout', '15s', true),
       pg_catalog.set_config('lock_timeout', '2s', true),
       pg_catalog.set_config('jit', 'off', true),
       pg_catalog.set_config('enable_seqscan', 'off', true),
       pg_catalog.set_config('TimeZone', 'UTC', true),
       pg_catalog.set_config('DateStyle', 'ISO, YMD', true),
       pg_catalog.set_config('IntervalStyle', 'postgres', true),
       pg_catalog.set_config('extra_float_digits', '1', true),
       pg_catalog.set_config('quote_all_identifiers', 'off', true);

-- name: examine_place
-- Who looks, at what. NULL as the owner: there is no such schema. Without pg_read_all_stats a session sees of the others
-- neither their transactions nor what they wait for.
SELECT current_setting('server_version') AS server,
       current_setting('server_version_num')::int / 10000 AS major,
       quote_ident(current_user) AS login,
       (SELECT quote_ident(pg_get_userbyid(n.nspowner)) FROM pg_namespace n WHERE n.nspname = 'core') AS owner,
       (SELECT quote_ident(pg_get_userbyid(c.relowner)) FROM pg_class c JOIN pg_namespace n ON n.oid = c.relnamespace
        WHERE n.nspname = 'core' AND c.relname = 'outbox') AS outbox_owner,
       EXISTS (SELECT FROM pg_namespace n JOIN pg_roles r ON r.oid = n.nspowner
               WHERE n.nspname = 'core' AND r.rolsuper) AS owner_is_superuser,
       EXISTS (SELECT FROM pg_class c JOIN pg_namespace n ON n.oid = c.relnamespace
               WHERE n.nspname = 'core' AND c.relname = 'migrations') AS has_ledger,
       EXISTS (SELECT FROM pg_class c JOIN pg_namespace n ON n.oid = c.relnamespace
               WHERE n.nspname = 'core' AND c.relname = 'contract') AS has_contract,
       pg_has_role('pg_read_all_stats', 'USAGE') AS sees_sessions;

-- --- the schema as it is: the names of the columns below are those of the differences that are reported ---

-- name: describe_tables
-- A partitioned outbox counts as the plain one: its partitions have the storage options, and a check of their own
-- (list_partition_flaws).
SELECT quote_ident(c.relname) AS name, quote_ident(pg_get_userbyid(c.relowner)) AS owner,
       CASE WHEN c.relname = 'outbox' AND c.relkind = 'p' THEN 'r' ELSE c.relkind::text END AS kind,
       c.relpersistence::text AS persistence, c.relrowsecurity AS row_security,
       coalesce(CASE WHEN c.relkind = 'p' THEN (SELECT d.reloptions FROM pg_class d
                                                WHERE d.relnamespace = n.oid AND d.relname = 'outbox_default')
                ELSE c.reloptions END, '{}') AS options
FROM pg_class c JOIN pg_namespace n ON n.oid = c.relnamespace
WHERE n.nspname = 'core' AND c.relkind IN ('r', 'p', 'f')
  AND NOT EXISTS (SELECT FROM pg_inherits h JOIN pg_class p ON p.oid = h.inhparent AND p.relname = 'outbox'
                  WHERE h.inhrelid = c.oid AND p.relnamespace = n.oid)
ORDER BY c.relname;

-- name: describe_columns
SELECT quote_ident(c.relname) AS relation, quote_ident(a.attname) AS name,
       format_type(a.atttypid, a.atttypmod) AS type,
       a.attnotnull AS not_null,
       CASE WHEN a.attgenerated = '' THEN pg_get_expr(d.adbin, d.adrelid) END AS default,
       CASE WHEN a.attgenerated <> '' THEN
           '(' || pg_get_expr(d.adbin, d.adrelid) || CASE a.attgenerated WHEN 's' THEN ') STORED' ELSE ') VIRTUAL' END
       END AS generated,
       CASE a.attidentity WHEN 'a' THEN 'ALWAYS' WHEN 'd' THEN 'BY DEFAULT' END AS identity,
       CASE WHEN a.attcollation <> t.typcollation THEN quote_ident(l.collname) END AS collation
FROM pg_class c
JOIN pg_namespace n ON n.oid = c.relnamespace
JOIN pg_attribute a ON a.attrelid = c.oid AND a.attnum > 0 AND NOT a.attisdropped
JOIN pg_type t ON t.oid = a.atttypid
LEFT JOIN pg_attrdef d ON d.adrelid = a.attrelid AND d.adnum = a.attnum
LEFT JOIN pg_collation l ON l.oid = a.attcollation
WHERE n.nspname = 'core' AND c.relkind IN ('r', 'p', 'f')
  AND NOT EXISTS (SELECT FROM pg_inherits h JOIN pg_class p ON p.oid = h.inhparent AND p.relname = 'outbox'
                  WHERE h.inhrelid = c.oid AND p.relnamespace = n.oid)
ORDER BY c.relname, a.attnum;

-- name: describe_constraints
-- Postgres 18 lists NOT NULL among the constraints; it stands with the columns already. Constraint triggers are triggers.
-- outbox_before belongs to a conversion that is under way, which has a check of its own.
SELECT quote_ident(c.relname) AS relation, quote_ident(o.conname) AS name,
       regexp_replace(pg_get_constraintdef(o.oid), ' NOT VALID$', '') AS definition, NOT o.convalidated AS invalid
FROM pg_constraint o
JOIN pg_class c ON c.oid = o.conrelid
JOIN pg_namespace n ON n.oid = c.relnamespace
WHERE n.nspname = 'core' AND o.contype NOT IN ('n', 't') AND NOT (c.relname = 'outbox' AND o.conname = 'outbox_before')
  AND NOT EXISTS (SELECT FROM pg_inherits h JOIN pg_class p ON p.oid = h.inhparent AND p.relname = 'outbox'
                  WHERE h.inhrelid = c.oid AND p.relnamespace = n.oid)
ORDER BY c.relname, o.conname;

-- name: describe_indexes
-- Those behind a primary key or a unique constraint come and go with it.
SELECT quote_ident(t.relname) AS relation, quote_ident(c.relname) AS name,
       replace(pg_get_indexdef(i.indexrelid), ' ON ONLY ', ' ON ') AS definition, NOT (i.indisvalid AND i.indisready) AS invalid
FROM pg_index i
JOIN pg_class c ON c.oid = i.indexrelid
JOIN pg_class t ON t.oid = i.indrelid
JOIN pg_namespace n ON n.oid = c.relnamespace
WHERE n.nspname = 'core' AND t.relkind IN ('r', 'p', 'm')
  AND NOT EXISTS (SELECT FROM pg_constraint o WHERE o.conindid = i.indexrelid AND o.contype IN ('p', 'u', 'x'))
  AND NOT EXISTS (SELECT FROM pg_inherits h JOIN pg_class p ON p.oid = h.inhparent AND p.relname = 'outbox'
                  WHERE h.inhrelid = t.oid AND p.relnamespace = n.oid)
ORDER BY c.relname;

-- name: describe_triggers
-- The trigger that asks for a source's owner need not fire while no source has one.
SELECT quote_ident(c.relname) AS relation, quote_ident(t.tgname) AS name,
       regexp_replace(pg_get_triggerdef(t.oid), 'WHEN \(+current_setting\(''holdfast[.]gathering''.* EXECUTE', 'EXECUTE')
           AS definition,
       CASE t.tgenabled WHEN 'O' THEN 'no'
                        WHEN 'D' THEN CASE WHEN t.tgname = 'outbox_source' AND 0 = (
                                               SELECT pg_relation_size(s.oid) FROM pg_class s
                                               WHERE s.relnamespace = n.oid AND s.relname = 'sources')
                                           THEN 'no' ELSE 'yes' END
                        WHEN 'R' THEN 'but for replicas'
                        ELSE 'never' END AS disabled
FROM pg_trigger t
JOIN pg_class c ON c.oid = t.tgrelid
JOIN pg_namespace n ON n.oid = c.relnamespace
WHERE n.nspname = 'core' AND NOT t.tgisinternal
  AND NOT EXISTS (SELECT FROM pg_inherits h JOIN pg_class p ON p.oid = h.inhparent AND p.relname = 'outbox'
                  WHERE h.inhrelid = c.oid AND p.relnamespace = n.oid)
ORDER BY c.relname, t.tgname;

-- name: describe_rules
SELECT quote_ident(c.relname) AS relation, quote_ident(r.rulename) AS name, pg_get_ruledef(r.oid) AS definition
FROM pg_rewrite r
JOIN pg_class c ON c.oid = r.ev_class
JOIN pg_namespace n ON n.oid = c.relnamespace
WHERE n.nspname = 'core' AND r.rulename <> '_RETURN'
ORDER BY c.relname, r.rulename;

-- name: describe_views
SELECT quote_ident(c.relname) AS name, quote_ident(pg_get_userbyid(c.relowner)) AS owner, c.relkind::text AS kind,
       pg_get_viewdef(c.oid, true) AS definition,
       coalesce(c.reloptions, '{}') AS options
FROM pg_class c JOIN pg_namespace n ON n.oid = c.relnamespace
WHERE n.nspname = 'core' AND c.relkind IN ('v', 'm')
ORDER BY c.relname;

-- name: describe_sequences
-- `identity` is the table of an identity column; such a sequence comes and goes with its column.
SELECT quote_ident(c.relname) AS name, quote_ident(pg_get_userbyid(c.relowner)) AS owner,
       (SELECT quote_ident(t.relname) FROM pg_depend d JOIN pg_class t ON t.oid = d.refobjid
        WHERE d.classid = 'pg_class'::regclass AND d.objid = c.oid AND d.refclassid = 'pg_class'::regclass
          AND d.deptype = 'i') AS identity,
       format('AS %s INCREMENT %s MINVALUE %s MAXVALUE %s START %s%s', format_type(s.seqtypid, NULL), s.seqincrement,
              s.seqmin, s.seqmax, s.seqstart, CASE WHEN s.seqcycle THEN ' CYCLE' ELSE ' NO CYCLE' END) AS counting
FROM pg_sequence s
JOIN pg_class c ON c.oid = s.seqrelid
JOIN pg_namespace n ON n.oid = c.relnamespace
WHERE n.nspname = 'core'
ORDER BY c.relname;

-- name: describe_functions
SELECT quote_ident(p.proname) || '(' || array_to_string(ARRAY(
           SELECT format_type(argument, NULL) FROM unnest(p.proargtypes) WITH ORDINALITY AS t (argument, place)
           ORDER BY place), ', ') || ')' AS name,
       quote_ident(pg_get_userbyid(p.proowner)) AS owner,
       p.prokind::text AS kind,
       pg_get_function_arguments(p.oid) AS arguments,
       pg_get_function_result(p.oid) AS result,
       l.lanname::text AS language,
       CASE p.provolatile WHEN 'i' THEN 'IMMUTABLE' WHEN 's' THEN 'STABLE' ELSE 'VOLATILE' END AS volatility,
       CASE p.proparallel WHEN 's' THEN 'SAFE' WHEN 'r' THEN 'RESTRICTED' ELSE 'UNSAFE' END AS parallel,
       CASE WHEN p.prosecdef THEN 'DEFINER' ELSE 'INVOKER' END AS security,
       p.proisstrict AS strict,
       coalesce(p.proconfig, '{}') AS settings,
       p.prosrc AS body
FROM pg_proc p
JOIN pg_namespace n ON n.oid = p.pronamespace
JOIN pg_language l ON l.oid = p.prolang
WHERE n.nspname = 'core'
ORDER BY 1;

-- name: describe_grants
-- What others than the owner hold. Grants on columns are one line for each table, role and verb.
WITH space AS (SELECT n.oid, n.nspowner, n.nspacl FROM pg_namespace n WHERE n.nspname = 'core'),
held AS (
    SELECT 'SCHEMA' AS kind, '' AS object, NULL::text AS attribute, space.nspowner AS owner, acl.*
    FROM space CROSS JOIN LATERAL aclexplode(coalesce(space.nspacl, acldefault('n', space.nspowner))) acl
    UNION ALL
    SELECT CASE c.relkind WHEN 'S' THEN 'SEQUENCE' ELSE 'TABLE' END, quote_ident(c.relname), NULL, c.relowner, acl.*
    FROM space JOIN pg_class c ON c.relnamespace = space.oid AND c.relkind IN ('r', 'p', 'f', 'v', 'm', 'S')
    CROSS JOIN LATERAL aclexplode(coalesce(
        c.relacl, acldefault(CASE c.relkind WHEN 'S' THEN 's' ELSE 'r' END::"char", c.relowner))) acl
    UNION ALL
    SELECT 'TABLE', quote_ident(c.relname), quote_ident(a.attname), c.relowner, acl.*
    FROM space JOIN pg_class c ON c.relnamespace = space.oid AND c.relkind IN ('r', 'p', 'f', 'v', 'm')
    JOIN pg_attribute a ON a.attrelid = c.oid AND NOT a.attisdropped
    CROSS JOIN LATERAL aclexplode(a.attacl) acl
    UNION ALL
    SELECT 'FUNCTION', quote_ident(p.proname) || '(' || array_to_string(ARRAY(
               SELECT format_type(argument, NULL) FROM unnest(p.proargtypes) WITH ORDINALITY AS t (argument, place)
               ORDER BY place), ', ') || ')', NULL, p.proowner, acl.*
    FROM space JOIN pg_proc p ON p.pronamespace = space.oid
    CROSS JOIN LATERAL aclexplode(coalesce(p.proacl, acldefault('f', p.proowner))) acl)
SELECT held.kind, held.object, held.privilege_type AS privilege,
       CASE held.grantee WHEN 0 THEN 'PUBLIC' ELSE quote_ident(pg_get_userbyid(held.grantee)) END AS grantee,
       held.attribute IS NOT NULL AS on_columns,
       coalesce(array_agg(DISTINCT held.attribute ORDER BY held.attribute)
                FILTER (WHERE held.attribute IS NOT NULL), '{}') AS columns,
       bool_or(held.is_grantable) AS grantable
FROM held
WHERE held.grantee <> held.owner
GROUP BY held.kind, held.object, held.privilege_type, held.grantee, held.attribute IS NOT NULL
ORDER BY 1, 2, 3, 4, 5;

-- name: describe_lost_rights
-- What an owner has by nature and somebody took away: functions with SECURITY DEFINER work with the owner's rights.
WITH space AS (SELECT n.oid FROM pg_namespace n WHERE n.nspname = 'core'),
owned AS (
    SELECT CASE c.relkind WHEN 'S' THEN 'SEQUENCE' ELSE 'TABLE' END AS kind, quote_ident(c.relname) AS object,
           c.relowner AS owner, c.relacl AS acl,
           acldefault(CASE c.relkind WHEN 'S' THEN 's' ELSE 'r' END::"char", c.relowner) AS by_nature
    FROM space JOIN pg_class c ON c.relnamespace = space.oid AND c.relkind IN ('r', 'p', 'f', 'v', 'm', 'S')
    WHERE c.relacl IS NOT NULL
    UNION ALL
    SELECT 'FUNCTION', quote_ident(p.proname) || '(' || array_to_string(ARRAY(
               SELECT format_type(argument, NULL) FROM unnest(p.proargtypes) WITH ORDINALITY AS t (argument, place)
               ORDER BY place), ', ') || ')', p.proowner, p.proacl, acldefault('f', p.proowner)
    FROM space JOIN pg_proc p ON p.pronamespace = space.oid
    WHERE p.proacl IS NOT NULL)
SELECT owned.kind, owned.object, array_agg(lost.privilege_type ORDER BY lost.privilege_type) AS privileges
FROM owned CROSS JOIN LATERAL (
    SELECT d.privilege_type FROM aclexplode(owned.by_nature) d WHERE d.grantee = owned.owner
    EXCEPT SELECT a.privilege_type FROM aclexplode(owned.acl) a WHERE a.grantee = owned.owner) lost
GROUP BY owned.kind, owned.object
ORDER BY 1, 2;

-- name: describe_default_grants
-- What the owner's next table, sequence or function would be open to. Only the role as a whole can be denied the
-- built-in grant to PUBLIC, so there are two places to look.
SELECT kind.name, ARRAY(
           SELECT DISTINCT format('%s %s %s', acl.privilege_type, scope.words, CASE acl.grantee
                      WHEN 0 THEN 'PUBLIC' ELSE quote_ident(pg_get_userbyid(acl.grantee)) END)
           FROM (SELECT 'to' AS words, coalesce((SELECT d.defaclacl FROM pg_default_acl d
                        WHERE d.defaclrole = r.oid AND d.defaclnamespace = 0 AND d.defaclobjtype = kind.letter),
                        acldefault(kind.acl_letter, r.oid)) AS acl
                 UNION ALL
                 SELECT 'in the schema to', d.defaclacl FROM pg_default_acl d
                 WHERE d.defaclrole = r.oid AND d.defaclnamespace = n.oid AND d.defaclobjtype = kind.letter) scope
           CROSS JOIN LATERAL aclexplode(scope.acl) acl
           WHERE acl.grantee <> r.oid
           ORDER BY 1) AS grants
FROM pg_namespace n
JOIN pg_roles r ON r.rolname = 'holdfast_owner'
CROSS JOIN (VALUES ('TABLES', 'r'::"char", 'r'::"char"), ('SEQUENCES', 'S', 's'), ('FUNCTIONS', 'f', 'f'))
    AS kind (name, letter, acl_letter)
WHERE n.nspname = 'core'
ORDER BY kind.name;

-- name: describe_roles
SELECT r.rolname::text AS name,
       array_remove(ARRAY[CASE WHEN r.rolcanlogin THEN 'LOGIN' END, CASE WHEN r.rolsuper THEN 'SUPERUSER' END,
           CASE WHEN r.rolcreaterole THEN 'CREATEROLE' END, CASE WHEN r.rolcreatedb THEN 'CREATEDB' END,
           CASE WHEN r.rolreplication THEN 'REPLICATION' END, CASE WHEN r.rolbypassrls THEN 'BYPASSRLS' END],
           NULL) AS attributes,
       ARRAY(SELECT quote_ident(g.rolname) FROM pg_auth_members m JOIN pg_roles g ON g.oid = m.roleid
             WHERE m.member = r.oid ORDER BY 1) AS member_of
FROM pg_roles r
WHERE r.rolname = ANY (:roles::text[])
ORDER BY r.rolname;

-- --- what keeps dead rows from being removed ---

-- name: horizon_sessions
-- Only sessions of this database hold the horizon of its tables. VACUUM's own snapshot holds nothing.
SELECT a.pid, coalesce(nullif(a.application_name, ''), '?') AS application, coalesce(a.usename::text, '?') AS login,
       coalesce(a.state, '?') AS state,
       coalesce(extract(epoch FROM clock_timestamp() - a.xact_start), 0)::float8 AS seconds,
       greatest(age(a.backend_xmin), age(a.backend_xid)) AS transactions,
       count(*) OVER ()::int AS total
FROM pg_stat_activity a
WHERE a.pid <> pg_backend_pid() AND a.datname = current_database()
  AND a.backend_type IS DISTINCT FROM 'autovacuum worker'
  AND (a.backend_xmin IS NOT NULL OR a.backend_xid IS NOT NULL)
  AND (clock_timestamp() - a.xact_start >= :held_for::interval
       OR greatest(age(a.backend_xmin), age(a.backend_xid)) >= :held_transactions::int)
ORDER BY a.xact_start
LIMIT 20;

-- name: horizon_slots
-- A slot that nobody reads keeps WAL as well, until the disk is full.
SELECT quote_literal(s.slot_name) AS slot, s.slot_type AS type, s.active,
       coalesce(greatest(age(s.xmin), age(s.catalog_xmin)), 0) AS transactions,
       pg_size_pretty(pg_wal_lsn_diff(
           CASE WHEN pg_is_in_recovery() THEN pg_last_wal_receive_lsn() ELSE pg_current_wal_lsn() END,
           s.restart_lsn)) AS kept,
       count(*) OVER ()::int AS total
FROM pg_replication_slots s
WHERE (NOT s.active AND (s.xmin IS NOT NULL OR s.catalog_xmin IS NOT NULL OR s.restart_lsn IS NOT NULL))
   OR greatest(age(s.xmin), age(s.catalog_xmin)) >= :held_transactions::int
ORDER BY s.slot_name
LIMIT 20;

-- name: horizon_prepared
SELECT quote_literal(p.gid) AS gid, p.owner::text AS login,
       extract(epoch FROM clock_timestamp() - p.prepared)::float8 AS seconds, age(p.transaction) AS transactions,
       count(*) OVER ()::int AS total
FROM pg_prepared_xacts p
WHERE p.database = current_database()
  AND (clock_timestamp() - p.prepared >= :held_for::interval OR age(p.transaction) >= :held_transactions::int)
ORDER BY p.prepared
LIMIT 20;

-- name: horizon_standbys
-- With hot_standby_feedback the oldest query on a standby counts as one here. Through a slot it counts as the slot's.
SELECT r.pid, coalesce(nullif(r.application_name, ''), '?') AS application,
       coalesce(host(r.client_addr), 'local') AS address, age(r.backend_xmin) AS transactions,
       count(*) OVER ()::int AS total
FROM pg_stat_replication r
WHERE r.backend_xmin IS NOT NULL AND age(r.backend_xmin) >= :held_transactions::int
ORDER BY 4 DESC
LIMIT 20;

-- --- the state of the tables ---

-- name: table_upkeep
-- Counted by the statistics collector; `due_at` is the number of dead rows at which autovacuum begins.
SELECT quote_ident(c.relname) AS name, s.n_live_tup AS live, s.n_dead_tup AS dead,
       s.n_tup_upd AS updates, s.n_tup_hot_upd AS hot_updates,
       coalesce((SELECT o.option_value::float8 FROM pg_options_to_table(c.reloptions) o
                 WHERE o.option_name = 'autovacuum_vacuum_threshold'),
                current_setting('autovacuum_vacuum_threshold')::float8)
       + coalesce((SELECT o.option_value::float8 FROM pg_options_to_table(c.reloptions) o
                   WHERE o.option_name = 'autovacuum_vacuum_scale_factor'),
                  current_setting('autovacuum_vacuum_scale_factor')::float8) * greatest(c.reltuples, 0) AS due_at,
       extract(epoch FROM clock_timestamp() - greatest(s.last_vacuum, s.last_autovacuum))::float8 AS vacuumed_before,
       c.relname = 'outbox' OR EXISTS (SELECT FROM pg_inherits h JOIN pg_class p ON p.oid = h.inhparent
                                       WHERE h.inhrelid = c.oid AND p.relname = 'outbox') AS is_outbox
FROM pg_stat_all_tables s
JOIN pg_class c ON c.oid = s.relid
JOIN pg_namespace n ON n.oid = c.relnamespace
WHERE n.nspname = 'core'
ORDER BY c.relname;

-- name: server_upkeep
SELECT current_setting('autovacuum')::boolean AS autovacuum,
       current_setting('track_counts')::boolean AS track_counts,
       age(d.datfrozenxid) AS transactions, current_setting('autovacuum_freeze_max_age')::int AS most_transactions,
       mxid_age(d.datminmxid) AS multixacts,
       current_setting('autovacuum_multixact_freeze_max_age')::int AS most_multixacts
FROM pg_database d
WHERE d.datname = current_database();

-- --- waking up ---

-- name: notify_lock_waits
-- A commit that notifies locks "the database with the number 0" until it is on disk.
SELECT count(*) AS sessions,
       coalesce(max(extract(epoch FROM clock_timestamp() - l.waitstart)), 0)::float8 AS longest
FROM pg_locks l
WHERE NOT l.granted AND l.locktype = 'object' AND l.database = 0 AND l.classid = 'pg_database'::regclass AND l.objid = 0;

-- name: list_worker_sessions
-- Workers name their sessions: the purpose, and the worker's id.
SELECT DISTINCT substring(a.application_name FROM '^holdfast \w+ ([0-9a-f-]{36})$') AS worker
FROM pg_stat_activity a
WHERE a.datname = current_database() AND starts_with(a.application_name, 'holdfast ');

-- --- what is owed ---

-- name: count_expired_leases
-- In flight, and the lease expired so long ago that a worker should have claimed the event again. Of open rows only, up
-- to a limit. By the worker that holds them, if it lives: then its handler still runs, and its slot is taken.
SELECT count(*) AS events, coalesce(max(extract(epoch FROM now() - o.lease_expires_at)), 0)::float8 AS longest,
       array_agg(DISTINCT o.route) AS routes, w.name AS worker, w.host || ':' || w.pid AS process
FROM (SELECT route, status, lease_expires_at, claimed_by FROM core.open_rows()
      LIMIT :most::int) o
LEFT JOIN core.workers w ON w.id = o.claimed_by AND w.stopped_at IS NULL AND core.is_living(w.heartbeat_at)
WHERE o.status = 'in_flight' AND o.lease_expires_at < now() - :expired_for::interval
GROUP BY w.id, w.name, w.host, w.pid
ORDER BY w.name NULLS LAST;

-- --- who can get in whose way ---

-- name: list_retired_handlers
-- Of some handlers, those that no longer subscribe to anything.
SELECT h.handler_name FROM unnest(:handlers::text[]) AS h (handler_name)
WHERE NOT EXISTS (SELECT FROM core.subscriptions s WHERE s.handler_name = h.handler_name AND s.retired_at IS NULL);

-- name: list_unowned_sources
-- Sources of the latest events that belong to no role, where several logins may publish under their names. Those with the
-- most events first: a producer names sources as it likes.
SELECT o.source, count(*) OVER ()::int AS total
FROM (SELECT o.source FROM core.outbox o ORDER BY o.id DESC LIMIT :most::int) o
WHERE NOT EXISTS (SELECT FROM core.sources s WHERE s.source = o.source)
  AND (SELECT count(*) FROM pg_roles r
       WHERE r.rolcanlogin AND NOT r.rolsuper AND pg_has_role(r.oid, to_regrole('holdfast_producer'), 'MEMBER')) > 1
GROUP BY o.source
ORDER BY count(*) DESC, 1 LIMIT 20;

-- name: list_foreign_locks
-- Advisory locks of ours that other sessions hold: the two of each channel (sql/wakeup.sql), and that of schema changes. A
-- name can be borrowed, so the role counts as well where there are roles. Producers share the second lock of a channel until
-- they have committed.
SELECT lock.name, l.pid, coalesce(a.usename::text, '?') AS login, coalesce(nullif(a.application_name, ''), '?') AS application,
       coalesce(extract(epoch FROM clock_timestamp() - a.state_change), 0)::float8 AS seconds,
       count(*) OVER ()::int AS total
FROM (SELECT format('%s of the channel %s', kind.name, c.channel) AS name, 'holdfast sleeper' AS application,
             'holdfast_worker' AS role, hashtextextended('core.' || c.channel || kind.suffix, 0) AS key
      FROM (SELECT unnest(w.channels) AS channel FROM core.workers w UNION SELECT 'outbox_default'
            UNION SELECT o.channel FROM core.open_channels(1000) o) c
      CROSS JOIN (VALUES ('sleeper lock', '/sleeper'), ('wake-up lock', '')) AS kind (name, suffix)
      UNION ALL
      SELECT 'lock of schema changes', 'holdfast migrate', 'holdfast_owner',
             hashtextextended('holdfast migrate ' || 'core', 0)) lock
JOIN pg_locks l ON l.locktype = 'advisory' AND l.granted AND l.objsubid = 1
    AND l.database = (SELECT d.oid FROM pg_database d WHERE d.datname = current_database())
    AND (l.classid::bigint << 32) | l.objid::bigint = lock.key
JOIN pg_stat_activity a ON a.pid = l.pid
WHERE (l.mode = 'ExclusiveLock' OR a.state_change < clock_timestamp() - interval '10 seconds')
  AND (starts_with(a.application_name, lock.application) IS NOT TRUE
       OR pg_has_role(a.usesysid, to_regrole(lock.role), 'MEMBER') IS FALSE)
ORDER BY 1, 2 LIMIT 20;

-- name: list_inbox_writers
-- Sessions that have written to the inbox and have not ended their transaction. Handlers of workers do that, for as long
-- as they may; a name can be borrowed, so the role counts as well.
SELECT a.pid, coalesce(nullif(a.application_name, ''), '?') AS application, coalesce(a.usename::text, '?') AS login,
       coalesce(a.state, '?') AS state, extract(epoch FROM clock_timestamp() - a.xact_start)::float8 AS seconds,
       count(*) OVER ()::int AS total
FROM pg_locks l
JOIN pg_stat_activity a ON a.pid = l.pid
WHERE l.locktype = 'relation' AND l.granted AND l.mode = 'RowExclusiveLock'
  AND l.database = (SELECT d.oid FROM pg_database d WHERE d.datname = current_database())
  AND l.relation = to_regclass('core.event_handled')
  AND a.xact_start < clock_timestamp() - :blocked::interval
  AND (starts_with(a.application_name, 'holdfast handler ') IS NOT TRUE
       OR pg_has_role(a.usesysid, to_regrole('holdfast_worker'), 'MEMBER') IS FALSE)
ORDER BY a.xact_start LIMIT 20;

-- name: list_lost_rows
-- Tables of one row, of no use without it.
SELECT 'subscriptions_version' AS name WHERE NOT EXISTS (SELECT FROM core.subscriptions_version)
UNION ALL SELECT 'sweeps' WHERE NOT EXISTS (SELECT FROM core.sweeps)
UNION ALL SELECT 'clock' WHERE NOT EXISTS (SELECT FROM core.clock)
UNION ALL SELECT 'partitioning' WHERE NOT EXISTS (SELECT FROM core.partitioning);

-- name: read_clock_steps
-- The last step that a worker has seen in the last day, and what lies further in the future than it can: leases beyond
-- the longest one, and events that were due at once. Beside open rows only, and up to a limit.
SELECT (SELECT extract(epoch FROM s.step) FROM core.clock_steps s
        WHERE s.seen_at BETWEEN now() - interval '1 day' AND now() ORDER BY s.id DESC LIMIT 1)::float8 AS step,
       (SELECT extract(epoch FROM now() - s.seen_at) FROM core.clock_steps s
        WHERE s.seen_at BETWEEN now() - interval '1 day' AND now() ORDER BY s.id DESC LIMIT 1)::float8 AS ago,
       count(*) FILTER (WHERE o.status = 'in_flight' AND o.lease_expires_at > now() + l.longest) AS leases,
       count(*) FILTER (WHERE o.status = 'pending' AND o.available_at > now() + :clock::interval
                        AND o.available_at <= o.created_at) AS due,
       array_agg(DISTINCT o.claimed_by::text) FILTER (
           WHERE o.status = 'in_flight' AND o.lease_expires_at > now() + l.longest) AS workers
FROM (SELECT coalesce(max(coalesce(w.lease, interval '1 hour')), interval '1 hour') + :clock::interval AS longest
      FROM core.workers w WHERE w.stopped_at IS NULL) l
LEFT JOIN (SELECT status, claimed_by, lease_expires_at, available_at, created_at FROM core.open_rows()
           LIMIT :most::int) o ON true;

-- name: list_frozen_sessions
-- A session that sends to a client which does not read. One that listens keeps the notification queue from being emptied,
-- and each keeps the snapshot of its transaction.
SELECT a.pid, coalesce(nullif(a.application_name, ''), '?') AS application, coalesce(a.usename::text, '?') AS login,
       extract(epoch FROM clock_timestamp() - coalesce(a.xact_start, a.state_change))::float8 AS seconds,
       count(*) OVER ()::int AS total
FROM pg_stat_activity a
WHERE a.datname = current_database() AND a.wait_event = 'ClientWrite'
  AND coalesce(a.xact_start, a.state_change) < clock_timestamp() - :frozen::interval
ORDER BY 4 DESC
LIMIT 20;

-- name: database_clock
SELECT extract(epoch FROM clock_timestamp())::float8;

-- --- partitions ---

-- name: list_partition_flaws
-- Partitions whose storage options are not those of outbox_default, or that lack an index.
SELECT quote_ident(c.relname) AS name, coalesce(array_to_string(c.reloptions, ', '), '') AS options,
       coalesce(array_to_string(d.reloptions, ', '), '') AS usual,
       (SELECT count(*) FROM pg_index i WHERE i.indrelid = p.oid)
       - (SELECT count(*) FROM pg_index i JOIN pg_inherits x ON x.inhrelid = i.indexrelid
          WHERE i.indrelid = c.oid AND i.indisvalid) AS indexes_missing
FROM pg_class p
JOIN pg_inherits h ON h.inhparent = p.oid
JOIN pg_class c ON c.oid = h.inhrelid
JOIN pg_class d ON d.oid = to_regclass('core.outbox_default')
WHERE p.oid = to_regclass('core.outbox') AND p.relkind = 'p'
  AND (c.reloptions IS DISTINCT FROM d.reloptions
       OR (SELECT count(*) FROM pg_index i WHERE i.indrelid = p.oid)
          > (SELECT count(*) FROM pg_index i JOIN pg_inherits x ON x.inhrelid = i.indexrelid
             WHERE i.indrelid = c.oid AND i.indisvalid))
ORDER BY c.relname LIMIT 20;

-- name: list_kept_partitions
-- Partitions that should have been dropped a while ago, and how many of their rows are kept, up to a limit.
SELECT l.name, cardinality(core.partition_kept(l.name, 10001)) AS kept,
       (extract(epoch FROM now() - l.upper_at) / 86400)::int AS days
FROM core.partitions_list() l CROSS JOIN core.partitioning g
WHERE l.upper_at + ('1 ' || g.every)::interval + interval '2 days'
      < now() - (SELECT max(p.active_ttl_days + p.tombstoned_grace_days) FROM core.retention_policies p
                 WHERE p.entity = 'outbox_row') * interval '1 day'
ORDER BY l.upper_at LIMIT 20;
