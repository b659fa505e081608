-- What one producer can take from others: its share.

-- Whose events have failed, so that a source whose events always do does not keep those of others back. See breaker.sql.
ALTER TABLE core.handler_flow
    ADD COLUMN failing_sources   text[] NOT NULL DEFAULT '{}',  -- of the failures that opened it, and of failed probes
    ADD COLUMN probe_source      text,                          -- of the last probe
    ADD COLUMN distrusted        text[] NOT NULL DEFAULT '{}',  -- sources whose failures say nothing; '': all without owner
    ADD COLUMN distrusted_until  timestamptz;

-- What producers name stands beside what workers subscribe, one line for each login that has named it: a transaction that has
-- written such a line and not committed keeps no worker from starting. '': a worker has subscribed it.
ALTER TABLE core.subscriptions
    ADD COLUMN line_of text NOT NULL GENERATED ALWAYS AS (coalesce(named_by, '')) STORED,
    DROP CONSTRAINT subscriptions_pkey;
ALTER TABLE core.subscriptions ADD PRIMARY KEY (handler_name, event_type, line_of);
