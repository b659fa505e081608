-- The status of a schema, for `holdfast status`, the metrics and the doctor. Nothing here counts settled rows: of those
-- there are millions, and a read must stay as cheap as on the first day. Open and failed rows are found by their partial
-- indexes, and every count ends at a limit.

-- name: begin_read
-- One snapshot for all the answers. A scan of the whole table is never what is wanted here, whatever the statistics
-- say; and a read must not become a burden.
SELECT pg_catalog.set_config('search_path', 'pg_catalog, pg_temp', true),
       pg_catalog.set_config('enable_seqscan', 'off', true), pg_catalog.set_config('jit', 'off', true),
       pg_catalog.set_config('statement_timeout', '15s', true);

-- name: count_open
-- The condition on ordering_key is that of the index: without it there is none for these rows.
SELECT count(*) FILTER (WHERE o.status = 'pending' AND o.available_at <= now()) AS pending,
       count(*) FILTER (WHERE o.status = 'pending' AND o.available_at > now()) AS delayed,
       count(*) FILTER (WHERE o.status = 'in_flight') AS in_flight,
       count(*) FILTER (WHERE o.status = 'in_flight' AND o.lease_expires_at < now()) AS expired_leases,
       count(*) AS examined
FROM (SELECT status, available_at, lease_expires_at FROM core.outbox
      WHERE settled_at IS NULL AND ordering_key IS NULL
      LIMIT :most::int) o;

-- name: count_failed
SELECT count(*) FROM (
    SELECT FROM core.outbox WHERE failed_at IS NOT NULL AND deleted_at IS NULL
    ORDER BY failed_at LIMIT :most::int) o;

-- name: newest_failure
-- In the outbox or in the archive, whose numbers grow with the time of the failure.
SELECT f.handler_name, f.failed_at, left(f.last_error, :error_length::int) AS last_error,
       core.raised_at(f.traceback) AS raised_at, f.archived
FROM ((SELECT o.handler_name, o.failed_at, o.last_error, o.traceback, false AS archived
       FROM core.outbox o WHERE o.failed_at IS NOT NULL AND o.deleted_at IS NULL
       ORDER BY o.failed_at DESC, o.id DESC LIMIT 1)
      UNION ALL
      (SELECT a.queue, a.failed_at, a.last_exception, a.traceback, true
       FROM core.archive a WHERE a.deleted_at IS NULL ORDER BY a.id DESC LIMIT 1)) f
ORDER BY f.failed_at DESC LIMIT 1;

-- name: count_archived
-- Dead letters that workers have moved out of the outbox.
SELECT count(*) FROM (SELECT FROM core.archive WHERE deleted_at IS NULL LIMIT :most::int) a;

-- name: list_routes
-- Routes by a loose index scan, then for each one: the handlers it is owed to, how much is open, since when the first of
-- it is due, and whether a living worker serves all of them. A route with a slash is an event's own, before it is known
-- to whom it is owed; any other is a handler's name. Of the channels those first that a worker serves, and then a
-- generation's own, and of the routes those first that a handler subscribes to by name: a writer names channels and types as
-- it likes. `total` is how many there are, up to a limit.
WITH channel AS MATERIALIZED (
    SELECT row_number() OVER (ORDER BY s.channel IS NULL, o.channel <> core.channel_of(o.generation), o.channel,
                                       o.generation) AS n, o.channel, o.generation
    FROM core.open_channels(:most_routes::int) o LEFT JOIN core.served_channels() s USING (channel, generation)
    ORDER BY n LIMIT :most_routes::int),
known AS MATERIALIZED (
    SELECT s.handler_name AS route FROM core.subscriptions s WHERE s.retired_at IS NULL
    UNION SELECT '*/' || s.event_type FROM core.subscriptions s
    WHERE s.retired_at IS NULL AND strpos(s.event_type, '*') = 0
    LIMIT 2000),
