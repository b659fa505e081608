-- The status of a schema, for `holdfast status`, the metrics and the doctor. Nothing here counts settled rows: of those
-- there are millions, and a read must stay as cheap as on the first day. Open and failed rows are found by their partial
-- indexes, and every count ends at a limit.

-- name: begin_read
-- One snapshot for all the answers. A scan of the whole table is never what is wanted here, whatever the statistics
-- say; and a read must not become a burden.
SELECT pg_catalog.set_config('search_path', 'pg_catalog, pg_temp', true),
       pg_catalog.set_config('enable_seqscan', 'off', true), pg_catalog.set_config('jit', 'off', true),
       pg_catalog.set_config('statement_timeout', '15s', true);

-- name: limit_read
-- After begin_read, for reads that somebody waits for in front of a page.
SELECT pg_catalog.set_config('statement_timeout', :limit::text, true);

-- name: count_open
SELECT count(*) FILTER (WHERE o.status = 'pending' AND o.available_at <= now()) AS pending,
       count(*) FILTER (WHERE o.status = 'pending' AND o.available_at > now()) AS delayed,
       count(*) FILTER (WHERE o.status = 'in_flight') AS in_flight,
       count(*) FILTER (WHERE o.status = 'in_flight' AND o.lease_expires_at < now()) AS expired_leases,
       count(*) AS examined
FROM (SELECT status, available_at, lease_expires_at FROM core.open_rows()
      LIMIT :most::int) o;

-- name: count_failed
SELECT count(*) FROM (
    SELECT FROM core.outbox WHERE failed_at IS NOT NULL AND deleted_at IS NULL
    ORDER BY failed_at LIMIT :most::int) o;

-- name: newest_failure
-- In the outbox or in the archive, whose numbers grow with the time of the failure. An event of which no attempt came to an
-- end has no error. The archive's row is read as JSON: metrics and status must not end with a column that somebody has
-- renamed there, which is what they have to tell of.
SELECT f.handler_name, f.failed_at,
       left(coalesce(f.last_error, CASE f.failure_reason WHEN 'max_deliveries'
                                   THEN 'max_deliveries: its worker died at each attempt' ELSE f.failure_reason END),
            :error_length::int) AS last_error,
       core.raised_at(f.traceback) AS raised_at, f.archived
FROM ((SELECT o.handler_name, o.failed_at, o.last_error, o.failure_reason, o.traceback, false AS archived
       FROM core.outbox o WHERE o.failed_at IS NOT NULL AND o.deleted_at IS NULL
       ORDER BY o.failed_at DESC, o.id DESC LIMIT 1)
      UNION ALL
      (SELECT a.r ->> 'queue', (a.r ->> 'failed_at')::timestamptz, a.r ->> 'last_exception', a.r ->> 'failure_reason',
              a.r ->> 'traceback', true
       FROM (SELECT to_jsonb(w) AS r FROM core.archive w
             WHERE w.deleted_at IS NULL ORDER BY w.id DESC LIMIT 1) a)) f
ORDER BY f.failed_at DESC LIMIT 1;

-- name: count_archived
-- Dead letters that workers have moved out of the outbox.
SELECT count(*) FROM (SELECT FROM core.archive WHERE deleted_at IS NULL LIMIT :most::int) a;

-- name: list_subscribed_types
-- The event types that some handler subscribes to, to compare one with that nobody does.
SELECT DISTINCT s.event_type FROM core.subscriptions s WHERE s.retired_at IS NULL ORDER BY 1 LIMIT :most::int;

-- name: list_broker_reports
-- What brokers hold for handlers that get their events there. With several channels, of all of them together: what one does
-- not tell is not known of all.
SELECT r.broker, r.handler_name,
       CASE WHEN bool_and(r.reported_at IS NOT NULL) THEN extract(epoch FROM now() - min(r.reported_at))::float8 END AS seconds,
       CASE WHEN bool_and(r.waiting IS NOT NULL) THEN sum(r.waiting)::bigint END AS waiting,
       CASE WHEN bool_and(r.unacknowledged IS NOT NULL) THEN sum(r.unacknowledged)::bigint END AS unacknowledged,
       CASE WHEN bool_and(r.redelivered IS NOT NULL) THEN sum(r.redelivered)::bigint END AS redelivered
