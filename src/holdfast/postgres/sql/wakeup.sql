-- The two locks of a channel. The first makes one worker the channel's sleeper; while a worker holds (or waits for)
-- the second exclusively, committing producers notify. See outbox_notify in functions/publish.sql.

-- name: become_sleeper
-- 2: the sleeper, and asleep. 1: the sleeper, but commits that saw no sleeper are still under way. 0: another worker is.
SELECT CASE
    WHEN NOT pg_catalog.pg_try_advisory_lock(
        pg_catalog.hashtextextended('core.' || :channel::text || '/sleeper', 0::bigint)) THEN 0
    WHEN pg_catalog.pg_try_advisory_lock(pg_catalog.hashtextextended('core.' || :channel::text, 0::bigint)) THEN 2
    ELSE 1 END;

-- name: fall_asleep
-- Waits for the commits under way. From the moment it queues, every further commit notifies.
SELECT pg_catalog.pg_advisory_lock(pg_catalog.hashtextextended('core.' || :channel::text, 0::bigint)) IS NOT NULL;

-- name: announce_sleeper
-- The other idle workers look once more: what was committed before the sleeper fell asleep rang no bell.
SELECT pg_catalog.pg_notify(:channel::text, 'asleep ' || :worker::text);

-- name: get_up
-- A busy worker needs no notification. Another idle worker becomes the sleeper.
SELECT pg_catalog.pg_advisory_unlock(pg_catalog.hashtextextended('core.' || :channel::text, 0::bigint))
     , pg_catalog.pg_advisory_unlock(pg_catalog.hashtextextended('core.' || :channel::text || '/sleeper', 0::bigint))
     , pg_catalog.pg_notify(:channel::text, 'awake ' || :worker::text);

-- name: ping
SELECT 1;
