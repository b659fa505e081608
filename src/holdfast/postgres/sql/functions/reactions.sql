-- Reactions that run in the producer's process, after its commit. The event stands in the outbox like any other, for
-- other handlers that want it; these functions record the outcome of the reactions, which no worker has run.

-- reaction_owned: whether an event stands in the outbox. Refused if it is not the caller's: a process that reacts says
-- what is handled, and must not say it of events that others have published, or of keys that it has not published under.
-- An old snapshot does not show what others have published since, so it cannot tell.
CREATE OR REPLACE FUNCTION core.reaction_owned(p_event uuid, p_source text, p_key text)
RETURNS boolean
LANGUAGE plpgsql
SET search_path = pg_catalog, pg_temp
AS $$
DECLARE
    v_source text;
    v_key    text;
BEGIN
    PERFORM core.require_source(p_source);
    SELECT o.source, o.idempotency_key INTO v_source, v_key FROM core.outbox o WHERE o.id = p_event;
    IF FOUND AND (v_source, v_key) IS DISTINCT FROM (p_source, p_key) THEN
        RAISE EXCEPTION 'event % is another one than it is said to be', p_event
            USING ERRCODE = 'insufficient_privilege', HINT = 'Pass the envelope of an event of your own.';
    ELSIF v_source IS NULL AND current_setting('transaction_isolation') <> 'read committed' THEN
        RAISE EXCEPTION 'event % is not in the outbox as this transaction sees it', p_event
            USING ERRCODE = 'object_not_in_prerequisite_state', HINT = 'Call it in a READ COMMITTED transaction.';
    END IF;
    RETURN v_source IS NOT NULL;
END
$$;

-- require_reactions: refuses what cannot be the reactions of a producer's process to an event. A handler that workers have
-- subscribed gets what it has subscribed to, from the outbox: of any other event a dead letter on its route would be run
-- by it after a replay, and a key in its inbox would keep an event with that key from it. The keys of schedules are
-- their own: their events are published by workers, and no process reacts to them.
CREATE OR REPLACE FUNCTION core.require_reactions(p_handlers text[], p_type text, p_target text, p_key text)
RETURNS void
LANGUAGE plpgsql STABLE
SET search_path = pg_catalog, pg_temp
AS $$
BEGIN
    IF starts_with(p_key, 'schedule:') THEN
        RAISE EXCEPTION 'keys that begin with schedule: belong to schedules'
            USING ERRCODE = 'insufficient_privilege', HINT = 'Publish the event with another idempotency key.';
    ELSIF EXISTS (SELECT FROM unnest(p_handlers) AS t (handler)
                  WHERE EXISTS (SELECT FROM core.subscriptions s
                                WHERE s.handler_name = t.handler AND s.retired_at IS DISTINCT FROM s.created_at)
                    AND NOT EXISTS (SELECT FROM core.subscriptions s
                                    WHERE s.handler_name = t.handler AND s.retired_at IS DISTINCT FROM s.created_at
                                      AND p_type LIKE s.pattern
                                      AND (p_target IS NULL OR p_target = s.domain_context))) THEN
        RAISE EXCEPTION 'a handler is named that has never wanted %', p_type
            USING ERRCODE = 'insufficient_privilege', HINT = 'Name the reactions that have run.';
    END IF;
END
$$;

-- reaction_unhandled: which of the handlers have not handled the source's key yet. For events whose key is not their own
-- id: the others cannot have been handled before.
CREATE OR REPLACE FUNCTION core.reaction_unhandled(p_handlers text[], p_key text, p_source text)
RETURNS text[]
LANGUAGE plpgsql STABLE SECURITY DEFINER
SET search_path = pg_catalog, pg_temp
AS $$
BEGIN
    RETURN ARRAY(
        SELECT t.handler FROM unnest(p_handlers) AS t (handler)
        WHERE NOT EXISTS (SELECT FROM core.event_handled h
                          WHERE h.handler_name = t.handler AND h.idempotency_key = p_key
                            AND (h.source = p_source OR core.inbox_has(t.handler, p_key, p_source))));
END
$$;

-- reaction_enter: the first statement of a transactional reaction, as outbox_enter is a handler's: what it writes and
-- the inbox row commit together. False: the event is handled already, or was handled by the transaction that held the inbox row until now.
CREATE OR REPLACE FUNCTION core.reaction_enter(
    p_handler text, p_event uuid, p_source text, p_key text, p_idle interval)
RETURNS boolean
LANGUAGE plpgsql SECURITY DEFINER
SET search_path = pg_catalog, pg_temp SET lock_timeout = '5s'
AS $$
DECLARE
    v_idle text;
