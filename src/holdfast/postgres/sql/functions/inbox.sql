-- The inbox: which handler has handled which key, and whose event it was.
--
-- The pair of handler and key is unique. A key that a source with an owner uses belongs to that source: when the pair was
-- taken by an event of another source, it stands in the inbox under a key that no other source can name (scoped_key).

-- secret: what only the owner's functions know.
CREATE OR REPLACE FUNCTION core.secret()
RETURNS bytea
LANGUAGE plpgsql STABLE SECURITY DEFINER
SET search_path = pg_catalog, pg_temp
AS $$
DECLARE
    v_secret bytea := (SELECT s.secret FROM core.secrets s);
BEGIN
    IF v_secret IS NULL THEN
        RAISE EXCEPTION 'core.secrets has lost its row'
            USING ERRCODE = 'object_not_in_prerequisite_state', HINT = 'INSERT INTO core.secrets DEFAULT VALUES;';
    END IF;
    RETURN v_secret;
END
$$;

-- scoped_key: a source's own name for a key.
CREATE OR REPLACE FUNCTION core.scoped_key(p_source text, p_key text)
RETURNS text
LANGUAGE plpgsql STABLE SECURITY DEFINER
SET search_path = pg_catalog, pg_temp
AS $$
BEGIN
    RETURN encode(sha256(core.secret() || convert_to(p_source || '/' || p_key, 'UTF8')), 'hex');
END
$$;

-- inbox_is_foreign: whether the pair was taken by another source than p_source, which has an owner.
CREATE OR REPLACE FUNCTION core.inbox_is_foreign(p_handler text, p_key text, p_source text)
RETURNS boolean
LANGUAGE plpgsql STABLE SECURITY DEFINER
SET search_path = pg_catalog, pg_temp
AS $$
BEGIN
    RETURN EXISTS (SELECT FROM core.event_handled h
                   WHERE h.handler_name = p_handler AND h.idempotency_key = p_key AND h.source <> p_source)
       AND EXISTS (SELECT FROM core.sources s WHERE s.source = p_source);
END
$$;

-- inbox_has: whether the handler has handled the key of the source. For pairs that were found with another source: a
-- claim asks about the others by itself.
CREATE OR REPLACE FUNCTION core.inbox_has(p_handler text, p_key text, p_source text)
RETURNS boolean
LANGUAGE plpgsql STABLE SECURITY DEFINER
SET search_path = pg_catalog, pg_temp
AS $$
BEGIN
    RETURN NOT core.inbox_is_foreign(p_handler, p_key, p_source)
        OR EXISTS (SELECT FROM core.event_handled h
                   WHERE h.handler_name = p_handler AND h.idempotency_key = core.scoped_key(p_source, p_key));
END
$$;

-- inbox_add: records that the handler has handled the key of the source. False when it had before.
CREATE OR REPLACE FUNCTION core.inbox_add(p_handler text, p_key text, p_source text)
RETURNS boolean
LANGUAGE plpgsql SECURITY DEFINER
SET search_path = pg_catalog, pg_temp
AS $$
BEGIN
    INSERT INTO core.event_handled (handler_name, idempotency_key, source) VALUES (p_handler, p_key, p_source)
    ON CONFLICT DO NOTHING;
    IF FOUND THEN
        RETURN true;
    ELSIF NOT core.inbox_is_foreign(p_handler, p_key, p_source) THEN
        RETURN false;
    END IF;
    INSERT INTO core.event_handled (handler_name, idempotency_key, source)
    VALUES (p_handler, core.scoped_key(p_source, p_key), p_source)
    ON CONFLICT DO NOTHING;
    RETURN FOUND;
END
$$;
