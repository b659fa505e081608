-- A clock that tests move, for one database that was made for tests. It takes the place of the server's functions in this
-- database alone: they are found by name, so whatever is created after this script, Holdfast's functions and defaults and
-- the application's own, reads the time here. CURRENT_TIMESTAMP and its kind are no functions, and show the server's time.
-- Only a superuser may do this, and nothing of it is part of Holdfast's schema.

CREATE TABLE holdfast_testing.clock (
    one     boolean     PRIMARY KEY DEFAULT true CHECK (one),
    shift   interval    NOT NULL DEFAULT '0',  -- how far the clock is ahead of the server's
    frozen  timestamptz                        -- NULL: it goes on
);
INSERT INTO holdfast_testing.clock DEFAULT VALUES;
GRANT SELECT ON holdfast_testing.clock TO PUBLIC;

ALTER FUNCTION pg_catalog.now() RENAME TO holdfast_now;
ALTER FUNCTION pg_catalog.transaction_timestamp() RENAME TO holdfast_transaction_timestamp;
ALTER FUNCTION pg_catalog.statement_timestamp() RENAME TO holdfast_statement_timestamp;
ALTER FUNCTION pg_catalog.clock_timestamp() RENAME TO holdfast_clock_timestamp;

CREATE FUNCTION pg_catalog.now() RETURNS timestamptz LANGUAGE sql STABLE PARALLEL SAFE AS $$
    SELECT coalesce(c.frozen, pg_catalog.holdfast_now() OPERATOR(pg_catalog.+) c.shift) FROM holdfast_testing.clock c
$$;
CREATE FUNCTION pg_catalog.transaction_timestamp() RETURNS timestamptz LANGUAGE sql STABLE PARALLEL SAFE AS $$
    SELECT coalesce(c.frozen, pg_catalog.holdfast_now() OPERATOR(pg_catalog.+) c.shift) FROM holdfast_testing.clock c
$$;
CREATE FUNCTION pg_catalog.statement_timestamp() RETURNS timestamptz LANGUAGE sql STABLE PARALLEL SAFE AS $$
    SELECT coalesce(c.frozen, pg_catalog.holdfast_statement_timestamp() OPERATOR(pg_catalog.+) c.shift)
    FROM holdfast_testing.clock c
$$;
CREATE FUNCTION pg_catalog.clock_timestamp() RETURNS timestamptz LANGUAGE sql VOLATILE PARALLEL SAFE AS $$
    SELECT coalesce(c.frozen, pg_catalog.holdfast_clock_timestamp() OPERATOR(pg_catalog.+) c.shift)
    FROM holdfast_testing.clock c
$$;
