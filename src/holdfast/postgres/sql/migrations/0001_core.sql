-- The outbox and what stands around it.
--
-- One row of core.outbox is one event owed to one handler. A producer inserts it in its own
-- transaction; from then on only the functions in sql/functions change it.

-- UUIDv7 from what every Postgres since 13 has: no extension, no uuidv7() of Postgres 18.
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

-- Numbers of deployments (GEN-1). No row means generation 0 everywhere.
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
    first_failed_at   timestamptz,
    failure_history   jsonb       NOT NULL DEFAULT '[]',
    delivered_at      timestamptz,
    deleted_at        timestamptz,
    disposed_at       timestamptz,                             -- retention has taken what it takes; the rest stays
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
    ordering_key      text,
    seq               bigint      NOT NULL GENERATED ALWAYS AS IDENTITY,
    dedupe_key        text,
    -- who works on it
    claimed_by        uuid,
    lease_token       uuid,
    lease_expires_at  timestamptz,

    CONSTRAINT outbox_status CHECK (status IN ('pending', 'in_flight', 'delivered', 'failed')),
    -- Every reader may rely on these: a settled row is delivered or failed, a leased row is in flight.
    CONSTRAINT outbox_settled CHECK ((settled_at IS NOT NULL) = (status IN ('delivered', 'failed'))),
    CONSTRAINT outbox_leased CHECK ((lease_token IS NOT NULL) = (status = 'in_flight')
                                    AND (lease_token IS NULL) = (lease_expires_at IS NULL)),
    CONSTRAINT outbox_failed CHECK ((failed_at IS NOT NULL) = (status = 'failed')
                                    AND (failure_reason IS NOT NULL) = (status = 'failed')),
    CONSTRAINT outbox_failure_reason CHECK (failure_reason IN
        ('max_deliveries', 'retry_terminal', 'rejected', 'cancelled', 'expired')),
    CONSTRAINT outbox_payload_present CHECK (payload IS NOT NULL OR deleted_at IS NOT NULL),
    -- The library refuses at 256 KiB of JSON text; this wall is for writers that do not use it. The text is measured
    -- once, by the trigger; the size of the stored datum is free to ask for on every update.
    CONSTRAINT outbox_payload_size CHECK (pg_column_size(payload) <= 262144
                                          OR octet_length(payload::text) <= 524288),
    CONSTRAINT outbox_headers_size CHECK (pg_column_size(headers) <= 65536),
    CONSTRAINT outbox_channel CHECK (octet_length(channel) BETWEEN 1 AND 63),
    -- An index row must stay under 2,704 bytes, whatever a writer sends.
    CONSTRAINT outbox_keys CHECK (octet_length(idempotency_key) BETWEEN 1 AND 1020
                                  AND octet_length(ordering_key) BETWEEN 1 AND 1020
                                  AND octet_length(dedupe_key) BETWEEN 1 AND 1020),
    CONSTRAINT outbox_texts CHECK (octet_length(trace_context) <= 1020 AND octet_length(content_class) BETWEEN 1 AND 800),
    CONSTRAINT outbox_numbers CHECK (event_version >= 1 AND generation >= 0 AND attempts >= 0
                                     AND priority BETWEEN 0 AND 2),
    -- Every driver can represent these years, and every claim looks at them. An event may be held until infinity.
    CONSTRAINT outbox_times CHECK (
        occurred_at >= '0001-01-02 00:00:00+00' AND occurred_at < '9999-12-31 00:00:00+00'
        AND available_at >= '0001-01-02 00:00:00+00'
        AND (available_at < '9999-12-31 00:00:00+00' OR available_at = 'infinity')
        AND expires_at >= '0001-01-02 00:00:00+00' AND expires_at < '9999-12-31 00:00:00+00'),
    -- A handler's lane is its name, an event's lane has a slash: they never meet.
    CONSTRAINT outbox_handler_name CHECK (strpos(handler_name, '/') = 0),
    -- Deliveries in order per key are not built yet; until they are, a key must not be accepted and then ignored.
    CONSTRAINT outbox_ordering_key CHECK (ordering_key IS NULL)
) WITH (
    -- Half of each page is left for the version that a claim writes, so that claims are heap-only updates. The table
    -- is no larger in the end (each row is written three times), and Postgres works a fifth less per event.
    fillfactor = 50,
    autovacuum_vacuum_scale_factor = 0.02,
    autovacuum_vacuum_insert_scale_factor = 0.1,
    autovacuum_analyze_scale_factor = 0.05
);

