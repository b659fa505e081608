-- What is left of a row: the disposal that a retention policy names when the time of a row is over (sweep.sql), and the
-- erasure of one domain id (a person, a tenant), which leaves only metadata.

-- outbox_dispose: what is left of rows whose time is over. ERASE leaves the metadata like RETAIN_METADATA, but not for
-- good: what the policy says is still to be done when the time comes.
CREATE OR REPLACE FUNCTION core.outbox_dispose(p_ids uuid[], p_disposal text)
RETURNS int
LANGUAGE plpgsql SECURITY DEFINER
SET search_path = pg_catalog, pg_temp SET jit = off
SET enable_seqscan = off SET enable_bitmapscan = off SET enable_hashjoin = off SET enable_mergejoin = off
AS $$
DECLARE
    n int;
BEGIN
    CASE p_disposal
    WHEN 'HARD_DELETE' THEN
        DELETE FROM core.outbox o WHERE o.id = ANY (p_ids);
    WHEN 'STRIP_PAYLOAD' THEN
        UPDATE core.outbox o SET payload = NULL, headers = NULL, disposed_at = now() WHERE o.id = ANY (p_ids);
    WHEN 'RETAIN_METADATA', 'ERASE' THEN
        -- The id, the type, where from and where to, the times and the outcome. A key may say more than that.
        PERFORM core.forget_heads(array_agg(o.handler_name), array_agg(o.ordering_key), array_agg(o.id))
        FROM core.outbox o WHERE o.id = ANY (p_ids) AND o.ordering_key > '';
        UPDATE core.outbox o
        SET payload = NULL, headers = NULL, domain_id = NULL, trace_context = NULL, idempotency_key = o.id::text,
            ordering_key = NULL, fairness_key = NULL, dedupe_key = NULL, last_error = NULL, traceback = NULL, error_signature = NULL,
            failure_history = '[]', claimed_by = NULL, deleted_at = coalesce(o.deleted_at, now()),
            disposed_at = CASE p_disposal WHEN 'ERASE' THEN o.disposed_at ELSE now() END
        WHERE o.id = ANY (p_ids);
    END CASE;
    GET DIAGNOSTICS n = ROW_COUNT;
    IF p_disposal IN ('STRIP_PAYLOAD', 'RETAIN_METADATA') THEN
        UPDATE core.partitioning p SET keeps_metadata = true WHERE p.one AND NOT p.keeps_metadata;
    END IF;
    RETURN n;
END
$$;

-- archive_dispose: likewise.
CREATE OR REPLACE FUNCTION core.archive_dispose(p_ids bigint[], p_disposal text)
RETURNS int
LANGUAGE plpgsql SECURITY DEFINER
SET search_path = pg_catalog, pg_temp SET jit = off
SET enable_seqscan = off SET enable_bitmapscan = off SET enable_hashjoin = off SET enable_mergejoin = off
AS $$
DECLARE
    n int;
BEGIN
    CASE p_disposal
    WHEN 'HARD_DELETE' THEN
        DELETE FROM core.archive a WHERE a.id = ANY (p_ids);
    WHEN 'STRIP_PAYLOAD' THEN
        UPDATE core.archive a SET payload = NULL, headers = NULL, disposed_at = now() WHERE a.id = ANY (p_ids);
    WHEN 'RETAIN_METADATA', 'ERASE' THEN
        PERFORM core.forget_heads(array_agg(a.queue), array_agg(a.ordering_key), array_agg(a.original_id))
        FROM core.archive a WHERE a.id = ANY (p_ids) AND a.ordering_key > '';
        UPDATE core.archive a
        SET payload = NULL, headers = NULL, domain_id = NULL, trace_context = NULL, idempotency_key = a.original_id::text,
            ordering_key = NULL, fairness_key = NULL, dedupe_key = NULL, last_exception = NULL, traceback = NULL, error_signature = NULL,
            failure_history = '[]', deleted_at = coalesce(a.deleted_at, now()),
            disposed_at = CASE p_disposal WHEN 'ERASE' THEN a.disposed_at ELSE now() END
        WHERE a.id = ANY (p_ids);
    END CASE;
    GET DIAGNOSTICS n = ROW_COUNT;
    RETURN n;
END
$$;

-- erase_keys: what keys may say about a domain, beside the rows themselves: those of the inbox, unless they are the ids of
-- the events, and those that producers hold. A key that was handled and is erased would be handled again if it were
-- published again.
CREATE OR REPLACE FUNCTION core.erase_keys(
    p_events uuid[], p_ids uuid[], p_handlers text[], p_sources text[], p_keys text[], p_dedupe_keys text[])
