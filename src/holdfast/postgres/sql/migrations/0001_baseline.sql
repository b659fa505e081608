-- The outbox and what stands around it: types, tables, indexes, triggers and views. The functions that work on them
-- are in ../functions, and what each role may do with them is in ../grants.sql.
--
-- One row of core.outbox is an event that one handler is owed; an event that several handlers want is split into one
-- row for each. A producer inserts it in its own transaction; from then on only the functions change it. What has
-- been applied stands in core.migrations and core.contract, which ../ledger.sql makes.

-- --- what the columns, triggers and views of the outbox name ---------------------------------------------------------

-- UUIDv7 from what every supported Postgres has: no extension, no uuidv7() of Postgres 18.
-- The first 48 bits are milliseconds, so ids sort by time and the primary key grows at its right edge.
CREATE FUNCTION core.uuid7() RETURNS uuid
LANGUAGE sql VOLATILE PARALLEL SAFE
SET search_path = pg_catalog, pg_temp
AS $$
    SELECT encode(
        set_bit(set_bit(
            overlay(uuid_send(gen_random_uuid())
                    PLACING substring(int8send((extract(epoch FROM clock_timestamp()) * 1000)::bigint) FROM 3)
                    FROM 1 FOR 6),
            52, 1), 53, 1), 'hex')::uuid
$$;

-- Numbers of deployments. No row means generation 0 everywhere.
CREATE TABLE core.deployments (
    generation  bigint PRIMARY KEY CHECK (generation >= 0),
    label       text,
    started_at  timestamptz NOT NULL DEFAULT now(),
    retired_at  timestamptz
);

-- Defaults for writers in other languages, who know neither generations nor their channels.
CREATE FUNCTION core.current_generation() RETURNS bigint
LANGUAGE plpgsql STABLE SECURITY DEFINER
SET search_path = pg_catalog, pg_temp
AS $$
BEGIN
    RETURN coalesce((SELECT max(generation) FROM core.deployments WHERE retired_at IS NULL), 0);
END
$$;

CREATE FUNCTION core.channel_of(p_generation bigint) RETURNS text
LANGUAGE sql IMMUTABLE PARALLEL SAFE
SET search_path = pg_catalog, pg_temp
AS $$
    SELECT CASE WHEN p_generation = 0 THEN 'outbox_default' ELSE 'outbox_gen_' || p_generation END
$$;

CREATE FUNCTION core.current_channel() RETURNS text
LANGUAGE plpgsql STABLE SECURITY DEFINER
SET search_path = pg_catalog, pg_temp
AS $$
BEGIN
    RETURN core.channel_of(core.current_generation());
END
$$;

-- Which database role may publish, see and cancel the events of which source. Filled by the owner.
CREATE TABLE core.sources (
    source     text NOT NULL,
    role_name  name NOT NULL,
    PRIMARY KEY (source, role_name)
);

-- One row: the secret of what no other login may compute, which is the ids of siblings, and keys of the inbox that
-- belong to one source. Only functions of the owner read it.
CREATE TABLE core.secrets (
    one     boolean PRIMARY KEY DEFAULT true CHECK (one),
    secret  bytea   NOT NULL DEFAULT decode(replace(gen_random_uuid()::text || gen_random_uuid()::text, '-', ''), 'hex')
);
INSERT INTO core.secrets DEFAULT VALUES;

-- Triggers name these. functions/publish.sql gives them their bodies, in the same transaction.
CREATE FUNCTION core.outbox_fill() RETURNS trigger LANGUAGE plpgsql AS $$ BEGIN RETURN NEW; END $$;
CREATE FUNCTION core.outbox_source() RETURNS trigger LANGUAGE plpgsql AS $$ BEGIN RETURN NEW; END $$;
CREATE FUNCTION core.outbox_changed() RETURNS trigger LANGUAGE plpgsql AS $$ BEGIN RETURN NULL; END $$;
CREATE FUNCTION core.outbox_notify() RETURNS trigger LANGUAGE plpgsql AS $$ BEGIN RETURN NULL; END $$;
CREATE FUNCTION core.sources_owned() RETURNS trigger LANGUAGE plpgsql AS $$ BEGIN RETURN NULL; END $$;

-- The first line enables outbox_source, below.
CREATE TRIGGER sources_owned AFTER INSERT OR UPDATE ON core.sources FOR EACH STATEMENT
    EXECUTE FUNCTION core.sources_owned();

-- --- the outbox ----------------------------------------------------------------------------------------------------

