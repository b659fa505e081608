-- How long rows are kept, and sweeping them. The statements behind these calls stand in functions/retention.sql.

-- name: read_policies
SELECT p.entity, p.content_class, p.active_ttl_days, p.tombstoned_grace_days, p.disposal FROM core.retention_registry() p;

-- name: set_policy
SELECT core.retention_set(
    :actor::text, :reason::text, :entity::text, :content_class::text, :active::int, :grace::int, :disposal::text);

-- name: consume
SELECT core.outbox_consume(:ids::uuid[], :tokens::uuid[], :routes::text[], :handlers::text[], :record::boolean);

-- name: forget
SELECT core.outbox_forget(:id::uuid, :handler::text);

-- name: sweep_turn
SELECT core.sweep_turn(:sweeper::uuid, :rest::interval, :force::boolean);

-- name: sweep_done
SELECT core.sweep_done(:sweeper::uuid, :counts::text::jsonb, :inbox_page::bigint);

-- name: retention_classes
SELECT core.retention_classes(:step::text);

-- name: sweep_batch
SELECT b.swept, b.upto, b.more
FROM core.retention_sweep(:step::text, :content_class::text, :start::timestamptz, :most::int, :actor::text, :reason::text) b;

-- name: sweep_inbox_batch
SELECT b.swept, b.next_page, b.pages
FROM core.sweep_inbox(:page::bigint, :pages::int, :most::int, :actor::text, :reason::text) b;

-- name: sweep_keys_batch
SELECT b.swept, b.next_source, b.next_key
FROM core.sweep_keys(:source::text, :key::text, :most::int, :actor::text, :reason::text) b;

-- name: sweep_records_batch
SELECT b.swept, b.more FROM core.sweep_records(:most::int, :actor::text, :reason::text) b;

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

-- name: erase_archived
SELECT core.erase_archived(:domain::uuid, :actor::text, :reason::text, :most::int);

-- name: erase_outbox
SELECT e.examined, e.erased, e.open, e.next_id
FROM core.erase_outbox(:domain::uuid, :actor::text, :reason::text, :cancel::boolean, :most::int, :after::uuid) e;

-- name: count_domain_archived
SELECT count(*)::int FROM (SELECT FROM core.archive a WHERE a.domain_id = :domain::uuid LIMIT :most::int) a;

-- name: count_domain_page
-- What erase_outbox would find on a page.
SELECT count(*)::int AS examined,
       count(*) FILTER (WHERE page.domain_id = :domain::uuid AND page.settled_at IS NOT NULL)::int AS settled,
       count(*) FILTER (WHERE page.domain_id = :domain::uuid AND page.settled_at IS NULL)::int AS open,
       max(page.id::text COLLATE "C")::uuid AS next_id
FROM (SELECT o.id, o.domain_id, o.settled_at FROM core.outbox o
      WHERE o.id > :after::uuid ORDER BY o.id LIMIT :most::int) page;

-- name: estimate_outbox
-- The planner's idea of the table's size, for a progress bar. -1: it has none yet.
SELECT c.reltuples::bigint FROM pg_catalog.pg_class c WHERE c.oid = 'core.outbox'::pg_catalog.regclass;