every AS MATERIALIZED (
    SELECT c.n, c.channel, c.generation, k.route, true AS known
    FROM (SELECT * FROM channel ORDER BY channel.n LIMIT 3) c CROSS JOIN known k
    CROSS JOIN LATERAL (
        SELECT FROM core.outbox o
        WHERE o.settled_at IS NULL AND o.ordering_key IS NULL
          AND o.channel = c.channel AND o.generation = c.generation AND o.route = k.route LIMIT 1) o
    UNION ALL
    (SELECT c.n, c.channel, c.generation, r.route, false
     FROM channel c CROSS JOIN LATERAL core.outbox_routes(c.channel, c.generation) AS r (route)
     LIMIT 10000)),
found AS MATERIALIZED (
    SELECT r.channel, r.generation, r.route, count(*) OVER ()::int AS total,
           CASE WHEN strpos(r.route, '/') > 0 THEN nullif(split_part(r.route, '/', 1), '*') END AS target,
           CASE WHEN strpos(r.route, '/') > 0 THEN split_part(r.route, '/', 2) END AS event_type
    FROM every r
    GROUP BY r.n, r.channel, r.generation, r.route
    ORDER BY bool_or(r.known) OR strpos(r.route, '/') = 0 DESC, r.n, r.route
    LIMIT :most_routes::int),
owed AS MATERIALIZED (
    SELECT found.*, CASE WHEN found.event_type IS NULL THEN ARRAY[found.route] ELSE ARRAY(
               SELECT DISTINCT s.handler_name FROM core.subscriptions s
               WHERE s.retired_at IS NULL AND found.event_type LIKE s.pattern
                 AND (found.target IS NULL OR found.target = s.domain_context)
               ORDER BY s.handler_name) END AS handlers
    FROM found)
SELECT owed.channel, owed.generation, owed.route, owed.total, owed.target, owed.event_type, owed.handlers,
       (SELECT count(*) FROM (
            SELECT FROM core.outbox o
            WHERE o.settled_at IS NULL AND o.ordering_key IS NULL
              AND o.channel = owed.channel AND o.generation = owed.generation AND o.route = owed.route
            LIMIT :most_in_route::int) o) AS open,
       (SELECT extract(epoch FROM now() - min(first.available_at))::float8
        FROM unnest('{0,1,2}'::smallint[]) AS level (priority)
        CROSS JOIN LATERAL (
            SELECT o.available_at FROM core.outbox o
            WHERE o.settled_at IS NULL AND o.ordering_key IS NULL
              AND o.channel = owed.channel AND o.generation = owed.generation AND o.route = owed.route
              AND o.priority = level.priority AND o.available_at <= now() AND o.status = 'pending'
            ORDER BY o.available_at LIMIT 1) first) AS oldest,
       ARRAY(SELECT h FROM unnest(owed.handlers) AS h
             WHERE NOT EXISTS (SELECT FROM core.workers w
                               WHERE w.stopped_at IS NULL AND core.is_living(w.heartbeat_at)
                                 AND w.generation = owed.generation AND owed.channel = ANY (w.channels)
                                 AND h = ANY (w.handlers))) AS unserved
FROM owed
ORDER BY owed.channel, owed.generation, owed.route;

-- name: list_unserved
-- Channels that have open rows and no living worker: some of them, those of deployments first, and how many there are.
SELECT first.channel, first.generation, first.total
FROM (SELECT c.channel, c.generation, count(*) OVER ()::int AS total
      FROM core.open_channels(:most_channels::int) c LEFT JOIN core.served_channels() s USING (channel, generation)
      WHERE s.channel IS NULL
      ORDER BY c.generation <> 0 AND NOT EXISTS (SELECT FROM core.deployments d WHERE d.generation = c.generation),
               c.channel <> core.channel_of(c.generation), c.channel, c.generation
      LIMIT :most_unserved::int) first
ORDER BY first.channel, first.generation;

-- name: list_workers
-- Those that have not stopped in order, the latest heartbeat first. One that has long been silent was killed, and after an
-- hour others have taken what it held. One whose heartbeat lies ahead is not living.
SELECT w.id, w.name, w.host, w.pid, w.version, w.generation, w.channels, w.handlers, w.started_at, w.heartbeat_at,
       extract(epoch FROM now() - w.heartbeat_at)::float8 AS silent_for,
       core.is_living(w.heartbeat_at) AS living, count(*) OVER ()::int AS total
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
