-- Everything that extends or ends a lease. It stands together so that the fence can be checked by eye: every statement
-- below names the row by its id AND its lease token AND status = 'in_flight', or, in outbox_reopen, outbox_retry_entered
-- and outbox_delete_delivered, a version of the row that this transaction wrote after it had passed the fence.
--
-- Settling waits for row locks, always in id order; everything else skips locked rows. So overlapping batches are free
-- of deadlocks.
--
-- The plans are pinned to look-ups by primary key, whatever the statistics say: a sub-select with FOR UPDATE is never
-- merged into the query around it, so LATERAL makes each row named by the caller one look-up; and where rows are
-- joined to what they become, the plan is made anew for each call (a third of a millisecond for hundreds of rows),
-- because one made while the table was empty would read the whole table once it is full.

-- outbox_extend: extends the leases. Returns the ids whose lease is lost or whose event is to be cancelled. A
-- row that a transactional handler has locked is skipped and not lost: its lock protects it from every other claim. Rows of
-- a handler that has a limit since they were claimed count from then on (flow.sql).
CREATE OR REPLACE FUNCTION core.outbox_extend(p_ids uuid[], p_tokens uuid[], p_lease interval)
RETURNS SETOF uuid
LANGUAGE plpgsql SECURITY DEFINER
SET search_path = pg_catalog, pg_temp SET jit = off
SET enable_seqscan = off SET enable_bitmapscan = off SET enable_hashjoin = off SET enable_mergejoin = off
AS $$
BEGIN
    PERFORM core.require_batch(p_ids, p_tokens, '{}');
    IF (p_lease BETWEEN interval '0' AND interval '1 day') IS NOT TRUE THEN
        PERFORM core.refuse_argument('p_lease must be at most a day');
    END IF;
    WITH held AS MATERIALIZED (
        SELECT o.id
        FROM unnest(p_ids, p_tokens) AS t (id, token)
        CROSS JOIN LATERAL (
            SELECT o.id FROM core.outbox o
            WHERE o.id = t.id AND o.lease_token = t.token AND o.status = 'in_flight'
            FOR NO KEY UPDATE SKIP LOCKED) o)
    UPDATE core.outbox o
    SET lease_expires_at = now() + p_lease,
        handler_name = o.handler_name  -- as it was, see outbox_claim
    WHERE o.id = ANY (ARRAY(SELECT id FROM held));
    IF EXISTS (SELECT FROM core.handler_flow) THEN
        PERFORM core.flow_adopt(p_ids, p_tokens);
    END IF;

    RETURN QUERY
    SELECT t.id FROM unnest(p_ids, p_tokens) AS t (id, token)
    -- Not an EXISTS, for which the planner may hash the whole table.
    WHERE (SELECT true FROM core.outbox o
           WHERE o.id = t.id AND o.lease_token = t.token AND o.status = 'in_flight' LIMIT 1) IS NULL
       OR EXISTS (SELECT FROM core.cancel_requests s WHERE s.id = t.id);
END
$$;

-- outbox_deliver: settles rows as delivered and, with p_record, writes the inbox. Returns the ids whose lease is lost;
-- nothing of theirs is written. p_routes and p_handlers, in parallel, name the handler that has handled the events of a
-- route that is not a handler's own. p_outcome says what it counts as: delivered, or duplicate.
-- The rows are looked up, locked and updated in one pass over the primary key, which goes through an array in id order.
-- The pairs of id and token are hashed; as the whole condition they would be joined, and the plan would vary.
-- The inbox rows are inserted plainly and, when one is there already (the same key published twice), once more around
-- the conflict: ON CONFLICT on every insert costs a sixth of a settle.
CREATE OR REPLACE FUNCTION core.outbox_deliver(
    p_ids uuid[], p_tokens uuid[], p_routes text[], p_handlers text[], p_record boolean, p_outcome text)
RETURNS SETOF uuid
LANGUAGE plpgsql SECURITY DEFINER
SET search_path = pg_catalog, pg_temp SET jit = off SET plan_cache_mode = force_custom_plan
SET enable_seqscan = off SET enable_bitmapscan = off SET enable_hashjoin = off SET enable_mergejoin = off
AS $$
DECLARE
    settled   uuid[];
