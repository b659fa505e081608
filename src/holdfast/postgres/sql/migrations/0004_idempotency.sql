-- The record of every command that was sent with an idempotency key: what it was, and how it was answered (IDM-1).
--
-- The row is inserted by the transaction that carries the command out and gets its answer from the same one, so nobody
-- ever sees a command that is under way: a duplicate waits on the primary key until the first commits or rolls back.
-- There is no lock to expire and no row to repair after a crash.
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

-- Retention knows them. They can be forgotten as soon as they have expired, and there is nothing to strip: what is
-- left of a record would only be in the way of the next one.
ALTER TABLE core.retention_policies
    DROP CONSTRAINT retention_policies_entity_check,
    ADD CONSTRAINT retention_policies_entity_check CHECK (
        entity IN ('outbox_row', 'failed_row', 'archive_row', 'event_handled', 'idempotency_record')),
    ADD CONSTRAINT retention_policies_records CHECK (entity <> 'idempotency_record'
                                                     OR (content_class = '*' AND disposal = 'HARD_DELETE'));
INSERT INTO core.retention_policies VALUES ('idempotency_record', '*', 0, 0, 'HARD_DELETE');
