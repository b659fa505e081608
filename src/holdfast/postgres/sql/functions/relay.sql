-- The relay: it is owed the events of every handler that a broker carries them to, once for all of them, under the name
-- relay.<broker>. Its rows are claimed, settled and kept like those of a handler; delivered says that the broker has confirmed
-- the event. It writes no inbox row: a row may be sent again.

-- relay_details: what a relay tells the broker about rows besides what a claim returns. cycle: how often the row was made
-- pending again, so that a broker does not take what it is sent again for a duplicate.
CREATE OR REPLACE FUNCTION core.relay_details(p_ids uuid[])
RETURNS TABLE (
    id uuid, channel text, content_class text, priority smallint, ordering_key text, fairness_key text,
    expires_at timestamptz, cycle int)
LANGUAGE plpgsql STABLE SECURITY DEFINER
SET search_path = pg_catalog, pg_temp SET jit = off SET enable_seqscan = off SET enable_bitmapscan = off
AS $$
#variable_conflict use_column
BEGIN
    IF (core.is_list(p_ids) AND cardinality(p_ids) <= 10000) IS NOT TRUE THEN
        PERFORM core.refuse_argument('p_ids must be at most 10000 ids');
    END IF;
    RETURN QUERY
    SELECT o.id, o.channel, o.content_class, o.priority, nullif(o.ordering_key, ''), o.fairness_key, o.expires_at,
           jsonb_array_length(o.failure_history)
    FROM core.outbox o WHERE o.id = ANY (p_ids);
END
$$;

-- relayed_rows: the rows that a relay has sent between two times, of one type or all, and of one source or all.
CREATE OR REPLACE FUNCTION core.relayed_rows(
    p_via text, p_since timestamptz, p_until timestamptz, p_event_type text, p_source text, p_most int)
RETURNS TABLE (id uuid, event_id uuid, event_type text, source text, target text, idempotency_key text, relayed_at timestamptz)
LANGUAGE plpgsql STABLE SECURITY DEFINER
SET search_path = pg_catalog, pg_temp SET jit = off SET enable_seqscan = off
AS $$
#variable_conflict use_column
BEGIN
    IF (p_via ~ '^[a-z][a-z0-9_]{0,29}$' AND p_since IS NOT NULL AND p_until IS NOT NULL
        AND p_most BETWEEN 1 AND 100000) IS NOT TRUE THEN
        PERFORM core.refuse_argument('p_via must be the name of a broker, p_since and p_until times, p_most 1 to 100000');
    END IF;
    RETURN QUERY
    SELECT o.id, coalesce(o.origin_id, o.id), o.event_type, o.source, o.target, o.idempotency_key, o.settled_at
    FROM core.retention_classes('delivered', '') AS c (content_class)
    CROSS JOIN LATERAL (
        SELECT o.* FROM core.outbox o
        WHERE o.settled_at IS NOT NULL AND o.failed_at IS NULL AND o.deleted_at IS NULL
          AND o.content_class = c.content_class AND o.settled_at >= p_since AND o.settled_at < p_until
          AND o.handler_name = 'relay.' || p_via AND o.status = 'delivered'
          AND (p_event_type IS NULL OR o.event_type = p_event_type) AND (p_source IS NULL OR o.source = p_source)
        ORDER BY o.settled_at LIMIT p_most) o
    LIMIT p_most;
END
$$;

-- relay_again: has a relay send up to p_most of those rows once more, in their old order where they have a key. Consumers that
-- have handled an event find it in their inbox. Returns how many. Rows that retention has removed cannot be sent again.
CREATE OR REPLACE FUNCTION core.relay_again(
    p_via text, p_since timestamptz, p_until timestamptz, p_event_type text, p_source text, p_most int, p_actor text,
    p_reason text DEFAULT NULL)
RETURNS int
LANGUAGE plpgsql SECURITY DEFINER
SET search_path = pg_catalog, pg_temp SET jit = off
SET enable_seqscan = off SET enable_hashjoin = off SET enable_mergejoin = off
AS $$
DECLARE
    v_again int;
BEGIN
    WITH found AS MATERIALIZED (
        SELECT o.id
        FROM (SELECT r.id FROM core.relayed_rows(p_via, p_since, p_until, p_event_type, p_source, p_most) r ORDER BY r.id) r
        CROSS JOIN LATERAL (
            SELECT o.id FROM core.outbox o
            WHERE o.id = r.id AND o.status = 'delivered' AND o.handler_name = 'relay.' || p_via AND o.payload IS NOT NULL
            FOR UPDATE SKIP LOCKED) o),
    again AS (
        UPDATE core.outbox o
        SET status = 'pending', attempts = 0, delivered_at = NULL, settled_at = NULL, available_at = now(), claimed_by = NULL,
            failure_history = o.failure_history || jsonb_build_object(
                'attempts', o.attempts, 'generation', o.generation, 'replayed_by', p_actor, 'replayed_at', now())
        WHERE o.id = ANY (ARRAY(SELECT found.id FROM found))
        RETURNING o.channel),
    notified AS (SELECT core.wake(c.channel, 'rescan') FROM (SELECT DISTINCT again.channel FROM again) c)
    SELECT count(*) INTO v_again FROM again WHERE (SELECT count(*) FROM notified) >= 0;
    PERFORM core.audit_append(
        p_actor, 'relay.again', p_reason,
        jsonb_build_object('via', p_via, 'since', p_since, 'until', p_until, 'event_type', p_event_type, 'source', p_source),
        jsonb_build_object('rows', v_again));
    RETURN v_again;
