-- What a worker sends. The statements behind these calls, with their reasons, stand in functions/delivery.sql and
-- functions/routing.sql.

-- name: claim
SELECT * FROM core.outbox_claim(
    :worker::uuid, :token::uuid, :lease::interval, :registry::bigint, :channel::text, :generation::bigint,
    :routes::text[], :priorities::smallint[], :handlers::text[], :limits::int[],
    :marks_at::timestamptz[], :marks_id::uuid[]);

-- name: split
SELECT * FROM core.outbox_split(
    :registry::bigint, :channel::text, :generation::bigint, :routes::text[], :priorities::smallint[], :limits::int[],
    :marks_at::timestamptz[], :marks_id::uuid[]);

-- name: extend
SELECT core.outbox_extend(:ids::uuid[], :tokens::uuid[], :lease::interval);

-- name: deliver
SELECT core.outbox_deliver(:ids::uuid[], :tokens::uuid[], :routes::text[], :handlers::text[], :record::boolean);

-- name: retry
SELECT core.outbox_retry(:ids::uuid[], :tokens::uuid[], :handlers::text[], :delays::interval[], :errors::text[]);

-- name: fail
SELECT core.outbox_fail(
    :ids::uuid[], :tokens::uuid[], :handlers::text[], :reasons::text[], :errors::text[], :signatures::text[]);

-- name: release
SELECT core.outbox_release(:ids::uuid[], :tokens::uuid[], :delays::interval[]);

-- name: enter
SELECT core.outbox_enter(:id::uuid, :token::uuid, :handler::text, :idle::interval);

-- name: reopen
SELECT core.outbox_reopen(:id::uuid, :token::uuid, :handler::text, :route::text);

-- name: due_in
SELECT core.outbox_due_in(
    :channel::text, :generation::bigint, :routes::text[], :priorities::smallint[], :since::interval);

-- name: lanes
SELECT core.outbox_lanes(:channel::text, :generation::bigint);

-- name: subscriptions
SELECT * FROM core.interest();

-- name: make_durable
SET LOCAL synchronous_commit TO on;

-- name: subscribe
SELECT core.subscribe(:context::text, :handler::text, :event_types::text[]);

-- name: open_channels
SELECT * FROM core.outbox_channels();

-- name: worker_beat
SELECT core.worker_beat(
    :id::uuid, :name::text, :host::text, :pid::int, :version::text, :generation::bigint,
    :channels::text[], :handlers::text[]);

-- name: worker_stopped
SELECT core.worker_stopped(:id::uuid);

-- name: unserved_channels
SELECT * FROM core.outbox_channels() EXCEPT SELECT * FROM core.served_channels() ORDER BY 1, 2;
