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
        UPDATE core.outbox o
        SET payload = NULL, headers = NULL, domain_id = NULL, trace_context = NULL, idempotency_key = o.id::text,
            ordering_key = NULL, dedupe_key = NULL, last_error = NULL, error_signature = NULL, failure_history = '[]',
            claimed_by = NULL, deleted_at = coalesce(o.deleted_at, now()),
            disposed_at = CASE p_disposal WHEN 'ERASE' THEN o.disposed_at ELSE now() END
        WHERE o.id = ANY (p_ids);
    END CASE;
    GET DIAGNOSTICS n = ROW_COUNT;
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
        UPDATE core.archive a
        SET payload = NULL, headers = NULL, domain_id = NULL, trace_context = NULL, idempotency_key = a.original_id::text,
            ordering_key = NULL, dedupe_key = NULL, last_exception = NULL, error_signature = NULL, failure_history = '[]',
            deleted_at = coalesce(a.deleted_at, now()),
            disposed_at = CASE p_disposal WHEN 'ERASE' THEN a.disposed_at ELSE now() END
        WHERE a.id = ANY (p_ids);
    END CASE;
    GET DIAGNOSTICS n = ROW_COUNT;
    RETURN n;
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
    v_erased int;
BEGIN
    v_erased := core.archive_dispose(ARRAY(
        SELECT a.id FROM core.archive a WHERE a.domain_id = p_domain
        LIMIT least(greatest(p_limit, 1), 5000)
        FOR UPDATE SKIP LOCKED), 'ERASE');
    IF v_erased > 0 THEN
        PERFORM core.audit_append(p_actor, 'retention.erase', p_reason,
            jsonb_build_object('domain_id', p_domain, 'table', 'archive'), jsonb_build_object('erased', v_erased));
    END IF;
    RETURN v_erased;
END
$$;

-- erase_outbox: the same for the settled rows of a domain among the p_limit rows after p_after. There is no index by
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
    FROM (SELECT o.id, o.domain_id FROM core.outbox o WHERE o.id > p_after ORDER BY o.id LIMIT v_limit) page;
    IF p_cancel THEN
        PERFORM core.outbox_stop(o.id, p_actor, p_reason) FROM core.outbox o WHERE o.id = ANY (v_ids) AND o.settled_at IS NULL;
    END IF;
    v_done := ARRAY(SELECT o.id FROM core.outbox o WHERE o.id = ANY (v_ids) AND o.settled_at IS NOT NULL
                    FOR UPDATE SKIP LOCKED);
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
