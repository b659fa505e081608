-- The archive of dead letters, which workers may be told to use, and what retention needs to sweep in small steps.

-- Where a worker with dead_letters = 'archive' moves what has failed for good (DLQ-2). The first ten columns are the
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
    dedupe_key        text,
    expires_at        timestamptz,
    -- what it went through
    first_failed_at   timestamptz,
    error_signature   text,
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

-- How long what is kept (OBX-5). In the database, because workers that disagreed about it would delete what others
-- mean to keep. '*' stands for every content class that has no line of its own; an entity without a line is kept until
-- somebody resolves it. Changed by core.retention_set.
CREATE TABLE core.retention_policies (
    entity                 text NOT NULL CHECK (entity IN ('outbox_row', 'failed_row', 'archive_row', 'event_handled')),
    content_class          text NOT NULL CHECK (octet_length(content_class) BETWEEN 1 AND 800),
    active_ttl_days        int  NOT NULL CHECK (active_ttl_days BETWEEN 0 AND 36500),
    tombstoned_grace_days  int  NOT NULL CHECK (tombstoned_grace_days BETWEEN 0 AND 36500),
    disposal               text NOT NULL CHECK (disposal IN ('HARD_DELETE', 'STRIP_PAYLOAD', 'RETAIN_METADATA')),
    PRIMARY KEY (entity, content_class),
    -- The inbox knows keys and no classes, and there is nothing in it to strip.
    CONSTRAINT retention_policies_inbox CHECK (entity <> 'event_handled'
                                               OR (content_class = '*' AND disposal = 'HARD_DELETE'))
);
INSERT INTO core.retention_policies VALUES
    ('outbox_row', '*', 45, 7, 'HARD_DELETE'),
    ('event_handled', '*', 60, 7, 'HARD_DELETE');

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