END
$$;

-- relay_lost: of those rows, the events that a handler of this database should have got from the broker and has not: it has
-- no inbox row of them, and nothing stands for it in the outbox or the archive. Handlers of other databases are not known.
CREATE OR REPLACE FUNCTION core.relay_lost(p_via text, p_since timestamptz, p_until timestamptz, p_most int)
RETURNS TABLE (id uuid, event_id uuid, handler_name text, event_type text, source text, relayed_at timestamptz)
LANGUAGE plpgsql STABLE SECURITY DEFINER
SET search_path = pg_catalog, pg_temp SET jit = off SET enable_seqscan = off SET enable_hashjoin = off SET enable_mergejoin = off
AS $$
#variable_conflict use_column
BEGIN
    RETURN QUERY
    SELECT r.id, r.event_id, s.handler_name, r.event_type, r.source, r.relayed_at
    FROM core.relayed_rows(p_via, p_since, p_until, NULL, NULL, p_most) r
    CROSS JOIN LATERAL (
        SELECT DISTINCT s.handler_name FROM core.subscriptions s
        WHERE s.retired_at IS NULL AND s.via = p_via AND r.event_type LIKE s.pattern
          AND (r.target IS NULL OR r.target = s.domain_context)
          -- What was sent before is not the broker's to give it.
          AND coalesce(s.via_since, s.created_at) <= r.relayed_at) s
    WHERE (SELECT h.source = r.source OR core.inbox_has(s.handler_name, r.idempotency_key, r.source)
           FROM core.event_handled h
           WHERE h.handler_name = s.handler_name AND h.idempotency_key = r.idempotency_key LIMIT 1) IS NOT TRUE
      AND NOT core.broker_parked(s.handler_name, r.event_id, r.source)
    ORDER BY r.relayed_at, r.id, s.handler_name;
END
$$;

-- relay_repair: puts what is lost into the lanes of its handlers, where no broker is needed. Returns how many deliveries.
CREATE OR REPLACE FUNCTION core.relay_repair(
    p_via text, p_since timestamptz, p_until timestamptz, p_most int, p_actor text, p_reason text DEFAULT NULL)
RETURNS int
LANGUAGE plpgsql SECURITY DEFINER
SET search_path = pg_catalog, pg_temp SET jit = off
SET enable_seqscan = off SET enable_hashjoin = off SET enable_mergejoin = off
AS $$
DECLARE
    v_secret bytea := core.secret();
    v_ids    uuid[];
BEGIN
    WITH lost AS MATERIALIZED (SELECT * FROM core.relay_lost(p_via, p_since, p_until, p_most)),
    repaired AS (
        INSERT INTO core.outbox (
            id, origin_id, handler_name, event_type, event_version, occurred_at, source, target, content_class, channel,
            generation, domain_id, payload, headers, idempotency_key, trace_context, created_at, expires_at, priority,
            ordering_key, fairness_key, seq)
        OVERRIDING SYSTEM VALUE
        SELECT CASE WHEN EXISTS (SELECT FROM core.outbox x
                                 WHERE x.id = core.sibling_id(lost.event_id, lost.handler_name, v_secret))
                    THEN core.sibling_id(lost.event_id, lost.source || '/' || lost.handler_name, v_secret)
                    ELSE core.sibling_id(lost.event_id, lost.handler_name, v_secret) END,
            lost.event_id, lost.handler_name, o.event_type, o.event_version, o.occurred_at, o.source, o.target,
            o.content_class, o.channel, o.generation, o.domain_id, o.payload, o.headers, o.idempotency_key, o.trace_context,
            o.created_at, o.expires_at, o.priority, o.ordering_key, o.fairness_key, o.seq
        FROM lost CROSS JOIN LATERAL (SELECT * FROM core.outbox o WHERE o.id = lost.id AND o.payload IS NOT NULL LIMIT 1) o
        ON CONFLICT (id) DO NOTHING
        RETURNING id)
    SELECT coalesce(array_agg(repaired.id), '{}') INTO v_ids FROM repaired;
    PERFORM core.audit_append(
        p_actor, 'relay.repair', p_reason,
        jsonb_build_object('via', p_via, 'since', p_since, 'until', p_until, 'ids', to_jsonb(v_ids[:1000])),
        jsonb_build_object('deliveries', cardinality(v_ids)));
    RETURN cardinality(v_ids);
END
$$;