BEGIN
    PERFORM core.require_batch(p_ids, p_tokens, '{}');
    IF (core.is_list(p_routes) AND cardinality(p_routes) = cardinality(p_handlers) AND core.are_names(p_handlers)
        AND strpos(array_to_string(p_handlers, ''), '/') = 0
        AND p_record IS NOT NULL AND p_outcome IN ('delivered', 'duplicate')) IS NOT TRUE THEN
        PERFORM core.refuse_argument('p_handlers must name a handler for each of p_routes, p_outcome say delivered or duplicate');
    END IF;
    WITH done AS (
        UPDATE core.outbox o
        SET status = 'delivered', delivered_at = now(), settled_at = now(), lease_token = NULL, lease_expires_at = NULL,
            handler_name = coalesce(o.handler_name, p_handlers[array_position(p_routes, o.route)])
        WHERE o.id = ANY (p_ids) AND o.status = 'in_flight'
          AND ((o.id, o.lease_token) IN (SELECT * FROM unnest(p_ids, p_tokens))) IS TRUE
        RETURNING o.id, o.handler_name, o.idempotency_key, o.source, o.generation),
    recorded AS (
        INSERT INTO core.event_handled (handler_name, idempotency_key, source)
        SELECT d.handler_name, d.idempotency_key, d.source FROM done d WHERE p_record
        ORDER BY d.handler_name COLLATE "C", d.idempotency_key COLLATE "C"),
    counted AS (
        INSERT INTO core.rollup_journal (handler_name, generation, outcome, n)
        SELECT d.handler_name, d.generation, p_outcome, count(*) FROM done d GROUP BY d.handler_name, d.generation)
    SELECT array_agg(d.id) INTO settled FROM done d;

    IF cardinality(settled) IS DISTINCT FROM cardinality(p_ids) THEN
        RETURN QUERY SELECT unnest(p_ids) EXCEPT SELECT unnest(settled);
    END IF;
EXCEPTION WHEN unique_violation THEN
    PERFORM core.inbox_add(o.handler, o.key, o.source)
    FROM (SELECT o.handler, o.key, o.source
          FROM (SELECT coalesce(o.handler_name, p_handlers[array_position(p_routes, o.route)]) AS handler,
                       o.idempotency_key AS key, o.source
                FROM core.outbox o
                WHERE o.id = ANY (p_ids) AND o.status = 'in_flight'
                  AND ((o.id, o.lease_token) IN (SELECT * FROM unnest(p_ids, p_tokens))) IS TRUE
                ORDER BY o.id
                FOR NO KEY UPDATE) o
          ORDER BY o.handler COLLATE "C", o.key COLLATE "C"
          OFFSET 0) o;
    RETURN QUERY SELECT core.outbox_deliver(p_ids, p_tokens, p_routes, p_handlers, false, p_outcome);
END
$$;

-- outbox_deliver_and_delete: outbox_deliver where the retention policies keep no delivered rows of some content class: it
-- deletes those under the same fence, and delivers the others. Returns the ids whose lease is lost.
CREATE OR REPLACE FUNCTION core.outbox_deliver_and_delete(
    p_ids uuid[], p_tokens uuid[], p_routes text[], p_handlers text[], p_record boolean, p_outcome text)
RETURNS SETOF uuid
LANGUAGE plpgsql SECURITY DEFINER
SET search_path = pg_catalog, pg_temp SET jit = off SET plan_cache_mode = force_custom_plan
SET enable_seqscan = off SET enable_bitmapscan = off SET enable_hashjoin = off SET enable_mergejoin = off
AS $$
DECLARE
    v_deleted uuid[]; v_handlers text[]; v_keys text[]; v_sources text[];
    v_classes record;
