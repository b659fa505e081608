-- holdfast: no-transaction
-- Rows that have a fairness key, in the order in which each key's are due.
CREATE INDEX CONCURRENTLY IF NOT EXISTS outbox_fair ON core.outbox (channel, generation, route, fairness_key, available_at, id)
    WHERE settled_at IS NULL AND fairness_key IS NOT NULL;
