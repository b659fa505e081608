-- The audit: one line for every change that an operator makes, written by the function that makes it.

-- audit_append: writes one line. Only other functions may call it. A caller that has selected rows by a filter says so in
-- holdfast.selection, for its transaction: a line that names ten thousand ids should say what they have in common.
CREATE OR REPLACE FUNCTION core.audit_append(p_actor text, p_action text, p_reason text, p_arguments jsonb, p_counts jsonb)
RETURNS void
LANGUAGE plpgsql SECURITY DEFINER
SET search_path = pg_catalog, pg_temp
AS $$
BEGIN
    IF coalesce(p_actor, '') = '' OR octet_length(p_actor) > 200 OR p_actor ~ '[[:cntrl:]]' THEN
        RAISE EXCEPTION 'p_actor must name who does this, in 1 to 200 bytes'
            USING ERRCODE = 'invalid_parameter_value', HINT = 'Pass an e-mail address, or sql-direct.';
    ELSIF octet_length(p_reason) > 2000 THEN
        RAISE EXCEPTION 'p_reason has % bytes, 2000 are allowed', octet_length(p_reason)
            USING ERRCODE = 'invalid_parameter_value', HINT = 'Say it in a few sentences.';
    ELSIF p_reason ~ '[[:cntrl:]]' THEN
        RAISE EXCEPTION 'p_reason has control characters'
            USING ERRCODE = 'invalid_parameter_value', HINT = 'Write plain text on one line.';
    END IF;
    INSERT INTO core.audit (actor, action, reason, arguments, counts)
    VALUES (p_actor, p_action, nullif(p_reason, ''),
            jsonb_strip_nulls(jsonb_build_object(
                'selection', left(nullif(current_setting('holdfast.selection', true), ''), 1000)) || coalesce(p_arguments, '{}')),
            coalesce(p_counts, '{}'));
END
$$;

-- audit_rows: the line of an action on rows. Those that moved are named, all are counted by what became of them.
CREATE OR REPLACE FUNCTION core.audit_rows(
    p_actor text, p_action text, p_reason text, p_arguments jsonb, p_ids uuid[], p_outcomes text[])
RETURNS void
LANGUAGE plpgsql SECURITY DEFINER
SET search_path = pg_catalog, pg_temp
AS $$
BEGIN
    PERFORM core.audit_append(
        p_actor, p_action, p_reason,
        p_arguments || jsonb_build_object('ids', (
            SELECT coalesce(jsonb_agg(t.id), '[]') FROM unnest(p_ids, p_outcomes) AS t (id, outcome)
            WHERE t.outcome = 'moved')),
        (SELECT jsonb_object_agg(c.outcome, c.n)
         FROM (SELECT t.outcome, count(*) AS n FROM unnest(p_outcomes) AS t (outcome) GROUP BY t.outcome) c));
END
$$;

-- audit_sweep: the line of one step of a sweep that an operator asked for and that took something. Workers sweep without an
-- actor, and leave none.
CREATE OR REPLACE FUNCTION core.audit_sweep(p_actor text, p_reason text, p_step text, p_content_class text, p_swept int)
RETURNS void
LANGUAGE plpgsql SECURITY DEFINER
SET search_path = pg_catalog, pg_temp
AS $$
BEGIN
    IF p_swept > 0 AND p_actor IS NOT NULL THEN
        PERFORM core.audit_append(p_actor, 'retention.sweep', p_reason,
            jsonb_build_object('step', p_step, 'content_class', p_content_class), jsonb_build_object('swept', p_swept));
    END IF;
END
$$;

-- audit_import: the line of one batch of an import, written in the transaction that publishes it. p_place is a table, or a
-- queue: never an address, which has a password.
CREATE OR REPLACE FUNCTION core.audit_import(
    p_actor text, p_reason text, p_library text, p_place text, p_source text, p_published int)
RETURNS void
LANGUAGE plpgsql SECURITY DEFINER
SET search_path = pg_catalog, pg_temp
AS $$
BEGIN
    IF (octet_length(p_library) BETWEEN 1 AND 100 AND octet_length(p_place) BETWEEN 1 AND 500
        AND octet_length(p_source) BETWEEN 1 AND 500 AND p_published > 0) IS NOT TRUE THEN
        PERFORM core.refuse_argument('p_library, p_place and p_source must be short names, p_published more than 0');
    END IF;
    PERFORM core.audit_append(p_actor, 'import', p_reason,
        jsonb_build_object('library', p_library, 'place', p_place, 'source', p_source),
        jsonb_build_object('published', p_published));
END
$$;