BEGIN
    PERFORM core.require_batch(p_ids, p_tokens, '{}');
    IF (core.is_list(p_routes) AND cardinality(p_routes) = cardinality(p_handlers) AND core.are_names(p_handlers)
        AND strpos(array_to_string(p_handlers, ''), '/') = 0
        AND p_record IS NOT NULL AND p_outcome IN ('delivered', 'duplicate')) IS NOT TRUE THEN
        PERFORM core.refuse_argument('p_handlers must name a handler for each of p_routes, p_outcome say delivered or duplicate');
    END IF;
    -- Once for the batch: asked for each row, the policies take longer than all the rest.
    SELECT * INTO v_classes FROM core.deletes_delivered_of();
    WITH deleted AS (
        DELETE FROM core.outbox o
        WHERE o.id = ANY (p_ids) AND o.status = 'in_flight'
          AND ((o.id, o.lease_token) IN (SELECT * FROM unnest(p_ids, p_tokens))) IS TRUE
          AND (o.content_class = ANY (v_classes.deleted) OR v_classes.others AND o.content_class <> ALL (v_classes.kept))
        RETURNING o.id, coalesce(o.handler_name, p_handlers[array_position(p_routes, o.route)]) AS handler_name,
                  o.idempotency_key, o.source, o.generation),
    counted AS (
        INSERT INTO core.rollup_journal (handler_name, generation, outcome, n)
        SELECT d.handler_name, d.generation, p_outcome, count(*) FROM deleted d GROUP BY d.handler_name, d.generation),
    recorded AS (
        INSERT INTO core.event_handled (handler_name, idempotency_key, source)
        SELECT d.handler_name, d.idempotency_key, d.source FROM deleted d WHERE p_record
        ORDER BY d.handler_name COLLATE "C", d.idempotency_key COLLATE "C"
        ON CONFLICT DO NOTHING
        RETURNING handler_name, idempotency_key)
    SELECT coalesce(array_agg(d.id), '{}'), array_agg(d.handler_name) FILTER (WHERE taken),
           array_agg(d.idempotency_key) FILTER (WHERE taken), array_agg(d.source) FILTER (WHERE taken)
    INTO v_deleted, v_handlers, v_keys, v_sources
    FROM (SELECT d.*, p_record AND (d.handler_name, d.idempotency_key) NOT IN (SELECT r.* FROM recorded r) AS taken
          FROM deleted d) d;
    IF v_keys IS NOT NULL THEN
        PERFORM core.inbox_add(t.handler, t.key, t.source)
        FROM unnest(v_handlers, v_keys, v_sources) AS t (handler, key, source);
    END IF;
    IF cardinality(v_deleted) < cardinality(p_ids) THEN
        RETURN QUERY
        SELECT core.outbox_deliver(array_agg(t.id), array_agg(t.token), p_routes, p_handlers, p_record, p_outcome)
        FROM unnest(p_ids, p_tokens) AS t (id, token) WHERE t.id NOT IN (SELECT unnest(v_deleted));
    END IF;
END
$$;

-- outbox_retry: back to pending, due again after a delay on the database's clock. Returns the ids whose lease is lost.
-- This and the settles below may run at the end of a handler's transaction, so they use the time of the statement.
CREATE OR REPLACE FUNCTION core.outbox_retry(
    p_ids uuid[], p_tokens uuid[], p_handlers text[], p_delays interval[], p_errors text[])
RETURNS SETOF uuid
LANGUAGE plpgsql SECURITY DEFINER
SET search_path = pg_catalog, pg_temp SET jit = off SET plan_cache_mode = force_custom_plan
SET enable_seqscan = off SET enable_bitmapscan = off SET enable_hashjoin = off SET enable_mergejoin = off
AS $$
BEGIN
    PERFORM core.require_batch(p_ids, p_tokens, ARRAY[cardinality(p_handlers), cardinality(p_delays), cardinality(p_errors)]);
    PERFORM core.require_failures(p_handlers, '{}');
    PERFORM core.require_delays(p_delays);
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
        SET status = 'pending', available_at = statement_timestamp() + mine.delay,
            last_error = core.error_text(mine.error), traceback = core.error_traceback(mine.error),
            first_failed_at = coalesce(o.first_failed_at, statement_timestamp()), handler_name = mine.handler,
            claimed_by = NULL, lease_token = NULL, lease_expires_at = NULL
        FROM mine WHERE o.id = mine.id
        RETURNING o.id, o.handler_name, o.generation),
    counted AS (
        INSERT INTO core.rollup_journal (handler_name, generation, outcome, n)
        SELECT d.handler_name, d.generation, 'retried', count(*) FROM done d GROUP BY d.handler_name, d.generation)
    SELECT t.id FROM unnest(p_ids) AS t (id) WHERE t.id NOT IN (SELECT done.id FROM done);
END
$$;

