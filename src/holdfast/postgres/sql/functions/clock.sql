-- Steps of the database's clock. Leases and due times are times of that clock, and nothing in the database tells a step
-- from time that has passed: workers do, who compare it with a clock of their own that never steps.
--
-- After a step forward live leases look expired. Each worker goes on with the time before the step for as long as the
-- longest lease lasts, within which every living holder extends its leases (p_ended_before of outbox_claim).
-- After a step back, times that were written before it lie in the future. They are repaired here. That step the heartbeats
-- show by themselves, also when no worker lived at the time: the next one to start finds it unrecorded.

-- clock_observe: with every heartbeat. Remembers the latest time, and when it has jumped: back, or forward by more than
-- lies between the heartbeats of a fleet. Not the time of the transaction, which its client may have kept open.
CREATE OR REPLACE FUNCTION core.clock_observe()
RETURNS void
LANGUAGE plpgsql SECURITY DEFINER
SET search_path = pg_catalog, pg_temp
AS $$
BEGIN
    UPDATE core.clock c
    SET latest = t.now,
        jump = CASE WHEN t.jumped THEN t.now - c.latest ELSE c.jump END,
        jumped_at = CASE WHEN t.jumped THEN t.now ELSE c.jumped_at END
    -- Time in which no worker lived does not hide a jump back that is still to be recorded.
    FROM (SELECT n.now, (n.now - s.latest BETWEEN interval '-1 second' AND interval '15 seconds') IS NOT TRUE
                        AND (n.now < s.latest OR n.now - s.latest >= - s.jump) AS jumped
          FROM core.clock s CROSS JOIN (SELECT clock_timestamp() AS now) n
          WHERE (n.now - s.latest BETWEEN interval '-1 second' AND interval '1 second') IS NOT TRUE
          FOR UPDATE OF s SKIP LOCKED) t
    WHERE c.one;
END
$$;

-- clock_shows: whether the jump that was last seen here is the step that a worker tells of. Between the heartbeats before
-- and after it some time has passed, so a step back is longer than its jump, and one forward shorter. A jump back shows
-- one step, which takes it away, however long ago it was seen.
CREATE OR REPLACE FUNCTION core.clock_shows(p_by interval, p_lease interval)
RETURNS boolean
LANGUAGE plpgsql SECURITY DEFINER
SET search_path = pg_catalog, pg_temp
AS $$
BEGIN
    PERFORM core.clock_observe();
    RETURN EXISTS (
        SELECT FROM core.clock c
        WHERE CASE WHEN p_by > interval '0'
                   THEN p_by <= c.jump + interval '3 seconds'
                        AND c.jumped_at BETWEEN clock_timestamp() - greatest(2 * p_lease, interval '2 minutes')
                                            AND clock_timestamp() + interval '3 seconds'
                   ELSE c.jump < interval '0' AND p_by >= c.jump - interval '30 seconds' END);
END
$$;

-- clock_unrecorded: the jump back that no worker has recorded as a step yet, in seconds; NULL without one.
CREATE OR REPLACE FUNCTION core.clock_unrecorded()
RETURNS float8
LANGUAGE plpgsql STABLE SECURITY DEFINER
SET search_path = pg_catalog, pg_temp
AS $$
BEGIN
    RETURN (SELECT extract(epoch FROM c.jump)::float8 FROM core.clock c WHERE c.jump < interval '0');
END
$$;

-- worker_alive: extends the lease of a worker as a whole, and is a heartbeat: its worker sends it from a thread of its own,
-- also while a handler blocks the event loop and until the last handler has ended after SIGTERM. Returns the time of this
-- clock, and the longest lease in the fleet, in seconds.
CREATE OR REPLACE FUNCTION core.worker_alive(p_id uuid, p_lease interval)
RETURNS TABLE (clock timestamptz, longest_lease float8)
LANGUAGE plpgsql SECURITY DEFINER
SET search_path = pg_catalog, pg_temp
AS $$
BEGIN
    PERFORM core.require_lease(p_lease);
    PERFORM core.clock_observe();
    UPDATE core.workers w SET lease = p_lease, lease_expires_at = now() + p_lease, heartbeat_at = now() WHERE w.id = p_id;
    RETURN QUERY SELECT clock_timestamp(), extract(epoch FROM greatest(p_lease, core.longest_lease()))::float8;
