-- The tables of the bookings service. Holdfast's own are in the schema core.

CREATE TABLE bookings (
    id           uuid        PRIMARY KEY,
    customer     text        NOT NULL,
    total_cents  bigint      NOT NULL CHECK (total_cents > 0),
    status       text        NOT NULL DEFAULT 'held' CHECK (status IN ('held', 'paid', 'released')),
    booked_at    timestamptz NOT NULL DEFAULT now()
);

CREATE TABLE seats (
    name        text PRIMARY KEY,
    booking_id  uuid REFERENCES bookings
);
INSERT INTO seats (name) SELECT r || n FROM unnest(ARRAY['A', 'B', 'C']) AS r, generate_series(1, 8) AS n;

-- Nothing here forbids two tickets for one booking: that there is one is for the handler to see to.
CREATE TABLE tickets (
    id          bigint      GENERATED ALWAYS AS IDENTITY PRIMARY KEY,
    booking_id  uuid        NOT NULL REFERENCES bookings,
    seat        text        NOT NULL,
    issued_at   timestamptz NOT NULL DEFAULT now()
);

CREATE TABLE daily_sales (
    day          date   PRIMARY KEY,
    tickets      bigint NOT NULL
);
