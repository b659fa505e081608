-- What a sweep and an erasure would do, and what the last sweep did. Sweeping itself stands in functions/sweep.sql.

-- name: count_due
-- What a step would take from a class now, up to a limit.
SELECT count(*)::int FROM core.retention_due(:step::text, :content_class::text, '-infinity', :most::int);

-- name: inbox_is_long
-- Longer than what count_due looks at.
SELECT pg_catalog.pg_relation_size('core.event_handled') > 12800 * 8192::bigint;

-- name: count_free_keys
-- Without locks: a key that changes hands meanwhile is counted for what it was.
SELECT count(*)::int
FROM (SELECT k.event_id FROM core.outbox_keys k LIMIT :most::int) k
WHERE NOT EXISTS (SELECT FROM core.outbox o
                  WHERE o.id = k.event_id
                    AND (o.settled_at IS NULL OR (o.failed_at IS NOT NULL AND o.deleted_at IS NULL)));

-- name: read_sweeps
SELECT s.finished_at, s.counts::text AS counts,
       coalesce(s.sweeper IS NOT NULL AND s.seen_at > now() - interval '1 minute', false) AS sweeping
FROM core.sweeps s WHERE s.one;

-- name: count_domain_archived
SELECT count(*)::int FROM (SELECT FROM core.archive a WHERE a.domain_id = :domain::uuid LIMIT :most::int) a;

-- name: count_domain_page
-- What erase_outbox would find on a page.
SELECT count(*)::int AS examined,
       count(*) FILTER (WHERE page.domain_id = :domain::uuid AND page.settled_at IS NOT NULL)::int AS settled,
       count(*) FILTER (WHERE page.domain_id = :domain::uuid AND page.settled_at IS NULL)::int AS open,
       count(*) FILTER (WHERE page.domain_id = :domain::uuid AND page.failed_at IS NOT NULL AND page.deleted_at IS NULL)::int
           AS failed,
       max(page.id::text COLLATE "C")::uuid AS next_id
FROM (SELECT o.id, o.domain_id, o.settled_at, o.failed_at, o.deleted_at FROM core.outbox o
      WHERE o.id >= coalesce(:after::uuid, '00000000-0000-0000-0000-000000000000') AND o.id IS DISTINCT FROM :after::uuid
      ORDER BY o.id LIMIT :most::int) page;

-- name: count_domain_mentions
-- What names a domain and is never erased: the audit, which is append-only, but for the lines that say that it was erased;
-- what people noted and planned; and what schedules publish.
SELECT (SELECT count(*) FROM (SELECT a.* FROM core.audit a ORDER BY a.id DESC LIMIT :most::int) a
        WHERE a.action <> 'retention.erase'
          AND strpos(lower(concat(a.actor, ' ', a.reason, ' ', a.arguments::text)), :domain::uuid::text) > 0)::int AS audit,
       (SELECT count(*) FROM core.failure_notes n WHERE strpos(lower(n.note), :domain::uuid::text) > 0)::int AS notes,
       (SELECT count(*) FROM (SELECT p.* FROM core.plans p ORDER BY p.id DESC LIMIT :most::int) p
        WHERE strpos(lower(p::text), :domain::uuid::text) > 0)::int AS plans,
       (SELECT count(*) FROM core.schedules s WHERE strpos(lower(s.payload::text), :domain::uuid::text) > 0)::int AS schedules;

-- name: estimate_outbox
-- The planner's idea of the table's size, for a progress bar. -1: it has none yet.
SELECT coalesce(sum(nullif(c.reltuples, -1)), -1)::bigint FROM pg_catalog.pg_class c
WHERE c.relkind = 'r' AND (c.oid = 'core.outbox'::pg_catalog.regclass OR c.oid IN (
    SELECT h.inhrelid FROM pg_catalog.pg_inherits h WHERE h.inhparent = 'core.outbox'::pg_catalog.regclass));
