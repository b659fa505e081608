-- Generations of a deployment: where to replay into, ending one, and moving what it left behind.

-- is_begun: whether a deployment of that number was begun. Without any deployment there is generation 0.
CREATE OR REPLACE FUNCTION core.is_begun(p_generation bigint)
RETURNS boolean
LANGUAGE sql STABLE
SET search_path = pg_catalog, pg_temp
AS $$
    SELECT p_generation = 0 OR EXISTS (SELECT FROM core.deployments d WHERE d.generation = p_generation)
$$;

-- served_generation: the newest that a living worker serves; NULL without one. Any worker can name any number, and what
-- is replayed into one that no other worker has would wait for ever: while a worker of a deployment that was begun lives,
-- only such count. Otherwise those do whose own channel is served.
CREATE OR REPLACE FUNCTION core.served_generation()
RETURNS bigint
LANGUAGE plpgsql STABLE SECURITY DEFINER
SET search_path = pg_catalog, pg_temp
AS $$
BEGIN
    RETURN (SELECT coalesce(max(s.generation) FILTER (WHERE core.is_begun(s.generation)
                                AND (s.channel = core.channel_of(s.generation) OR s.generation <= core.current_generation())),
                            max(s.generation) FILTER (WHERE s.channel = core.channel_of(s.generation)))
            FROM core.served_channels() s);
END
$$;

-- serving_generation: where replays go that name no generation.
CREATE OR REPLACE FUNCTION core.serving_generation()
RETURNS bigint
LANGUAGE plpgsql STABLE SECURITY DEFINER
SET search_path = pg_catalog, pg_temp
AS $$
BEGIN
    RETURN coalesce(core.served_generation(), core.current_generation());
END
$$;

-- counted_generation: what counts as the generation of a worker that says it is of p_generation, by the same rule.
CREATE OR REPLACE FUNCTION core.counted_generation(p_generation bigint)
RETURNS bigint
LANGUAGE plpgsql STABLE SECURITY DEFINER
SET search_path = pg_catalog, pg_temp
AS $$
DECLARE
    v_served bigint := core.served_generation();
BEGIN
    RETURN CASE WHEN NOT core.is_begun(p_generation) AND core.is_begun(v_served) THEN v_served ELSE p_generation END;
END
$$;

-- generation_open: how many open rows a generation has, counted up to a limit, over all its channels.
CREATE OR REPLACE FUNCTION core.generation_open(p_generation bigint, p_most int)
RETURNS TABLE (channel text, open int)
LANGUAGE plpgsql STABLE SECURITY DEFINER
SET search_path = pg_catalog, pg_temp SET jit = off SET enable_seqscan = off SET enable_bitmapscan = off
AS $$
#variable_conflict use_column
BEGIN
    RETURN QUERY
    SELECT c.channel, (SELECT count(*)::int FROM (
               SELECT FROM core.open_rows() o
               WHERE o.channel = c.channel AND o.generation = c.generation
               LIMIT p_most) o)
    FROM core.outbox_channels() c
    WHERE c.generation = p_generation;
END
$$;

-- generation_begin: the next number, which is the current one from then on: that of writers that do not name one. A number
-- that a worker has named, or that open events have, without a deployment is left out, so that none is used twice.
CREATE OR REPLACE FUNCTION core.generation_begin(p_label text, p_actor text, p_reason text DEFAULT NULL)
RETURNS bigint
LANGUAGE plpgsql SECURITY DEFINER
SET search_path = pg_catalog, pg_temp
AS $$
DECLARE
    v_generation bigint;
BEGIN
    LOCK TABLE core.deployments IN SHARE ROW EXCLUSIVE MODE;  -- one number for each, when two begin at once
    SELECT coalesce(max(d.generation), 0) INTO v_generation FROM core.deployments d;
    LOOP
        IF v_generation = 9223372036854775807 THEN
            RAISE EXCEPTION 'there is no generation after %', v_generation
                USING ERRCODE = 'numeric_value_out_of_range', HINT = 'Delete its line from core.deployments.';
        END IF;
        v_generation := v_generation + 1;
        EXIT WHEN NOT EXISTS (SELECT FROM core.workers w WHERE w.generation = v_generation AND w.stopped_at IS NULL)
              AND NOT EXISTS (SELECT FROM core.outbox_channels() c WHERE c.generation = v_generation);
    END LOOP;
    INSERT INTO core.deployments (generation, label) VALUES (v_generation, p_label);
    PERFORM core.audit_append(
        p_actor, 'generation.begin', p_reason, jsonb_build_object('generation', v_generation, 'label', p_label), '{}');
    RETURN v_generation;
END
$$;

