-- Who may do what, applied after every migration. Runtime roles change rows only through functions.
REVOKE ALL ON SCHEMA core FROM PUBLIC;
REVOKE ALL ON ALL TABLES IN SCHEMA core FROM PUBLIC, holdfast_producer, holdfast_worker, holdfast_operator;
REVOKE ALL ON ALL SEQUENCES IN SCHEMA core FROM PUBLIC, holdfast_producer, holdfast_worker, holdfast_operator;
REVOKE ALL ON ALL FUNCTIONS IN SCHEMA core FROM PUBLIC, holdfast_producer, holdfast_worker, holdfast_operator;
ALTER DEFAULT PRIVILEGES IN SCHEMA core REVOKE ALL ON TABLES FROM PUBLIC;
-- Without a schema: the built-in grant to PUBLIC can only be taken back for the role as a whole.
ALTER DEFAULT PRIVILEGES REVOKE EXECUTE ON FUNCTIONS FROM PUBLIC;
GRANT USAGE ON SCHEMA core TO holdfast_producer, holdfast_worker, holdfast_operator;
GRANT SELECT ON core.migrations, core.contract TO holdfast_producer, holdfast_worker, holdfast_operator;

-- Producers write events, and may look after those of their own sources.
GRANT INSERT (id, event_type, event_version, occurred_at, source, target, content_class, channel, generation, domain_id,
              payload, headers, idempotency_key, trace_context, available_at, expires_at, priority, ordering_key, dedupe_key,
              fairness_key)
    ON core.outbox TO holdfast_producer;
GRANT SELECT ON core.my_outbox TO holdfast_producer;
GRANT EXECUTE ON FUNCTION
    core.uuid7(), core.current_generation(), core.current_channel(), core.channel_of(bigint),
    core.outbox_hold_key(text, text, uuid, boolean, timestamptz),
    core.outbox_cancel(text, text), core.outbox_reschedule(text, text, timestamptz)
    TO holdfast_producer;
-- They may also react to their own events in their own process; so may a handler's process.
GRANT EXECUTE ON FUNCTION
    core.reaction_unhandled(text[], text, text),
    core.reaction_enter(text, uuid, text, text, interval),
    core.reaction_settle(jsonb, text[], text[], text[], text[], text[], boolean)
    TO holdfast_producer, holdfast_worker;

-- Workers have functions and no table.
GRANT EXECUTE ON FUNCTION
    core.outbox_claim_ordered(uuid, uuid, interval, text, bigint, text[], int[], boolean[], text[], text[], text[], text[],
        text[], bigint[], boolean, int, timestamptz),
    core.outbox_claim_fair(uuid, uuid, interval, text, bigint, text[], int[], int[], text[], text[], text[], int, timestamptz),
    core.outbox_claim(uuid, uuid, interval, bigint, text, bigint, text[], smallint[], text[], int[], timestamptz[], uuid[],
        timestamptz, boolean),
    core.outbox_extend(uuid[], uuid[], interval),
    core.outbox_deliver(uuid[], uuid[], text[], text[], boolean, text),
    core.outbox_blocked(uuid[], uuid[], text[], boolean, boolean),
    core.outbox_retry(uuid[], uuid[], text[], interval[], text[]),
    core.outbox_fail(uuid[], uuid[], text[], text[], text[], text[]),
    core.outbox_release(uuid[], uuid[], interval[], text[]),
    core.outbox_enter(uuid, uuid, text, interval), core.outbox_enter_at_once(uuid, uuid, text, interval, boolean),
    core.outbox_enter_batch(uuid[], uuid[], text, interval),
    core.outbox_reopen(uuid, uuid, text, text), core.outbox_retry_entered(uuid, text, interval, text),
    core.outbox_split(bigint, text, bigint, text[], smallint[], int[], timestamptz[], uuid[], timestamptz),
    core.outbox_routes(text, bigint), core.outbox_routes_within(text, bigint, text[], text[], text, int, int, boolean),
    core.outbox_channels(),
    core.outbox_due_in(text, bigint, text[], smallint[], interval),
    core.subscribe(text, text, text[]), core.subscriptions_read(),
    core.worker_beat(uuid, text, text, int, text, bigint, text[], text[]), core.worker_stopped(uuid),
    core.worker_alive(uuid, interval), core.silent_workers(timestamptz), core.clock_stepped(uuid, interval, interval),
    core.clock_unrecorded(), core.clock_repair(int), core.unserved_channels(),
    core.rollup_write(bigint, text[], bigint[], bigint[], float8[], bigint[], float8[]), core.rollup_fold(int),
    core.rollup_lag()
    TO holdfast_worker;

