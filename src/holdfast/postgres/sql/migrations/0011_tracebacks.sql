-- Where a failure was raised, and what became of an event that several handlers wanted. Only the catalogue changes.

-- The first line is the place in the user's code. A row that will be retried has that line alone.
ALTER TABLE core.outbox ADD COLUMN traceback text;
ALTER TABLE core.archive ADD COLUMN traceback text;

CREATE OR REPLACE VIEW core.failed AS
    SELECT id, coalesce(origin_id, id) AS event_id, event_type, event_version, source, target, handler_name,
           failure_reason, attempts, last_error, error_signature, first_failed_at, failed_at, failure_history,
           occurred_at, created_at, channel, generation, domain_id, payload, headers, idempotency_key, trace_context,
           substring(traceback FROM '^raised at ([^\n]*)') AS raised_at, traceback
    FROM core.outbox
    WHERE failed_at IS NOT NULL AND deleted_at IS NULL;

-- Deliveries for people. The published row of an event that was split for its handlers is settled before any of them has
-- run: here its state is fanned_out, and what became of the event is in the rows with its event_id.
CREATE VIEW core.deliveries AS
    SELECT id, coalesce(origin_id, id) AS event_id, event_type, source, target, nullif(handler_name, '*') AS handler_name,
           CASE WHEN handler_name = '*' AND status = 'delivered' THEN 'fanned_out' ELSE status END AS state,
           attempts, failure_reason, last_error, substring(traceback FROM '^raised at ([^\n]*)') AS raised_at,
           created_at, available_at, CASE WHEN handler_name IS DISTINCT FROM '*' THEN delivered_at END AS delivered_at,
           failed_at, deleted_at, channel, generation
    FROM core.outbox;