END
$$;

-- require_lease: refuses what cannot be the length of a lease.
CREATE OR REPLACE FUNCTION core.require_lease(p_lease interval)
RETURNS void
LANGUAGE plpgsql IMMUTABLE
SET search_path = pg_catalog, pg_temp
AS $$
BEGIN
    IF (p_lease > interval '0' AND p_lease <= interval '1 hour') IS NOT TRUE THEN
        PERFORM core.refuse_argument('p_lease must be more than nothing and at most an hour');
    END IF;
END
$$;

-- longest_lease: of the workers that have not stopped. For a worker that has only just registered, and not yet told its
-- own, it is an hour, the longest that can be set.
CREATE OR REPLACE FUNCTION core.longest_lease()
RETURNS interval
LANGUAGE plpgsql STABLE SECURITY DEFINER
SET search_path = pg_catalog, pg_temp
AS $$
BEGIN
    RETURN (SELECT max(coalesce(w.lease, interval '1 hour')) FROM core.workers w
            WHERE w.stopped_at IS NULL AND (w.lease IS NOT NULL OR core.is_living(w.heartbeat_at)));
END
$$;

-- silent_workers: the workers that have not stopped in order and whose lease has expired, and a third of it passed since
-- then, by this clock and by the caller's reckoning of it (p_ended_before).
CREATE OR REPLACE FUNCTION core.silent_workers(p_ended_before timestamptz)
RETURNS SETOF uuid
LANGUAGE plpgsql STABLE SECURITY DEFINER
SET search_path = pg_catalog, pg_temp
AS $$
BEGIN
    RETURN QUERY
    SELECT w.id FROM core.workers w
    WHERE w.stopped_at IS NULL
      AND coalesce(w.lease_expires_at + w.lease / 3, w.heartbeat_at + core.living_for())
          < least(now(), p_ended_before);
END
$$;

