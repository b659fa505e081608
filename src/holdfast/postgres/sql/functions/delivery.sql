-- Claim, extend, settle: the life of a lease. They stand together so that the fence, `lease_token = token AND
-- status = 'in_flight'`, can be checked by eye: every statement below that ends a lease has it.
--
-- Only settling waits for row locks, always in id order; everything else skips locked rows. That is what keeps
-- overlapping batches free of deadlocks.
--
-- The plans are pinned to look-ups by primary key, whatever the statistics say: a sub-select with FOR UPDATE is never
-- merged into the query around it, so LATERAL makes each row named by the caller one look-up; and where rows are
-- joined to what they become, the plan is made anew for each call (a third of a millisecond for hundreds of rows),
-- because one made while the table was empty would read the whole table once it is full.

-- outbox_claim: takes up to p_limits[i] due rows from each lane i and leases them under p_token, which is made anew for
-- each claim.
-- p_routes, p_priorities, p_handlers, p_limits, p_marks_at, p_marks_id run in parallel, one entry per lane.
-- Rows whose lease ran out are due again: there is no reaper to fail.
-- Returns one row with a NULL id, and claims nothing, when the registry of interest has changed.
-- Touches core.outbox (update); reads core.registry, core.event_handled.
CREATE OR REPLACE FUNCTION core.outbox_claim(
    p_worker uuid, p_token uuid, p_lease interval, p_registry bigint, p_channel text, p_generation bigint,
    p_routes text[], p_priorities smallint[], p_handlers text[], p_limits int[],
    p_marks_at timestamptz[], p_marks_id uuid[])
RETURNS TABLE (
    id uuid, route text, priority smallint, available_at timestamptz, origin_id uuid,
    event_type text, event_version int, occurred_at timestamptz, source text, target text, domain_id uuid,
    payload jsonb, idempotency_key text, trace_context text, headers jsonb,
    attempts int, failing_for float8, expired boolean, stopped boolean, handled boolean)
LANGUAGE plpgsql SECURITY DEFINER
SET search_path = pg_catalog, pg_temp SET jit = off
SET enable_seqscan = off SET enable_bitmapscan = off SET enable_hashjoin = off SET enable_mergejoin = off
AS $$
#variable_conflict use_column
DECLARE
    stops boolean := EXISTS (SELECT FROM core.stops);
BEGIN
    RETURN QUERY
    WITH due AS MATERIALIZED (
        SELECT o.id
        FROM unnest(p_routes, p_priorities, p_limits, p_marks_at, p_marks_id) AS lane (route, priority, n, mark_at, mark_id)
        CROSS JOIN LATERAL (
            SELECT o.id FROM core.outbox o
            WHERE o.settled_at IS NULL AND o.ordering_key IS NULL
              AND o.channel = p_channel AND o.generation = p_generation
              AND o.route = lane.route AND o.priority = lane.priority
              AND (o.available_at, o.id) >= (lane.mark_at, lane.mark_id)
              AND o.available_at <= now()
              AND (o.status = 'pending' OR o.lease_expires_at < now())
            ORDER BY o.available_at, o.id
            LIMIT lane.n
            FOR UPDATE SKIP LOCKED) o
        -- Under the snapshot that shows the rows: in a statement before this one the answer could be older than an
        -- event which is owed to a handler that was subscribed in between.
        WHERE EXISTS (SELECT FROM core.registry WHERE one AND version = p_registry))
    UPDATE core.outbox AS o
    SET status = 'in_flight', attempts = o.attempts + 1, claimed_by = p_worker,
        lease_token = p_token, lease_expires_at = now() + p_lease
    -- Not UPDATE ... FROM due: a generic plan may hash-join that with a scan of the whole table.
    WHERE o.id = ANY (ARRAY(SELECT due.id FROM due))
    RETURNING o.id, o.route, o.priority, o.available_at, o.origin_id,
        o.event_type, o.event_version, o.occurred_at, o.source, o.target,
        o.domain_id, o.payload, o.idempotency_key, o.trace_context, o.headers,
        o.attempts, extract(epoch FROM now() - o.first_failed_at)::float8, o.expires_at <= now(),
        stops AND EXISTS (SELECT FROM core.stops WHERE stops.id = o.id),
        -- LIMIT keeps the planner from hashing the whole inbox for an EXISTS.
        coalesce((SELECT true FROM core.event_handled h
                  WHERE h.handler_name = p_handlers[array_position(p_routes, o.route)]
                    AND h.idempotency_key = o.idempotency_key LIMIT 1), false);
    IF NOT FOUND AND NOT EXISTS (SELECT FROM core.registry WHERE one AND version = p_registry) THEN
        RETURN QUERY SELECT NULL::uuid, NULL, NULL::smallint, NULL::timestamptz, NULL::uuid, NULL,
            NULL::int, NULL::timestamptz, NULL, NULL, NULL::uuid, NULL::jsonb, NULL, NULL, NULL::jsonb,
            NULL::int, NULL::float8, NULL::boolean, NULL::boolean, NULL::boolean;
    END IF;