-- outbox_release: back to pending as if the rows had not been claimed; the attempt is not counted. With a delay of zero a
-- row keeps its place in its lane; a longer delay is a snooze. p_handlers says whose they are counted as. Returns the ids
-- whose lease is lost.
CREATE OR REPLACE FUNCTION core.outbox_release(p_ids uuid[], p_tokens uuid[], p_delays interval[], p_handlers text[])
RETURNS SETOF uuid
LANGUAGE plpgsql SECURITY DEFINER
SET search_path = pg_catalog, pg_temp SET jit = off SET plan_cache_mode = force_custom_plan
SET enable_seqscan = off SET enable_bitmapscan = off SET enable_hashjoin = off SET enable_mergejoin = off
AS $$
BEGIN
    PERFORM core.require_batch(p_ids, p_tokens, ARRAY[cardinality(p_delays), cardinality(p_handlers)]);
    PERFORM core.require_failures(p_handlers, '{}');
    PERFORM core.require_delays(p_delays);
    RETURN QUERY
    WITH mine AS MATERIALIZED (
        SELECT t.id, t.delay, t.handler
        FROM (SELECT * FROM unnest(p_ids, p_tokens, p_delays, p_handlers) AS t (id, token, delay, handler) ORDER BY id) t
        CROSS JOIN LATERAL (
            SELECT FROM core.outbox o
            WHERE o.id = t.id AND o.lease_token = t.token AND o.status = 'in_flight'
            FOR NO KEY UPDATE) o),
    done AS (
        UPDATE core.outbox o
        SET status = 'pending', attempts = greatest(o.attempts - 1, 0),
            available_at = CASE WHEN mine.delay > interval '0' THEN statement_timestamp() + mine.delay ELSE o.available_at END,
            -- Whose delay it is: one that a worker has made moves with a step of the clock.
            claimed_by = CASE WHEN mine.delay > interval '0' THEN o.claimed_by END,
            lease_token = NULL, lease_expires_at = NULL
        FROM mine WHERE o.id = mine.id
        RETURNING o.id, o.channel, mine.delay, o.attempts, o.generation, mine.handler),
    counted AS (
        INSERT INTO core.rollup_journal (handler_name, generation, outcome, n)
        SELECT d.handler, d.generation, CASE WHEN d.delay > interval '0' THEN 'snoozed' ELSE 'released' END, count(*)
        FROM done d GROUP BY 1, 2, 3
        UNION ALL
        SELECT d.handler, d.generation, 'begun', - count(*) FROM done d WHERE d.attempts = 0 GROUP BY 1, 2),
    notified AS (
        -- Rows that keep their place lie below the other workers' low-water marks.
        SELECT core.wake(c.channel, 'rescan')
        FROM (SELECT DISTINCT channel FROM done WHERE done.delay <= interval '0') c)
    SELECT t.id FROM unnest(p_ids) AS t (id)
    WHERE t.id NOT IN (SELECT done.id FROM done) AND (SELECT count(*) FROM notified) >= 0;
END
$$;

-- outbox_fail: makes dead letters, in place. Cancelled and expired rows are kept, but there is nothing to repair:
-- deleted_at is set at once, and they are not in the dead-letter queue. Returns the ids whose lease is lost.
CREATE OR REPLACE FUNCTION core.outbox_fail(
    p_ids uuid[], p_tokens uuid[], p_handlers text[], p_reasons text[], p_errors text[], p_signatures text[])
RETURNS SETOF uuid
LANGUAGE plpgsql SECURITY DEFINER
SET search_path = pg_catalog, pg_temp SET jit = off SET plan_cache_mode = force_custom_plan
SET enable_seqscan = off SET enable_bitmapscan = off SET enable_hashjoin = off SET enable_mergejoin = off
AS $$
BEGIN
    PERFORM core.require_batch(p_ids, p_tokens, ARRAY[
        cardinality(p_handlers), cardinality(p_reasons), cardinality(p_errors), cardinality(p_signatures)]);
    PERFORM core.require_failures(p_handlers, p_reasons);
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
            failure_reason = mine.reason, last_error = coalesce(core.error_text(mine.error), o.last_error),
            traceback = CASE WHEN mine.error IS NULL THEN o.traceback ELSE core.error_traceback(mine.error) END,
            error_signature = left(mine.signature, 300), first_failed_at = coalesce(o.first_failed_at, statement_timestamp()),
            deleted_at = CASE WHEN mine.reason IN ('cancelled', 'expired') THEN statement_timestamp() END,
            handler_name = mine.handler, lease_token = NULL, lease_expires_at = NULL
        FROM mine WHERE o.id = mine.id
        RETURNING o.id, o.handler_name, o.generation, o.failure_reason),
    counted AS (
        INSERT INTO core.rollup_journal (handler_name, generation, outcome, n)
        SELECT d.handler_name, d.generation,
               CASE WHEN d.failure_reason IN ('cancelled', 'expired') THEN d.failure_reason ELSE 'failed' END, count(*)
        FROM done d GROUP BY 1, 2, 3),
    -- A request to cancel the event is fulfilled, or came too late. It ends with this cycle.
    fulfilled AS (DELETE FROM core.cancel_requests s USING done WHERE s.id = done.id)
    SELECT t.id FROM unnest(p_ids) AS t (id) WHERE t.id NOT IN (SELECT done.id FROM done);
END
$$;

