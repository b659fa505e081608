-- The fleet: which workers run, when each was last heard of, and which channels they serve.

-- worker_beat: a worker's heartbeat: registers it, and says every ten seconds that it lives.
CREATE OR REPLACE FUNCTION core.worker_beat(
    p_id uuid, p_name text, p_host text, p_pid int, p_version text, p_generation bigint, p_channels text[], p_handlers text[])
RETURNS void
LANGUAGE plpgsql SECURITY DEFINER
SET search_path = pg_catalog, pg_temp
AS $$
BEGIN
    IF (p_id IS NOT NULL AND core.is_name(p_name) AND core.is_name(p_host) AND p_pid >= 0 AND core.is_name(p_version)
        AND p_generation >= 0 AND core.are_names(p_channels, 1000, 63) AND core.are_names(p_handlers)) IS NOT TRUE THEN
        PERFORM core.refuse_argument('a worker has an id, a name, a host, a pid, a version, a generation, channels and handlers');
    END IF;
    PERFORM core.clock_observe();
    INSERT INTO core.workers (id, name, host, pid, version, generation, channels, handlers)
    VALUES (p_id, p_name, p_host, p_pid, p_version, p_generation, p_channels, p_handlers)
    ON CONFLICT (id) DO UPDATE SET heartbeat_at = now(), stopped_at = NULL;
    -- A silent worker is replaced when another lives under its name on its host, such as one that its supervisor started.
    UPDATE core.workers w SET stopped_at = now()
    WHERE w.name = p_name AND w.host = p_host AND w.id <> p_id AND w.stopped_at IS NULL AND NOT core.is_living(w.heartbeat_at);
    -- Kept a day for people who ask what ran last night.
    DELETE FROM core.workers w WHERE w.heartbeat_at < now() - interval '1 day';
    -- Requests to cancel that came too late.
    DELETE FROM core.cancel_requests s WHERE s.requested_at < now() - interval '1 day';
END
$$;

-- worker_stopped: a worker has ended in an orderly way.
CREATE OR REPLACE FUNCTION core.worker_stopped(p_id uuid)
RETURNS void
LANGUAGE plpgsql SECURITY DEFINER
SET search_path = pg_catalog, pg_temp
AS $$
BEGIN
    UPDATE core.workers w SET stopped_at = now() WHERE w.id = p_id;
END
$$;

-- worker_release: releases up to p_most rows that a worker holds, for an operator who knows that it is gone. Like
-- outbox_release it counts no attempt, and the fence keeps the worker from settling them if it comes back. Rows that a
-- transaction has locked stay. Returns how many were released: call it again until there are none. A worker that holds
-- nothing more counts as stopped, until it is heard of again.
CREATE OR REPLACE FUNCTION core.worker_release(p_worker uuid, p_most int, p_actor text, p_reason text DEFAULT NULL)
RETURNS int
LANGUAGE plpgsql SECURITY DEFINER
SET search_path = pg_catalog, pg_temp SET jit = off SET enable_seqscan = off SET enable_bitmapscan = off
AS $$
DECLARE
    v_ids uuid[];
BEGIN
    IF p_worker IS NULL THEN
        RAISE EXCEPTION 'p_worker must be the id of a worker'
            USING ERRCODE = 'invalid_parameter_value', HINT = 'holdfast workers list has them.';
    ELSIF (p_most BETWEEN 1 AND 10000) IS NOT TRUE THEN
        RAISE EXCEPTION 'p_most must be 1 to 10000' USING ERRCODE = 'invalid_parameter_value', HINT = 'Call it again for more.';
    END IF;
    WITH held AS MATERIALIZED (
        SELECT o.id FROM core.outbox o
        WHERE o.settled_at IS NULL AND o.ordering_key IS NULL AND o.status = 'in_flight' AND o.claimed_by = p_worker
        LIMIT p_most
        FOR UPDATE SKIP LOCKED),
    keyed AS MATERIALIZED (
        SELECT o.id FROM core.outbox o
        WHERE o.settled_at IS NULL AND o.ordering_key IS NOT NULL AND o.status = 'in_flight' AND o.claimed_by = p_worker
        LIMIT p_most - (SELECT count(*) FROM held)
        FOR UPDATE SKIP LOCKED),
    released AS (
        UPDATE core.outbox o
        SET status = 'pending', attempts = greatest(o.attempts - 1, 0), available_at = least(o.available_at, now()),
            claimed_by = NULL, lease_token = NULL, lease_expires_at = NULL
        WHERE o.id = ANY (ARRAY(SELECT held.id FROM held UNION ALL SELECT keyed.id FROM keyed))
        RETURNING o.id, o.channel, o.attempts, o.generation, o.handler_name, o.target, o.event_type),
    counted AS (
        INSERT INTO core.rollup_journal (handler_name, generation, outcome, n)
        SELECT core.begun_for(r.handler_name, r.target, r.event_type, p_worker), r.generation, 'begun', - sum(r.n)
        FROM (SELECT r.handler_name, r.target, r.event_type, r.generation, count(*) AS n
              FROM released r WHERE r.attempts = 0 GROUP BY 1, 2, 3, 4) r
        GROUP BY 1, 2),
    notified AS (SELECT core.wake(c.channel, 'rescan') FROM (SELECT DISTINCT released.channel FROM released) c)
    SELECT array_agg(released.id) INTO v_ids FROM released WHERE (SELECT count(*) FROM notified) >= 0;
    PERFORM core.audit_append(
        p_actor, 'worker.release', p_reason,
        jsonb_build_object('worker', p_worker, 'ids', coalesce(to_jsonb(v_ids), '[]')),
        jsonb_build_object('moved', coalesce(cardinality(v_ids), 0)));
    UPDATE core.workers w SET stopped_at = now()
    WHERE w.id = p_worker AND w.stopped_at IS NULL
      AND coalesce(cardinality(v_ids), 0) < p_most
      AND NOT EXISTS (SELECT FROM core.open_rows() o WHERE o.status = 'in_flight' AND o.claimed_by = p_worker);
    RETURN coalesce(cardinality(v_ids), 0);
