-- Reading the roll-up, for the status, the metrics, the doctor and charts. Its size depends on the number of handlers and
-- on its retention, never on how many events were delivered.

-- name: read_rates
-- What each handler has done in so many whole minutes and the current one: those that did most, and how many there are.
-- The histograms are summed bucket by bucket, of these alone.
WITH handler AS MATERIALIZED (
    SELECT l.handler_name, sum(l.delivered)::bigint AS delivered, sum(l.duplicate)::bigint AS duplicate,
           sum(l.retried)::bigint AS retried, sum(l.snoozed)::bigint AS snoozed, sum(l.failed)::bigint AS failed,
           sum(l.archived)::bigint AS archived, sum(l.expired)::bigint AS expired, sum(l.cancelled)::bigint AS cancelled,
           sum(l.released)::bigint AS released, sum(l.lost_lease)::bigint AS lost_lease,
           sum(l.handler_seconds) AS handler_seconds, sum(l.outbox_seconds) AS outbox_seconds,
           count(*) OVER ()::int AS total
    FROM core.rollup_counts l
    WHERE NOT l.hourly AND l.period_start >= date_trunc('minute', now(), 'UTC') - :minutes::interval
      AND (:handler::text IS NULL OR l.handler_name = :handler::text)
      AND strpos(l.handler_name, '/') = 0  -- a route is no handler
    GROUP BY l.handler_name
    ORDER BY sum(l.delivered + l.retried + l.failed + l.duplicate) DESC, l.handler_name COLLATE "C"
    LIMIT :most::int),
bucket AS MATERIALIZED (
    SELECT l.handler_name, b.n, sum(b.handler)::bigint AS handler, sum(b.outbox)::bigint AS outbox
    FROM core.rollup l JOIN handler USING (handler_name)
    CROSS JOIN LATERAL unnest(l.handler_buckets, l.outbox_buckets) WITH ORDINALITY AS b (handler, outbox, n)
    WHERE NOT l.hourly AND l.period_start >= date_trunc('minute', now(), 'UTC') - :minutes::interval
    GROUP BY l.handler_name, b.n)
SELECT h.*, extract(epoch FROM now() - date_trunc('minute', now(), 'UTC') + :minutes::interval)::float8 AS seconds,
       ARRAY(SELECT b.handler FROM bucket b WHERE b.handler_name = h.handler_name ORDER BY b.n) AS handler_buckets,
       ARRAY(SELECT b.outbox FROM bucket b WHERE b.handler_name = h.handler_name ORDER BY b.n) AS outbox_buckets
FROM handler h
ORDER BY h.delivered + h.retried + h.failed + h.duplicate DESC, h.handler_name COLLATE "C";

-- name: read_series
-- One handler's lines, the oldest first: of minutes, and of hours before a day ago. A period may have several.
SELECT r.* FROM core.rollup_counts r
WHERE r.handler_name = :handler::text AND r.period_start >= now() - :since::interval
ORDER BY r.period_start
LIMIT :most::int;

-- name: read_flow
-- What all handlers did together, in steps of some minutes, the oldest first: attempts that ended well and badly, and how
-- long after they were due they had ended, up to 0.1, 1 and 10 seconds and beyond. The positions are those of the bounds
-- in handler_tally.py; sums of elements take a tenth of the time of unnest.
SELECT date_bin(:step::interval, l.period_start, TIMESTAMPTZ '2000-01-01 00:00:00+00') AS start,
       sum(l.delivered)::bigint AS delivered, sum(l.retried + l.failed)::bigint AS failed_attempts,
       sum(l.failed)::bigint AS failed,
       coalesce(sum(b[1] + b[2] + b[3] + b[4] + b[5] + b[6] + b[7]), 0)::bigint AS within_100_ms,
       coalesce(sum(b[8] + b[9] + b[10]), 0)::bigint AS within_1_s,
       coalesce(sum(b[11] + b[12] + b[13]), 0)::bigint AS within_10_s,
       coalesce(sum(b[14] + b[15] + b[16] + b[17] + b[18] + b[19] + b[20] + b[21]), 0)::bigint AS longer
FROM core.rollup_counts l CROSS JOIN LATERAL (SELECT l.outbox_buckets) AS t (b)
WHERE NOT l.hourly AND l.period_start >= date_trunc('minute', now(), 'UTC') - :since::interval
  AND strpos(l.handler_name, '/') = 0  -- a route is no handler