FROM core.broker_reports r
WHERE r.handler_name <> '' AND r.asked_at > now() - interval '5 minutes'
  AND EXISTS (SELECT FROM core.subscriptions s
              WHERE s.handler_name = r.handler_name AND s.retired_at IS NULL AND r.broker IN (s.via, s.draining))
GROUP BY r.broker, r.handler_name
ORDER BY waiting DESC NULLS FIRST, r.broker, r.handler_name
LIMIT :most_handlers::int;

-- name: list_broker_weaknesses
-- Of brokers that carry something: workers go on asking one that they were started with.
SELECT DISTINCT r.broker, w.subject, w.problem, w.remedy
FROM core.broker_reports r
CROSS JOIN LATERAL jsonb_to_recordset(r.weaknesses) AS w (subject text, problem text, remedy text)
WHERE r.handler_name = '' AND r.asked_at > now() - interval '5 minutes'
  AND EXISTS (SELECT FROM core.subscriptions s WHERE s.retired_at IS NULL AND r.broker IN (s.via, s.draining))
ORDER BY r.broker, w.subject, w.problem
LIMIT 100;

-- name: list_stranded
-- What brokers hold for handlers by names that their workers had before, and use no longer.
SELECT r.broker, r.handler_name, f.key AS naming,
       CASE WHEN bool_and(f.value <> 'null') THEN sum((f.value #>> '{}')::bigint)::bigint END AS waiting
FROM core.broker_reports r
CROSS JOIN LATERAL jsonb_each(r.former) AS f (key, value)
WHERE r.former <> '{}'
  AND EXISTS (SELECT FROM core.subscriptions s
              WHERE s.handler_name = r.handler_name AND s.retired_at IS NULL AND r.broker IN (s.via, s.draining))
GROUP BY r.broker, r.handler_name, f.key
ORDER BY r.broker, r.handler_name, f.key
LIMIT 100;

-- name: count_blocked_keys
-- Ordering keys that a dead letter blocks, by handler. It reads dead letters, which are few, and not the lines of all keys;
-- and nothing where no event has a key.
SELECT d.handler_name, count(DISTINCT d.ordering_key)::int AS keys, min(d.failed_at) AS since
FROM ((SELECT o.id, o.handler_name, o.ordering_key, o.failed_at
       FROM core.outbox o WHERE o.failed_at IS NOT NULL AND o.deleted_at IS NULL AND o.status = 'failed'
       ORDER BY o.failed_at LIMIT :most::int)
      UNION ALL
      (SELECT a.original_id, a.queue, a.ordering_key, a.failed_at
       FROM core.archive a WHERE a.deleted_at IS NULL LIMIT :most::int)) d
CROSS JOIN LATERAL (
    SELECT FROM core.ordering_heads h
    WHERE h.handler_name = d.handler_name AND h.ordering_key = d.ordering_key AND h.head_id = d.id AND h.blocks LIMIT 1) head
WHERE d.ordering_key > '' AND EXISTS (SELECT FROM core.ordering_heads h WHERE h.blocks)
GROUP BY d.handler_name
ORDER BY keys DESC, d.handler_name;

-- name: list_routes
-- Routes, and for each one: the handlers it is owed to, how much is open, since when the first of it is due, and whether a
-- living worker serves all of them. A route with a slash is an event's own, before it is known to whom it is owed; any
-- other is a handler's name.
-- A writer names channels and types as it likes, and dates them as far ahead as it likes. So those are listed first that a
-- handler subscribes to in a channel that workers have served in the last day or a generation has of its own; then those
-- that a handler subscribes to elsewhere; and among equals what has been due for longest, never by name. `total` is how
-- many there are and `first_due_at` when the first row of all is due, also of those that are not listed. Lanes are found
-- by a loose index scan, one probe each, first one of every channel, then a second one: a flood in one channel hides
-- no other channel, and a flood in all of them no subscription that names its event type.
WITH RECURSIVE known_channel AS MATERIALIZED (
    SELECT served.channel, w.generation FROM core.workers w CROSS JOIN unnest(w.channels) AS served (channel)
    UNION SELECT core.channel_of(d.generation), d.generation FROM core.deployments d
    UNION SELECT core.channel_of(0), 0),
open_channel AS MATERIALIZED (
    SELECT c.channel, c.generation, k.channel IS NOT NULL AS known
    FROM core.open_channels(:most_channels::int) c LEFT JOIN known_channel k USING (channel, generation)
    ORDER BY known DESC, c.channel, c.generation),
named AS MATERIALIZED (
    SELECT s.handler_name AS route FROM core.subscriptions s WHERE s.retired_at IS NULL
    UNION SELECT s.owed_to FROM core.subscriptions s WHERE s.retired_at IS NULL
    UNION SELECT '*/' || s.event_type FROM core.subscriptions s
    WHERE s.retired_at IS NULL AND strpos(s.event_type, '*') = 0
    LIMIT 2000),
walked AS (
    SELECT c.channel, c.generation, c.known, first.route, first.priority, first.available_at, first.status
    FROM open_channel c
    CROSS JOIN LATERAL (
        SELECT o.route, o.priority, o.available_at, o.status FROM core.outbox o
        WHERE o.settled_at IS NULL AND o.ordering_key IS NULL
          AND o.channel = c.channel AND o.generation = c.generation
        ORDER BY o.channel, o.generation, o.route, o.priority, o.available_at LIMIT 1) first
    UNION ALL
    SELECT w.channel, w.generation, w.known, next.route, next.priority, next.available_at, next.status
    FROM walked w
    CROSS JOIN LATERAL (
        SELECT o.route, o.priority, o.available_at, o.status FROM core.outbox o
        WHERE o.settled_at IS NULL AND o.ordering_key IS NULL
          AND o.channel = w.channel AND o.generation = w.generation AND (o.route, o.priority) > (w.route, w.priority)
        ORDER BY o.channel, o.generation, o.route, o.priority, o.available_at LIMIT 1) next),
lane AS MATERIALIZED (
    (SELECT w.channel, w.generation, w.known, w.route, w.priority, w.available_at, w.status
     FROM walked w LIMIT :most_lanes::int)
    UNION ALL
    SELECT c.channel, c.generation, c.known, n.route, first.priority, first.available_at, first.status
    FROM (SELECT * FROM open_channel c WHERE c.known
          LIMIT (SELECT 10000 / greatest(count(*), 1) FROM named)) c
    CROSS JOIN named n
    CROSS JOIN LATERAL (
        SELECT FROM core.outbox o
        WHERE o.settled_at IS NULL AND o.ordering_key IS NULL
          AND o.channel = c.channel AND o.generation = c.generation AND o.route = n.route LIMIT 1) present
    CROSS JOIN unnest('{0,1,2}'::smallint[]) AS level (priority)
    CROSS JOIN LATERAL (
        SELECT o.priority, o.available_at, o.status FROM core.outbox o
        WHERE o.settled_at IS NULL AND o.ordering_key IS NULL
          AND o.channel = c.channel AND o.generation = c.generation AND o.route = n.route
          AND o.priority = level.priority
        ORDER BY o.available_at LIMIT 1) first
    UNION ALL
    -- Those of events with a key, which stand apart. The first of a key is the oldest, and any key will do.
    SELECT l.channel, l.generation, k.channel IS NOT NULL, l.route, 1::smallint, first.available_at, first.status
    FROM (SELECT * FROM core.keyed_lanes() LIMIT :most_lanes::int) l
    LEFT JOIN known_channel k USING (channel, generation)
    CROSS JOIN LATERAL (
        SELECT o.available_at, o.status FROM core.outbox o
        WHERE o.settled_at IS NULL AND o.ordering_key IS NOT NULL
          AND o.channel = l.channel AND o.generation = l.generation AND o.route = l.route
        ORDER BY o.ordering_key, o.seq LIMIT 1) first),
every AS MATERIALIZED (
    SELECT lane.channel, lane.generation, lane.route, bool_or(lane.known) AS known,
           CASE WHEN strpos(lane.route, '/') > 0 THEN nullif(split_part(lane.route, '/', 1), '*') END AS target,
           CASE WHEN strpos(lane.route, '/') > 0 THEN split_part(lane.route, '/', 2) END AS event_type,
           -- Behind what workers hold, for the first one that none does.
           min(CASE WHEN lane.available_at > now() THEN NULL WHEN lane.status = 'pending' THEN lane.available_at
                    ELSE (SELECT o.available_at FROM core.outbox o
                          WHERE o.settled_at IS NULL AND o.ordering_key IS NULL
                            AND o.channel = lane.channel AND o.generation = lane.generation AND o.route = lane.route
                            AND o.priority = lane.priority AND o.available_at <= now() AND o.status = 'pending'
                          ORDER BY o.available_at LIMIT 1) END) AS due_at
    FROM lane
    GROUP BY lane.channel, lane.generation, lane.route),
found AS MATERIALIZED (
    SELECT e.channel, e.generation, e.route, e.target, e.event_type, e.due_at,
           count(*) OVER ()::int AS total, min(e.due_at) OVER () AS first_due_at
    FROM (SELECT every.*,
                 every.event_type IS NULL OR every.route IN (SELECT named.route FROM named)
                 OR EXISTS (SELECT FROM core.subscriptions s
                            WHERE s.retired_at IS NULL AND strpos(s.event_type, '*') > 0 AND every.event_type LIKE s.pattern
                              AND (every.target IS NULL OR every.target = s.domain_context)) AS wanted
          FROM every) e
    ORDER BY e.known AND e.wanted DESC, e.wanted DESC, e.due_at NULLS LAST, e.channel, e.generation, e.route
    LIMIT :most_routes::int),
owed AS MATERIALIZED (
    SELECT found.*, CASE WHEN found.event_type IS NULL THEN ARRAY[found.route] ELSE ARRAY(
               SELECT DISTINCT s.owed_to FROM core.subscriptions s
               WHERE s.retired_at IS NULL AND found.event_type LIKE s.pattern
                 AND (found.target IS NULL OR found.target = s.domain_context)
               ORDER BY s.owed_to) END AS handlers
    FROM found),
-- Together up to the limit, in the order in which they were found.
counted AS MATERIALIZED (
    SELECT o.channel, o.generation, o.route,
           count(*) FILTER (WHERE o.status = 'pending' AND o.available_at <= now())::int AS pending,
           count(*) FILTER (WHERE o.status = 'in_flight')::int AS in_flight
    FROM (SELECT found.channel, found.generation, found.route, o.status, o.available_at
          FROM found CROSS JOIN LATERAL (
              SELECT o.status, o.available_at FROM core.open_rows() o
              WHERE o.channel = found.channel AND o.generation = found.generation AND o.route = found.route
              LIMIT :most::int) o
          LIMIT :most::int) o
    GROUP BY o.channel, o.generation, o.route)
SELECT owed.channel, owed.generation, owed.route, owed.total, owed.target, owed.event_type, owed.handlers,
       (SELECT count(*) FROM (
            SELECT FROM core.open_rows() o
            WHERE o.channel = owed.channel AND o.generation = owed.generation AND o.route = owed.route
            LIMIT :most_in_route::int) o) AS open,
       coalesce(counted.pending, 0) AS pending, coalesce(counted.in_flight, 0) AS in_flight,
       extract(epoch FROM now() - owed.due_at)::float8 AS oldest,
       extract(epoch FROM now() - owed.first_due_at)::float8 AS oldest_of_all,
       ARRAY(SELECT h FROM unnest(owed.handlers) AS h
             WHERE NOT EXISTS (SELECT FROM core.workers w
                               WHERE w.stopped_at IS NULL AND core.is_living(w.heartbeat_at)
                                 AND w.generation = owed.generation AND owed.channel = ANY (w.channels)
                                 AND h = ANY (w.handlers))) AS unserved
FROM owed LEFT JOIN counted USING (channel, generation, route)
ORDER BY owed.channel, owed.generation, owed.route;

-- name: list_unserved
-- Channels that have open rows and no living worker: some of them, and how many there are. Those first that workers have
-- served in the last day or a generation has of its own, and among equals the one in which a row has been due for longest.
WITH RECURSIVE known_channel AS MATERIALIZED (
    SELECT served.channel, w.generation FROM core.workers w CROSS JOIN unnest(w.channels) AS served (channel)
    UNION SELECT core.channel_of(d.generation), d.generation FROM core.deployments d
    UNION SELECT core.channel_of(0), 0),
unserved AS MATERIALIZED (
    SELECT c.channel, c.generation, k.channel IS NOT NULL AS known
    FROM core.open_channels(:most_channels::int) c
    LEFT JOIN core.served_channels() s USING (channel, generation) LEFT JOIN known_channel k USING (channel, generation)
    WHERE s.channel IS NULL
    ORDER BY known DESC, c.channel, c.generation),
walked AS (
    SELECT c.channel, c.generation, first.route, first.priority, first.available_at
    FROM unserved c
    CROSS JOIN LATERAL (
        SELECT o.route, o.priority, o.available_at FROM core.outbox o
        WHERE o.settled_at IS NULL AND o.ordering_key IS NULL
          AND o.channel = c.channel AND o.generation = c.generation
        ORDER BY o.channel, o.generation, o.route, o.priority, o.available_at LIMIT 1) first
    UNION ALL
    SELECT w.channel, w.generation, next.route, next.priority, next.available_at
    FROM walked w
    CROSS JOIN LATERAL (
        SELECT o.route, o.priority, o.available_at FROM core.outbox o
        WHERE o.settled_at IS NULL AND o.ordering_key IS NULL
          AND o.channel = w.channel AND o.generation = w.generation AND (o.route, o.priority) > (w.route, w.priority)
        ORDER BY o.channel, o.generation, o.route, o.priority, o.available_at LIMIT 1) next),
due AS MATERIALIZED (
    SELECT w.channel, w.generation, min(w.available_at) AS at
    FROM (SELECT walked.channel, walked.generation, walked.available_at FROM walked LIMIT :most_lanes::int) w
    WHERE w.available_at <= now()
    GROUP BY w.channel, w.generation)
SELECT first.channel, first.generation, first.total
FROM (SELECT u.channel, u.generation, count(*) OVER ()::int AS total
      FROM unserved u LEFT JOIN due USING (channel, generation)
      ORDER BY u.known DESC, due.at NULLS LAST, u.channel, u.generation
      LIMIT :most_unserved::int) first
ORDER BY first.channel, first.generation;

-- name: list_workers
-- Those that have not stopped in order, the latest heartbeat first. One that has long been silent was killed, and after an
-- hour others have taken what it held. One whose heartbeat lies ahead is not living. Sessions have the worker's id in
-- their name, which everybody may read: those of a process that was killed are gone at once.
SELECT w.id, w.name, w.host, w.pid, w.version, w.generation, w.channels, w.handlers, w.started_at, w.heartbeat_at,
       extract(epoch FROM now() - w.heartbeat_at)::float8 AS silent_for,
       core.is_living(w.heartbeat_at) AS living,
       EXISTS (SELECT FROM pg_catalog.pg_stat_activity a
               WHERE a.datname = pg_catalog.current_database()
                 AND a.application_name ~ ('^holdfast \w+ ' || w.id || '$')) AS connected,
       count(*) OVER ()::int AS total
FROM core.workers w
WHERE w.stopped_at IS NULL AND w.heartbeat_at > now() - interval '1 hour'
ORDER BY living DESC, w.heartbeat_at DESC
LIMIT :most_workers::int;

-- name: read_notifications
-- The queue is the server's. Listeners are found by the name that workers give their connections, which everybody may
-- read; it is the same in every schema of the database.
SELECT pg_catalog.pg_notification_queue_usage() AS queue_usage,
       (SELECT count(*) FROM pg_catalog.pg_stat_activity a
        WHERE a.datname = pg_catalog.current_database() AND a.application_name ~ '^holdfast listen\M') AS listeners;