-- Lanes: a worker reads only what it serves. No index mentions status or the lease, so that a claim is a
-- heap-only update. See docs/architecture/claiming.md.
CREATE INDEX outbox_lane ON core.outbox (channel, generation, route, priority, available_at, id)
    WHERE settled_at IS NULL AND ordering_key IS NULL;
CREATE INDEX outbox_keyed ON core.outbox (channel, generation, route, ordering_key, seq)
    WHERE settled_at IS NULL AND ordering_key IS NOT NULL;
CREATE INDEX outbox_dlq ON core.outbox (failed_at, id)
    WHERE failed_at IS NOT NULL AND deleted_at IS NULL;

-- Each settled row is in exactly one partial index, by what retention may do with it next, or in none when nothing is
-- left to do. So a sweep begins at the left edge of an index, and meets no row that has to stay; and class comes first,
-- because the rows of a class that is kept for years would otherwise lie there before all others. None of these columns
-- is changed by a claim. Delivered rows are in outbox_retention, failed ones in outbox_dlq, and those that are set aside in
-- one of the other two.
CREATE INDEX outbox_retention ON core.outbox (content_class, settled_at)
    WHERE settled_at IS NOT NULL AND failed_at IS NULL AND deleted_at IS NULL;
CREATE INDEX outbox_tombstones ON core.outbox (content_class, deleted_at)
    WHERE deleted_at IS NOT NULL AND failed_at IS NULL AND disposed_at IS NULL;
CREATE INDEX outbox_discarded ON core.outbox (content_class, settled_at)
    WHERE deleted_at IS NOT NULL AND failed_at IS NOT NULL AND disposed_at IS NULL;

-- The inbox: which handler has already handled which event.
CREATE TABLE core.event_handled (
    handler_name     text        NOT NULL,
    idempotency_key  text        NOT NULL,
    handled_at       timestamptz NOT NULL DEFAULT now(),
    CONSTRAINT event_handled_once PRIMARY KEY (handler_name, idempotency_key)
) WITH (autovacuum_vacuum_insert_scale_factor = 0.1);

