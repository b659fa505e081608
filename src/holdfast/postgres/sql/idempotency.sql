-- Idempotency records, in the transaction of the command. The statements behind these calls stand in
-- functions/idempotency.sql. Values travel as text and are cast here, so that every driver sends the same thing.

-- name: begin_command
SELECT core.idempotency_begin(
    :scope::text, :key::text, pg_catalog.string_to_array(:hashes::text, ' '), :hash_version::text::int,
    :keep::text::interval, :wait::text::int, :idle::text::int);

-- name: complete_command
SELECT core.idempotency_complete(
    :scope::text, :key::text, :failed::text::boolean, :status_code::text::int, :headers::text::jsonb,
    pg_catalog.decode(:body::text, 'base64'), :omitted::text::boolean);

-- name: mark_request
-- What the endpoint does from here on can be undone, and the record of the request stays.
SAVEPOINT holdfast_request;

-- name: undo_request
ROLLBACK TO SAVEPOINT holdfast_request;

-- name: confirm_request
-- Fails in a transaction that has failed.
SELECT true;