BEGIN
    IF core.is_silence(p_idle) IS NOT TRUE THEN
        PERFORM core.refuse_argument('p_idle must be 0.1 seconds to 24 days');
    END IF;
    IF (p_event IS NOT NULL AND p_source IS NOT NULL AND octet_length(p_key) BETWEEN 1 AND 1020 AND core.is_name(p_handler)
        AND p_handler ~ '^[a-z][a-z0-9_]*([.][a-z][a-z0-9_]*)+$') IS NOT TRUE THEN
        PERFORM core.refuse_argument('p_event, p_source and p_key must not be NULL, and p_handler must name a handler');
    END IF;
    v_idle := set_config(
        'idle_in_transaction_session_timeout', (extract(epoch FROM p_idle) * 1000)::bigint::text, true);
    IF current_setting('server_version_num')::int >= 170000 THEN
        v_idle := set_config('transaction_timeout', v_idle, true);
    END IF;
    IF NOT core.reaction_owned(p_event, p_source, p_key) THEN
        RAISE EXCEPTION 'event % is not in the outbox', p_event
            USING ERRCODE = 'no_data_found', HINT = 'React to an event after the commit that published it.';
    END IF;
    PERFORM core.require_reactions(ARRAY[p_handler], o.event_type, o.target, p_key)
    FROM core.outbox o WHERE o.id = p_event;
    RETURN core.inbox_add(p_handler, p_key, p_source);
END
$$;

-- reaction_settle: records the outcome of the reactions to one event. Those that are done go into the inbox, so that a reaction
-- which moves to the outbox does not run again. Each one that failed becomes a dead letter of its own, a sibling in its
-- handler's route: listed, replayed and discarded like every other, and a replay is run by a worker. An event to
-- which no handler is subscribed is settled; otherwise it waits as it is. p_alone: the caller's application has no handler
-- that is to get it from the outbox; one that is deployed for the first time may not have subscribed yet.
-- The event is passed as a whole, because other handlers may have handled it, and retention may have removed it.
-- May be sent again when the answer was lost. Returns the ids of the dead letters, in the order of p_failed.
CREATE OR REPLACE FUNCTION core.reaction_settle(
    p_event jsonb, p_done text[], p_failed text[], p_reasons text[], p_errors text[], p_signatures text[],
    p_alone boolean)
RETURNS uuid[]
LANGUAGE plpgsql SECURITY DEFINER
SET search_path = pg_catalog, pg_temp
AS $$
DECLARE
    v_id     uuid;
    v_source text := p_event ->> 'source';
    v_type   text := p_event ->> 'event_type';
    v_target text := p_event ->> 'target';
    v_secret bytea := core.secret();
    v_known  boolean;
    v_ids    uuid[];
    v_new    text[];
    v_handler    text;
    v_generation bigint;
    v_attempts   int;