-- Interest: who is owed which events, running or not, until an operator retires it.
CREATE TABLE core.subscriptions (
    handler_name  text        NOT NULL,
    event_type    text        NOT NULL CHECK (event_type <> ''),  -- '*' stands for any characters
    context       text        NOT NULL CHECK (context <> ''),
    pattern       text        NOT NULL GENERATED ALWAYS AS (replace(replace(replace(replace(
                              event_type, '\', '\\'), '%', '\%'), '_', '\_'), '*', '%')) STORED,
    created_at    timestamptz NOT NULL DEFAULT now(),
    retired_at    timestamptz,
    PRIMARY KEY (handler_name, event_type),
    CHECK (handler_name ~ '^[a-z][a-z0-9_]*([.][a-z][a-z0-9_]*)+$')
);

-- One row. Its version changes with core.subscriptions, and a claim names the version it was planned with.
CREATE TABLE core.registry (
    one      boolean PRIMARY KEY DEFAULT true CHECK (one),
    version  bigint  NOT NULL DEFAULT 1
);
INSERT INTO core.registry DEFAULT VALUES;

-- The pending event that holds a producer's key (PUB-2). A table of its own, because a unique index on the
-- outbox could not survive partitioning.
CREATE TABLE core.outbox_keys (
    source      text NOT NULL,
    dedupe_key  text NOT NULL,
    event_id    uuid NOT NULL,
    PRIMARY KEY (source, dedupe_key)
);

-- Which database role may see and cancel the events of which source (OBX-2). Filled by the owner.
CREATE TABLE core.sources (
    source     text NOT NULL,
    role_name  name NOT NULL,
    PRIMARY KEY (source, role_name)
);

-- Events that somebody wants stopped while their handlers hold them in a transaction (LSN-11).
CREATE TABLE core.stops (
    id          uuid PRIMARY KEY,
    stopped_by  text        NOT NULL,
    stopped_at  timestamptz NOT NULL DEFAULT now()
);

CREATE TABLE core.workers (
    id            uuid PRIMARY KEY,
    name          text        NOT NULL,
    host          text        NOT NULL,
    pid           int         NOT NULL,
    version       text        NOT NULL,
    generation    bigint      NOT NULL,
    channels      text[]      NOT NULL,
    handlers      text[]      NOT NULL,
    started_at    timestamptz NOT NULL DEFAULT now(),
    heartbeat_at  timestamptz NOT NULL DEFAULT now(),
    stopped_at    timestamptz
);

-- A writer in another language names event_type, source and payload; the key defaults to the id, which a
-- column default cannot say. What never changes after the insert is checked here and not by a CHECK, because a
-- CHECK runs on every update, and this one would read large payloads back from storage each time.
CREATE FUNCTION core.outbox_fill() RETURNS trigger
LANGUAGE plpgsql
SET search_path = pg_catalog, pg_temp
AS $$
BEGIN
    IF jsonb_typeof(NEW.payload) IS DISTINCT FROM 'object' THEN
        RAISE EXCEPTION 'payload must be a JSON object, not %', coalesce(jsonb_typeof(NEW.payload), 'NULL')
            USING ERRCODE = 'invalid_parameter_value', HINT = 'Wrap the value: {"value": ...}.';
    ELSIF NEW.event_type !~ '^[^/*[:space:][:cntrl:]]+$' OR char_length(NEW.event_type) > 200 THEN
        RAISE EXCEPTION 'event_type must be 1 to 200 characters without spaces, "/" or "*"'
            USING ERRCODE = 'invalid_parameter_value', HINT = 'Write it like order.placed.';
    ELSIF NEW.source !~ '^[^/*[:space:][:cntrl:]]+$' OR char_length(NEW.source) > 200 THEN
        RAISE EXCEPTION 'source must be 1 to 200 characters without spaces, "/" or "*"'
            USING ERRCODE = 'invalid_parameter_value', HINT = 'Name the producing context, like shop.';
    ELSIF NEW.target !~ '^[^/*[:space:][:cntrl:]]+$' OR char_length(NEW.target) > 200 THEN
        RAISE EXCEPTION 'target must be NULL or 1 to 200 characters without spaces, "/" or "*"'
            USING ERRCODE = 'invalid_parameter_value', HINT = 'Name one context, like billing, or leave it NULL for all.';
    ELSIF octet_length(NEW.payload::text) > 524288 THEN
        RAISE EXCEPTION 'payload has % bytes of JSON text, 524288 are allowed', octet_length(NEW.payload::text)
            USING ERRCODE = 'check_violation', CONSTRAINT = 'outbox_payload_size',
                  HINT = 'Store the data elsewhere and publish a reference to it.';
    ELSIF jsonb_typeof(NEW.headers) <> 'object' THEN
        RAISE EXCEPTION 'headers must be NULL or a JSON object, not %', jsonb_typeof(NEW.headers)
            USING ERRCODE = 'invalid_parameter_value', HINT = 'Write them like {"tenant": "acme"}.';
    ELSIF octet_length(NEW.headers::text) > 65536 THEN
        RAISE EXCEPTION 'headers have % bytes of JSON text, 65536 are allowed', octet_length(NEW.headers::text)
            USING ERRCODE = 'check_violation', CONSTRAINT = 'outbox_headers_size',
                  HINT = 'Put the data into the payload.';
    END IF;
    NEW.idempotency_key := coalesce(NEW.idempotency_key, NEW.id::text);
    RETURN NEW;
END
$$;

-- Lengths are compared apart: in the pattern, {1,200} would cost as much as the insert itself.
CREATE TRIGGER outbox_fill BEFORE INSERT ON core.outbox FOR EACH ROW
    WHEN (NEW.idempotency_key IS NULL
          OR jsonb_typeof(NEW.payload) IS DISTINCT FROM 'object'
          OR NEW.event_type !~ '^[^/*[:space:][:cntrl:]]+$' OR char_length(NEW.event_type) > 200
          OR NEW.source !~ '^[^/*[:space:][:cntrl:]]+$' OR char_length(NEW.source) > 200
          OR NEW.target !~ '^[^/*[:space:][:cntrl:]]+$' OR char_length(NEW.target) > 200
          -- As text: 1e131071 takes eight bytes in jsonb, and a few thousand of them would fail every claim that meets
          -- the row.
          OR octet_length(NEW.payload::text) > 524288
          OR jsonb_typeof(NEW.headers) <> 'object' OR octet_length(NEW.headers::text) > 65536)
    EXECUTE FUNCTION core.outbox_fill();

-- The bell. A NOTIFY takes a lock that is held across the commit's flush, so producers that notify cannot
-- commit together. Ask first whether anybody sleeps: a sleeping worker holds (or queues for) the channel's
-- lock exclusively. The shared lock lives until this transaction ends, when its row is visible: a worker that
-- falls asleep waits for it and then looks once more, so no wake-up is lost. See docs/architecture/waking-up.md.
-- Every name is qualified instead of pinning the search_path, which would cost as much as all the rest of it does.
CREATE FUNCTION core.outbox_notify() RETURNS trigger
LANGUAGE plpgsql
AS $$
BEGIN
    -- For two-phase commit, which refuses NOTIFY.
    IF pg_catalog.texteq(pg_catalog.current_setting('holdfast.notify', true), 'off') THEN
        RETURN NULL;
    END IF;
    IF pg_catalog.texteq(TG_ARGV[0], 'when_idle')
       AND pg_catalog.pg_try_advisory_xact_lock_shared(
               pg_catalog.hashtextextended(pg_catalog.concat('core.', NEW.channel), 0)) THEN
        RETURN NULL;
    END IF;
    -- Once per transaction and channel, however many rows it writes.
    IF pg_catalog.texteq(pg_catalog.current_setting('holdfast.rung', true), NEW.channel) THEN
        RETURN NULL;
    END IF;
    PERFORM pg_catalog.set_config('holdfast.rung', NEW.channel, true),
            pg_catalog.pg_notify(NEW.channel, NEW.id::pg_catalog.text);
    RETURN NULL;
END
$$;

-- Without WHEN: a condition, however short, is compiled for each statement, and costs more than the bell itself.
CREATE CONSTRAINT TRIGGER outbox_bell AFTER INSERT ON core.outbox
    DEFERRABLE INITIALLY DEFERRED FOR EACH ROW
    EXECUTE FUNCTION core.outbox_notify('when_idle');

-- The dead-letter queue for people: status = 'failed' AND deleted_at IS NULL, in the words of its index.
CREATE VIEW core.failed AS
    SELECT id, coalesce(origin_id, id) AS event_id, event_type, event_version, source, target, handler_name,
           failure_reason, attempts, last_error, error_signature, first_failed_at, failed_at, failure_history,
           occurred_at, created_at, channel, generation, domain_id, payload, headers, idempotency_key, trace_context
    FROM core.outbox
    WHERE failed_at IS NOT NULL AND deleted_at IS NULL;

-- A producer's own rows (producer-owned recovery).
CREATE VIEW core.my_outbox WITH (security_barrier) AS
    SELECT o.id, o.event_type, o.event_version, o.occurred_at, o.source, o.target, o.domain_id, o.payload, o.headers,
           o.idempotency_key, o.status, o.attempts, o.last_error, o.failure_reason, o.handler_name, o.origin_id,
           o.created_at, o.available_at, o.expires_at, o.delivered_at, o.failed_at, o.deleted_at, o.dedupe_key
    FROM core.outbox o
    WHERE EXISTS (SELECT FROM core.sources s
                  WHERE s.source = o.source AND pg_has_role(current_user, to_regrole(quote_ident(s.role_name)), 'MEMBER'));