-- No CHECK: see require_row in functions/publish.sql, which has the rules.
CREATE TABLE core.outbox (
    -- what happened
    id                uuid        PRIMARY KEY DEFAULT core.uuid7(),
    event_type        text        NOT NULL,
    event_version     int         NOT NULL DEFAULT 1,
    occurred_at       timestamptz NOT NULL DEFAULT now(),
    source            text        NOT NULL,
    target            text,                                    -- NULL: every interested context
    content_class     text        NOT NULL DEFAULT 'operations',
    channel           text        NOT NULL DEFAULT core.current_channel(),
    generation        bigint      NOT NULL DEFAULT core.current_generation(),
    domain_id         uuid,
    payload           jsonb,                                   -- NULL only once retention stripped it
    headers           jsonb,
    idempotency_key   text        NOT NULL,
    trace_context     text,
    -- where it is in its life
    status            text        NOT NULL DEFAULT 'pending',
    attempts          int         NOT NULL DEFAULT 0,
    last_error        text,
    traceback         text,                                    -- its first line is the place in the user's code
    first_failed_at   timestamptz,
    failure_history   jsonb       NOT NULL DEFAULT '[]',
    delivered_at      timestamptz,
    deleted_at        timestamptz,
    disposed_at       timestamptz,                             -- retention has stripped the row
    created_at        timestamptz NOT NULL DEFAULT now(),
    available_at      timestamptz NOT NULL DEFAULT now(),
    expires_at        timestamptz,
    settled_at        timestamptz,
    failed_at         timestamptz,
    failure_reason    text,
    error_signature   text,
    -- to whom it is owed, and in which order
    handler_name      text,                                    -- NULL: not yet known; '*': split into siblings
    origin_id         uuid,                                    -- a sibling's published row
    route             text        NOT NULL GENERATED ALWAYS AS
                                  (coalesce(handler_name, coalesce(target, '*') || '/' || event_type)) STORED,
    priority          smallint    NOT NULL DEFAULT 1,
    ordering_key      text,                                    -- NULL: none; '': it has only a fairness key
    fairness_key      text,                                    -- events take turns over these; NULL: no turns
    seq               bigint      NOT NULL GENERATED ALWAYS AS IDENTITY,
    dedupe_key        text,
    -- who works on it
    claimed_by        uuid,
    lease_token       uuid,
    lease_expires_at  timestamptz
) WITH (
    -- Half of each page is left for the version that a claim writes, so that claims are heap-only updates. The table
    -- is no larger in the end (each row is written three times), and Postgres works a fifth less per event.
    fillfactor = 50,
    autovacuum_vacuum_scale_factor = 0.02,
    autovacuum_vacuum_insert_scale_factor = 0.1,
    autovacuum_analyze_scale_factor = 0.05
);

-- A lane is a channel, generation, route and priority; a worker reads only the lanes that it serves. No index
-- mentions status or the lease, so that a claim is a heap-only update. See docs/architecture/claiming.md.
CREATE INDEX outbox_lane ON core.outbox (channel, generation, route, priority, available_at, id)
    WHERE settled_at IS NULL AND ordering_key IS NULL;
CREATE INDEX outbox_keyed ON core.outbox (channel, generation, route, ordering_key, seq)
    WHERE settled_at IS NULL AND ordering_key IS NOT NULL;
-- Rows that have a fairness key, in the order in which each key's are due.
CREATE INDEX outbox_fair ON core.outbox (channel, generation, route, fairness_key, available_at, id)
    WHERE settled_at IS NULL AND fairness_key IS NOT NULL;
CREATE INDEX outbox_dlq ON core.outbox (failed_at, id)
    WHERE failed_at IS NOT NULL AND deleted_at IS NULL;

-- Each settled row is in exactly one partial index, by what retention may do with it next, or in none when nothing is
-- left to do. So a sweep begins at the left edge of an index, and meets no row that has to stay; and class comes
-- first, because the rows of a class that is kept for years would otherwise lie there before all others. None of
-- these columns is changed by a claim. Delivered rows are in outbox_retention, failed ones in outbox_dlq, and those
-- that are set aside in one of the other two.
CREATE INDEX outbox_retention ON core.outbox (content_class, settled_at)
    WHERE settled_at IS NOT NULL AND failed_at IS NULL AND deleted_at IS NULL;
CREATE INDEX outbox_tombstones ON core.outbox (content_class, deleted_at)
    WHERE deleted_at IS NOT NULL AND failed_at IS NULL AND disposed_at IS NULL;
CREATE INDEX outbox_discarded ON core.outbox (content_class, settled_at)
    WHERE deleted_at IS NOT NULL AND failed_at IS NOT NULL AND disposed_at IS NULL;

CREATE TRIGGER outbox_fill BEFORE INSERT ON core.outbox FOR EACH ROW
    EXECUTE FUNCTION core.outbox_fill();

-- Disabled until core.sources has a line: a trigger's condition costs a tenth of an insert. What functions insert, as
-- the owner, they have asked about already.
CREATE TRIGGER outbox_source BEFORE INSERT ON core.outbox FOR EACH ROW
    WHEN (current_user <> 'holdfast_owner')
    EXECUTE FUNCTION core.outbox_source();
ALTER TABLE core.outbox DISABLE TRIGGER outbox_source;