RETURNS int
LANGUAGE plpgsql SECURITY DEFINER
SET search_path = pg_catalog, pg_temp SET jit = off
SET enable_seqscan = off SET enable_bitmapscan = off SET enable_hashjoin = off SET enable_mergejoin = off
AS $$
DECLARE
    n_inbox int;
    n_held  int;
BEGIN
    DELETE FROM core.event_handled h
    USING (SELECT t.handler, spelling.key
           FROM unnest(p_events, p_handlers, p_sources, p_keys) AS t (event, handler, source, key)
           CROSS JOIN LATERAL unnest(ARRAY[t.key, core.scoped_key(t.source, t.key)]) AS spelling (key)
           WHERE t.key <> t.event::text AND t.handler IS NOT NULL) erased
    WHERE h.handler_name = erased.handler AND h.idempotency_key = erased.key;
    GET DIAGNOSTICS n_inbox = ROW_COUNT;
    DELETE FROM core.outbox_keys k
    USING unnest(p_ids, p_sources, p_dedupe_keys) AS t (id, source, key)
    WHERE k.source = t.source AND k.dedupe_key = t.key AND k.event_id = t.id;
    GET DIAGNOSTICS n_held = ROW_COUNT;
    RETURN n_inbox + n_held;
END
$$;

-- erase_records: what idempotency records say about a domain, of p_limit of them after (p_scope, p_key); NULL: from the
-- first. They have no domain: one whose scope or key has the domain's id in it is forgotten, and of one whose answer has
-- it only that the command was carried out stays. With p_count_only nothing is changed. Says how many it looked at and took,
-- and where to go on, NULL at the end.
CREATE OR REPLACE FUNCTION core.erase_records(
    p_domain uuid, p_actor text, p_reason text, p_limit int, p_scope text, p_key text, p_count_only boolean)
RETURNS TABLE (examined int, erased int, next_scope text, next_key text)
LANGUAGE plpgsql SECURITY DEFINER
SET search_path = pg_catalog, pg_temp SET jit = off SET enable_seqscan = off SET enable_bitmapscan = off
AS $$
#variable_conflict use_column
DECLARE
    v_limit     int := least(greatest(p_limit, 1), 5000);
    v_spellings text[] := ARRAY[p_domain::text, replace(p_domain::text, '-', '')];
    v_named     tid[];
    v_told      tid[];
BEGIN
    WITH page AS MATERIALIZED (
        SELECT r.* , r.ctid AS place FROM core.idempotency_records r
        WHERE (r.scope, r.key) > (coalesce(p_scope, ''), coalesce(p_key, ''))
        ORDER BY r.scope, r.key LIMIT v_limit),
    found AS (
        SELECT page.place,
               EXISTS (SELECT FROM unnest(v_spellings) s WHERE strpos(lower(page.scope || ' ' || page.key), s) > 0) AS named,
               EXISTS (SELECT FROM unnest(v_spellings || ARRAY(SELECT upper(s) FROM unnest(v_spellings) s)) s
                       WHERE strpos(lower(page.response_headers::text), lower(s)) > 0
                          OR position(convert_to(s, 'UTF8') IN page.response_body) > 0) AS told
        FROM page)
    SELECT (SELECT count(*) FROM page), array_agg(found.place) FILTER (WHERE found.named),
           array_agg(found.place) FILTER (WHERE found.told AND NOT found.named),
           (SELECT page.scope FROM page ORDER BY page.scope DESC, page.key DESC LIMIT 1),
           (SELECT page.key FROM page ORDER BY page.scope DESC, page.key DESC LIMIT 1)
    INTO examined, v_named, v_told, next_scope, next_key FROM found;
    erased := coalesce(cardinality(v_named), 0) + coalesce(cardinality(v_told), 0);
    IF examined < v_limit THEN
        next_scope := NULL;
        next_key := NULL;
    END IF;
    IF erased > 0 AND p_count_only IS NOT TRUE THEN
        DELETE FROM core.idempotency_records r WHERE r.ctid = ANY (v_named);
        UPDATE core.idempotency_records r SET response_headers = NULL, response_body = NULL, body_omitted = true
        WHERE r.ctid = ANY (v_told);
        PERFORM core.audit_append(p_actor, 'retention.erase', p_reason,
            jsonb_build_object('domain_id', p_domain, 'table', 'idempotency_records'), jsonb_build_object('erased', erased));
    END IF;
    RETURN NEXT;