-- Operators read everything and repair through functions.
GRANT SELECT ON core.outbox, core.failed, core.deliveries, core.event_handled, core.subscriptions, core.subscriptions_version,
    core.workers, core.clock_steps, core.clock, core.rollup, core.rollup_journal, core.rollup_reports, core.rollup_counts,
    core.deployments, core.outbox_keys, core.sources, core.cancel_requests, core.audit, core.failure_notes, core.plans, core.plan_rows,
    core.ordering_heads, core.broker_reports
    TO holdfast_operator;
GRANT EXECUTE ON FUNCTION
    core.outbox_replay(uuid, bigint, text), core.outbox_replay_many(uuid[], bigint, text, text, boolean),
    core.outbox_cancel_event(uuid, text, text), core.outbox_discard(uuid[], text, text), core.outbox_restore(uuid[], text, text),
    core.outbox_edit(uuid, uuid, jsonb, bigint, text, text), core.failure_note(text, text, text, text),
    core.failed_select(jsonb, int, timestamptz, uuid), core.event_rows(uuid),
    core.deliveries_of(uuid[]), core.row_outcomes(uuid[], uuid[]),
    core.plan_create(uuid[], jsonb, int, bigint, int, float8, float8, interval, boolean, text, text),
    core.plan_take(bigint, uuid, text, text, interval, text), core.plan_step(bigint, uuid, int, interval),
    core.plan_release(bigint, uuid), core.plan_change_state(bigint, text, text, text),
    core.serving_generation(), core.generation_open(bigint, int), core.generation_begin(text, text, text), core.generation_retire(bigint, boolean, text, text),
    core.generation_move(bigint, bigint, int, text, text), core.worker_release(uuid, int, text, text),
    core.retire(text, text, text, text), core.audit_refused(text, text, text, jsonb, text), core.audit_reveal(text, text, uuid),
    core.audit_import(text, text, text, text, text, int),
    core.keys_blocked(text, text, int, int), core.key_release(text, text, text, text), core.open_rows(), core.keyed_lanes(),
    core.outbox_routes(text, bigint), core.outbox_channels(), core.served_channels(), core.channel_of(bigint),
    core.living_for(), core.is_living(timestamptz), core.open_channels(int), core.subscriptions_read(), core.raised_at(text),
    core.rollup_lag(), core.operator_secret()
    TO holdfast_operator;

-- Brokers: what a relay and those who take from a broker need, and what operators decide.
GRANT EXECUTE ON FUNCTION
    core.broker_interests(text, text[]), core.broker_undecided(text[]), core.broker_adopt(text[], text, text),
    core.broker_look(text, uuid[], text[], text[]),
    core.broker_enter(text, uuid, text, text, bigint, interval),
    core.broker_enter_at_once(text, uuid, text, text, bigint, interval, boolean),
    core.broker_enter_batch(text, uuid[], text[], text[], bigint, interval),
    core.broker_leave(text, text[], text[], bigint),
    core.broker_deliver(text[], text[], text[], bigint, boolean, text),
    core.broker_park(text, text, bigint, uuid, interval, text[], uuid[]),
    core.relay_details(uuid[]), core.relay_keys(),
    core.broker_report_due(text, text, text[], interval),
    core.broker_report(text, text, text[], bigint[], bigint[], bigint[], jsonb),
    core.broker_naming(text, text, text[], text), core.broker_stranded(text, text, text, text, bigint)
    TO holdfast_worker;
GRANT EXECUTE ON FUNCTION
    core.handler_via(text[], text, text, text), core.handler_drained(text, text, text, text),
    core.broker_interests(text, text[]),
    core.relayed_rows(text, timestamptz, timestamptz, text, text, int),
    core.relay_again(text, timestamptz, timestamptz, text, text, int, text, text),
    core.relay_lost(text, timestamptz, timestamptz, int),
    core.relay_repair(text, timestamptz, timestamptz, int, text, text), core.relay_rotate(boolean, text, text)
    TO holdfast_operator;

