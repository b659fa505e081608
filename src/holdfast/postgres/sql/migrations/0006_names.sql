-- One name for one thing. Only the catalogue changes, under locks that are held for a moment.

-- The version of the subscriptions. "Registry" is the application's handlers.
ALTER TABLE core.registry RENAME TO subscriptions_version;
ALTER TABLE core.subscriptions_version RENAME CONSTRAINT registry_pkey TO subscriptions_version_pkey;
ALTER TABLE core.subscriptions_version RENAME CONSTRAINT registry_one_check TO subscriptions_version_one_check;

-- The domain context: the `billing` in `billing.charge_card`.
ALTER TABLE core.subscriptions RENAME COLUMN context TO domain_context;
ALTER TABLE core.subscriptions RENAME CONSTRAINT subscriptions_context_check TO subscriptions_domain_context_check;

-- Requests to stop events whose handlers hold them in a transaction.
ALTER TABLE core.stops RENAME TO stop_requests;
ALTER TABLE core.stop_requests RENAME CONSTRAINT stops_pkey TO stop_requests_pkey;
ALTER TABLE core.stop_requests RENAME COLUMN stopped_by TO requested_by;
ALTER TABLE core.stop_requests RENAME COLUMN stopped_at TO requested_at;

-- Functions with a parameter of another name, which REPLACE cannot change: they are made anew in this transaction.
DROP FUNCTION IF EXISTS core.subscribe(text, text, text[]);
DROP FUNCTION IF EXISTS core.outbox_claim(
    uuid, uuid, interval, bigint, text, bigint, text[], smallint[], text[], int[], timestamptz[], uuid[]);
DROP FUNCTION IF EXISTS core.outbox_split(
    bigint, text, bigint, text[], smallint[], int[], timestamptz[], uuid[]);
DROP FUNCTION IF EXISTS core.retention_policy(text, text);
DROP FUNCTION IF EXISTS core.retention_set(text, text, text, text, int, int, text);
DROP FUNCTION IF EXISTS core.retention_due(text, text, timestamptz, int);
DROP FUNCTION IF EXISTS core.retention_sweep(text, text, timestamptz, int, text, text);

-- Functions with another name that only functions called. What workers and operators called under another name stays,
-- in functions/previous_names.sql.
DROP FUNCTION IF EXISTS core.replay_rows(uuid[], bigint, text, boolean);
DROP FUNCTION IF EXISTS core.is_brief(text);
DROP FUNCTION IF EXISTS core.is_planned(uuid);
