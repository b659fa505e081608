-- Errors as workers send them.

-- error_text, error_traceback: what a worker sends of an error is its text and, behind a record separator, its traceback,
-- whose first line is the place in the user's code; an error that has none is the text alone. Every name is qualified, as in
-- is_name.
CREATE OR REPLACE FUNCTION core.error_text(p_error text)
RETURNS text
LANGUAGE sql IMMUTABLE
AS $$
    SELECT pg_catalog.left(pg_catalog.split_part(p_error, pg_catalog.chr(30), 1), 8192)
$$;

CREATE OR REPLACE FUNCTION core.error_traceback(p_error text)
RETURNS text
LANGUAGE sql IMMUTABLE
AS $$
    SELECT CASE WHEN pg_catalog.strpos(p_error, pg_catalog.chr(30)) OPERATOR(pg_catalog.>) 0
                THEN pg_catalog.left(pg_catalog.split_part(p_error, pg_catalog.chr(30), 2), 4096) END
$$;

-- raised_at: the place in the user's code that a traceback begins with; NULL without one.
CREATE OR REPLACE FUNCTION core.raised_at(p_traceback text)
RETURNS text
LANGUAGE sql IMMUTABLE
AS $$
    SELECT pg_catalog.substring(p_traceback, '^raised at ([^\n]*)')
$$;
