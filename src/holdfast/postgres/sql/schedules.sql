-- What workers send about schedules. The statements behind these calls, with their reasons, stand in
-- functions/schedules.sql.

-- name: declare_schedule
SELECT core.schedule_declare(
    :name::text, :cron::text, :timezone::text, :every::interval, :missed::text, :event_type::text, :source::text,
    :target::text, :priority::smallint, :payload::text::jsonb, :generation::bigint, :force::boolean);

-- name: look_at_schedules
SELECT l.name, l.cron, l.timezone, l.every, l.missed, l.version, l.owed_after, l.looked_at, l.due_in
FROM core.schedules_look(:names::text[]) l;

-- name: fire_schedule
SELECT core.schedule_fire(
    :name::text, :version::bigint, :slots::timestamptz[], :until::timestamptz, :next::timestamptz, :generation::bigint);

-- name: list_schedules
-- overdue_for: since when a slot, or working out the first one, has been left undone; NULL when nothing is.
SELECT s.name, s.cron, s.timezone, s.every, s.missed, s.event_type, s.source, s.target, s.priority,
       CASE WHEN :payload::boolean THEN s.payload::text END AS payload, s.generation, s.declared_at, s.attended_at,
       s.attended_at > now() - :silence::interval AS attended, s.owed_after, s.next_slot, s.last_slot, s.last_fired_at, s.fired,
       s.paused_at, s.paused_by, now() AS looked_at,
       CASE WHEN s.paused_at IS NULL AND coalesce(s.next_slot, s.owed_after) < now() - :overdue::interval
            THEN extract(epoch FROM now() - coalesce(s.next_slot, s.owed_after))::float8 END AS overdue_for
FROM core.schedules s
WHERE :only::text IS NULL OR s.name = :only::text
ORDER BY s.name
LIMIT :most::int;

-- name: trigger_schedule
SELECT core.schedule_trigger(:name::text, :actor::text, :reason::text);

-- name: turn_schedule
SELECT t.before, t.after FROM core.schedule_turn(:name::text, :verb::text, :actor::text, :reason::text) t;

-- name: remove_schedule
SELECT core.schedule_remove(:name::text, :actor::text, :reason::text);
