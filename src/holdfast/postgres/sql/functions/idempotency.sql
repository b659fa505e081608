-- Idempotency records. The caller has the transaction in which the command is carried out.

-- idempotency_begin: NULL when this is the first command with the key, which is recorded; otherwise, as JSON, how the
-- first one was answered. p_hashes are the hashes of this request under every secret that is in use, the newest first:
-- a caller that cannot name the request gets no answer that another caller was given.
-- A scope that has a role in core.sources is open to that role alone; without, every producer may use any key first. The
-- line may name the scope, or what all scopes of requests or of jobs begin with: http: and job:.
-- Operators have records of requests to the HTTP API and of log-outs from the console, and none of applications; nobody else
-- has those.
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
    IF starts_with(p_scope, 'http:operator-api/') OR starts_with(p_scope, 'operator-console/') THEN
        PERFORM core.require_operators_records();
    -- Of a producer it is known without the function, which costs as much as looking for the owner of a scope.
    ELSIF pg_has_role(coalesce(nullif(current_setting('role'), 'none'), session_user), to_regrole('holdfast_producer'), 'MEMBER')
          IS NOT TRUE THEN
        PERFORM core.require_application();
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

-- require_application: who is an operator and neither a producer nor a worker would answer requests in their place, and leave
-- no line in the audit.
CREATE OR REPLACE FUNCTION core.require_application()
RETURNS void
LANGUAGE plpgsql STABLE SECURITY DEFINER
SET search_path = pg_catalog, pg_temp
AS $$
DECLARE
    caller name := coalesce(nullif(current_setting('role'), 'none'), session_user);
BEGIN
    IF pg_has_role(caller, to_regrole('holdfast_operator'), 'MEMBER')
       AND NOT pg_has_role(caller, to_regrole('holdfast_producer'), 'MEMBER')
       AND NOT pg_has_role(caller, to_regrole('holdfast_worker'), 'MEMBER')
       AND NOT pg_has_role(caller, current_user, 'MEMBER') THEN
        RAISE EXCEPTION 'records of requests are for applications, and % is an operator', caller
            USING ERRCODE = 'insufficient_privilege', HINT = 'Use a login that has holdfast_producer or holdfast_worker.';
    END IF;
END
$$;

-- require_operators_records: an answer to an operator's request that is there already would be given in place of the change,
-- and a log-out would end an operator's session.
CREATE OR REPLACE FUNCTION core.require_operators_records()
RETURNS void
LANGUAGE plpgsql STABLE SECURITY DEFINER
SET search_path = pg_catalog, pg_temp
AS $$
DECLARE
    caller name := coalesce(nullif(current_setting('role'), 'none'), session_user);
BEGIN
    IF NOT coalesce(pg_has_role(caller, to_regrole('holdfast_operator'), 'MEMBER'), false)
       AND NOT pg_has_role(caller, current_user, 'MEMBER') THEN
        RAISE EXCEPTION 'records of the HTTP API and the console are for operators, and % is none', caller
            USING ERRCODE = 'insufficient_privilege', HINT = 'Use a login that has holdfast_operator.';
    END IF;
END
$$;

-- operator_secret: keys the hashes of operators' requests in all processes that serve this database and have no secret of
-- their own. Nobody else can compute it.
CREATE OR REPLACE FUNCTION core.operator_secret()
RETURNS text
LANGUAGE plpgsql STABLE SECURITY DEFINER
SET search_path = pg_catalog, pg_temp
AS $$
BEGIN
    RETURN encode(sha256(core.secret() || convert_to('operator records', 'UTF8')), 'hex');
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

-- requests_read: requests with a key as operators may see them: when, of whom and how they ended, and never a body, a header, a
-- hash or a whole key. Those that expire last come first. A scope with a key is looked up; everything else is searched for among
-- at most p_most_examined records, from a place on. The last line says how many were examined and where the search ended,
-- and has no scope.
CREATE OR REPLACE FUNCTION core.requests_read(
    p_scope text, p_key text, p_since timestamptz, p_until timestamptz, p_state text, p_before_at timestamptz,
    p_before_mark text, p_most int, p_most_examined int)
RETURNS TABLE (scope text, key_hint text, key_bytes int, state text, status_code int, body_bytes int, body_omitted boolean,
               created_at timestamptz, expires_at timestamptz, examined int, last_at timestamptz, last_mark text)
LANGUAGE plpgsql STABLE SECURITY DEFINER
SET search_path = pg_catalog, pg_temp SET enable_seqscan = off SET jit = off
AS $$
#variable_conflict use_column
DECLARE
    v_examined int := 0;
    v_found    int := 0;
    v_last_at  timestamptz;
    v_mark     tid;
    v_row      record;
BEGIN
    IF (p_most BETWEEN 1 AND 1000 AND p_most_examined BETWEEN 1 AND 100000
        AND coalesce(octet_length(p_scope), 1) <= 1020 AND coalesce(octet_length(p_key), 1) <= 255
        AND coalesce(p_before_mark ~ '^\([0-9]{1,10},[0-9]{1,5}\)$', true)) IS NOT TRUE THEN
        PERFORM core.refuse_argument('a page has 1 to 1000 requests, of 1 to 100000 that are examined');
    END IF;
    FOR v_row IN
        SELECT r.scope, r.key, lower(r.status) AS state, r.response_status_code AS status_code,
               octet_length(r.response_body) AS body_bytes, r.body_omitted, r.created_at, r.expires_at, r.mark
        FROM (
            (SELECT r.*, r.ctid AS mark FROM core.idempotency_records r
             WHERE p_scope IS NOT NULL AND p_key IS NOT NULL AND r.scope = p_scope AND r.key = p_key)
            UNION ALL
            (SELECT r.*, r.ctid AS mark FROM core.idempotency_records r
             WHERE (p_scope IS NULL OR p_key IS NULL)
               AND r.expires_at <= coalesce(p_before_at, 'infinity')
               AND (r.expires_at < coalesce(p_before_at, 'infinity') OR p_before_mark IS NULL
                    OR r.ctid < p_before_mark::tid)
             ORDER BY r.expires_at DESC, r.ctid DESC
             LIMIT p_most_examined)) r
    LOOP
        v_examined := v_examined + 1;
        v_last_at := v_row.expires_at;
        v_mark := v_row.mark;
        IF (p_scope IS NULL OR v_row.scope = p_scope) AND (p_key IS NULL OR v_row.key = p_key)
           AND (p_since IS NULL OR v_row.created_at >= p_since) AND (p_until IS NULL OR v_row.created_at < p_until)
           AND (p_state IS NULL OR v_row.state = p_state) THEN
            v_found := v_found + 1;
            RETURN QUERY SELECT v_row.scope, left(v_row.key, least(8, char_length(v_row.key) / 2)) || '…',
                octet_length(v_row.key), v_row.state, v_row.status_code, v_row.body_bytes, v_row.body_omitted,
                v_row.created_at, v_row.expires_at, NULL::int, NULL::timestamptz, NULL::text;
            EXIT WHEN v_found = p_most;
        END IF;
    END LOOP;
    RETURN QUERY SELECT NULL::text, NULL::text, NULL::int, NULL::text, NULL::int, NULL::int, NULL::boolean,
        NULL::timestamptz, NULL::timestamptz, v_examined,
        CASE WHEN v_found = p_most OR v_examined = p_most_examined THEN v_last_at END, v_mark::text;
END
$$;
