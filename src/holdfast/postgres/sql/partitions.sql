-- Partitions of the outbox, as operators see them. What makes and drops them stands in functions/partitions.sql.

-- name: read_partitioning
-- `bound` is set while a conversion is under way, `unproven` while it has not been shown that the table ends there.
SELECT pg_catalog.now() AS now, p.every, core.is_partitioned() AS partitioned, core.partitions_bound() AS bound,
       EXISTS (SELECT FROM pg_catalog.pg_constraint k
               WHERE k.conrelid = pg_catalog.to_regclass('core.outbox') AND k.conname = 'outbox_before'
                 AND NOT k.convalidated) AS unproven,
       EXISTS (SELECT FROM pg_catalog.pg_trigger t
               WHERE t.tgrelid = pg_catalog.to_regclass('core.outbox')
                 AND pg_catalog.strpos(pg_catalog.pg_get_triggerdef(t.oid), 'holdfast.gathering') > 0) AS gathering
FROM core.partitioning p WHERE p.one;

-- name: list_partitions
-- Rows as of the last vacuum or analyze; NULL before the first.
SELECT l.name, l.kind, l.lower_at, l.upper_at, nullif(c.reltuples, -1)::bigint AS rows,
       pg_catalog.pg_total_relation_size(l.table_id) AS bytes
FROM core.partitions_list() l JOIN pg_catalog.pg_class c ON c.oid = l.table_id;

-- name: count_default_rows
-- In outbox_default, up to a limit, of times that it is not for: from the first period on. What was kept of dropped
-- partitions is older.
SELECT pg_catalog.count(*)::int FROM (
    SELECT FROM core.outbox o
    WHERE o.tableoid = pg_catalog.to_regclass('core.outbox_default') AND o.id >= core.first_id(:since::timestamptz)
    LIMIT :most::int) o;

-- name: audit_partitions
SELECT core.audit_append(
    :actor::text, :action::text, :reason::text, pg_catalog.jsonb_build_object('every', :every::text), NULL
);

-- name: list_partition_names
-- Of a partitioned outbox alone, by the catalogs, which need no function of this release.
SELECT pg_catalog.quote_ident(c.relname) AS name
FROM pg_catalog.pg_inherits h
JOIN pg_catalog.pg_class p ON p.oid = h.inhparent AND p.relkind = 'p' AND p.relname = 'outbox'
JOIN pg_catalog.pg_namespace n ON n.oid = p.relnamespace AND n.nspname = 'core'
JOIN pg_catalog.pg_class c ON c.oid = h.inhrelid
ORDER BY c.relname;
