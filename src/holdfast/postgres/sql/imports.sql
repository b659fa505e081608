-- Taking what waits in the table of another library, in the transaction that publishes it: an event is in one of the two
-- places at any time. The tables' names are the user's, so each statement is composed by the server, which quotes them.
-- `due` names the rows first: what the library's own workers hold is left to them.

-- name: untrusted_peer
-- What of a table would run with the rights of who imports, and belongs to somebody else: triggers, rules and policies are the
-- owner's, or of who has the privilege TRIGGER. Trusted are this login, superusers, the roles in `trusted`, and for a login that
-- is no superuser those that it is a member of. A superuser has the most to lose: there the schema counts too, where the
-- functions of triggers are looked for. The family is every table whose triggers fire with the table's own: its partitions, what
-- a foreign key reaches from it, and what is under a view. Up to Postgres 17 the triggers of a table that only refers to this one
-- fire with the rights of who deletes here, and the privilege REFERENCES is enough to make one.
WITH RECURSIVE me AS (
    SELECT r.rolsuper FROM pg_catalog.pg_roles r WHERE r.rolname = current_user),
named AS (
    SELECT r.oid FROM pg_catalog.pg_roles r, me
    WHERE r.rolsuper OR r.rolname IN (current_user, session_user) OR r.rolname = ANY (:trusted::text[])
       OR NOT me.rolsuper AND pg_catalog.pg_has_role(r.oid, 'MEMBER')),
trusted AS (
    SELECT named.oid FROM named
    UNION ALL
    SELECT r.oid FROM pg_catalog.pg_roles r, pg_catalog.pg_database d
    WHERE r.rolname = 'pg_database_owner' AND d.datname = pg_catalog.current_database()
      AND d.datdba IN (SELECT named.oid FROM named)),
family AS (
    SELECT c.oid FROM pg_catalog.pg_class c WHERE c.oid = :table::text::regclass
    UNION
    SELECT beside.oid FROM family CROSS JOIN LATERAL (
        SELECT i.inhrelid FROM pg_catalog.pg_inherits i WHERE i.inhparent = family.oid
        UNION ALL
        SELECT k.conrelid FROM pg_catalog.pg_constraint k
        WHERE k.contype = 'f' AND k.confrelid = family.oid
          AND (k.confdeltype IN ('c', 'n', 'd') OR k.confupdtype IN ('c', 'n', 'd'))
        UNION ALL
        SELECT d.refobjid FROM pg_catalog.pg_rewrite w
        JOIN pg_catalog.pg_depend d ON d.classid = 'pg_catalog.pg_rewrite'::regclass AND d.objid = w.oid
                                   AND d.refclassid = 'pg_catalog.pg_class'::regclass
        WHERE w.ev_class = family.oid) AS beside (oid)),
-- What is evaluated when a row of them changes: triggers with their conditions, checks, indexes, generated columns, rules, policies.
evaluated (kind, oid) AS (
    SELECT 'pg_catalog.pg_trigger'::regclass, t.oid FROM pg_catalog.pg_trigger t
    WHERE t.tgrelid IN (SELECT family.oid FROM family) AND NOT t.tgisinternal
    UNION ALL
    SELECT 'pg_catalog.pg_constraint'::regclass, k.oid FROM pg_catalog.pg_constraint k
    WHERE k.conrelid IN (SELECT family.oid FROM family)
    UNION ALL
    SELECT 'pg_catalog.pg_class'::regclass, i.indexrelid FROM pg_catalog.pg_index i
    WHERE i.indrelid IN (SELECT family.oid FROM family)
    UNION ALL
    SELECT 'pg_catalog.pg_attrdef'::regclass, a.oid FROM pg_catalog.pg_attrdef a
    WHERE a.adrelid IN (SELECT family.oid FROM family)
    UNION ALL
    SELECT 'pg_catalog.pg_rewrite'::regclass, w.oid FROM pg_catalog.pg_rewrite w
    WHERE w.ev_class IN (SELECT family.oid FROM family)
    UNION ALL
    SELECT 'pg_catalog.pg_policy'::regclass, p.oid FROM pg_catalog.pg_policy p
    WHERE p.polrelid IN (SELECT family.oid FROM family)),