END
$$;

-- erase_archived: leaves only the metadata of at most p_limit archived rows of a domain. Returns how many.
CREATE OR REPLACE FUNCTION core.erase_archived(p_domain uuid, p_actor text, p_reason text, p_limit int)
RETURNS int
LANGUAGE plpgsql SECURITY DEFINER
SET search_path = pg_catalog, pg_temp SET jit = off
SET enable_seqscan = off SET enable_bitmapscan = off SET enable_hashjoin = off SET enable_mergejoin = off
AS $$
DECLARE
    v_ids    bigint[];
    v_erased int;
BEGIN
    v_ids := ARRAY(
        SELECT a.id FROM core.archive a WHERE a.domain_id = p_domain
        LIMIT least(greatest(p_limit, 1), 5000)
        FOR UPDATE SKIP LOCKED);
    PERFORM core.erase_keys(array_agg(coalesce(a.origin_id, a.original_id)), array_agg(a.original_id), array_agg(a.queue),
                            array_agg(a.source), array_agg(a.idempotency_key), array_agg(a.dedupe_key))
    FROM core.archive a WHERE a.id = ANY (v_ids);
    v_erased := core.archive_dispose(v_ids, 'ERASE');
    IF v_erased > 0 THEN
        PERFORM core.audit_append(p_actor, 'retention.erase', p_reason,
            jsonb_build_object('domain_id', p_domain, 'table', 'archive'), jsonb_build_object('erased', v_erased));
    END IF;
    RETURN v_erased;
END
$$;

-- erase_outbox: the same for the settled rows of a domain among the p_limit rows after p_after; NULL: from the first. There is no index by
-- domain, which every publish would pay for: the whole table is read, a page at a time, in the order of its primary key.
-- What is open is left alone, and counted; with p_cancel it is cancelled first. The last page is audited in any case:
-- an operator may have to prove that it was done.
CREATE OR REPLACE FUNCTION core.erase_outbox(
    p_domain uuid, p_actor text, p_reason text, p_cancel boolean, p_limit int, p_after uuid)
RETURNS TABLE (examined int, erased int, open int, next_id uuid)
LANGUAGE plpgsql SECURITY DEFINER
SET search_path = pg_catalog, pg_temp SET jit = off
SET enable_seqscan = off SET enable_bitmapscan = off SET enable_hashjoin = off SET enable_mergejoin = off
AS $$
#variable_conflict use_column
DECLARE
    v_limit int := least(greatest(p_limit, 1), 100000);
    v_ids   uuid[];
    v_done  uuid[];
BEGIN
    SELECT count(*), max(page.id::text COLLATE "C")::uuid,
           coalesce(array_agg(page.id) FILTER (WHERE page.domain_id = p_domain), '{}')
    INTO examined, next_id, v_ids
    FROM (SELECT o.id, o.domain_id FROM core.outbox o
          WHERE o.id >= coalesce(p_after, '00000000-0000-0000-0000-000000000000') AND o.id IS DISTINCT FROM p_after
          ORDER BY o.id LIMIT v_limit) page;
    IF p_cancel THEN
        PERFORM core.outbox_cancel_event(o.id, p_actor, p_reason) FROM core.outbox o WHERE o.id = ANY (v_ids) AND o.settled_at IS NULL;
    END IF;
    v_done := ARRAY(SELECT o.id FROM core.outbox o WHERE o.id = ANY (v_ids) AND o.settled_at IS NOT NULL
                    FOR UPDATE SKIP LOCKED);
    PERFORM core.erase_keys(array_agg(coalesce(o.origin_id, o.id)), array_agg(o.id), array_agg(o.handler_name),
                            array_agg(o.source), array_agg(o.idempotency_key), array_agg(o.dedupe_key))
    FROM core.outbox o WHERE o.id = ANY (v_done);
    erased := core.outbox_dispose(v_done, 'ERASE');
    open := cardinality(v_ids) - erased;
    IF examined < v_limit THEN
        next_id := NULL;
    END IF;
    IF erased > 0 OR next_id IS NULL THEN
        PERFORM core.audit_append(p_actor, 'retention.erase', p_reason,
            jsonb_build_object('domain_id', p_domain, 'table', 'outbox', 'ids', to_jsonb(v_done), 'cancel', p_cancel),
            jsonb_build_object('erased', erased, 'open', open));
    END IF;
    RETURN NEXT;
END
$$;