END
$$;

-- outbox_extend: a heartbeat. Returns the ids whose lease is lost or whose event is to be stopped; a row that a transactional handler has locked
-- is skipped and not lost, because its lock protects it from every other claim.
CREATE OR REPLACE FUNCTION core.outbox_extend(p_ids uuid[], p_tokens uuid[], p_lease interval)
RETURNS SETOF uuid
LANGUAGE plpgsql SECURITY DEFINER
SET search_path = pg_catalog, pg_temp SET jit = off
SET enable_seqscan = off SET enable_bitmapscan = off SET enable_hashjoin = off SET enable_mergejoin = off
AS $$
BEGIN
    WITH held AS MATERIALIZED (
        SELECT o.id
        FROM unnest(p_ids, p_tokens) AS t (id, token)
        CROSS JOIN LATERAL (
            SELECT o.id FROM core.outbox o
            WHERE o.id = t.id AND o.lease_token = t.token AND o.status = 'in_flight'
            FOR NO KEY UPDATE SKIP LOCKED) o)
    UPDATE core.outbox o SET lease_expires_at = now() + p_lease
    WHERE o.id = ANY (ARRAY(SELECT id FROM held));

    RETURN QUERY
    SELECT t.id FROM unnest(p_ids, p_tokens) AS t (id, token)
    WHERE NOT EXISTS (SELECT FROM core.outbox o
                      WHERE o.id = t.id AND o.lease_token = t.token AND o.status = 'in_flight')
       OR EXISTS (SELECT FROM core.stops s WHERE s.id = t.id);
END
$$;

-- outbox_deliver: settles rows as delivered and, with p_record, writes the inbox. Returns the ids whose lease was lost;
-- nothing of theirs is written. p_routes and p_handlers, in parallel, say which handler has handled the events of a
-- route that is not a handler's own.
-- The rows are looked up, locked and updated in one pass over the primary key, which goes through an array in id
-- order. The pairs of id and token are hashed; as the whole condition they would be joined, and the plan be at large.
-- The inbox rows are inserted plainly and, when one is there already (the same key published twice), once more around
-- the conflict: ON CONFLICT on every insert costs a sixth of a settle.
CREATE OR REPLACE FUNCTION core.outbox_deliver(
    p_ids uuid[], p_tokens uuid[], p_routes text[], p_handlers text[], p_record boolean)
RETURNS SETOF uuid
LANGUAGE plpgsql SECURITY DEFINER
SET search_path = pg_catalog, pg_temp SET jit = off SET plan_cache_mode = force_custom_plan
SET enable_seqscan = off SET enable_bitmapscan = off SET enable_hashjoin = off SET enable_mergejoin = off
AS $$
DECLARE
    settled uuid[];
BEGIN
    WITH done AS (
        UPDATE core.outbox o
        SET status = 'delivered', delivered_at = now(), settled_at = now(), lease_token = NULL, lease_expires_at = NULL,
            handler_name = coalesce(o.handler_name, p_handlers[array_position(p_routes, o.route)])
        WHERE o.id = ANY (p_ids) AND o.status = 'in_flight'
          AND ((o.id, o.lease_token) IN (SELECT * FROM unnest(p_ids, p_tokens))) IS TRUE
        RETURNING o.id, o.handler_name, o.idempotency_key),
    noted AS (
        INSERT INTO core.event_handled (handler_name, idempotency_key)
        SELECT d.handler_name, d.idempotency_key FROM done d WHERE p_record
        ORDER BY d.handler_name COLLATE "C", d.idempotency_key COLLATE "C")
    SELECT array_agg(d.id) INTO settled FROM done d;

    IF cardinality(settled) IS DISTINCT FROM cardinality(p_ids) THEN
        RETURN QUERY SELECT unnest(p_ids) EXCEPT SELECT unnest(settled);
    END IF;
EXCEPTION WHEN unique_violation THEN
    INSERT INTO core.event_handled (handler_name, idempotency_key)
    SELECT o.handler, o.key
    FROM (SELECT coalesce(o.handler_name, p_handlers[array_position(p_routes, o.route)]) AS handler,
                 o.idempotency_key AS key
          FROM core.outbox o
          WHERE o.id = ANY (p_ids) AND o.status = 'in_flight'
            AND ((o.id, o.lease_token) IN (SELECT * FROM unnest(p_ids, p_tokens))) IS TRUE
          ORDER BY o.id
          FOR NO KEY UPDATE) o
    ORDER BY o.handler COLLATE "C", o.key COLLATE "C"
    ON CONFLICT DO NOTHING;
    RETURN QUERY SELECT core.outbox_deliver(p_ids, p_tokens, p_routes, p_handlers, false);