found AS (
    SELECT 1 AS place, 'pg_catalog.pg_class'::regclass AS kind, c.oid, c.relowner AS owner, 'belongs to' AS relation
    FROM pg_catalog.pg_class c WHERE c.oid IN (SELECT family.oid FROM family)
    UNION ALL
    SELECT 2, e.kind, e.oid, p.proowner, 'calls a function of'
    FROM evaluated e JOIN pg_catalog.pg_depend d ON d.classid = e.kind AND d.objid = e.oid
    JOIN pg_catalog.pg_proc p ON d.refclassid = 'pg_catalog.pg_proc'::regclass AND p.oid = d.refobjid
    UNION ALL
    SELECT 3, 'pg_catalog.pg_namespace'::regclass, n.oid, n.nspowner, 'belongs to'
    FROM me, pg_catalog.pg_class c JOIN pg_catalog.pg_namespace n ON n.oid = c.relnamespace
    WHERE me.rolsuper AND c.oid IN (SELECT family.oid FROM family)
    UNION ALL
    SELECT 4, 'pg_catalog.pg_namespace'::regclass, n.oid, acl.grantee, 'is open to'
    FROM me, pg_catalog.pg_class c JOIN pg_catalog.pg_namespace n ON n.oid = c.relnamespace
    CROSS JOIN LATERAL pg_catalog.aclexplode(n.nspacl) acl
    WHERE me.rolsuper AND c.oid = :table::text::regclass AND acl.privilege_type = 'CREATE'
      AND NOT (acl.grantee = 0 AND 'PUBLIC' = ANY (:trusted::text[]))
    UNION ALL
    -- Whoever owns a type may give it a cast to JSON, which reading a row calls.
    SELECT 5, 'pg_catalog.pg_type'::regclass, t.oid, t.typowner, 'belongs to'
    FROM pg_catalog.pg_attribute a JOIN pg_catalog.pg_type c ON c.oid = a.atttypid
    JOIN pg_catalog.pg_type t ON t.oid IN (c.oid, c.typelem, c.typbasetype)
    WHERE a.attrelid = :table::text::regclass AND a.attnum > 0 AND NOT a.attisdropped)
SELECT pg_catalog.pg_describe_object(found.kind, found.oid, 0) AS object, found.relation,
       CASE found.owner WHEN 0 THEN 'PUBLIC' ELSE pg_catalog.quote_ident(pg_catalog.pg_get_userbyid(found.owner)) END AS owner
FROM found
WHERE found.owner NOT IN (SELECT trusted.oid FROM trusted)
ORDER BY found.place, found.oid LIMIT 1;

-- name: compose_hold
-- Takes the locks that taking rows takes, and runs nothing: until the transaction ends nobody adds a trigger or a foreign key.
SELECT pg_catalog.format('EXPLAIN %s', :take::text) AS hold;

-- name: enter_peer_schema
-- Triggers of the other library look for its own types and functions where its table is. Our own statements name the
-- operators of Postgres in full.
SELECT pg_catalog.set_config('search_path', pg_catalog.format('pg_catalog, %s, pg_temp', found.relnamespace::regnamespace), true)
FROM pg_catalog.pg_class AS found WHERE found.oid OPERATOR(pg_catalog.=) :table::text::regclass;

-- name: leave_peer_schema
-- Before anything is published in the same transaction.
SELECT pg_catalog.set_config('search_path', 'pg_catalog, pg_temp', true);

-- name: login_search_path
-- The statements that are composed below name their table as this path finds it.
SELECT pg_catalog.current_setting('search_path');

-- name: return_to_search_path
-- In a dry run all batches are in one transaction, and the one before has left its own path.
SELECT pg_catalog.set_config('search_path', :path::text, true);

-- name: peer_columns
-- The columns of a table, with the category of their types: D is a date or time, B a boolean.
SELECT a.attname::text AS name, pg_catalog.format_type(a.atttypid, a.atttypmod) AS type, t.typcategory::text AS category
FROM pg_catalog.pg_attribute a JOIN pg_catalog.pg_type t ON t.oid = a.atttypid
WHERE a.attrelid = :table::text::regclass AND a.attnum > 0 AND NOT a.attisdropped
ORDER BY a.attnum;

-- name: is_key_column
-- Whether one column tells all rows of a table apart.
SELECT EXISTS (SELECT FROM pg_catalog.pg_index i
               JOIN pg_catalog.pg_attribute a ON a.attrelid = i.indrelid AND a.attnum = i.indkey[0]
               WHERE i.indrelid = :table::text::regclass AND i.indisunique AND i.indisvalid AND i.indpred IS NULL
                 AND i.indnkeyatts = 1 AND a.attnotnull AND a.attname = :id::text::name);