END
$$;

-- living_for: how long a heartbeat counts.
CREATE OR REPLACE FUNCTION core.living_for()
RETURNS interval
LANGUAGE sql IMMUTABLE PARALLEL SAFE
SET search_path = pg_catalog, pg_temp
AS $$
    SELECT interval '1 minute'
$$;

-- is_living: whether a worker with such a heartbeat is living, or the declaration of a schedule with such an attended_at.
-- The one rule for status, doctor and every action: what a list calls unused can be retired. Workers send worker_beat
-- every ten seconds and write attended_at every fifteen. One that lies ahead was written before the clock was set back,
-- and says nothing; a living worker writes it again.
CREATE OR REPLACE FUNCTION core.is_living(p_heartbeat timestamptz)
RETURNS boolean
LANGUAGE sql STABLE PARALLEL SAFE
SET search_path = pg_catalog, pg_temp
AS $$
    SELECT p_heartbeat > now() - core.living_for() AND p_heartbeat < now() + core.living_for()
$$;

-- served_channels: the channels and generations in which a living worker claims.
CREATE OR REPLACE FUNCTION core.served_channels()
RETURNS TABLE (channel text, generation bigint)
LANGUAGE plpgsql STABLE SECURITY DEFINER
SET search_path = pg_catalog, pg_temp
AS $$
#variable_conflict use_column
BEGIN
    RETURN QUERY
    SELECT DISTINCT served.channel, w.generation
    FROM core.workers w CROSS JOIN unnest(w.channels) AS served (channel)
    WHERE w.stopped_at IS NULL AND core.is_living(w.heartbeat_at);
END
$$;

-- unserved_channels: the channels and generations that have open rows and no living worker; a hundred at most, those
-- first that workers have served in the last day, and then those of deployments.
CREATE OR REPLACE FUNCTION core.unserved_channels()
RETURNS TABLE (channel text, generation bigint)
LANGUAGE plpgsql STABLE SECURITY DEFINER
SET search_path = pg_catalog, pg_temp
AS $$
BEGIN
    RETURN QUERY
    SELECT first.channel, first.generation
    FROM (SELECT c.channel, c.generation
          FROM (SELECT * FROM core.open_channels(1000) EXCEPT SELECT * FROM core.served_channels()) c
          ORDER BY EXISTS (SELECT FROM core.workers w
                           WHERE w.generation = c.generation AND c.channel = ANY (w.channels)) DESC,
                   core.is_begun(c.generation) DESC, c.channel = core.channel_of(c.generation) DESC, c.channel, c.generation
          LIMIT 100) first
    ORDER BY first.channel, first.generation;
END
$$;

-- wake: has the workers of a channel look again, or hear the word. Not while the queue of notifications is half full: one that is
-- full makes the commit fail, any login can fill it, and workers poll.
CREATE OR REPLACE FUNCTION core.wake(p_channel text, p_word text)
RETURNS void
LANGUAGE plpgsql SECURITY DEFINER
SET search_path = pg_catalog, pg_temp
AS $$
BEGIN
    IF pg_notification_queue_usage() < 0.5 THEN
        PERFORM pg_notify(p_channel, p_word);
    END IF;
END
$$;
