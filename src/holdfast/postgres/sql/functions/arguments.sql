-- What the functions require of their arguments. A call may come from any login with the role, not only from this library:
-- whatever it passes, it gets invalid_parameter_value (22023) and a sentence, or what it asked for.

-- refuse_argument: ends the call.
CREATE OR REPLACE FUNCTION core.refuse_argument(p_problem text, p_hint text DEFAULT 'Call it as the library does.')
RETURNS void
LANGUAGE plpgsql IMMUTABLE
SET search_path = pg_catalog, pg_temp
AS $$
BEGIN
    RAISE EXCEPTION '%', left(p_problem, 500) USING ERRCODE = 'invalid_parameter_value', HINT = p_hint;
END
$$;

-- is_list: an array of one dimension without NULL. Here and in the next two every name is qualified instead of pinning
-- the search_path: then they are merged into the expression that asks, and cost next to nothing.
CREATE OR REPLACE FUNCTION core.is_list(p_array anyarray)
RETURNS boolean
LANGUAGE sql IMMUTABLE
AS $$
    SELECT p_array IS NOT NULL AND coalesce(pg_catalog.array_ndims(p_array), 1) OPERATOR(pg_catalog.=) 1
       AND pg_catalog.array_position(p_array, NULL) IS NULL
$$;

-- is_name: 1 to p_most bytes of a name that can be shown on a line, without characters that control or cannot be seen
-- (Unicode's Cc, Cf, Zl and Zp, its white space but for the space, fillers, the blank of Braille, and what selects a variant
-- of the character before it): two names that look the same would be two. characters.py has those that Python prints.
CREATE OR REPLACE FUNCTION core.is_name(p_text text, p_most int DEFAULT 200)
RETURNS boolean
LANGUAGE sql IMMUTABLE
AS $$
    SELECT pg_catalog.octet_length(p_text) OPERATOR(pg_catalog.>=) 1
       AND pg_catalog.octet_length(p_text) OPERATOR(pg_catalog.<=) p_most
       AND p_text OPERATOR(pg_catalog.!~)
           '[[:cntrl:]\u007f-\u00a0\u00ad\u034f\u0600-\u0605\u061c\u06dd\u070f\u0890\u0891\u08e2\u115f\u1160\u1680\u17b4\u17b5\u180b-\u180f'
           '\u2000-\u200f\u2028-\u202f\u205f-\u206f\u2800\u3000\u3164\ufe00-\ufe0f\ufeff\uffa0\ufff0-\ufffb\U000110bd\U000110cd'
           '\U00013430-\U0001343f\U0001bca0-\U0001bca3\U0001d173-\U0001d17a\U000e0000-\U000e0fff]'
$$;

-- is_silence: how long a transaction may stay silent.
CREATE OR REPLACE FUNCTION core.is_silence(p_idle interval)
RETURNS boolean
LANGUAGE sql IMMUTABLE
AS $$
    SELECT p_idle OPERATOR(pg_catalog.>=) '0.1 seconds'::pg_catalog.interval
       AND p_idle OPERATOR(pg_catalog.<=) '24 days'::pg_catalog.interval
$$;

-- are_names: a list of at most p_most names, none longer than p_longest bytes.
CREATE OR REPLACE FUNCTION core.are_names(p_texts text[], p_most int DEFAULT 10000, p_longest int DEFAULT 200)
RETURNS boolean
LANGUAGE plpgsql IMMUTABLE
SET search_path = pg_catalog, pg_temp
AS $$
BEGIN
    RETURN core.is_list(p_texts) AND cardinality(p_texts) <= p_most
       AND NOT EXISTS (SELECT FROM unnest(p_texts) AS t (text)
                       WHERE core.is_name(t.text, p_longest) IS NOT TRUE);
END
$$;

-- require_batch: the rows of a settle, each named by its id and its lease's token, with what becomes of each.
CREATE OR REPLACE FUNCTION core.require_batch(p_ids uuid[], p_tokens uuid[], p_others int[])
RETURNS void
LANGUAGE plpgsql IMMUTABLE
SET search_path = pg_catalog, pg_temp
AS $$
BEGIN
    IF (core.is_list(p_ids) AND core.is_list(p_tokens) AND cardinality(p_ids) <= 100000
        AND cardinality(p_ids) = ALL (cardinality(p_tokens) || p_others)) IS NOT TRUE THEN
        PERFORM core.refuse_argument('p_ids, p_tokens and the other arrays must have one entry for each row');
    END IF;
END
$$;

-- require_failures: what is said about rows that have failed.
CREATE OR REPLACE FUNCTION core.require_failures(p_handlers text[], p_reasons text[])
RETURNS void
LANGUAGE plpgsql IMMUTABLE
SET search_path = pg_catalog, pg_temp
AS $$
BEGIN
    IF core.are_names(p_handlers, 100000) IS NOT TRUE OR EXISTS (SELECT FROM unnest(p_handlers) h WHERE strpos(h, '/') > 0) THEN
        PERFORM core.refuse_argument('p_handlers must name handlers, in 1 to 200 bytes each');
    ELSIF EXISTS (SELECT FROM unnest(p_reasons) AS t (reason)
                  WHERE t.reason IS NULL
                     OR t.reason NOT IN ('max_deliveries', 'retry_terminal', 'rejected', 'cancelled', 'expired')) THEN
        PERFORM core.refuse_argument('p_reasons must be max_deliveries, retry_terminal, rejected, cancelled or expired');
    END IF;
END
$$;

-- require_delays: how long rows are to wait.
CREATE OR REPLACE FUNCTION core.require_delays(p_delays interval[])
RETURNS void
LANGUAGE plpgsql IMMUTABLE
SET search_path = pg_catalog, pg_temp
AS $$
BEGIN
    IF (core.is_list(p_delays) AND interval '-1 year' <= ALL (p_delays)
        AND interval '1000 years' >= ALL (p_delays)) IS NOT TRUE THEN
        PERFORM core.refuse_argument('p_delays must be intervals of at most 1000 years');
    END IF;
END
$$;
