-- Limits, pauses and breakers of handlers. functions/flow.sql and functions/breaker.sql say how they are used.

-- One line for each handler that has any of them; without a line a handler is served as fast as workers can.
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
    resumed_at                  timestamptz                    -- when it was closed, and the ramp began
) WITH (fillfactor = 50, autovacuum_vacuum_scale_factor = 0, autovacuum_vacuum_threshold = 200);

-- What workers hold of handlers that have a limit: the rows of one claim. A row counts for as long as core.outbox has it in
-- flight under this token; that is looked up whenever it is asked for, so nothing that ends a delivery has to write here.
CREATE TABLE core.handler_slots (
    handler_name  text   NOT NULL,
    token         uuid   NOT NULL,
    ids           uuid[] NOT NULL,
    PRIMARY KEY (handler_name, token)
) WITH (autovacuum_vacuum_scale_factor = 0, autovacuum_vacuum_threshold = 500);
