-- The secrets with which relays sign messages, and by which workers know what a relay has sent.

-- relay_keys: the secret to sign with, those to accept, and what the keys of foreign events are made with, which never changes.
CREATE OR REPLACE FUNCTION core.relay_keys()
RETURNS TABLE (signing bytea, accepted bytea[], apart bytea)
LANGUAGE plpgsql STABLE SECURITY DEFINER
SET search_path = pg_catalog, pg_temp
AS $$
#variable_conflict use_column
BEGIN
    RETURN QUERY
    SELECT (SELECT s.secret FROM core.relay_secrets s WHERE s.signs_at <= now() ORDER BY s.signs_at DESC, s.id DESC LIMIT 1),
           ARRAY(SELECT s.secret FROM core.relay_secrets s
                 WHERE s.accepted_until IS NULL OR s.accepted_until > now() ORDER BY s.id DESC LIMIT 100),
           sha256(core.secret() || convert_to('foreign events', 'UTF8'))
    WHERE EXISTS (SELECT FROM core.relay_secrets s WHERE s.signs_at <= now());
    IF NOT FOUND THEN
        RAISE EXCEPTION 'core.relay_secrets has lost its rows'
            USING ERRCODE = 'object_not_in_prerequisite_state',
                  HINT = 'INSERT INTO core.relay_secrets (signs_at) VALUES (now());';
    END IF;
END
$$;

-- relay_rotate: makes a new secret, which relays sign with a minute later. What was signed with the old ones is accepted for 30
-- days, or, for one that somebody else has got hold of (p_drop), for two minutes. Returns how many are accepted now.
CREATE OR REPLACE FUNCTION core.relay_rotate(p_drop boolean, p_actor text, p_reason text DEFAULT NULL)
RETURNS int
LANGUAGE plpgsql SECURITY DEFINER
SET search_path = pg_catalog, pg_temp
AS $$
DECLARE
    v_until    timestamptz := now() + CASE WHEN p_drop THEN interval '2 minutes' ELSE interval '30 days' END;
    v_accepted int;
BEGIN
    IF p_drop IS NULL THEN
        PERFORM core.refuse_argument('p_drop must be true or false');
    END IF;
    LOCK TABLE core.relay_secrets IN SHARE ROW EXCLUSIVE MODE;
    IF (SELECT count(*) FROM core.relay_secrets s) >= 50 AND NOT p_drop THEN
        PERFORM core.refuse_argument('50 secrets are accepted already', 'Drop the old ones: holdfast relay rotate --drop-old.');
    END IF;
    DELETE FROM core.relay_secrets s WHERE s.accepted_until < now() - interval '1 day';
    UPDATE core.relay_secrets s SET accepted_until = least(s.accepted_until, v_until);
    INSERT INTO core.relay_secrets DEFAULT VALUES;
    v_accepted := (SELECT count(*) FROM core.relay_secrets s WHERE s.accepted_until IS NULL OR s.accepted_until > now());
    PERFORM core.audit_append(
        p_actor, 'relay.rotate', p_reason, jsonb_build_object('drop_old', p_drop), jsonb_build_object('accepted', v_accepted));
    RETURN v_accepted;
END
$$;