GROUP BY 1
ORDER BY 1;

-- name: read_failing
-- How many deliveries of each handler have failed in each hour of a day, of the handlers that failed most.
WITH line AS MATERIALIZED (
    SELECT l.handler_name, date_bin('1 hour', l.period_start, TIMESTAMPTZ '2000-01-01 00:00:00+00') AS start,
           sum(l.failed)::bigint AS failed
    FROM core.rollup_counts l
    WHERE l.failed > 0 AND l.period_start >= date_trunc('hour', now(), 'UTC') - INTERVAL '23 hours'
      AND strpos(l.handler_name, '/') = 0
    GROUP BY 1, 2)
SELECT l.handler_name, l.start, l.failed
FROM line l JOIN (SELECT t.handler_name FROM line t GROUP BY t.handler_name
                  ORDER BY sum(t.failed) DESC, t.handler_name COLLATE "C" LIMIT :most::int) AS worst USING (handler_name)
ORDER BY l.handler_name COLLATE "C", l.start;

-- name: read_balance
-- Everything that was counted and is kept, and how many open rows have attempts: what was begun is one or the other. It
-- reads all of the journal and all open rows, however many.
SELECT (coalesce(r.begun, 0) + coalesce(j.begun, 0))::bigint AS begun,
       (coalesce(r.delivered, 0) + coalesce(j.delivered, 0))::bigint AS delivered,
       (coalesce(r.duplicate, 0) + coalesce(j.duplicate, 0))::bigint AS duplicate,
       (coalesce(r.failed, 0) + coalesce(j.failed, 0))::bigint AS failed,
       (coalesce(r.expired, 0) + coalesce(j.expired, 0))::bigint AS expired,
       (coalesce(r.cancelled, 0) + coalesce(j.cancelled, 0))::bigint AS cancelled,
       (SELECT count(*) FROM core.open_rows() o WHERE o.attempts > 0) AS open
FROM (SELECT sum(r.begun) AS begun, sum(r.delivered) AS delivered, sum(r.duplicate) AS duplicate, sum(r.failed) AS failed,
             sum(r.expired) AS expired, sum(r.cancelled) AS cancelled
      FROM core.rollup r) r
CROSS JOIN (
      SELECT sum(j.n) FILTER (WHERE j.outcome = 'begun') AS begun, sum(j.n) FILTER (WHERE j.outcome = 'delivered') AS delivered,
             sum(j.n) FILTER (WHERE j.outcome = 'duplicate') AS duplicate,
             sum(j.n) FILTER (WHERE j.outcome IN ('failed', 'archived')) AS failed,
             sum(j.n) FILTER (WHERE j.outcome = 'expired') AS expired, sum(j.n) FILTER (WHERE j.outcome = 'cancelled') AS cancelled
      FROM core.rollup_journal j) j;

-- name: read_lag
-- How far folding the journal is behind.
SELECT l.lines, l.seconds, l.bytes FROM core.rollup_lag() l;

-- name: read_signals
-- How large the outbox is, as its statistics estimate it; failures of the last week; and the times in the outbox of the
-- week before the last day, whose hours are added up. NULL: not known, or less than six days are.
SELECT (SELECT sum(nullif(c.reltuples, -1))::bigint FROM pg_catalog.pg_class c
        WHERE c.relkind = 'r' AND (c.oid = to_regclass('core.outbox') OR c.oid IN (
                  SELECT h.inhrelid FROM pg_catalog.pg_inherits h WHERE h.inhparent = to_regclass('core.outbox')))) AS outbox_rows,
       (SELECT c.relkind = 'p' FROM pg_catalog.pg_class c WHERE c.oid = to_regclass('core.outbox')) AS partitioned,
       (SELECT coalesce(sum(r.failed), 0)::bigint FROM core.rollup_counts r
        WHERE r.failed > 0 AND r.period_start >= now() - interval '7 days') AS failures,
       ARRAY(SELECT sum(b.count)::bigint FROM core.rollup r
             CROSS JOIN LATERAL unnest(r.outbox_buckets) WITH ORDINALITY AS b (count, n)
             WHERE r.hourly AND r.period_start >= now() - interval '8 days'
             GROUP BY b.n ORDER BY b.n) AS outbox_buckets,
       EXISTS (SELECT FROM core.rollup r
               WHERE r.hourly AND r.period_start BETWEEN now() - interval '8 days' AND now() - interval '7 days') AS is_a_week;
