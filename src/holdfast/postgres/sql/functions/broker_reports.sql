-- What brokers hold for handlers, and which of their settings break a promise. Workers ask the broker and tell the database,
-- so that operators, who may reach the database alone, know of both.

-- broker_report_due: of handlers, those about which no worker has asked a broker for so long. Who calls this asks, and the
-- others of the fleet need not.
CREATE OR REPLACE FUNCTION core.broker_report_due(p_broker text, p_channel text, p_handlers text[], p_every interval)
RETURNS text[]
LANGUAGE plpgsql SECURITY DEFINER
SET search_path = pg_catalog, pg_temp
AS $$
DECLARE
    v_due text[];
BEGIN
    IF (p_broker ~ '^[a-z][a-z0-9_]{0,29}$' AND core.is_name(p_channel, 63) AND core.is_list(p_handlers)
        AND cardinality(p_handlers) <= 10000 AND p_every BETWEEN interval '0' AND interval '1 day') IS NOT TRUE THEN
        PERFORM core.refuse_argument('p_broker must name a broker, p_channel a channel, p_handlers handlers');
    END IF;
    WITH due AS (
        INSERT INTO core.broker_reports AS r (broker, channel, handler_name)
        SELECT p_broker, p_channel, h.name FROM (SELECT DISTINCT unnest(p_handlers) AS name ORDER BY 1) h
        ON CONFLICT (broker, channel, handler_name) DO UPDATE SET asked_at = now() WHERE r.asked_at <= now() - p_every
        RETURNING r.handler_name)
    SELECT coalesce(array_agg(due.handler_name), '{}') INTO v_due FROM due;
    RETURN v_due;
END
$$;

-- broker_report: what the broker has answered. Lines that nobody has renewed for a week go, unless the handler still gets
-- events from there: its line knows by which names.
CREATE OR REPLACE FUNCTION core.broker_report(
    p_broker text, p_channel text, p_handlers text[], p_waiting bigint[], p_unacknowledged bigint[], p_redelivered bigint[],
    p_weaknesses jsonb)
RETURNS void
LANGUAGE plpgsql SECURITY DEFINER
SET search_path = pg_catalog, pg_temp
AS $$
BEGIN
    IF (core.is_list(p_handlers) AND cardinality(p_handlers) <= 10000 AND octet_length(p_weaknesses::text) <= 100000
        -- Whatever else it is would fail everybody who asks for the state.
        AND CASE jsonb_typeof(p_weaknesses) WHEN 'array' THEN NOT EXISTS (
                SELECT FROM jsonb_array_elements(p_weaknesses) AS t (one)
                WHERE (jsonb_typeof(t.one -> 'subject') = 'string' AND jsonb_typeof(t.one -> 'problem') = 'string'
                       AND jsonb_typeof(t.one -> 'remedy') = 'string') IS NOT TRUE) END
        AND cardinality(p_handlers) = ALL (ARRAY[
            cardinality(p_waiting), cardinality(p_unacknowledged), cardinality(p_redelivered)])
        -- Sums of them must be numbers too.
        AND NOT EXISTS (SELECT FROM unnest(p_waiting || p_unacknowledged || p_redelivered) AS t (n)
                        WHERE t.n NOT BETWEEN -100000000000000 AND 100000000000000)) IS NOT TRUE THEN
        PERFORM core.refuse_argument('each of p_handlers must have its three numbers, and p_weaknesses be a JSON array in which '
                                     'each has subject, problem and remedy');
    END IF;
    UPDATE core.broker_reports r
    SET reported_at = now(), waiting = t.waiting, unacknowledged = t.unacknowledged, redelivered = t.redelivered
    FROM unnest(p_handlers, p_waiting, p_unacknowledged, p_redelivered) AS t (name, waiting, unacknowledged, redelivered)
    WHERE r.broker = p_broker AND r.channel = p_channel AND r.handler_name = t.name;
    UPDATE core.broker_reports r SET weaknesses = p_weaknesses
    WHERE r.broker = p_broker AND r.channel = p_channel AND r.handler_name = '' AND '' = ANY (p_handlers);
    DELETE FROM core.broker_reports r
    WHERE r.asked_at < now() - interval '7 days'
      AND NOT EXISTS (SELECT FROM core.subscriptions s
                      WHERE s.handler_name = r.handler_name AND s.retired_at IS NULL AND r.broker IN (s.via, s.draining));
END
$$;

-- broker_naming: notes by which names a worker finds what a broker has for handlers. Returns the names that they had before,
-- where something may be left. Of workers with different names each notes its own, so that none is forgotten. Twenty are the
-- most of a handler: who changes them more often has to clear up.
CREATE OR REPLACE FUNCTION core.broker_naming(p_broker text, p_channel text, p_handlers text[], p_naming text)
RETURNS TABLE (handler_name text, former text[])
LANGUAGE plpgsql SECURITY DEFINER
SET search_path = pg_catalog, pg_temp
AS $$
#variable_conflict use_column
BEGIN
    IF (core.is_list(p_handlers) AND cardinality(p_handlers) <= 10000
        AND octet_length(p_naming) BETWEEN 1 AND 2000) IS NOT TRUE THEN
        PERFORM core.refuse_argument('p_handlers must name handlers, and p_naming have 1 to 2000 bytes');
    END IF;
    UPDATE core.broker_reports r
    SET naming = p_naming,
        former = CASE WHEN r.naming IS NULL OR (SELECT count(*) >= 20 FROM jsonb_object_keys(r.former)) THEN r.former
                      ELSE r.former || jsonb_build_object(r.naming, NULL) END - p_naming
    WHERE r.broker = p_broker AND r.channel = p_channel AND r.handler_name = ANY (p_handlers)
      AND r.naming IS DISTINCT FROM p_naming;
    RETURN QUERY
    SELECT r.handler_name, ARRAY(SELECT jsonb_object_keys(r.former))
    FROM core.broker_reports r
    WHERE r.broker = p_broker AND r.channel = p_channel AND r.handler_name = ANY (p_handlers) AND r.former <> '{}';
END
$$;

-- broker_stranded: how many messages a broker has for a handler by names that it had before. NULL: it does not tell. With 0
-- the names are forgotten.
CREATE OR REPLACE FUNCTION core.broker_stranded(
    p_broker text, p_channel text, p_handler text, p_naming text, p_waiting bigint)
RETURNS void
LANGUAGE plpgsql SECURITY DEFINER
SET search_path = pg_catalog, pg_temp
AS $$
BEGIN
    IF p_waiting NOT BETWEEN -100000000000000 AND 100000000000000 THEN
        PERFORM core.refuse_argument('p_waiting must be a number of messages');
    END IF;
    UPDATE core.broker_reports r
    SET former = CASE WHEN p_waiting = 0 THEN r.former - p_naming
                      ELSE r.former || jsonb_build_object(p_naming, p_waiting) END
    WHERE r.broker = p_broker AND r.channel = p_channel AND r.handler_name = p_handler AND r.former ? p_naming
      AND r.naming <> p_naming;
END
$$;