-- audit_refused: writes down an action that was refused. What it had begun is rolled back by then, so this is a call and
-- a transaction of its own. Every line of it says `refused` and names no rows: it cannot be taken for something done.
CREATE OR REPLACE FUNCTION core.audit_refused(
    p_actor text, p_action text, p_reason text, p_arguments jsonb, p_problem text)
RETURNS void
LANGUAGE plpgsql SECURITY DEFINER
SET search_path = pg_catalog, pg_temp
AS $$
BEGIN
    IF octet_length(p_arguments::text) > 8192 THEN
        RAISE EXCEPTION 'p_arguments has % bytes, 8192 are allowed', octet_length(p_arguments::text)
            USING ERRCODE = 'invalid_parameter_value', HINT = 'Name what was asked for, and not every row of it.';
    END IF;
    IF coalesce(p_action, '') = '' OR octet_length(p_action) > 100 OR p_action ~ '[[:cntrl:]]' THEN
        RAISE EXCEPTION 'p_action must name what was tried, in 1 to 100 bytes'
            USING ERRCODE = 'invalid_parameter_value', HINT = 'Pass a verb, like replay or plan.run.';
    ELSIF coalesce(p_problem, '') = '' THEN
        RAISE EXCEPTION 'p_problem must say why it was refused'
            USING ERRCODE = 'invalid_parameter_value', HINT = 'Pass what the caller was told.';
    ELSIF jsonb_typeof(p_arguments) <> 'object' THEN
        RAISE EXCEPTION 'p_arguments must be a JSON object, not %', jsonb_typeof(p_arguments)
            USING ERRCODE = 'invalid_parameter_value', HINT = 'Write {} when there is nothing to say.';
    END IF;
    PERFORM core.audit_append(
        p_actor, p_action, p_reason,
        (coalesce(p_arguments, '{}') - 'ids') || jsonb_build_object('refused', left(p_problem, 500)), NULL);
END
$$;

-- require_operator: a line in the audit names a person only when an operator, or the owner, has called. Inside a SECURITY
-- DEFINER function current_user is the owner; who called is the role that was SET, or else the login.
CREATE OR REPLACE FUNCTION core.require_operator(p_actor text)
RETURNS void
LANGUAGE plpgsql STABLE SECURITY DEFINER
SET search_path = pg_catalog, pg_temp
AS $$
DECLARE
    caller name := coalesce(nullif(current_setting('role'), 'none'), session_user);
BEGIN
    IF p_actor IS NOT NULL
       AND NOT pg_has_role(caller, current_user, 'MEMBER')
       AND pg_has_role(caller, to_regrole('holdfast_operator'), 'MEMBER') IS NOT TRUE THEN
        RAISE EXCEPTION 'p_actor is for operators, and % is none', caller
            USING ERRCODE = 'insufficient_privilege', HINT = 'Leave it out: what workers sweep is not audited.';
    END IF;
END
$$;

-- require_ids: rows that an operator names by hand. More than that many are what plans are for.
CREATE OR REPLACE FUNCTION core.require_ids(p_ids uuid[])
RETURNS void
LANGUAGE plpgsql IMMUTABLE SECURITY DEFINER
SET search_path = pg_catalog, pg_temp
AS $$
BEGIN
    IF coalesce(cardinality(p_ids), 0) NOT BETWEEN 1 AND 10000 THEN
        RAISE EXCEPTION 'p_ids has % ids, 1 to 10000 are allowed', coalesce(cardinality(p_ids), 0)
            USING ERRCODE = 'invalid_parameter_value', HINT = 'Make a plan for more: holdfast plans create.';
    ELSIF array_position(p_ids, NULL) IS NOT NULL THEN
        RAISE EXCEPTION 'p_ids has a NULL in it'
            USING ERRCODE = 'invalid_parameter_value', HINT = 'Name each row by its id.';
    END IF;
END
$$;

-- audit_reveal: writes down that somebody has asked for the values of an event's payload, which were hidden from them, and
-- why. Whoever may call it could read them anyway: it is the line that matters.
CREATE OR REPLACE FUNCTION core.audit_reveal(p_actor text, p_reason text, p_id uuid)
RETURNS void
LANGUAGE plpgsql SECURITY DEFINER
SET search_path = pg_catalog, pg_temp
AS $$
BEGIN
    IF coalesce(p_reason, '') = '' THEN
        RAISE EXCEPTION 'p_reason must say why the values are needed'
            USING ERRCODE = 'invalid_parameter_value', HINT = 'Say it in a sentence.';
    ELSIF p_id IS NULL THEN
        RAISE EXCEPTION 'p_id must name an event'
            USING ERRCODE = 'invalid_parameter_value', HINT = 'Pass the id of a row.';
    END IF;
    PERFORM core.audit_append(p_actor, 'event.reveal', p_reason, jsonb_build_object('ids', jsonb_build_array(p_id)), NULL);
END
$$;
