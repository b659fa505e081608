-- The two locks of a channel. The first makes one worker the channel's guard; while a worker holds (or waits for)
-- the second exclusively, committing producers notify. See functions of the bell in migrations/0001_core.sql.

-- name: guard
-- 2: the guard, and asleep. 1: the guard, but commits that saw nobody asleep are still under way. 0: somebody else.
SELECT CASE
    WHEN NOT pg_try_advisory_lock(hashtextextended('core.' || :channel::text || '/guard', 0)) THEN 0
    WHEN pg_try_advisory_lock(hashtextextended('core.' || :channel::text, 0)) THEN 2
    ELSE 1 END;

-- name: fall_asleep
-- Waits for the commits under way. From the moment it queues, every further commit notifies.
SELECT pg_advisory_lock(hashtextextended('core.' || :channel::text, 0)) IS NOT NULL;

-- name: announce_guard
-- Workers that sleep under this guard look once more: what was committed before it stood guard rang no bell.
SELECT pg_notify(:channel::text, 'guarded ' || :worker::text);

-- name: stand_down
-- A busy worker needs no bell. Another that sleeps takes over.
SELECT pg_advisory_unlock(hashtextextended('core.' || :channel::text, 0))
     , pg_advisory_unlock(hashtextextended('core.' || :channel::text || '/guard', 0))
     , pg_notify(:channel::text, 'unguarded ' || :worker::text);

-- name: ping
SELECT 1;
