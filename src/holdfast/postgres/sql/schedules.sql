-- What workers send about schedules. The statements behind these calls, with their reasons, stand in
-- functions/schedules.sql.

-- name: declare_schedule
SELECT core.schedule_declare(
    :name::text, :cron::text, :timezone::text, :every::interval, :missed::text, :event_type::text, :source::text,
    :target::text, :priority::smallint, :payload::text::jsonb, :generation::bigint);

-- name: look_at_schedules
SELECT l.name, l.cron, l.timezone, l.every, l.missed, l.version, l.owed_after, l.looked_at, l.due_in
FROM core.schedules_look(:names::text[]) l;

-- name: fire_schedule
SELECT core.schedule_fire(
    :name::text, :version::bigint, :slots::timestamptz[], :until::timestamptz, :next::timestamptz, :generation::bigint);
