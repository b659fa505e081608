-- The names of contract 1, the preview, which only its code calls. The schema of contract 3 serves contract 2 and its own.

DROP VIEW IF EXISTS core.registry;
DROP VIEW IF EXISTS core.stops;
DROP FUNCTION IF EXISTS core.interest();
DROP FUNCTION IF EXISTS core.outbox_consume(uuid[], uuid[], text[], text[], boolean);
DROP FUNCTION IF EXISTS core.outbox_forget(uuid, text);
DROP FUNCTION IF EXISTS core.outbox_lanes(text, bigint);
DROP FUNCTION IF EXISTS core.outbox_lanes_within(text, bigint, text[], text[], text, int, int);
DROP FUNCTION IF EXISTS core.outbox_stop(uuid, text, text);
DROP FUNCTION IF EXISTS core.retention_registry();
DROP FUNCTION IF EXISTS core.sweep_turn(uuid, interval, boolean);
DROP FUNCTION IF EXISTS core.sweep_done(uuid, jsonb, bigint);
DROP FUNCTION IF EXISTS core.plan_turn(bigint, text, text, text);
DROP FUNCTION IF EXISTS core.schedule_turn(text, text, text, text);
DROP FUNCTION IF EXISTS core.schedules_look(text[]);