-- clock_stepped: writes down a step that a worker has seen; the last hundred are kept. The worker that is the first to
-- tell of a step back also moves the times that workers have made (delays of retries and snoozes, leases of workers and
-- of replay plans, the sweep's turn) with the clock. A time that a producer has named stays. Returns whether it was
-- the first. A step that the heartbeats of the fleet do not show is not believed, and nothing is done: without it delays
-- are as long as the step was, and that is no more than seconds where they miss it.
CREATE OR REPLACE FUNCTION core.clock_stepped(p_worker uuid, p_by interval, p_lease interval)
RETURNS boolean
LANGUAGE plpgsql SECURITY DEFINER
SET search_path = pg_catalog, pg_temp SET jit = off SET enable_seqscan = off SET enable_bitmapscan = off
AS $$
DECLARE
    v_channels int;
BEGIN
    PERFORM core.require_lease(p_lease);
    IF p_worker IS NULL OR (p_by BETWEEN interval '-1000 years' AND interval '1000 years') IS NOT TRUE THEN
        PERFORM core.refuse_argument('p_worker and p_by must say who has seen which step, of at most 1000 years');
    END IF;
    LOCK TABLE core.clock_steps IN SHARE ROW EXCLUSIVE MODE;
    IF NOT core.clock_shows(p_by, p_lease) THEN
        RETURN false;
    END IF;
    -- Others see it when they next extend their leases. The same worker sees a step once: a second one is another step.
    -- Of a step back only the first is shown.
    IF p_by > interval '0' AND EXISTS (SELECT FROM core.clock_steps s
               WHERE s.seen_by <> p_worker AND s.step BETWEEN p_by - interval '3 seconds' AND p_by + interval '3 seconds'
                 AND s.seen_at BETWEEN now() - greatest(p_lease, interval '1 minute') AND now() + interval '3 seconds') THEN
        RETURN false;
    END IF;
    INSERT INTO core.clock_steps (seen_by, step) VALUES (p_worker, p_by);
    DELETE FROM core.clock_steps s WHERE s.id <= (SELECT max(l.id) - 100 FROM core.clock_steps l);

    IF p_by > interval '0' THEN
        -- How long it has been failing is part of the retry policy, and must not grow by the step.
        WITH open AS MATERIALIZED (
            SELECT o.id FROM core.outbox o
            WHERE o.settled_at IS NULL AND o.ordering_key IS NULL AND o.first_failed_at < now() - p_by
            FOR UPDATE SKIP LOCKED),
        keyed AS MATERIALIZED (
            SELECT o.id FROM core.outbox o
            WHERE o.settled_at IS NULL AND o.ordering_key IS NOT NULL AND o.first_failed_at < now() - p_by
            FOR UPDATE SKIP LOCKED)
        UPDATE core.outbox o SET first_failed_at = o.first_failed_at + p_by
        WHERE o.id = ANY (ARRAY(SELECT open.id FROM open UNION ALL SELECT keyed.id FROM keyed));
        RETURN true;
    END IF;
    WITH ahead AS MATERIALIZED (
        SELECT o.id FROM core.outbox o
        WHERE o.settled_at IS NULL AND o.ordering_key IS NULL AND o.status = 'pending'
          AND o.available_at > now() AND o.available_at < 'infinity'
          AND (o.first_failed_at IS NOT NULL OR o.claimed_by IS NOT NULL OR o.failure_history <> '[]')
        FOR UPDATE SKIP LOCKED),
    keyed AS MATERIALIZED (
        SELECT o.id FROM core.outbox o
        WHERE o.settled_at IS NULL AND o.ordering_key IS NOT NULL AND o.status = 'pending'
          AND o.available_at > now() AND o.available_at < 'infinity'
          AND (o.first_failed_at IS NOT NULL OR o.claimed_by IS NOT NULL OR o.failure_history <> '[]')
        FOR UPDATE SKIP LOCKED),
    moved AS (
        UPDATE core.outbox o
        SET available_at = greatest(o.available_at + p_by, now()), first_failed_at = least(o.first_failed_at, now())
        WHERE o.id = ANY (ARRAY(SELECT ahead.id FROM ahead UNION ALL SELECT keyed.id FROM keyed))
        RETURNING o.channel)
    SELECT count(core.wake(c.channel, 'rescan')) INTO v_channels FROM (SELECT DISTINCT moved.channel FROM moved) c;
    UPDATE core.workers w
    SET heartbeat_at = least(w.heartbeat_at, now()), lease_expires_at = least(w.lease_expires_at, now() + w.lease)
    WHERE w.heartbeat_at > now() OR w.lease_expires_at > now() + w.lease;
    UPDATE core.clock c SET jump = interval '0' WHERE c.one;  -- it is recorded now
    UPDATE core.sweeps s SET seen_at = least(s.seen_at, now()), finished_at = least(s.finished_at, now()) WHERE s.one;
    UPDATE core.plans p
    SET waiting_since = least(p.waiting_since, now()), lease_expires_at = p.lease_expires_at + p_by
    WHERE p.finished_at IS NULL AND (p.waiting_since > now() OR p.lease_expires_at > now() - p_by);
    RETURN true;
END
$$;

-- clock_repair: after a step back, up to p_most rows at a time: what was due at once is due whatever the clock says, and
-- a lease that expires later than the longest lease from now is none; it gets that much time, in which a living holder
-- extends it. What is in flight was due. Returns how many rows it has repaired: call it again until there are none.
CREATE OR REPLACE FUNCTION core.clock_repair(p_most int)
RETURNS int
LANGUAGE plpgsql SECURITY DEFINER
SET search_path = pg_catalog, pg_temp SET jit = off SET enable_seqscan = off SET enable_bitmapscan = off
AS $$
DECLARE
    v_latest timestamptz := now() + coalesce(core.longest_lease(), interval '1 hour');
    v_leases int;
    v_due    int;
BEGIN
    IF (p_most BETWEEN 1 AND 10000) IS NOT TRUE THEN
        PERFORM core.refuse_argument('p_most must be 1 to 10000');
    END IF;
    WITH held AS MATERIALIZED (
        SELECT o.id FROM core.outbox o
        WHERE o.settled_at IS NULL AND o.ordering_key IS NULL AND o.status = 'in_flight'
          AND (o.lease_expires_at > v_latest OR o.available_at > now())
        LIMIT p_most
        FOR UPDATE SKIP LOCKED),
    keyed AS MATERIALIZED (
        SELECT o.id FROM core.outbox o
        WHERE o.settled_at IS NULL AND o.ordering_key IS NOT NULL AND o.status = 'in_flight'
          AND (o.lease_expires_at > v_latest OR o.available_at > now())
        LIMIT p_most
        FOR UPDATE SKIP LOCKED)
    UPDATE core.outbox o
    SET lease_expires_at = least(o.lease_expires_at, v_latest), available_at = least(o.available_at, now())
    WHERE o.id = ANY (ARRAY(SELECT held.id FROM held UNION ALL SELECT keyed.id FROM keyed));
    GET DIAGNOSTICS v_leases = ROW_COUNT;

    WITH ahead AS MATERIALIZED (
        SELECT o.id
        FROM core.open_lanes() c
        CROSS JOIN (VALUES (0::smallint), (1::smallint), (2::smallint)) AS p (priority)
        CROSS JOIN LATERAL (
            SELECT o.id FROM core.outbox o
            WHERE o.settled_at IS NULL AND o.ordering_key IS NULL
              AND o.channel = c.channel AND o.generation = c.generation
              AND o.route = c.route AND o.priority = p.priority
              AND o.available_at > now() AND o.available_at <= o.created_at AND o.status = 'pending'
            LIMIT p_most
            FOR UPDATE SKIP LOCKED) o
        LIMIT p_most),
    keyed AS MATERIALIZED (
        SELECT o.id FROM core.outbox o
        WHERE o.settled_at IS NULL AND o.ordering_key IS NOT NULL
          AND o.available_at > now() AND o.available_at <= o.created_at AND o.status = 'pending'
        LIMIT p_most
        FOR UPDATE SKIP LOCKED),
    moved AS (
        UPDATE core.outbox o SET available_at = now()
        WHERE o.id = ANY (ARRAY(SELECT ahead.id FROM ahead UNION ALL SELECT keyed.id FROM keyed))
        RETURNING o.channel),
    notified AS (SELECT core.wake(c.channel, 'rescan') FROM (SELECT DISTINCT moved.channel FROM moved) c)
    SELECT count(*) INTO v_due FROM moved WHERE (SELECT count(*) FROM notified) >= 0;
    RETURN v_leases + v_due;
END
$$;

-- clock_advance: by how much the clock has been set forward since then.
CREATE OR REPLACE FUNCTION core.clock_advance(p_since timestamptz)
RETURNS interval
LANGUAGE plpgsql STABLE SECURITY DEFINER
SET search_path = pg_catalog, pg_temp
AS $$
BEGIN
    RETURN coalesce((SELECT sum(s.step) FROM core.clock_steps s
                     WHERE s.step > interval '0' AND s.seen_at > p_since AND s.seen_at <= now()), interval '0');
END
$$;

-- clock_jumped: whether the clock was set forward by more than an hour within the last week. What looks old then may not be.
CREATE OR REPLACE FUNCTION core.clock_jumped() RETURNS boolean
LANGUAGE plpgsql STABLE SECURITY DEFINER
SET search_path = pg_catalog, pg_temp
AS $$
BEGIN
    RETURN EXISTS (SELECT FROM core.clock_steps s
                   WHERE s.step > interval '1 hour' AND s.seen_at BETWEEN now() - interval '7 days' AND now());
END
$$;
