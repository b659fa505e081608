-- Retention policies: how long what is kept. The sweep that applies them stands in sweep.sql. Days are 24 hours, in
-- every time zone.

-- days_ago: the moment so many days before this transaction.
CREATE OR REPLACE FUNCTION core.days_ago(p_days int)
RETURNS timestamptz
LANGUAGE plpgsql STABLE
SET search_path = pg_catalog, pg_temp
AS $$
BEGIN
    RETURN now() - make_interval(hours => 24 * p_days);
END
$$;

-- retention_policy: the policy that a step applies to a class: its own, or else the one for all classes. What was
-- discarded is resolved: without a policy of its entity it follows the outbox's. NULL: it is kept.
CREATE OR REPLACE FUNCTION core.retention_policy(p_step text, p_content_class text)
RETURNS core.retention_policies
LANGUAGE plpgsql STABLE SECURITY DEFINER
SET search_path = pg_catalog, pg_temp
AS $$
DECLARE
    v_entities text[] := CASE p_step
        WHEN 'delivered' THEN '{outbox_row}'
        WHEN 'tombstones' THEN '{outbox_row}'
        WHEN 'failed' THEN '{failed_row}'
        WHEN 'discarded' THEN '{failed_row,outbox_row}'
        WHEN 'archived' THEN '{archive_row}'
        WHEN 'archive_tombstones' THEN '{archive_row,outbox_row}'
        WHEN 'inbox' THEN '{event_handled}'
        WHEN 'records' THEN '{idempotency_record}'
        WHEN 'rollup' THEN '{rollup_row}' END;
    v_policy core.retention_policies;
BEGIN
    SELECT p.* INTO v_policy FROM core.retention_policies p
    WHERE p.entity = ANY (v_entities) AND p.content_class IN (p_content_class, '*')
    ORDER BY array_position(v_entities, p.entity), p.content_class = '*' LIMIT 1;
    RETURN v_policy;
END
$$;

-- retention_policies_read: every policy, for workers, which may not read the table.
CREATE OR REPLACE FUNCTION core.retention_policies_read()
RETURNS TABLE (
    entity text, content_class text, active_ttl_days int, tombstoned_grace_days int, disposal text)
LANGUAGE plpgsql STABLE SECURITY DEFINER
SET search_path = pg_catalog, pg_temp
AS $$
#variable_conflict use_column
BEGIN
    RETURN QUERY
    SELECT p.entity, p.content_class, p.active_ttl_days, p.tombstoned_grace_days, p.disposal
    FROM core.retention_policies p ORDER BY p.entity, p.content_class;
END
$$;

-- retention_set: adds or changes a policy, or with p_active NULL removes it. Refuses what would let the inbox forget
-- before everything that can be replayed is gone.
CREATE OR REPLACE FUNCTION core.retention_set(
    p_actor text, p_reason text, p_entity text, p_content_class text, p_active int, p_grace int, p_disposal text)
RETURNS void
LANGUAGE plpgsql SECURITY DEFINER
SET search_path = pg_catalog, pg_temp
AS $$
DECLARE
    v_before jsonb;
    v_inbox  int;
    v_rows   int;
BEGIN
    LOCK TABLE core.retention_policies IN SHARE ROW EXCLUSIVE MODE;
    SELECT to_jsonb(p) INTO v_before FROM core.retention_policies p
    WHERE p.entity = p_entity AND p.content_class = p_content_class;
    IF p_active IS NULL THEN
        DELETE FROM core.retention_policies p WHERE p.entity = p_entity AND p.content_class = p_content_class;
    ELSE
        INSERT INTO core.retention_policies AS p
        VALUES (p_entity, p_content_class, p_active, p_grace, p_disposal)
        ON CONFLICT (entity, content_class) DO UPDATE SET active_ttl_days = EXCLUDED.active_ttl_days,
            tombstoned_grace_days = EXCLUDED.tombstoned_grace_days, disposal = EXCLUDED.disposal;
    END IF;
    SELECT min(p.active_ttl_days) FILTER (WHERE p.entity = 'event_handled'),
           max(p.active_ttl_days + p.tombstoned_grace_days)
               FILTER (WHERE p.entity IN ('outbox_row', 'failed_row', 'archive_row'))
    INTO v_inbox, v_rows FROM core.retention_policies p;
    IF v_inbox IS NULL OR NOT EXISTS (SELECT FROM core.retention_policies p
                                      WHERE p.entity = 'outbox_row' AND p.content_class = '*') THEN
        RAISE EXCEPTION 'outbox_row and event_handled need a policy for all classes'
            USING ERRCODE = 'invalid_parameter_value', HINT = 'Change it instead of removing it.';
    ELSIF v_inbox <= v_rows THEN
        RAISE EXCEPTION 'the inbox would forget after % days what can be replayed for %', v_inbox, v_rows
            USING ERRCODE = 'invalid_parameter_value', HINT = 'Keep event_handled for longer, or the others for less.';
    END IF;
    PERFORM core.audit_append(p_actor, 'retention.set', p_reason,
        jsonb_build_object('entity', p_entity, 'content_class', p_content_class, 'before', v_before,
                           'after', (SELECT to_jsonb(p) FROM core.retention_policies p
                                     WHERE p.entity = p_entity AND p.content_class = p_content_class)), '{}');
END
$$;

-- inbox_horizon: what was published before this time may have been handled although the inbox no longer says so.
CREATE OR REPLACE FUNCTION core.inbox_horizon()
RETURNS timestamptz
LANGUAGE plpgsql STABLE SECURITY DEFINER
SET search_path = pg_catalog, pg_temp
AS $$
BEGIN
    RETURN (SELECT core.days_ago(min(p.active_ttl_days)) FROM core.retention_policies p WHERE p.entity = 'event_handled');
END
$$;

-- deletes_delivered: whether delivered rows of a content class are deleted at once, having neither active days nor a
-- grace.
CREATE OR REPLACE FUNCTION core.deletes_delivered(p_content_class text)
RETURNS boolean
LANGUAGE plpgsql STABLE SECURITY DEFINER
SET search_path = pg_catalog, pg_temp
AS $$
DECLARE
    v_policy core.retention_policies := core.retention_policy('delivered', p_content_class);
BEGIN
    RETURN v_policy.active_ttl_days + v_policy.tombstoned_grace_days = 0 AND v_policy.disposal = 'HARD_DELETE';
END
$$;

-- deletes_delivered_of: the same for many rows: the classes whose policy says so, those whose policy says otherwise, and
-- whether the rest is deleted.
CREATE OR REPLACE FUNCTION core.deletes_delivered_of()
RETURNS TABLE (deleted text[], kept text[], others boolean)
LANGUAGE plpgsql STABLE SECURITY DEFINER
SET search_path = pg_catalog, pg_temp
AS $$
BEGIN
    RETURN QUERY
    SELECT coalesce(array_agg(p.content_class) FILTER (WHERE p.deletes), '{}'),
           coalesce(array_agg(p.content_class) FILTER (WHERE NOT p.deletes), '{}'), core.deletes_delivered('*')
    FROM (SELECT p.content_class, core.deletes_delivered(p.content_class) AS deletes
          FROM core.retention_policies p WHERE p.entity = 'outbox_row' AND p.content_class <> '*') p;
END
$$;
