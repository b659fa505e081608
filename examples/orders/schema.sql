-- The tables of the orders service. Holdfast's own are in the schema core.

CREATE TABLE IF NOT EXISTS orders (
    id           uuid        PRIMARY KEY,
    customer     text        NOT NULL,
    total_cents  bigint      NOT NULL CHECK (total_cents > 0),
    placed_at    timestamptz NOT NULL DEFAULT now()
);

-- Nothing here forbids a second row for one order: that there is none is what the demo shows.
CREATE TABLE IF NOT EXISTS ledger (
    id           bigint      GENERATED ALWAYS AS IDENTITY PRIMARY KEY,
    order_id     uuid        NOT NULL REFERENCES orders,
    total_cents  bigint      NOT NULL,
    recorded_at  timestamptz NOT NULL DEFAULT clock_timestamp()
);
CREATE INDEX IF NOT EXISTS ledger_order ON ledger (order_id);

CREATE TABLE IF NOT EXISTS closed_days (
    day          date        PRIMARY KEY,
    orders       bigint      NOT NULL,
    total_cents  bigint      NOT NULL
);

CREATE TABLE IF NOT EXISTS orders_by_day (
    day     date   PRIMARY KEY,
    orders  bigint NOT NULL
);