-- outbox_archive: makes dead letters, in core.archive. One statement deletes from the outbox and inserts into the archive:
-- a lost lease moves nothing, and an archive that refuses a row rolls all of it back, so that the rows stay leased and are
-- due again when the leases expire. Returns the ids whose lease is lost.
CREATE OR REPLACE FUNCTION core.outbox_archive(
    p_ids uuid[], p_tokens uuid[], p_handlers text[], p_reasons text[], p_errors text[], p_signatures text[])
RETURNS SETOF uuid
LANGUAGE plpgsql SECURITY DEFINER
SET search_path = pg_catalog, pg_temp SET jit = off SET plan_cache_mode = force_custom_plan
SET enable_seqscan = off SET enable_bitmapscan = off SET enable_hashjoin = off SET enable_mergejoin = off
AS $$
BEGIN
    PERFORM core.require_batch(p_ids, p_tokens, ARRAY[
        cardinality(p_handlers), cardinality(p_reasons), cardinality(p_errors), cardinality(p_signatures)]);
    PERFORM core.require_failures(p_handlers, p_reasons);
    RETURN QUERY
    WITH mine AS MATERIALIZED (
        SELECT t.id, t.handler, t.reason, t.error, t.signature
        FROM (SELECT * FROM unnest(p_ids, p_tokens, p_handlers, p_reasons, p_errors, p_signatures)
              AS t (id, token, handler, reason, error, signature) ORDER BY id) t
        CROSS JOIN LATERAL (
            SELECT FROM core.outbox o
            WHERE o.id = t.id AND o.lease_token = t.token AND o.status = 'in_flight'
            FOR UPDATE) o),
    moved AS (
        DELETE FROM core.outbox o USING mine WHERE o.id = mine.id
        RETURNING o.*, mine.handler, mine.reason, mine.error, mine.signature),
    archived AS (
        INSERT INTO core.archive (
            original_id, queue, payload, headers, deliveries_count, created_at, failed_at, failure_reason,
            last_exception, event_type, event_version, occurred_at, source, target, content_class, channel, generation,
            domain_id, idempotency_key, trace_context, origin_id, priority, ordering_key, dedupe_key, expires_at,
            first_failed_at, error_signature, failure_history, traceback, fairness_key, seq)
        SELECT m.id, m.handler, m.payload, m.headers, m.attempts, m.created_at, statement_timestamp(), m.reason,
            -- A rejection without a reason says nothing about the errors before.
            CASE WHEN m.error IS NULL AND m.reason <> 'rejected' THEN m.last_error ELSE core.error_text(m.error) END,
            m.event_type, m.event_version, m.occurred_at, m.source, m.target, m.content_class, m.channel, m.generation,
            m.domain_id, m.idempotency_key, m.trace_context, m.origin_id, m.priority, m.ordering_key, m.dedupe_key,
            m.expires_at, coalesce(m.first_failed_at, statement_timestamp()), left(m.signature, 300), m.failure_history,
            CASE WHEN m.error IS NULL AND m.reason <> 'rejected' THEN m.traceback ELSE core.error_traceback(m.error) END,
            m.fairness_key, m.seq
        FROM moved m ORDER BY m.id
        RETURNING original_id),
    counted AS (
        INSERT INTO core.rollup_journal (handler_name, generation, outcome, n)
        SELECT m.handler, m.generation, 'archived', count(*) FROM moved m GROUP BY 1, 2),
    -- A request to cancel the event came too late.
    fulfilled AS (DELETE FROM core.cancel_requests s USING archived WHERE s.id = archived.original_id)
    SELECT t.id FROM unnest(p_ids) AS t (id) WHERE t.id NOT IN (SELECT archived.original_id FROM archived);
END
$$;

-- outbox_enter: the first statement of a transactional handler. It settles the row and writes the inbox ahead of the
-- handler: both are there when the transaction commits, and not otherwise. Until then the row is locked, so no other
-- worker can claim it, even when the lease expires; and a second copy of the event waits for the inbox row until the
-- first has committed, and is then a duplicate. It does not wait for long, because others need the session: then the call
-- fails with lock_not_available, and nothing has changed. The server ends a transaction that has been silent for p_idle, whose
-- client is gone. Returns run, duplicate, or lost (the lease).
CREATE OR REPLACE FUNCTION core.outbox_enter(p_id uuid, p_token uuid, p_handler text, p_idle interval)
RETURNS text
LANGUAGE plpgsql SECURITY DEFINER
SET search_path = pg_catalog, pg_temp SET lock_timeout = '0.2s'
AS $$
DECLARE
    v_idle       text;
    v_key        text;
    v_source     text;
    v_generation bigint;
    v_first      boolean;
