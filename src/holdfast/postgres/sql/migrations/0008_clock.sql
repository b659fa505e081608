-- The lease of a worker as a whole, and the steps of the database's clock that workers have seen.

-- While it lasts, the worker lives, however long one of its handlers takes. NULL for workers of earlier releases.
ALTER TABLE core.workers
    ADD COLUMN lease interval,
    ADD COLUMN lease_expires_at timestamptz;

CREATE TABLE core.clock_steps (
    id       bigint      PRIMARY KEY GENERATED ALWAYS AS IDENTITY,
    seen_at  timestamptz NOT NULL DEFAULT now(),  -- by the clock after the step
    seen_by  uuid        NOT NULL,
    step     interval    NOT NULL                 -- negative: back
);