-- For what is written by hand. The functions of this schema check what they write by themselves: they run as its
-- owner, with this search_path; either of the two is no proof alone, since everybody may set a search_path. Only the
-- owner may change core.secrets. AFTER: a trigger before an update would lock each row once more.
CREATE TRIGGER outbox_changed AFTER UPDATE ON core.outbox FOR EACH ROW
    WHEN (current_setting('search_path') <> 'pg_catalog, pg_temp'
          OR NOT has_table_privilege('core.secrets'::regclass, 'UPDATE'))
    EXECUTE FUNCTION core.outbox_changed();

-- The bell. Without WHEN: a condition, however short, is compiled for each statement, and costs more than the bell
-- itself.
CREATE CONSTRAINT TRIGGER outbox_bell AFTER INSERT ON core.outbox
    DEFERRABLE INITIALLY DEFERRED FOR EACH ROW
    EXECUTE FUNCTION core.outbox_notify('when_idle');

-- The dead-letter queue for people: status = 'failed' AND deleted_at IS NULL, in the words of its index.
CREATE VIEW core.failed AS
    SELECT id, coalesce(origin_id, id) AS event_id, event_type, event_version, source, target, handler_name,
           failure_reason, attempts, last_error, error_signature, first_failed_at, failed_at, failure_history,
           occurred_at, created_at, channel, generation, domain_id, payload, headers, idempotency_key, trace_context,
           substring(traceback FROM '^raised at ([^\n]*)') AS raised_at, traceback
    FROM core.outbox
    WHERE failed_at IS NOT NULL AND deleted_at IS NULL;

-- Deliveries for people. The published row of an event that was split for its handlers is settled before any of them
-- has run: here its state is fanned_out, and what became of the event is in the rows with its event_id.
CREATE VIEW core.deliveries AS
    SELECT id, coalesce(origin_id, id) AS event_id, event_type, source, target, nullif(handler_name, '*') AS handler_name,
           CASE WHEN handler_name = '*' AND status = 'delivered' THEN 'fanned_out' ELSE status END AS state,
           attempts, failure_reason, last_error, substring(traceback FROM '^raised at ([^\n]*)') AS raised_at,
           created_at, available_at, CASE WHEN handler_name IS DISTINCT FROM '*' THEN delivered_at END AS delivered_at,
           failed_at, deleted_at, channel, generation
    FROM core.outbox;

-- A producer's own rows (producer-owned recovery).
CREATE VIEW core.my_outbox WITH (security_barrier) AS
    SELECT o.id, o.event_type, o.event_version, o.occurred_at, o.source, o.target, o.domain_id, o.payload, o.headers,
           o.idempotency_key, o.status, o.attempts, o.last_error, o.failure_reason, o.handler_name, o.origin_id,
           o.created_at, o.available_at, o.expires_at, o.delivered_at, o.failed_at, o.deleted_at, o.dedupe_key
    FROM core.outbox o
    WHERE EXISTS (SELECT FROM core.sources s
                  WHERE s.source = o.source AND pg_has_role(current_user, to_regrole(quote_ident(s.role_name)), 'MEMBER'));

-- The pending event that holds a producer's key. A table of its own, because a unique index on the outbox could not
-- survive partitioning.
CREATE TABLE core.outbox_keys (
    source      text NOT NULL,
    dedupe_key  text NOT NULL,
    event_id    uuid NOT NULL,
    PRIMARY KEY (source, dedupe_key)
);

-- Which row of an ordering key a handler has got last. While that row is open no other row of the key is claimed for
-- the handler; nor, with blocks, while it is a dead letter. One line for each key, and not a unique index on the
-- outbox, which a table in partitions cannot have. former_id and former_at are the line that the claim has seen: an
-- id alone may come back after a replay.
CREATE TABLE core.ordering_heads (
    handler_name  text        NOT NULL,
    ordering_key  text        NOT NULL,
    head_id       uuid        NOT NULL,
    former_id     uuid,
    former_at     timestamptz,
    blocks        boolean     NOT NULL,
    claimed_at    timestamptz NOT NULL DEFAULT clock_timestamp(),
    PRIMARY KEY (handler_name, ordering_key)
) WITH (fillfactor = 70, autovacuum_vacuum_scale_factor = 0.02);

-- Requests to cancel events whose handlers hold them in a transaction.
CREATE TABLE core.cancel_requests (
    id            uuid PRIMARY KEY,
    requested_by  text        NOT NULL,
    requested_at  timestamptz NOT NULL DEFAULT now()
);

-- Partitions of core.outbox by time, which an operator may ask for (functions/partitions.sql); the table is plain
-- until then. One row, which a session locks while it makes or drops partitions.
CREATE TABLE core.partitioning (
    one             boolean PRIMARY KEY DEFAULT true CHECK (one),
    every           text    NOT NULL DEFAULT 'week' CHECK (every IN ('day', 'week')),
    -- Whether retention has ever left rows without their contents, which stay for good and which no index finds.
    keeps_metadata  boolean NOT NULL DEFAULT false
);
INSERT INTO core.partitioning DEFAULT VALUES;