BEGIN
    IF core.is_silence(p_idle) IS NOT TRUE THEN
        PERFORM core.refuse_argument('p_idle must be 0.1 seconds to 24 days');
    ELSIF (core.is_name(p_handler) AND strpos(p_handler, '/') = 0) IS NOT TRUE THEN
        PERFORM core.refuse_argument('p_handler must name a handler, in 1 to 200 bytes');
    END IF;
    v_idle := set_config(
        'idle_in_transaction_session_timeout', (extract(epoch FROM p_idle) * 1000)::bigint::text, true);
    IF current_setting('server_version_num')::int >= 170000 THEN
        -- Also for a client that vanished in the middle of a message, which counts as neither idle nor running.
        v_idle := set_config('transaction_timeout', v_idle, true);
    END IF;
    UPDATE core.outbox o
    SET status = 'delivered', delivered_at = now(), settled_at = now(), handler_name = p_handler,
        lease_token = NULL, lease_expires_at = NULL
    WHERE o.id = p_id AND o.lease_token = p_token AND o.status = 'in_flight'
    RETURNING o.idempotency_key, o.source, o.generation INTO v_key, v_source, v_generation;
    IF NOT FOUND THEN
        RETURN 'lost';
    END IF;
    -- As inbox_add, whose call would cost every delivery: nearly always the first copy is the only one.
    INSERT INTO core.event_handled (handler_name, idempotency_key, source) VALUES (p_handler, v_key, v_source)
    ON CONFLICT DO NOTHING;
    v_first := FOUND OR core.inbox_add(p_handler, v_key, v_source);
    INSERT INTO core.rollup_journal (handler_name, generation, outcome, n)
    VALUES (p_handler, v_generation, CASE WHEN v_first THEN 'delivered' ELSE 'duplicate' END, 1);
    RETURN CASE WHEN v_first THEN 'run' ELSE 'duplicate' END;
END
$$;

-- outbox_enter_at_once: outbox_enter in the message that begins the transaction, whose sender is told of no result: what is
-- not 'run' is an error, and the sender asks again in the ordinary way. With p_look it is the first statement on a session
-- that another handler has used, as in ../handling.sql.
-- Every condition stands in the UPDATE: in each transaction, an expression of a block is prepared anew, and costs as much as
-- one of the writes.
CREATE OR REPLACE FUNCTION core.outbox_enter_at_once(p_id uuid, p_token uuid, p_handler text, p_idle interval, p_look boolean)
RETURNS void
LANGUAGE plpgsql SECURITY DEFINER
SET search_path = pg_catalog, pg_temp SET lock_timeout = '0.2s'
AS $$
DECLARE
    v_key        text;
    v_source     text;
    v_generation bigint;
BEGIN
    UPDATE core.outbox o
    SET status = 'delivered', delivered_at = now(), settled_at = now(), handler_name = p_handler,
        lease_token = NULL, lease_expires_at = NULL
    WHERE o.id = p_id AND o.lease_token = p_token AND o.status = 'in_flight'
      AND core.is_silence(p_idle) AND core.is_name(p_handler) AND strpos(p_handler, '/') = 0
      AND NOT (p_look AND (EXISTS (SELECT FROM pg_prepared_statements p
                                   WHERE p.from_sql OR NOT starts_with(p.name, '__asyncpg_'))
                           OR EXISTS (SELECT FROM pg_listening_channels())
                           OR pg_advisory_unlock_all() IS NULL))
      AND set_config(
              'idle_in_transaction_session_timeout', (extract(epoch FROM p_idle) * 1000)::bigint::text, true) IS NOT NULL
      -- Also for a client that vanished in the middle of a message, which counts as neither idle nor running.
      AND (current_setting('server_version_num')::int < 170000
           OR set_config('transaction_timeout', (extract(epoch FROM p_idle) * 1000)::bigint::text, true) IS NOT NULL)
    RETURNING o.idempotency_key, o.source, o.generation INTO v_key, v_source, v_generation;
    IF FOUND THEN
        INSERT INTO core.event_handled (handler_name, idempotency_key, source) VALUES (p_handler, v_key, v_source)
        ON CONFLICT DO NOTHING;
        IF FOUND THEN
            INSERT INTO core.rollup_journal (handler_name, generation, outcome, n)
            VALUES (p_handler, v_generation, 'delivered', 1);
            RETURN;
        END IF;
    END IF;
    RAISE EXCEPTION 'the handler cannot begin at once'
        USING ERRCODE = 'object_not_in_prerequisite_state', HINT = 'Call outbox_enter in a statement of its own.';
END
$$;

