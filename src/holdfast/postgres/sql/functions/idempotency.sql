-- Idempotency records. The caller has the transaction in which the command is carried out.

-- idempotency_begin: NULL when this is the first command with the key, which is recorded; otherwise, as JSON, how the
-- first one was answered. p_hashes are the hashes of this request under every secret that is in use, the newest first:
-- a caller that cannot name the request gets no answer that another caller was given.
-- A scope that has a role in core.sources is open to that role alone; without, every producer may use any key first. The
-- line may name the scope, or what all scopes of requests or of jobs begin with: http: and job:.
-- A duplicate of a command that is under way waits for it on the primary key, at most p_wait_ms (55P03); afterwards it finds
-- the answer, or is the first. Above READ COMMITTED it gets 40001 instead, and finds the answer in a new transaction.
CREATE OR REPLACE FUNCTION core.idempotency_begin(
    p_scope text, p_key text, p_hashes text[], p_hash_version int, p_keep interval, p_wait_ms int, p_idle_ms int)
RETURNS text
LANGUAGE plpgsql SECURITY DEFINER
-- Named here, so that what the body sets ends with it: the command's own statements wait as long as they ever did.
SET search_path = pg_catalog, pg_temp SET lock_timeout = '2s' SET enable_seqscan = off
AS $$
DECLARE
    v_found core.idempotency_records;
    v_kind  text := split_part(split_part(p_scope, ':', 1), '-sha256', 1) || ':';
BEGIN
    -- An index row must stay under 2,704 bytes, whatever a caller sends.
    IF (octet_length(p_key) BETWEEN 1 AND 255 AND octet_length(p_scope) BETWEEN 1 AND 1020
        AND core.is_list(p_hashes) AND cardinality(p_hashes) BETWEEN 1 AND 100
        AND octet_length(p_hashes[1]) BETWEEN 1 AND 128) IS NOT TRUE THEN
        PERFORM core.refuse_argument('a key has 1 to 255 bytes, a scope 1 to 1020, a hash 1 to 128', 'Hash what is longer.');
    ELSIF (p_hash_version IS NOT NULL AND p_keep BETWEEN interval '0' AND interval '36500 days' AND p_wait_ms IS NOT NULL
           AND coalesce(p_idle_ms, 100) >= 100) IS NOT TRUE THEN
        PERFORM core.refuse_argument('p_hash_version, p_keep (at most 36500 days) and p_wait_ms must not be NULL, '
                                     'p_idle_ms at least 100');
    END IF;
    IF EXISTS (SELECT FROM core.sources s WHERE s.source IN (p_scope, v_kind)) THEN
        PERFORM core.require_source(p_scope), core.require_source(v_kind);
    END IF;
    IF p_wait_ms <> 2000 THEN
        PERFORM set_config('lock_timeout', greatest(1, p_wait_ms)::text, true);
    END IF;
    FOR n IN 1 .. 100 LOOP
        INSERT INTO core.idempotency_records (scope, key, request_hash, hash_version, expires_at)
        VALUES (p_scope, p_key, p_hashes[1], p_hash_version, now() + p_keep)
        ON CONFLICT DO NOTHING;
        IF FOUND THEN
            -- For the whole transaction: a client that vanished from the network must not hold up the next one for long.
            IF p_idle_ms IS NOT NULL THEN
                PERFORM set_config('idle_in_transaction_session_timeout', p_idle_ms::text, true);
            END IF;
            RETURN NULL;
        END IF;
        SELECT r.* INTO v_found FROM core.idempotency_records r WHERE r.scope = p_scope AND r.key = p_key;
        IF NOT FOUND THEN
            CONTINUE;  -- swept just now
        -- Not earlier than it was promised when the clock has been set forward.
        ELSIF v_found.expires_at <= now() AND v_found.expires_at + core.clock_advance(v_found.created_at) <= now() THEN
            DELETE FROM core.idempotency_records r
            WHERE r.scope = p_scope AND r.key = p_key AND r.expires_at = v_found.expires_at;
            CONTINUE;
        ELSIF (v_found.request_hash = ANY (p_hashes)) IS NOT TRUE THEN
            RETURN json_build_object('outcome', 'reused');
        ELSIF v_found.status = 'Started' THEN
            -- In this transaction: the caller asks twice. Committed: the command ended its transaction by itself.
            RETURN json_build_object('outcome', 'unfinished');
        ELSE
            RETURN json_build_object(
                'outcome', 'answered', 'failed', v_found.status = 'Failed', 'status', v_found.response_status_code,
                'headers', v_found.response_headers, 'omitted', v_found.body_omitted,
                'body', encode(v_found.response_body, 'base64'));
        END IF;
    END LOOP;
    RAISE EXCEPTION 'the record changes all the time' USING ERRCODE = 'serialization_failure';
END
$$;

-- idempotency_complete: keeps the answer of a command that this transaction has begun. False when it has not, because
-- the command itself ended the transaction.
CREATE OR REPLACE FUNCTION core.idempotency_complete(
    p_scope text, p_key text, p_failed boolean, p_status_code int, p_headers jsonb, p_body bytea, p_omitted boolean)
RETURNS boolean
LANGUAGE plpgsql SECURITY DEFINER
SET search_path = pg_catalog, pg_temp SET enable_seqscan = off
AS $$
BEGIN
    IF (p_scope IS NOT NULL AND p_key IS NOT NULL AND p_failed IS NOT NULL AND p_omitted IS NOT NULL
        AND p_status_code BETWEEN 100 AND 599 AND coalesce(octet_length(p_body), 0) <= 67108864
        AND coalesce(octet_length(p_headers::text), 0) <= 1048576) IS NOT TRUE THEN
        PERFORM core.refuse_argument('an answer has a status of 100 to 599, at most 1 MiB of headers and 64 MiB of body');
    END IF;
    UPDATE core.idempotency_records r
    SET status = CASE WHEN p_failed THEN 'Failed' ELSE 'Completed' END, response_status_code = p_status_code,
        response_headers = p_headers, response_body = p_body, body_omitted = p_omitted
    WHERE r.scope = p_scope AND r.key = p_key AND r.status = 'Started' AND r.transaction_id = pg_current_xact_id();
    RETURN FOUND;
END
$$;
