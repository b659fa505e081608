-- The locks of a channel. The first makes one worker the channel's sleeper; while a worker holds (or waits for) the
-- second exclusively, committing producers notify. See outbox_notify in functions/publish.sql. The third makes another
-- worker the sleeper's deputy.

-- name: become_sleeper
-- 2: the sleeper, and asleep. 1: the sleeper, but commits that saw no sleeper are still under way. 0: another worker is.
-- Who falls asleep says so in the same statement, and the other idle workers look once more: what was committed before
-- rang no bell.
SELECT CASE
    WHEN NOT pg_catalog.pg_try_advisory_lock(
        pg_catalog.hashtextextended('core.' || :channel::text || '/sleeper', 0::bigint)) THEN 0
    WHEN pg_catalog.pg_try_advisory_lock(pg_catalog.hashtextextended('core.' || :channel::text, 0::bigint)) THEN
        CASE WHEN core.wake(:channel::text, 'asleep ' || :worker::text) IS NULL THEN 2 ELSE 2 END
    ELSE 1 END;

-- name: watch_sleeper
-- The deputy's look. 2 and 1: it has become the sleeper, as above. 0: another worker is, and commits notify. 3: another
-- worker is, and commits do not notify: it died between its two locks, and its session has not ended yet.
SELECT CASE
    WHEN pg_catalog.pg_try_advisory_lock(
        pg_catalog.hashtextextended('core.' || :channel::text || '/sleeper', 0::bigint)) THEN
        CASE WHEN pg_catalog.pg_try_advisory_lock(pg_catalog.hashtextextended('core.' || :channel::text, 0::bigint)) THEN
            CASE WHEN core.wake(:channel::text, 'asleep ' || :worker::text) IS NULL THEN 2 ELSE 2 END
            ELSE 1 END
    WHEN pg_catalog.pg_try_advisory_xact_lock_shared(
        pg_catalog.hashtextextended('core.' || :channel::text, 0::bigint)) THEN 3
    ELSE 0 END;

-- name: become_deputy
SELECT pg_catalog.pg_try_advisory_lock(pg_catalog.hashtextextended('core.' || :channel::text || '/deputy', 0::bigint));

-- name: resign_as_deputy
SELECT pg_catalog.pg_advisory_unlock(pg_catalog.hashtextextended('core.' || :channel::text || '/deputy', 0::bigint));

-- name: is_place_vacant
-- Whether the channel has no sleeper or no deputy. On any connection: the locks end with the statement. A worker that
-- tries to become the sleeper meanwhile may fail, but whoever looks last tries after all the looks.
SELECT pg_catalog.pg_try_advisory_xact_lock_shared(
           pg_catalog.hashtextextended('core.' || :channel::text || '/sleeper', 0::bigint))
    OR pg_catalog.pg_try_advisory_xact_lock_shared(
           pg_catalog.hashtextextended('core.' || :channel::text || '/deputy', 0::bigint));

-- name: fall_asleep
-- Waits for the commits under way. From the moment it queues, every further commit notifies.
SELECT CASE WHEN pg_catalog.pg_advisory_lock(pg_catalog.hashtextextended('core.' || :channel::text, 0::bigint)) IS NOT NULL
       THEN core.wake(:channel::text, 'asleep ' || :worker::text) IS NOT NULL END;

-- name: get_up
-- A busy worker needs no notification. Another idle worker becomes the sleeper.
SELECT pg_catalog.pg_advisory_unlock(pg_catalog.hashtextextended('core.' || :channel::text, 0::bigint))
     , pg_catalog.pg_advisory_unlock(pg_catalog.hashtextextended('core.' || :channel::text || '/sleeper', 0::bigint))
     , core.wake(:channel::text, 'awake ' || :worker::text);

-- name: look_all
-- Every idle worker looks once more.
SELECT core.wake(:channel::text, 'awake ' || :worker::text);

-- name: ping
SELECT 1;