-- outbox_enter_batch: outbox_enter for several rows of one handler, as the first statement of a batch's transaction. Returns
-- run, duplicate or lost for each row, in their order. The rows are locked in id order, in one pass as in outbox_deliver,
-- and the inbox rows are written in the order of their keys, so that batches which share rows or keys do not deadlock:
-- they wait, and not for long. Of two rows with one key the first runs.
CREATE OR REPLACE FUNCTION core.outbox_enter_batch(p_ids uuid[], p_tokens uuid[], p_handler text, p_idle interval)
RETURNS text[]
LANGUAGE plpgsql SECURITY DEFINER
SET search_path = pg_catalog, pg_temp SET lock_timeout = '0.2s' SET jit = off SET plan_cache_mode = force_custom_plan
SET enable_seqscan = off SET enable_bitmapscan = off
AS $$
DECLARE
    v_idle        text;
    v_ids         uuid[];
    v_keys        text[];
    v_sources     text[];
    v_generations bigint[];
    v_first       boolean[];
    v_row         int;
BEGIN
    PERFORM core.require_batch(p_ids, p_tokens, '{}');
    IF core.is_silence(p_idle) IS NOT TRUE THEN
        PERFORM core.refuse_argument('p_idle must be 0.1 seconds to 24 days');
    ELSIF (core.is_name(p_handler) AND strpos(p_handler, '/') = 0) IS NOT TRUE THEN
        PERFORM core.refuse_argument('p_handler must name a handler, in 1 to 200 bytes');
    END IF;
    v_idle := set_config(
        'idle_in_transaction_session_timeout', (extract(epoch FROM p_idle) * 1000)::bigint::text, true);
    IF current_setting('server_version_num')::int >= 170000 THEN
        v_idle := set_config('transaction_timeout', v_idle, true);
    END IF;
    WITH entered AS (
        UPDATE core.outbox o
        SET status = 'delivered', delivered_at = now(), settled_at = now(), handler_name = p_handler,
            lease_token = NULL, lease_expires_at = NULL
        WHERE o.id = ANY (p_ids) AND o.status = 'in_flight'
          AND ((o.id, o.lease_token) IN (SELECT * FROM unnest(p_ids, p_tokens))) IS TRUE
        RETURNING o.id, o.idempotency_key, o.source, o.generation),
    ordered AS (
        SELECT e.*, row_number() OVER (PARTITION BY e.idempotency_key ORDER BY e.id) = 1 AS foremost FROM entered e),
    recorded AS (
        INSERT INTO core.event_handled (handler_name, idempotency_key, source)
        SELECT p_handler, o.idempotency_key, o.source FROM ordered o WHERE o.foremost
        ORDER BY o.idempotency_key COLLATE "C"
        ON CONFLICT DO NOTHING
        RETURNING idempotency_key)
    SELECT array_agg(o.id), array_agg(o.idempotency_key), array_agg(o.source), array_agg(o.generation),
           array_agg(o.foremost AND r.idempotency_key IS NOT NULL)
    INTO v_ids, v_keys, v_sources, v_generations, v_first
    FROM ordered o LEFT JOIN recorded r ON r.idempotency_key = o.idempotency_key;

    FOR v_row IN SELECT t.n FROM unnest(v_first) WITH ORDINALITY AS t (first, n) WHERE NOT t.first LOOP
        v_first[v_row] := core.inbox_add(p_handler, v_keys[v_row], v_sources[v_row]);
    END LOOP;
    INSERT INTO core.rollup_journal (handler_name, generation, outcome, n)
    SELECT p_handler, t.generation, CASE WHEN t.first THEN 'delivered' ELSE 'duplicate' END, count(*)
    FROM unnest(v_generations, v_first) AS t (generation, first) GROUP BY 2, 3;
    RETURN ARRAY(SELECT CASE WHEN e.first THEN 'run' WHEN NOT e.first THEN 'duplicate' ELSE 'lost' END
                 FROM unnest(p_ids) WITH ORDINALITY AS t (id, n)
                 LEFT JOIN unnest(v_ids, v_first) AS e (id, first) ON e.id = t.id
                 ORDER BY t.n);
END
$$;

-- outbox_reopen: undoes outbox_enter or outbox_enter_batch, in the same transaction, for a handler that has failed. The row stays locked, and the
-- outcome of the attempt can be settled under its token. Returns false when this transaction has not entered.
CREATE OR REPLACE FUNCTION core.outbox_reopen(p_id uuid, p_token uuid, p_handler text, p_route text)
RETURNS boolean
LANGUAGE plpgsql SECURITY DEFINER
SET search_path = pg_catalog, pg_temp
AS $$
DECLARE
    v_key        text;
    v_source     text;
    v_generation bigint;