-- name: compose_pgqueuer
SELECT pg_catalog.format($take$
    WITH due AS MATERIALIZED (SELECT id FROM %1$s WHERE status OPERATOR(pg_catalog.=) 'queued' ORDER BY id LIMIT $1 FOR UPDATE SKIP LOCKED)
    DELETE FROM %1$s AS job WHERE job.id OPERATOR(pg_catalog.=) ANY (ARRAY(SELECT due.id FROM due))
    RETURNING pg_catalog.to_jsonb(job), job.id::text
$take$, :table::text::regclass) AS take,
pg_catalog.format($busy$SELECT pg_catalog.count(*) FROM %1$s WHERE status OPERATOR(pg_catalog.=) 'picked'$busy$, :table::text::regclass) AS busy;

-- name: compose_procrastinate
-- Cancelled, not deleted: its other tables refer to jobs, and its history keeps them.
SELECT pg_catalog.format($take$
    WITH due AS MATERIALIZED (SELECT id FROM %1$s WHERE status OPERATOR(pg_catalog.=) 'todo' ORDER BY id LIMIT $1 FOR UPDATE SKIP LOCKED)
    UPDATE %1$s AS job SET status = 'cancelled' WHERE job.id OPERATOR(pg_catalog.=) ANY (ARRAY(SELECT due.id FROM due))
    RETURNING pg_catalog.to_jsonb(job), job.id::text
$take$, :table::text::regclass) AS take,
pg_catalog.format($busy$SELECT pg_catalog.count(*) FROM %1$s WHERE status OPERATOR(pg_catalog.=) 'doing'$busy$, :table::text::regclass) AS busy;

-- name: compose_faststream_outbox
SELECT pg_catalog.format($take$
    WITH due AS MATERIALIZED (
        SELECT id FROM %1$s WHERE acquired_token IS NULL ORDER BY id LIMIT $1 FOR UPDATE SKIP LOCKED)
    DELETE FROM %1$s AS job WHERE job.id OPERATOR(pg_catalog.=) ANY (ARRAY(SELECT due.id FROM due))
    RETURNING pg_catalog.to_jsonb(job), job.id::text
$take$, :table::text::regclass) AS take,
pg_catalog.format(
    $busy$SELECT pg_catalog.count(*) FROM %1$s WHERE acquired_token IS NOT NULL$busy$, :table::text::regclass) AS busy;

-- name: compose_table
-- A table of one's own: rows whose column `done` is NULL are due, and get the time when they were taken. `aside` is how
-- one of them is taken by hand, for those who meet a row that cannot be an event.
SELECT pg_catalog.format($take$
    WITH due AS MATERIALIZED (
        SELECT %2$I AS id FROM %1$s WHERE %3$I IS NULL ORDER BY %2$I LIMIT $1 FOR UPDATE SKIP LOCKED)
    UPDATE %1$s AS event SET %3$I = pg_catalog.now() WHERE event.%2$I OPERATOR(pg_catalog.=) ANY (ARRAY(SELECT due.id FROM due))
    RETURNING pg_catalog.to_jsonb(event), event.%2$I::text
$take$, :table::text::regclass, :id::text, :done::text) AS take, 'SELECT 0' AS busy,
pg_catalog.format(
    'UPDATE %1$s SET %3$I = now() WHERE %2$I = ', :table::text::regclass, :id::text, :done::text) AS aside;

-- name: compose_table_with_flag
-- The same where `done` is a boolean: a row is due until it is true.
SELECT pg_catalog.format($take$
    WITH due AS MATERIALIZED (
        SELECT %2$I AS id FROM %1$s WHERE %3$I IS NOT TRUE ORDER BY %2$I LIMIT $1 FOR UPDATE SKIP LOCKED)
    UPDATE %1$s AS event SET %3$I = true WHERE event.%2$I OPERATOR(pg_catalog.=) ANY (ARRAY(SELECT due.id FROM due))
    RETURNING pg_catalog.to_jsonb(event), event.%2$I::text
$take$, :table::text::regclass, :id::text, :done::text) AS take, 'SELECT 0' AS busy,
pg_catalog.format(
    'UPDATE %1$s SET %3$I = true WHERE %2$I = ', :table::text::regclass, :id::text, :done::text) AS aside;
