-- Subscriptions: which handler is owed which events, whether a worker runs or not. A claim and a split name the version
-- of the subscriptions that they were worked out with, and do nothing when it is no longer the current one.

-- subscribe: records durably that a handler is owed events of these types, by what carries its other ones. Only additions
-- and changes raise the version, so a fleet that restarts unchanged interrupts no other worker. Who waits for the lock that
-- orders changes gives up after two seconds, and is told which session has it.
CREATE OR REPLACE FUNCTION core.subscribe(p_domain_context text, p_handler text, p_event_types text[])
RETURNS void
LANGUAGE plpgsql SECURITY DEFINER
SET search_path = pg_catalog, pg_temp SET lock_timeout = '2s'
AS $$
DECLARE
    v_blocker     int;
    v_event_types text[] := ARRAY(SELECT DISTINCT t FROM unnest(p_event_types) AS t ORDER BY t);
BEGIN
    IF (core.is_name(p_domain_context) AND core.is_name(p_handler)
        AND p_handler ~ '^[a-z][a-z0-9_]*([.][a-z][a-z0-9_]*)+$' AND core.are_names(p_event_types, 1000)) IS NOT TRUE THEN
        PERFORM core.refuse_argument(
            'p_domain_context, p_handler and at most 1000 p_event_types must be names of 1 to 200 bytes',
            'Write a handler like billing.charge_card.');
    END IF;
    -- Most starts change nothing: look before taking the lock that orders changes.
    IF (SELECT count(*) FROM core.subscriptions
        WHERE handler_name = p_handler AND event_type = ANY (v_event_types) AND line_of = ''
          AND domain_context = p_domain_context AND retired_at IS NULL) = cardinality(v_event_types) THEN
        RETURN;
    END IF;
    -- Whatever the connection's setting: an event that is owed to a handler must not be lost by a crash of the server.
    PERFORM set_config('synchronous_commit', 'on', true);
    BEGIN
        UPDATE core.subscriptions_version SET version = version + 1;
    EXCEPTION WHEN lock_not_available THEN
        SELECT l.pid INTO v_blocker FROM core.subscriptions_version v
        JOIN pg_locks l ON l.locktype = 'transactionid' AND l.granted AND l.transactionid = v.xmax LIMIT 1;
        RAISE EXCEPTION 'a transaction of pid % keeps handlers from being subscribed', coalesce(v_blocker::text, '?')
            USING ERRCODE = 'lock_not_available',
                  HINT = coalesce('as an administrator: SELECT pg_terminate_backend(' || v_blocker || ');',
                                  'holdfast doctor names the session');
    END;
    INSERT INTO core.subscriptions AS s (domain_context, handler_name, event_type, via, via_since, via_by)
    SELECT p_domain_context, p_handler, t, coalesce(other.via, 'outbox'), other.via_since, other.via_by
    FROM unnest(v_event_types) AS t
    LEFT JOIN (SELECT s.via, s.via_since, s.via_by FROM core.subscriptions s
               WHERE s.handler_name = p_handler ORDER BY s.retired_at IS NULL DESC, s.via_since DESC NULLS LAST LIMIT 1) other
           ON true
    ON CONFLICT (handler_name, event_type, line_of) DO UPDATE
        SET domain_context = EXCLUDED.domain_context, retired_at = NULL,
            via = EXCLUDED.via, via_since = EXCLUDED.via_since, via_by = EXCLUDED.via_by;
END
$$;

-- retire: ends the subscriptions of a handler that is gone for good, or the one to an event type that it no longer wants.
-- Open events on the handler's own route stay visible. Returns how many ended; when it was none, no worker is interrupted.
CREATE OR REPLACE FUNCTION core.retire(
    p_handler text, p_event_type text DEFAULT NULL, p_actor text DEFAULT NULL, p_reason text DEFAULT NULL)
RETURNS int
LANGUAGE plpgsql SECURITY DEFINER
SET search_path = pg_catalog, pg_temp
AS $$
DECLARE
    n int;
BEGIN
    PERFORM FROM core.subscriptions_version FOR UPDATE;   -- before the subscriptions, as in subscribe
    UPDATE core.subscriptions SET retired_at = now()
    WHERE handler_name = p_handler AND event_type = coalesce(p_event_type, event_type) AND retired_at IS NULL;
    GET DIAGNOSTICS n = ROW_COUNT;
    IF n > 0 THEN
        UPDATE core.subscriptions_version SET version = version + 1;
    END IF;
    PERFORM core.audit_append(
        coalesce(p_actor, session_user), 'handler.retire', p_reason,
        jsonb_build_object('handler', p_handler, 'event_type', p_event_type), jsonb_build_object('ended', n));
    RETURN n;
END
$$;

-- subscriptions_read: the subscriptions in force, each line with the version that they were read at. Without any there is
-- one line, which has only the version. handler_name is whose rows the events become: of a handler to which a broker carries
-- them, the relay's (relay.sql).
CREATE OR REPLACE FUNCTION core.subscriptions_read()
RETURNS TABLE (version bigint, domain_context text, handler_name text, event_type text)
LANGUAGE plpgsql STABLE SECURITY DEFINER
SET search_path = pg_catalog, pg_temp
AS $$
#variable_conflict use_column
BEGIN
    RETURN QUERY
    SELECT DISTINCT v.version, s.domain_context, s.owed_to, s.event_type
    FROM core.subscriptions_version v LEFT JOIN core.subscriptions s ON s.retired_at IS NULL
    ORDER BY s.owed_to, s.event_type;
END
$$;