-- Limits, pauses and breakers of handlers.
GRANT EXECUTE ON FUNCTION
    core.flow_declare(text[], int[], float8[], int[], float8[], float8[]), core.flow_limited(text[]),
    core.flow_waits(text[], timestamptz),
    core.outbox_falter(uuid[], uuid[], text[], interval[], text[], boolean[], boolean[]),
    core.breaker_succeed(text[], uuid[]), core.wake(text, text)
    TO holdfast_worker;
GRANT SELECT ON core.handler_flow, core.handler_slots TO holdfast_operator;
GRANT EXECUTE ON FUNCTION
    core.handler_limit(text, int, float8, text[], text, text), core.handler_pause(text, text, text),
    core.handler_resume(text, text, text), core.handler_breaker(text, boolean, text, text),
    core.flow_waits(text[], timestamptz)
    TO holdfast_operator;

-- The archive of dead letters, and retention. A sweep does what the policies say, for every caller.
GRANT EXECUTE ON FUNCTION
    core.outbox_archive(uuid[], uuid[], text[], text[], text[], text[]),
    core.outbox_deliver_and_delete(uuid[], uuid[], text[], text[], boolean, text), core.outbox_delete_delivered(uuid, text)
    TO holdfast_worker;
GRANT EXECUTE ON FUNCTION
    core.retention_policies_read(), core.retention_classes(text, text),
    core.retention_sweep(text, text, timestamptz, int, text, text), core.sweep_keys(text, text, int, text, text),
    core.sweep_inbox(bigint, int, int, text, text),
    core.sweep_heads(text, text, int, text, text), core.sweep_acquire(uuid, interval, boolean), core.sweep_finish(uuid, jsonb, bigint)
    TO holdfast_worker, holdfast_operator;
GRANT SELECT ON core.archive, core.retention_policies, core.sweeps TO holdfast_operator;
GRANT EXECUTE ON FUNCTION
    core.archive_replay(bigint[], bigint, text, text, boolean), core.archive_discard(bigint[], boolean, text, text),
    core.retention_set(text, text, text, text, int, int, text), core.retention_due(text, text, timestamptz, int),
    core.inbox_horizon(), core.erase_archived(uuid, text, text, int), core.erase_outbox(uuid, text, text, boolean, int, uuid),
    core.erase_records(uuid, text, text, int, text, text, boolean)
    TO holdfast_operator;

-- Schedules.
GRANT EXECUTE ON FUNCTION
    core.schedule_declare(text, text, text, interval, text, text, text, text, smallint, jsonb, bigint, boolean),
    core.schedules_watch(text[]), core.schedule_fire(text, bigint, timestamptz[], timestamptz, timestamptz, bigint, text)
    TO holdfast_worker;
GRANT SELECT ON core.schedules TO holdfast_operator;
GRANT EXECUTE ON FUNCTION
    core.schedule_trigger(text, text, text), core.schedule_change_state(text, text, text, text),
    core.schedule_remove(text, text, text)
    TO holdfast_operator;

-- Idempotency records: a process that carries out commands begins and completes them, and no role reads the table. Operators
-- see what is no secret, and have records of their own: of requests to the HTTP API.
GRANT EXECUTE ON FUNCTION core.requests_read(text, text, timestamptz, timestamptz, text, timestamptz, text, int, int)
    TO holdfast_operator;
GRANT EXECUTE ON FUNCTION
    core.idempotency_begin(text, text, text[], int, interval, int, int),
    core.idempotency_complete(text, text, boolean, int, jsonb, bytea, boolean)
    TO holdfast_producer, holdfast_worker, holdfast_operator;
GRANT EXECUTE ON FUNCTION core.sweep_records(int, text, text), core.sweep_rollup(int, text, text) TO holdfast_worker, holdfast_operator;

-- Partitions: workers make and drop them as the policies say. The conversion is the owner's.
GRANT EXECUTE ON FUNCTION core.partitions_extend(), core.partitions_drop() TO holdfast_worker;
GRANT EXECUTE ON FUNCTION core.partitions_list(), core.partitions_bound(), core.is_partitioned(), core.partition_kept(text, int),
    core.first_id(timestamptz), core.id_time(uuid)
    TO holdfast_operator;
GRANT SELECT ON core.partitioning TO holdfast_operator;