BEGIN
    IF (pg_column_size(p_event) <= 1048576 AND core.is_name(v_source)
        AND core.is_name(v_type) AND v_type ~ '^[^/*[:space:][:cntrl:]]+$'
        AND octet_length(p_event ->> 'idempotency_key') BETWEEN 1 AND 1020
        AND p_event ->> 'event_id' ~ '^[0-9a-fA-F-]{32,36}$') IS NOT TRUE THEN
        PERFORM core.refuse_argument('p_event must have event_id, source, event_type and idempotency_key',
                                     'Pass the envelope of the event.');
    ELSIF (core.are_names(p_done, 1000) AND core.are_names(p_failed, 1000) AND p_alone IS NOT NULL
           AND cardinality(p_failed) = ALL (ARRAY[cardinality(p_reasons), cardinality(p_errors), cardinality(p_signatures)]))
          IS NOT TRUE
          OR EXISTS (SELECT FROM unnest(p_done || p_failed) AS t (handler)
                     WHERE t.handler !~ '^[a-z][a-z0-9_]*([.][a-z][a-z0-9_]*)+$') THEN
        PERFORM core.refuse_argument('p_done and p_failed must name handlers, with a reason, an error and a signature for '
                                     'each that failed', 'Write them like billing.charge_card.');
    END IF;
    PERFORM core.require_failures(p_failed, p_reasons);
    v_id := p_event ->> 'event_id';
    IF cardinality(p_failed) > 0 THEN
        -- Whatever the connection's setting: a dead letter must not be lost by a crash of the server.
        PERFORM set_config('synchronous_commit', 'on', true);
    END IF;
    IF cardinality(p_failed) > 0 THEN
        -- Whose siblings stand here uncommitted is not split meanwhile: a split passes over rows that are locked.
        PERFORM FROM core.outbox o WHERE o.id = v_id AND o.source = v_source FOR KEY SHARE;
    END IF;
    v_known := core.reaction_owned(v_id, v_source, p_event ->> 'idempotency_key');
    PERFORM core.require_reactions(p_done || p_failed, v_type, v_target, p_event ->> 'idempotency_key');
    -- The ids that a split gives are only for who has published the event. One that is gone may be another's: its dead
    -- letters have ids that no split uses, unless they were made before it went.
    v_ids := ARRAY(SELECT CASE WHEN v_known OR EXISTS (SELECT FROM core.outbox x
                                                       WHERE x.id = t.id AND x.origin_id = v_id AND x.source = v_source)
                               THEN t.id
                               ELSE core.sibling_id(v_id, v_source || '/' || t.handler, v_secret) END
                   FROM (SELECT t.n, t.handler, core.sibling_id(v_id, t.handler, v_secret) AS id
                         FROM unnest(p_failed) WITH ORDINALITY AS t (handler, n)) t ORDER BY t.n);

    -- For an event that retention has removed by now the inbox row would never be read.
    PERFORM core.inbox_add(t.handler, p_event ->> 'idempotency_key', v_source)
    FROM (SELECT handler FROM unnest(p_done) AS t (handler) WHERE v_known ORDER BY handler COLLATE "C") t;

    -- Retired at once, so that it is owed nothing: an event's siblings, and the handlers that have handled it, are found
    -- by the handlers in core.subscriptions. Those that workers have subscribed are there.
    v_new := ARRAY(SELECT t.handler FROM unnest(p_done || p_failed) AS t (handler)
                   WHERE NOT EXISTS (SELECT FROM core.subscriptions s
                                     WHERE s.handler_name = t.handler
                                       AND (s.event_type = v_type OR s.retired_at IS DISTINCT FROM s.created_at))
                   ORDER BY t.handler COLLATE "C");
    -- As many for each login as any application has: what a producer names here is kept.
    IF v_new <> '{}' AND (SELECT count(*) FROM (SELECT FROM core.subscriptions s WHERE s.named_by = session_user
                                                LIMIT 20000) s) = 20000 THEN
        RAISE EXCEPTION 'the reactions of % have 20000 subscriptions already', session_user
            USING ERRCODE = 'object_not_in_prerequisite_state', HINT = 'Delete those that are retired from core.subscriptions.';
    END IF;
    INSERT INTO core.subscriptions (domain_context, handler_name, event_type, retired_at, named_by)
    SELECT split_part(t.handler, '.', 1), t.handler, v_type, now(), session_user
    FROM unnest(v_new) AS t (handler)
    ON CONFLICT DO NOTHING;

    INSERT INTO core.outbox (
        id, origin_id, handler_name, event_type, event_version, occurred_at, source, target, content_class, channel,
        generation, domain_id, payload, headers, idempotency_key, trace_context, created_at, priority,
        status, attempts, failure_reason, last_error, error_signature, traceback, first_failed_at, failed_at, settled_at)
    SELECT t.id, v_id, t.handler, e.event_type, e.event_version, e.occurred_at, v_source,
        e.target, coalesce(o.content_class, 'operations'), coalesce(o.channel, core.current_channel()),
        coalesce(o.generation, core.current_generation()), e.domain_id, e.payload, coalesce(o.headers, e.headers),
        e.idempotency_key, e.trace_context, coalesce(o.created_at, now()), coalesce(o.priority, 1),
        'failed', 1, t.reason, core.error_text(t.error), left(t.signature, 300), core.error_traceback(t.error), now(), now(), now()
    FROM unnest(v_ids, p_failed, p_reasons, p_errors, p_signatures) AS t (id, handler, reason, error, signature)
    CROSS JOIN jsonb_to_record(p_event) AS e (
        event_type text, event_version int, occurred_at timestamptz, target text, domain_id uuid, payload jsonb,
        headers jsonb, idempotency_key text, trace_context text)
    LEFT JOIN core.outbox o ON o.id = v_id AND o.source = v_source
    ON CONFLICT (id) DO NOTHING;

    UPDATE core.outbox o
    SET status = 'delivered', delivered_at = now(), settled_at = now(),
        handler_name = CASE WHEN cardinality(p_done) = 1 AND cardinality(p_failed) = 0 THEN p_done[1] ELSE '*' END
    WHERE p_alone AND o.id = v_id AND o.source = v_source AND o.status = 'pending' AND o.handler_name IS NULL
      AND NOT EXISTS (SELECT FROM core.subscriptions s
                      WHERE s.retired_at IS NULL AND o.event_type LIKE s.pattern
                        AND (o.target IS NULL OR o.target = s.domain_context))
    RETURNING core.begun_for(NULL, o.target, o.event_type, o.claimed_by), o.generation, o.attempts
    INTO v_handler, v_generation, v_attempts;
    IF v_attempts > 0 THEN
        PERFORM core.rollup_count(v_handler, v_generation, 'begun', -1);  -- a worker had claimed it meanwhile
    END IF;
    RETURN v_ids;
EXCEPTION WHEN data_exception OR check_violation OR not_null_violation OR program_limit_exceeded THEN
    PERFORM core.refuse_argument('p_event: ' || SQLERRM, 'Pass the envelope of the event.');
END
$$;