END
$$;

-- outbox_retry: back to pending, due again after a delay on the database's clock. Returns the ids of lost leases.
-- This and the settles below may run at the end of a handler's transaction, so they tell the time of the statement.
CREATE OR REPLACE FUNCTION core.outbox_retry(
    p_ids uuid[], p_tokens uuid[], p_handlers text[], p_delays interval[], p_errors text[])
RETURNS SETOF uuid
LANGUAGE plpgsql SECURITY DEFINER
SET search_path = pg_catalog, pg_temp SET jit = off SET plan_cache_mode = force_custom_plan
SET enable_seqscan = off SET enable_bitmapscan = off SET enable_hashjoin = off SET enable_mergejoin = off
AS $$
BEGIN
    RETURN QUERY
    WITH mine AS MATERIALIZED (
        SELECT t.id, t.handler, t.delay, t.error
        FROM (SELECT * FROM unnest(p_ids, p_tokens, p_handlers, p_delays, p_errors)
              AS t (id, token, handler, delay, error) ORDER BY id) t
        CROSS JOIN LATERAL (
            SELECT FROM core.outbox o
            WHERE o.id = t.id AND o.lease_token = t.token AND o.status = 'in_flight'
            FOR NO KEY UPDATE) o),
    done AS (
        UPDATE core.outbox o
        SET status = 'pending', available_at = statement_timestamp() + mine.delay, last_error = mine.error,
            first_failed_at = coalesce(o.first_failed_at, statement_timestamp()), handler_name = mine.handler,
            claimed_by = NULL, lease_token = NULL, lease_expires_at = NULL
        FROM mine WHERE o.id = mine.id
        RETURNING o.id)
    SELECT t.id FROM unnest(p_ids) AS t (id) WHERE t.id NOT IN (SELECT done.id FROM done);
END
$$;

-- outbox_fail: the dead letter. Cancelled and expired rows are kept, but are nobody's to put right: deleted_at is
-- set at once and they are not in the dead-letter queue. Returns the ids of lost leases.
CREATE OR REPLACE FUNCTION core.outbox_fail(
    p_ids uuid[], p_tokens uuid[], p_handlers text[], p_reasons text[], p_errors text[], p_signatures text[])
RETURNS SETOF uuid
LANGUAGE plpgsql SECURITY DEFINER
SET search_path = pg_catalog, pg_temp SET jit = off SET plan_cache_mode = force_custom_plan
SET enable_seqscan = off SET enable_bitmapscan = off SET enable_hashjoin = off SET enable_mergejoin = off
AS $$
BEGIN
    RETURN QUERY
    WITH mine AS MATERIALIZED (
        SELECT t.id, t.handler, t.reason, t.error, t.signature
        FROM (SELECT * FROM unnest(p_ids, p_tokens, p_handlers, p_reasons, p_errors, p_signatures)
              AS t (id, token, handler, reason, error, signature) ORDER BY id) t
        CROSS JOIN LATERAL (
            SELECT FROM core.outbox o
            WHERE o.id = t.id AND o.lease_token = t.token AND o.status = 'in_flight'
            FOR NO KEY UPDATE) o),
    done AS (
        UPDATE core.outbox o
        SET status = 'failed', failed_at = statement_timestamp(), settled_at = statement_timestamp(),
            failure_reason = mine.reason, last_error = coalesce(mine.error, o.last_error),
            error_signature = mine.signature, first_failed_at = coalesce(o.first_failed_at, statement_timestamp()),
            deleted_at = CASE WHEN mine.reason IN ('cancelled', 'expired') THEN statement_timestamp() END,
            handler_name = mine.handler, lease_token = NULL, lease_expires_at = NULL
        FROM mine WHERE o.id = mine.id
        RETURNING o.id),
    -- The wish to stop it has come true, or too late. It is not the next cycle's.
    past AS (DELETE FROM core.stops s USING done WHERE s.id = done.id)
    SELECT t.id FROM unnest(p_ids) AS t (id) WHERE t.id NOT IN (SELECT done.id FROM done);
END
$$;