-- generation_retire: no new events for a generation: writers that do not name one get the newest that is not retired. The
-- current one is retired only by force, and only while living workers serve the one that becomes current. Answers how many
-- events and living workers it still has; with either it is retired only by force.
CREATE OR REPLACE FUNCTION core.generation_retire(p_generation bigint, p_force boolean, p_actor text, p_reason text DEFAULT NULL)
RETURNS TABLE (open int, workers int, retired boolean)
LANGUAGE plpgsql SECURITY DEFINER
SET search_path = pg_catalog, pg_temp
AS $$
#variable_conflict use_column
DECLARE
    v_open    int := (SELECT coalesce(sum(g.open), 0) FROM core.generation_open(p_generation, 100000) g);
    v_workers int := (SELECT count(*) FROM core.workers w
                      WHERE w.generation = p_generation AND w.stopped_at IS NULL
                        AND core.is_living(w.heartbeat_at));
    v_retired boolean := p_force OR (v_open = 0 AND v_workers = 0);
    v_next    bigint := (SELECT coalesce(max(d.generation), 0) FROM core.deployments d
                         WHERE d.retired_at IS NULL AND d.generation <> p_generation);
BEGIN
    IF p_generation = core.current_generation() AND NOT (
           p_force AND v_next <> p_generation
           AND EXISTS (SELECT FROM core.served_channels() s WHERE s.generation = v_next)) THEN
        RAISE EXCEPTION 'generation % is the current one%', p_generation, CASE
                WHEN v_next = p_generation THEN ', and there is none to go back to'
                WHEN p_force THEN format(', and no living worker serves generation %s, which would become current', v_next)
                ELSE '' END
            USING ERRCODE = 'object_not_in_prerequisite_state',
                  HINT = format('Begin another deployment first; or go back by force, while workers of %s live.', v_next);
    END IF;
    IF v_retired THEN
        INSERT INTO core.deployments AS d (generation, retired_at) VALUES (p_generation, now())
        ON CONFLICT (generation) DO UPDATE SET retired_at = coalesce(d.retired_at, now());
        PERFORM core.audit_append(
            p_actor, 'generation.retire', p_reason,
            jsonb_build_object('generation', p_generation, 'force', nullif(p_force, false)),
            jsonb_build_object('open', v_open, 'workers', v_workers));
    END IF;
    RETURN QUERY SELECT v_open, v_workers, v_retired;
END
$$;

-- generation_move: pending rows of one generation to another, up to p_most at a time. A row that a worker holds stays
-- with it; one whose lease has expired moves as well. Workers of the other generation look again. Returns how many moved.
CREATE OR REPLACE FUNCTION core.generation_move(p_from bigint, p_to bigint, p_most int, p_actor text, p_reason text DEFAULT NULL)
RETURNS int
LANGUAGE plpgsql SECURITY DEFINER
SET search_path = pg_catalog, pg_temp SET jit = off SET enable_seqscan = off SET enable_bitmapscan = off
AS $$
DECLARE
    v_ids uuid[];
BEGIN
    IF p_from IS NULL OR p_to IS NULL OR p_from < 0 OR p_to < 0 OR p_from = p_to THEN
        RAISE EXCEPTION 'p_from and p_to must be two generation numbers'
            USING ERRCODE = 'invalid_parameter_value', HINT = 'holdfast generations list has them.';
    ELSIF p_most IS NULL OR p_most NOT BETWEEN 1 AND 10000 THEN
        RAISE EXCEPTION 'p_most must be 1 to 10000' USING ERRCODE = 'invalid_parameter_value', HINT = 'Call it again for more.';
    END IF;
    WITH movable AS MATERIALIZED (
        SELECT o.id
        FROM core.outbox_channels() c
        CROSS JOIN LATERAL (
            SELECT o.id FROM core.outbox o
            WHERE o.settled_at IS NULL AND o.ordering_key IS NULL
              AND o.channel = c.channel AND o.generation = p_from
              AND (o.status = 'pending' OR o.lease_expires_at < now())
            LIMIT p_most
            FOR UPDATE SKIP LOCKED) o
        WHERE c.generation = p_from
        LIMIT p_most),
    keyed AS MATERIALIZED (
        SELECT o.id
        FROM core.outbox_channels() c
        CROSS JOIN LATERAL (
            SELECT o.id FROM core.outbox o
            WHERE o.settled_at IS NULL AND o.ordering_key IS NOT NULL
              AND o.channel = c.channel AND o.generation = p_from
              AND (o.status = 'pending' OR o.lease_expires_at < now())
            LIMIT p_most
            FOR UPDATE SKIP LOCKED) o
        WHERE c.generation = p_from
        LIMIT p_most - (SELECT count(*) FROM movable)),
    moved AS (
        UPDATE core.outbox o
        SET generation = p_to,
            channel = CASE WHEN o.channel = core.channel_of(p_from) THEN core.channel_of(p_to) ELSE o.channel END
        WHERE o.id = ANY (ARRAY(SELECT movable.id FROM movable UNION ALL SELECT keyed.id FROM keyed))
        RETURNING o.id, o.channel),
    notified AS (SELECT core.wake(c.channel, 'rescan') FROM (SELECT DISTINCT moved.channel FROM moved) c)
    SELECT array_agg(moved.id) INTO v_ids FROM moved WHERE (SELECT count(*) FROM notified) >= 0;
    PERFORM core.audit_append(
        p_actor, 'generation.move', p_reason,
        jsonb_build_object('from', p_from, 'to', p_to, 'ids', coalesce(to_jsonb(v_ids), '[]')),
        jsonb_build_object('moved', coalesce(cardinality(v_ids), 0)));
    RETURN coalesce(cardinality(v_ids), 0);
END
$$;