BEGIN
    -- Only a version that this transaction wrote: what is committed is delivered for good.
    UPDATE core.outbox o
    SET status = 'in_flight', delivered_at = NULL, settled_at = NULL, lease_token = p_token, lease_expires_at = now(),
        handler_name = CASE WHEN strpos(p_route, '/') = 0 THEN p_handler END
    WHERE o.id = p_id AND o.status = 'delivered' AND o.handler_name = p_handler AND o.xmin = pg_current_xact_id()::xid
    RETURNING o.idempotency_key, o.source, o.generation INTO v_key, v_source, v_generation;
    IF NOT FOUND THEN
        RETURN false;
    END IF;
    DELETE FROM core.event_handled h
    WHERE h.handler_name = p_handler AND h.idempotency_key = ANY (ARRAY[v_key, core.scoped_key(v_source, v_key)])
      AND h.xmin = pg_current_xact_id()::xid;
    PERFORM core.rollup_count(p_handler, v_generation, CASE WHEN FOUND THEN 'delivered' ELSE 'duplicate' END, -1);
    RETURN true;
END
$$;

-- outbox_retry_entered: outbox_reopen and outbox_retry in one, for the message that ends a handler's transaction, whose
-- sender is told of no result: when this transaction has not entered it is an error. For one row this costs a fifth of
-- the two.
CREATE OR REPLACE FUNCTION core.outbox_retry_entered(p_id uuid, p_handler text, p_delay interval, p_error text)
RETURNS void
LANGUAGE plpgsql SECURITY DEFINER
SET search_path = pg_catalog, pg_temp
AS $$
DECLARE
    v_key        text;
    v_source     text;
    v_generation bigint;
    v_first      boolean;
BEGIN
    IF (p_delay BETWEEN interval '-1 year' AND interval '1000 years') IS NOT TRUE THEN
        PERFORM core.refuse_argument('p_delay must be an interval of at most 1000 years');
    END IF;
    UPDATE core.outbox o
    SET status = 'pending', delivered_at = NULL, settled_at = NULL, available_at = statement_timestamp() + p_delay,
        last_error = core.error_text(p_error), traceback = core.error_traceback(p_error),
        first_failed_at = coalesce(o.first_failed_at, statement_timestamp()), claimed_by = NULL
    WHERE o.id = p_id AND o.status = 'delivered' AND o.handler_name = p_handler AND o.xmin = pg_current_xact_id()::xid
    RETURNING o.idempotency_key, o.source, o.generation INTO v_key, v_source, v_generation;
    IF NOT FOUND THEN
        RAISE EXCEPTION 'this transaction has not entered the handler'
            USING ERRCODE = 'object_not_in_prerequisite_state', HINT = 'Call outbox_retry, if the lease is held.';
    END IF;
    DELETE FROM core.event_handled h
    WHERE h.handler_name = p_handler AND h.idempotency_key = v_key AND h.xmin = pg_current_xact_id()::xid;
    v_first := FOUND;
    IF NOT v_first THEN
        DELETE FROM core.event_handled h
        WHERE h.handler_name = p_handler AND h.idempotency_key = core.scoped_key(v_source, v_key)
          AND h.xmin = pg_current_xact_id()::xid;
        v_first := FOUND;
    END IF;
    INSERT INTO core.rollup_journal (handler_name, generation, outcome, n)
    VALUES (p_handler, v_generation, CASE WHEN v_first THEN 'delivered' ELSE 'duplicate' END, -1),
           (p_handler, v_generation, 'retried', 1);
END
$$;

-- outbox_delete_delivered: deletes the row that outbox_enter has settled in this transaction, if the retention policies
-- keep no delivered rows of its content class. The fence is outbox_enter's.
CREATE OR REPLACE FUNCTION core.outbox_delete_delivered(p_id uuid, p_handler text)
RETURNS void
LANGUAGE plpgsql SECURITY DEFINER
SET search_path = pg_catalog, pg_temp
AS $$
BEGIN
    -- Only a version that this transaction wrote. One that a producer has locked, who reacts to its event, is left to
    -- the next sweep: the session is not the producer's to hold.
    DELETE FROM core.outbox o
    WHERE o.id = (SELECT o.id FROM core.outbox o
                  WHERE o.id = p_id AND o.status = 'delivered' AND o.handler_name = p_handler
                    AND o.xmin = pg_current_xact_id()::xid AND core.deletes_delivered(o.content_class)
                  FOR UPDATE SKIP LOCKED);
END
$$;