-- --- handlers ------------------------------------------------------------------------------------------------------

-- The inbox: which handler has already handled which event.
CREATE TABLE core.event_handled (
    handler_name     text        NOT NULL,
    idempotency_key  text        NOT NULL,
    handled_at       timestamptz NOT NULL DEFAULT now(),
    source           text        NOT NULL,                     -- whose event it was
    CONSTRAINT event_handled_once PRIMARY KEY (handler_name, idempotency_key)
) WITH (autovacuum_vacuum_insert_scale_factor = 0.1);

-- Who is owed which events, running or not, until an operator retires it. What a producer's reactions name has lines
-- of its own, one for each login, so that an open transaction of the producer keeps no worker from starting.
CREATE TABLE core.subscriptions (
    handler_name    text        NOT NULL,
    event_type      text        NOT NULL CHECK (event_type <> ''),  -- '*' stands for any characters
    domain_context  text        NOT NULL CHECK (domain_context <> ''),  -- the `billing` in `billing.charge_card`
    pattern         text        NOT NULL GENERATED ALWAYS AS (replace(replace(replace(replace(
                                event_type, '\', '\\'), '%', '\%'), '_', '\_'), '*', '%')) STORED,
    created_at      timestamptz NOT NULL DEFAULT now(),
    retired_at      timestamptz,
    -- The login whose reactions have named the handler and the type; NULL: a worker has subscribed.
    named_by        text,
    line_of         text        NOT NULL GENERATED ALWAYS AS (coalesce(named_by, '')) STORED,
    -- What carries the handler's events to it: outbox, or the name of a broker, to which a relay sends them.
    via             text        NOT NULL DEFAULT 'outbox' CHECK (via ~ '^[a-z][a-z0-9_]{0,29}$'),
    via_since       timestamptz,                               -- NULL: from the first day on
    -- The operator who has decided it; NULL: nobody has, and a worker that is started with a broker may.
    via_by          text,
    -- The broker that carried them before, from which the last ones are still taken; NULL: none, or nothing is left
    -- there.
    draining        text,
    -- Under whose name the event waits in the outbox: the handler's, or that of the relay to the broker.
    owed_to         text        NOT NULL
                    GENERATED ALWAYS AS (CASE via WHEN 'outbox' THEN handler_name ELSE 'relay.' || via END) STORED,
    PRIMARY KEY (handler_name, event_type, line_of),
    CHECK (handler_name ~ '^[a-z][a-z0-9_]*([.][a-z][a-z0-9_]*)+$')
);
-- A split reads the subscriptions in force, however many lines are retired.
CREATE INDEX subscriptions_in_force ON core.subscriptions (handler_name, event_type) WHERE retired_at IS NULL;

-- One row. Its version changes with core.subscriptions, and a claim names the version it was planned with.
CREATE TABLE core.subscriptions_version (
    one      boolean PRIMARY KEY DEFAULT true CHECK (one),
    version  bigint  NOT NULL DEFAULT 1
);
INSERT INTO core.subscriptions_version DEFAULT VALUES;

-- Limits, pauses and breakers: functions/flow.sql and functions/breaker.sql say how they are used. One line for each
-- handler that has any of them; without a line a handler is served as fast as workers can.
CREATE TABLE core.handler_flow (
    handler_name                text PRIMARY KEY,
    -- As the worker that started last has declared it.
    declared_fleet_concurrency  int,
    declared_rate               float8,                        -- per second
    breaker_after               int,                           -- failures in a row; NULL: it has no breaker
    first_probe                 float8,                        -- seconds
    longest_wait                float8,                        -- between two probes, in seconds
    -- As an operator has set it, which wins.
    fleet_concurrency           int,
    rate                        float8,
    paused_at                   timestamptz,
    paused_by                   text,
    -- The token bucket. NULL: nothing was taken yet, and it is full.
    tokens                      float8,
    tokens_at                   timestamptz,
    -- The breaker.
    failing                     uuid[] NOT NULL DEFAULT '{}',  -- the rows that failed since the last success, in order
    last_chances                uuid[] NOT NULL DEFAULT '{}',  -- rows that were given one attempt more than their budget
    opened_at                   timestamptz,                   -- NULL: it is closed
    failed_probes               int NOT NULL DEFAULT 0,        -- since it opened
    probe_at                    timestamptz,                   -- the next one, not before
    probe_token                 uuid,                          -- the lease of the last one
    resumed_at                  timestamptz,                   -- when it was closed, and the ramp began
    -- Whose events have failed, so that a source whose events always do does not keep those of others back.
    failing_sources             text[] NOT NULL DEFAULT '{}',  -- of the failures that opened it, and of failed probes
    probe_source                text,                          -- of the last probe
    distrusted                  text[] NOT NULL DEFAULT '{}',  -- sources whose failures say nothing; '': all without owner
    distrusted_until            timestamptz
) WITH (fillfactor = 50, autovacuum_vacuum_scale_factor = 0, autovacuum_vacuum_threshold = 200);

-- What workers hold of handlers that have a limit: the rows of one claim. A row counts for as long as core.outbox has
-- it in flight under this token; that is looked up whenever it is asked for, so nothing that ends a delivery has to
-- write here.
CREATE TABLE core.handler_slots (
    handler_name  text   NOT NULL,
    token         uuid   NOT NULL,
    ids           uuid[] NOT NULL,
    PRIMARY KEY (handler_name, token)
) WITH (autovacuum_vacuum_scale_factor = 0, autovacuum_vacuum_threshold = 500);

-- --- workers and the clock -----------------------------------------------------------------------------------------

-- Who works, and when each was last heard of.
CREATE TABLE core.workers (
    id                uuid PRIMARY KEY,
    name              text        NOT NULL,
    host              text        NOT NULL,
    pid               int         NOT NULL,
    version           text        NOT NULL,
    generation        bigint      NOT NULL,
    channels          text[]      NOT NULL,
    handlers          text[]      NOT NULL,
    started_at        timestamptz NOT NULL DEFAULT now(),
    heartbeat_at      timestamptz NOT NULL DEFAULT now(),
    stopped_at        timestamptz,
    -- While it lasts, the worker lives, however long one of its handlers takes. NULL: the worker has only just
    -- registered.
    lease             interval,
    lease_expires_at  timestamptz
);

-- One row: the latest time that any heartbeat found here, and the last jump between two. A step of the clock that a
-- worker tells of is believed only if it matches.
CREATE TABLE core.clock (
    one        boolean     PRIMARY KEY DEFAULT true CHECK (one),
    latest     timestamptz NOT NULL DEFAULT clock_timestamp(),
    jump       interval    NOT NULL DEFAULT '0',
    jumped_at  timestamptz NOT NULL DEFAULT '-infinity'
);
INSERT INTO core.clock DEFAULT VALUES;

-- Steps of the database's clock that workers have seen.
CREATE TABLE core.clock_steps (
    id       bigint      PRIMARY KEY GENERATED ALWAYS AS IDENTITY,
    seen_at  timestamptz NOT NULL DEFAULT now(),  -- by the clock after the step
    seen_by  uuid        NOT NULL,
    step     interval    NOT NULL                 -- negative: back
);

-- --- schedules -----------------------------------------------------------------------------------------------------

-- Events that time itself publishes.
--
-- Code declares them, workers write them down when they start, and whoever comes first fires a slot. The slots are
-- worked out by workers, because only they know calendars; which of them are due is decided by this database's clock.
-- Every change of a row raises its version, and a slot is fired only by a worker that names the version it has seen:
-- so each slot is fired once, whoever dies when.
CREATE TABLE core.schedules (
    name           text        PRIMARY KEY,
    -- when
    cron           text,
    timezone       text,
    every          interval,
    missed         text        NOT NULL,
    -- what
    event_type     text        NOT NULL,
    source         text        NOT NULL,
    target         text,
    priority       smallint    NOT NULL,
    payload        jsonb       NOT NULL,
    -- by whom it was declared, and whether it still is
    generation     bigint      NOT NULL CHECK (generation >= 0),
    declared_at    timestamptz NOT NULL DEFAULT clock_timestamp(),
    attended_at    timestamptz NOT NULL DEFAULT clock_timestamp(),  -- when a worker that declares it last looked
    -- how far it is
    version        bigint      NOT NULL DEFAULT 1,
    owed_after     timestamptz NOT NULL DEFAULT clock_timestamp(),  -- slots up to here are dealt with
    next_slot      timestamptz,                                     -- NULL: to be worked out by the next worker that looks
    last_slot      timestamptz,                                     -- that was fired
    last_fired_at  timestamptz,
    fired          bigint      NOT NULL DEFAULT 0,
    paused_at      timestamptz,
    paused_by      text,
    CONSTRAINT schedules_name CHECK (name ~ '^[a-z][a-z0-9_]*([.][a-z][a-z0-9_]*)+$' AND octet_length(name) <= 200),
    CONSTRAINT schedules_timing CHECK ((cron IS NULL) <> (every IS NULL) AND (cron IS NULL) = (timezone IS NULL)
                                       AND every BETWEEN '1 second' AND '366 days'
                                       AND octet_length(cron) <= 1000 AND octet_length(timezone) <= 100),
    CONSTRAINT schedules_missed CHECK (missed IN ('latest', 'all', 'skip')),
    CONSTRAINT schedules_event CHECK (jsonb_typeof(payload) = 'object' AND octet_length(payload::text) <= 524288
                                      AND priority BETWEEN 0 AND 2),
    CONSTRAINT schedules_slots CHECK (next_slot > owed_after AND last_slot <= owed_after),
    CONSTRAINT schedules_paused CHECK ((paused_at IS NULL) = (paused_by IS NULL))
);

-- --- operators -----------------------------------------------------------------------------------------------------

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

-- A replay of many rows: first a canary, then the rest at a rate, stopped when too many fail again. The rows are
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

-- pending: not yet its turn; replayed: moved, its outcome is not known; delivered, failed: the outcome; skipped: it
-- was not there to be replayed any more, and `why` is what it was instead.
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

-- --- what is kept, and for how long ---------------------------------------------------------------------------------

-- Where a worker with dead_letters = 'archive' moves what has failed for good. The first ten columns are the
-- record of a failure; the rest is what a replay puts back. There is no foreign key: the row is gone from the outbox.
-- A constraint here that a row of the outbox might not fulfil would keep it from being settled: there are only two.
CREATE TABLE core.archive (
    id                bigint      PRIMARY KEY GENERATED ALWAYS AS IDENTITY,
    original_id       uuid        NOT NULL,                    -- not unique: the same id may be published again
    queue             text        NOT NULL,                    -- the handler that it was owed to
    payload           jsonb,                                   -- NULL only once retention stripped it
    headers           jsonb,
    deliveries_count  int         NOT NULL,
    created_at        timestamptz NOT NULL,                    -- of the event
    failed_at         timestamptz NOT NULL DEFAULT now(),
    failure_reason    text        NOT NULL,
    last_exception    text,                                    -- NULL when it was rejected without a reason
    -- what happened
    event_type        text        NOT NULL,
    event_version     int         NOT NULL,
    occurred_at       timestamptz NOT NULL,
    source            text        NOT NULL,
    target            text,
    content_class     text        NOT NULL,
    channel           text        NOT NULL,
    generation        bigint      NOT NULL,
    domain_id         uuid,
    idempotency_key   text        NOT NULL,
    trace_context     text,
    origin_id         uuid,
    priority          smallint    NOT NULL,
    ordering_key      text,
    fairness_key      text,
    seq               bigint,                                  -- its place in its key, which it keeps while it blocks the key
    dedupe_key        text,
    expires_at        timestamptz,
    -- what it went through
    first_failed_at   timestamptz,
    error_signature   text,
    traceback         text,
    failure_history   jsonb       NOT NULL,
    deleted_at        timestamptz,                             -- set aside, by an operator or by retention
    disposed_at       timestamptz,                             -- retention has taken what it takes

    CONSTRAINT archive_failure_reason CHECK (failure_reason IN ('max_deliveries', 'retry_terminal', 'rejected')),
    CONSTRAINT archive_payload_present CHECK (payload IS NOT NULL OR deleted_at IS NOT NULL)
);
CREATE INDEX archive_queue ON core.archive (queue, failed_at);
CREATE INDEX archive_discarded ON core.archive (id) WHERE deleted_at IS NOT NULL;
CREATE INDEX archive_original ON core.archive (original_id);
CREATE INDEX archive_origin ON core.archive (origin_id) WHERE origin_id IS NOT NULL;
CREATE INDEX archive_domain ON core.archive (domain_id) WHERE domain_id IS NOT NULL;
CREATE INDEX archive_retention ON core.archive (content_class, failed_at) WHERE deleted_at IS NULL;
CREATE INDEX archive_tombstones ON core.archive (content_class, failed_at)
    WHERE deleted_at IS NOT NULL AND disposed_at IS NULL;

-- The record of every command that was sent with an idempotency key: what it was, and how it was answered.
--
-- The row is inserted by the transaction that carries the command out and gets its answer from the same one, so
-- nobody ever sees a command that is under way: a duplicate waits on the primary key until the first commits or rolls
-- back. There is no lock to expire and no row to repair after a crash.
CREATE TABLE core.idempotency_records (
    scope                 text        NOT NULL,                 -- whose key it is: a user or a tenant
    key                   text        NOT NULL,
    request_hash          text        NOT NULL,                 -- an HMAC: without the secret it says nothing
    hash_version          int         NOT NULL,                 -- which secret made it
    status                text        NOT NULL DEFAULT 'Started',
    response_status_code  int,
    response_headers      jsonb,
    response_body         bytea,
    body_omitted          boolean     NOT NULL DEFAULT false,   -- it was too large to be kept
    created_at            timestamptz NOT NULL DEFAULT now(),
    expires_at            timestamptz NOT NULL,
    transaction_id        xid8        NOT NULL DEFAULT pg_current_xact_id(),

    PRIMARY KEY (scope, key),
    -- One for all of it: each is compiled for every statement. Lengths are checked by the function that inserts.
    CONSTRAINT idempotency_status CHECK (status IN ('Started', 'Completed', 'Failed')
                                         AND (status = 'Started') = (response_status_code IS NULL))
) WITH (
    -- Every row is written twice, by one transaction; the second version fits beside the first.
    fillfactor = 60,
    autovacuum_vacuum_scale_factor = 0.05
);
CREATE INDEX idempotency_expired ON core.idempotency_records (expires_at);

-- How long what is kept. In the database, because workers that disagreed about it would delete what others mean to
-- keep. '*' stands for every content class that has no line of its own; an entity without a line is kept until
-- somebody resolves it. Changed by core.retention_set.
CREATE TABLE core.retention_policies (
    entity                 text NOT NULL,
    content_class          text NOT NULL CHECK (octet_length(content_class) BETWEEN 1 AND 800),
    active_ttl_days        int  NOT NULL CHECK (active_ttl_days BETWEEN 0 AND 36500),
    tombstoned_grace_days  int  NOT NULL CHECK (tombstoned_grace_days BETWEEN 0 AND 36500),
    disposal               text NOT NULL CHECK (disposal IN ('HARD_DELETE', 'STRIP_PAYLOAD', 'RETAIN_METADATA')),
    PRIMARY KEY (entity, content_class),
    CONSTRAINT retention_policies_entity CHECK (
        entity IN ('outbox_row', 'failed_row', 'archive_row', 'event_handled', 'idempotency_record', 'rollup_row')),
    -- These have no classes, and nothing that could be stripped. A record can be forgotten as soon as it has expired,
    -- and what was left of it would only be in the way of the next one.
    CONSTRAINT retention_policies_whole CHECK (entity NOT IN ('event_handled', 'idempotency_record', 'rollup_row')
                                               OR content_class = '*' AND disposal = 'HARD_DELETE')
);
INSERT INTO core.retention_policies VALUES
    ('outbox_row', '*', 45, 7, 'HARD_DELETE'),
    ('event_handled', '*', 60, 7, 'HARD_DELETE'),
    ('idempotency_record', '*', 0, 0, 'HARD_DELETE'),
    ('rollup_row', '*', 14, 0, 'HARD_DELETE');

-- One row: who is sweeping, and when a whole pass last ended. A row and not a session's lock, which a transaction
-- pooler could not keep.
CREATE TABLE core.sweeps (
    one          boolean PRIMARY KEY DEFAULT true CHECK (one),
    sweeper      uuid,                                          -- NULL: nobody
    seen_at      timestamptz,                                   -- when it last took its turn
    finished_at  timestamptz NOT NULL DEFAULT now(),
    counts       jsonb       NOT NULL DEFAULT '{}',             -- what the last pass did
    inbox_page   bigint      NOT NULL DEFAULT 0                 -- where the next pass goes on in core.event_handled
);
INSERT INTO core.sweeps DEFAULT VALUES;

-- --- the roll-up: what has become of deliveries, by minute, handler and generation ---------------------------------

-- What claims and settles append, in their own transactions. No index and no update: sessions never wait for each
-- other here, and what a worker that was killed has settled is counted. Workers fold the lines into core.rollup.
CREATE TABLE core.rollup_journal (
    counted_at    timestamptz NOT NULL DEFAULT now(),
    generation    bigint      NOT NULL,
    n             int         NOT NULL,                        -- below zero: taken back
    outcome       text        NOT NULL,                        -- a column of core.rollup
    handler_name  text        NOT NULL
) WITH (autovacuum_vacuum_scale_factor = 0, autovacuum_vacuum_threshold = 2000, autovacuum_vacuum_insert_threshold = -1,
        vacuum_truncate = off);

-- What workers append every few seconds, of what they count by themselves; folded likewise.
CREATE TABLE core.rollup_reports (
    counted_at       timestamptz NOT NULL DEFAULT now(),
    generation       bigint      NOT NULL,
    handler_name     text        NOT NULL,
    lost_lease       bigint      NOT NULL,
    handler_buckets  bigint[]    NOT NULL,
    handler_seconds  float8      NOT NULL,
    outbox_buckets   bigint[]    NOT NULL,
    outbox_seconds   float8      NOT NULL
) WITH (autovacuum_vacuum_scale_factor = 0, autovacuum_vacuum_threshold = 2000, autovacuum_vacuum_insert_threshold = -1);

-- Whose turn it is to fold: the session's that has locked the row. Only functions of the schema can.
CREATE TABLE core.rollup_turn (one boolean PRIMARY KEY DEFAULT true CHECK (one));
INSERT INTO core.rollup_turn DEFAULT VALUES;

-- Periods begin at whole minutes and hours of UTC, whatever the time zone of a session.
CREATE TABLE core.rollup (
    period_start     timestamptz NOT NULL,
    hourly           boolean     NOT NULL DEFAULT false,       -- of an hour, and not of a minute
    handler_name     text        NOT NULL,
    generation       bigint      NOT NULL,
    writer           int         NOT NULL DEFAULT 0,           -- another than 0: folded out of turn, by a session of this number
    begun            bigint      NOT NULL DEFAULT 0,           -- deliveries that were claimed for the first time
    delivered        bigint      NOT NULL DEFAULT 0,
    duplicate        bigint      NOT NULL DEFAULT 0,
    retried          bigint      NOT NULL DEFAULT 0,
    snoozed          bigint      NOT NULL DEFAULT 0,
    failed           bigint      NOT NULL DEFAULT 0,
    archived         bigint      NOT NULL DEFAULT 0,           -- of the failed
    expired          bigint      NOT NULL DEFAULT 0,
    cancelled        bigint      NOT NULL DEFAULT 0,
    released         bigint      NOT NULL DEFAULT 0,
    -- What workers report every few seconds; a worker that is killed does not report its last ones.
    lost_lease       bigint      NOT NULL DEFAULT 0,
    handler_buckets  bigint[]    NOT NULL DEFAULT '{}',        -- of the bounds in handler_tally.py; empty: none
    handler_seconds  float8      NOT NULL DEFAULT 0,
    outbox_buckets   bigint[]    NOT NULL DEFAULT '{}',
    outbox_seconds   float8      NOT NULL DEFAULT 0,
    PRIMARY KEY (period_start, handler_name, generation, hourly, writer)
) WITH (fillfactor = 70, autovacuum_vacuum_scale_factor = 0.05);
-- A handler's series.
CREATE INDEX rollup_handler ON core.rollup (handler_name, period_start);
-- What becomes hours next.
CREATE INDEX rollup_minutes ON core.rollup (period_start) WHERE NOT hourly;
-- A week's failures, without reading a week.
CREATE INDEX rollup_failures ON core.rollup (period_start) INCLUDE (handler_name, failed) WHERE failed > 0;

-- Counts, folded or not. Only the journal's first 8,192 pages are read, so that a long journal costs no more.
CREATE VIEW core.rollup_counts AS
    SELECT period_start, hourly, handler_name, generation, begun, delivered, duplicate, retried, snoozed, failed, archived,
           expired, cancelled, released, lost_lease, handler_buckets, handler_seconds, outbox_buckets, outbox_seconds
    FROM core.rollup
    UNION ALL
    SELECT date_trunc('minute', counted_at, 'UTC'), false, handler_name, generation,
           CASE outcome WHEN 'begun' THEN n ELSE 0 END, CASE outcome WHEN 'delivered' THEN n ELSE 0 END,
           CASE outcome WHEN 'duplicate' THEN n ELSE 0 END, CASE outcome WHEN 'retried' THEN n ELSE 0 END,
           CASE outcome WHEN 'snoozed' THEN n ELSE 0 END, CASE WHEN outcome IN ('failed', 'archived') THEN n ELSE 0 END,
           CASE outcome WHEN 'archived' THEN n ELSE 0 END, CASE outcome WHEN 'expired' THEN n ELSE 0 END,
           CASE outcome WHEN 'cancelled' THEN n ELSE 0 END, CASE outcome WHEN 'released' THEN n ELSE 0 END,
           0, '{}', 0, '{}', 0
    FROM (SELECT * FROM core.rollup_journal j WHERE j.ctid < '(8192,0)'::tid LIMIT 50000) j;

-- --- brokers -------------------------------------------------------------------------------------------------------

-- What brokers hold for handlers, as workers see it: functions/broker_reports.sql. One line for each handler and
-- channel.
CREATE TABLE core.broker_reports (
    broker          text NOT NULL,
    channel         text NOT NULL,
    -- The empty name has what is known of the broker itself.
    handler_name    text NOT NULL,
    -- When a worker was last about to ask the broker, and when it last had an answer.
    asked_at        timestamptz NOT NULL DEFAULT now(),
    reported_at     timestamptz,
    -- Messages that nobody has taken, that were taken and are not acknowledged, and of those the ones delivered
    -- again.
    waiting         bigint,
    unacknowledged  bigint,
    redelivered     bigint,
    -- Settings that break a promise, each with subject, problem and remedy; of the line with the empty name.
    weaknesses      jsonb NOT NULL DEFAULT '[]',
    -- The templates of the address, as options of it; NULL where names make no difference.
    naming          text,
    -- Earlier templates, each with the number of messages that are left under it; null: not known.
    former          jsonb NOT NULL DEFAULT '{}',
    PRIMARY KEY (broker, channel, handler_name)
);

-- What relays sign messages with, so that nobody else who may write to a broker can send an event in their name:
-- functions/relay_secrets.sql. Only functions of the owner read it.
CREATE TABLE core.relay_secrets (
    id              bigint      GENERATED ALWAYS AS IDENTITY PRIMARY KEY,
    secret          bytea       NOT NULL
                    DEFAULT decode(replace(gen_random_uuid()::text || gen_random_uuid()::text, '-', ''), 'hex'),
    created_at      timestamptz NOT NULL DEFAULT now(),
    -- Accepted before anybody signs with it: every worker knows it by then.
    signs_at        timestamptz NOT NULL DEFAULT now() + interval '1 minute',
    accepted_until  timestamptz                                 -- NULL: it has no successor
);
-- The first secret signs at once.
INSERT INTO core.relay_secrets (signs_at) VALUES (now());
