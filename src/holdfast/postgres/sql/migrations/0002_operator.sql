-- What operators leave behind: who did what and why, what they noted, and replays that take their time.

-- Append-only: nobody has the right to change it, and the trigger below stops whoever has every right. `actor` is who
-- the caller says it is, `login` who the database knows it is. A row-level action lists the rows it moved in
-- arguments.ids, which is how an event finds what was done to it.
CREATE TABLE core.audit (
    id         bigint      PRIMARY KEY GENERATED ALWAYS AS IDENTITY,
    at         timestamptz NOT NULL DEFAULT clock_timestamp(),
    actor      text        NOT NULL,
    login      text        NOT NULL DEFAULT session_user,
    action     text        NOT NULL CHECK (action <> ''),
    reason     text,
    arguments  jsonb       NOT NULL DEFAULT '{}',
    counts     jsonb       NOT NULL DEFAULT '{}',
    CONSTRAINT audit_actor CHECK (octet_length(actor) BETWEEN 1 AND 200 AND actor !~ '[[:cntrl:]]'),
    CONSTRAINT audit_reason CHECK (octet_length(reason) BETWEEN 1 AND 2000)
);
CREATE INDEX audit_ids ON core.audit USING gin ((arguments -> 'ids') jsonb_path_ops);

CREATE FUNCTION core.audit_is_kept() RETURNS trigger
LANGUAGE plpgsql
SET search_path = pg_catalog, pg_temp
AS $$
BEGIN
    RAISE EXCEPTION 'core.audit is append-only: % is refused', TG_OP
        USING ERRCODE = 'insufficient_privilege', HINT = 'Append a line that says what was wrong with the other.';
END
$$;

CREATE TRIGGER audit_is_kept BEFORE UPDATE OR DELETE OR TRUNCATE ON core.audit
    FOR EACH STATEMENT EXECUTE FUNCTION core.audit_is_kept();

-- What somebody found out about a group of failures.
CREATE TABLE core.failure_notes (
    handler_name     text        NOT NULL,
    error_signature  text        NOT NULL,
    note             text        NOT NULL CHECK (octet_length(note) BETWEEN 1 AND 2000),
    noted_by         text        NOT NULL,
    noted_at         timestamptz NOT NULL DEFAULT now(),
    PRIMARY KEY (handler_name, error_signature)
);

-- A replay of many rows: first a canary, then the rest at a rate, stopped when too many fail again (DLQ-4). The rows are
-- frozen when the plan is made. Whoever runs it holds its lease; every step of theirs is fenced by the token.
-- A plan that is open, paused or stopped can still go on and holds its rows: finished_at is null.
CREATE TABLE core.plans (
    id                 bigint      PRIMARY KEY GENERATED ALWAYS AS IDENTITY,
    created_at         timestamptz NOT NULL DEFAULT now(),
    created_by         text        NOT NULL,
    reason             text,
    selection          jsonb       NOT NULL,                  -- what was asked for
    generation         bigint      CHECK (generation >= 0),  -- NULL: the one that is served, asked for at each step
    canary             int         NOT NULL CHECK (canary BETWEEN 0 AND 1000),
    rate               float8      NOT NULL CHECK (rate BETWEEN 0.01 AND 10000),   -- events a second
    max_failure_ratio  float8      NOT NULL CHECK (max_failure_ratio BETWEEN 0 AND 1),
    patience           interval    NOT NULL CHECK (patience BETWEEN '1 second' AND '7 days'),
    force              boolean     NOT NULL DEFAULT false,    -- also what the inbox may have forgotten
    state              text        NOT NULL DEFAULT 'open',
    state_reason       text,
    finished_at        timestamptz,
    -- Since it was made, or resumed after a stop: what failed before does not count again.
    judged_from        timestamptz NOT NULL DEFAULT now(),
    canary_passed      boolean     NOT NULL DEFAULT false,
    waiting_since      timestamptz NOT NULL DEFAULT now(),    -- for the outcome of what was replayed last
    runner             text,
    run_by             text,
    lease_token        uuid,
    lease_expires_at   timestamptz,
    CONSTRAINT plans_state CHECK (state IN ('open', 'paused', 'stopped', 'cancelled', 'done')),
    CONSTRAINT plans_finished CHECK ((finished_at IS NOT NULL) = (state IN ('cancelled', 'done')))
);

-- pending: not yet its turn; replayed: moved, its outcome is not known; delivered, failed: the outcome; skipped: it was
-- not there to be replayed any more, and `why` is what it was instead.
CREATE TABLE core.plan_rows (
    plan_id      bigint      NOT NULL REFERENCES core.plans,
    row_id       uuid        NOT NULL,                         -- core.outbox.id
    position     bigint      NOT NULL,
    state        text        NOT NULL DEFAULT 'pending',
    why          text,
    replayed_at  timestamptz,
    PRIMARY KEY (plan_id, row_id),
    CONSTRAINT plan_rows_state CHECK (state IN ('pending', 'replayed', 'delivered', 'failed', 'skipped')),
    CONSTRAINT plan_rows_why CHECK ((why IS NOT NULL) = (state = 'skipped')),
    CONSTRAINT plan_rows_replayed CHECK ((replayed_at IS NOT NULL) = (state IN ('replayed', 'delivered', 'failed')))
);
CREATE INDEX plan_rows_next ON core.plan_rows (plan_id, state, position);
CREATE INDEX plan_rows_held ON core.plan_rows (row_id);

-- Made anew with a name and a reason, for the audit.
DROP FUNCTION IF EXISTS core.retire(text, text);
DROP FUNCTION IF EXISTS core.outbox_stop(uuid, text);
