-- Rows that another session keeps from being settled.

-- outbox_blocked: the ids of rows that another session keeps from being settled now: it has locked the row or, with
-- p_record, has written its inbox row and not committed. With p_delete, for settles that delete the row. What others have
-- not committed can be seen by trying alone: each row is settled as far as it takes, and the attempt rolled back. For
-- batches of which one row is blocked, and for handlers that have blocked rows: a blocked one costs a millisecond.
CREATE OR REPLACE FUNCTION core.outbox_blocked(
    p_ids uuid[], p_tokens uuid[], p_handlers text[], p_record boolean, p_delete boolean)
RETURNS SETOF uuid
LANGUAGE plpgsql SECURITY DEFINER
SET search_path = pg_catalog, pg_temp SET jit = off SET lock_timeout = '1ms'
SET enable_seqscan = off SET enable_bitmapscan = off
AS $$
DECLARE
    v_key    text;
    v_source text;
BEGIN
    PERFORM core.require_batch(p_ids, p_tokens, ARRAY[cardinality(p_handlers)]);
    PERFORM core.require_failures(p_handlers, '{}');
    IF p_record IS NULL OR p_delete IS NULL THEN
        PERFORM core.refuse_argument('p_record and p_delete must not be NULL');
    END IF;
    FOR n IN 1 .. cardinality(p_ids) LOOP
        BEGIN
            IF p_delete THEN
                SELECT o.idempotency_key, o.source INTO v_key, v_source FROM core.outbox o
                WHERE o.id = p_ids[n] AND o.lease_token = p_tokens[n] AND o.status = 'in_flight' FOR UPDATE;
            ELSE
                SELECT o.idempotency_key, o.source INTO v_key, v_source FROM core.outbox o
                WHERE o.id = p_ids[n] AND o.lease_token = p_tokens[n] AND o.status = 'in_flight' FOR NO KEY UPDATE;
            END IF;
            IF FOUND AND p_record THEN
                PERFORM core.inbox_add(p_handlers[n], v_key, v_source);
            END IF;
            RAISE EXCEPTION 'free';
        EXCEPTION
            WHEN lock_not_available THEN
                RETURN NEXT p_ids[n];
            WHEN OTHERS THEN
                NULL;  -- free, or refused for another reason, which the settle meets by itself
        END;
    END LOOP;
END
$$;