-- outbox_release: gives rows back as if they had not been claimed. The attempt is not counted. A delay of zero is
-- a give-back and keeps the row's place in its lane; a longer one is a snooze.
CREATE OR REPLACE FUNCTION core.outbox_release(p_ids uuid[], p_tokens uuid[], p_delays interval[])
RETURNS SETOF uuid
LANGUAGE plpgsql SECURITY DEFINER
SET search_path = pg_catalog, pg_temp SET jit = off SET plan_cache_mode = force_custom_plan
SET enable_seqscan = off SET enable_bitmapscan = off SET enable_hashjoin = off SET enable_mergejoin = off
AS $$
BEGIN
    RETURN QUERY
    WITH mine AS MATERIALIZED (
        SELECT t.id, t.delay
        FROM (SELECT * FROM unnest(p_ids, p_tokens, p_delays) AS t (id, token, delay) ORDER BY id) t
        CROSS JOIN LATERAL (
            SELECT FROM core.outbox o
            WHERE o.id = t.id AND o.lease_token = t.token AND o.status = 'in_flight'
            FOR NO KEY UPDATE) o),
    done AS (
        UPDATE core.outbox o
        SET status = 'pending', attempts = greatest(o.attempts - 1, 0),
            available_at = CASE WHEN mine.delay > interval '0' THEN statement_timestamp() + mine.delay ELSE o.available_at END,
            claimed_by = NULL, lease_token = NULL, lease_expires_at = NULL
        FROM mine WHERE o.id = mine.id
        RETURNING o.id, o.channel, mine.delay),
    told AS (
        -- Rows that keep their place lie below the other workers' low-water marks.
        SELECT pg_notify(c.channel, 'rescan')
        FROM (SELECT DISTINCT channel FROM done WHERE done.delay <= interval '0') c)
    SELECT t.id FROM unnest(p_ids) AS t (id)
    WHERE t.id NOT IN (SELECT done.id FROM done) AND (SELECT count(*) FROM told) >= 0;
END
$$;

-- outbox_enter: the first statement of a transactional handler. It settles the row and writes the inbox ahead of the
-- handler: all of it is there when the transaction commits, and not otherwise. Until then the row is locked, so nobody
-- else can claim it, even when the lease runs out; and a second copy of the event waits for the inbox row until the
-- first has committed, and is then a duplicate. A transaction whose client is gone is ended by the server p_idle after
-- it fell silent. Returns run, duplicate, or lost, which is the lease.
CREATE OR REPLACE FUNCTION core.outbox_enter(p_id uuid, p_token uuid, p_handler text, p_idle interval)
RETURNS text
LANGUAGE plpgsql SECURITY DEFINER
SET search_path = pg_catalog, pg_temp SET lock_timeout = '5s'
AS $$
DECLARE
    v_idle text := (extract(epoch FROM p_idle) * 1000)::bigint::text;
    v_key  text;
BEGIN
    PERFORM set_config('idle_in_transaction_session_timeout', v_idle, true);
    IF current_setting('server_version_num')::int >= 170000 THEN
        -- Also for a client that vanished in the middle of a message, which counts as neither idle nor running.
        PERFORM set_config('transaction_timeout', v_idle, true);
    END IF;
    UPDATE core.outbox o
    SET status = 'delivered', delivered_at = now(), settled_at = now(), handler_name = p_handler,
        lease_token = NULL, lease_expires_at = NULL
    WHERE o.id = p_id AND o.lease_token = p_token AND o.status = 'in_flight'
    RETURNING o.idempotency_key INTO v_key;
    IF NOT FOUND THEN
        RETURN 'lost';
    END IF;
    INSERT INTO core.event_handled (handler_name, idempotency_key) VALUES (p_handler, v_key) ON CONFLICT DO NOTHING;
    RETURN CASE WHEN FOUND THEN 'run' ELSE 'duplicate' END;
END
$$;

-- outbox_reopen: takes back what outbox_enter did, for a handler that has failed, in the same transaction. The row
-- stays locked, and what became of the attempt can be settled under its token. False: it did not enter here.
CREATE OR REPLACE FUNCTION core.outbox_reopen(p_id uuid, p_token uuid, p_handler text, p_route text)
RETURNS boolean
LANGUAGE plpgsql SECURITY DEFINER
SET search_path = pg_catalog, pg_temp
AS $$
DECLARE
    v_key text;
BEGIN
    -- Only a version that this transaction wrote: what is committed is delivered for good.
    UPDATE core.outbox o
    SET status = 'in_flight', delivered_at = NULL, settled_at = NULL, lease_token = p_token, lease_expires_at = now(),
        handler_name = CASE WHEN strpos(p_route, '/') = 0 THEN p_handler END
    WHERE o.id = p_id AND o.status = 'delivered' AND o.handler_name = p_handler AND o.xmin = pg_current_xact_id()::xid
    RETURNING o.idempotency_key INTO v_key;
    IF NOT FOUND THEN
        RETURN false;
    END IF;
    DELETE FROM core.event_handled h
    WHERE h.handler_name = p_handler AND h.idempotency_key = v_key AND h.xmin = pg_current_xact_id()::xid;
    RETURN true;
END
$$;
