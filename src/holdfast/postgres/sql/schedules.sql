-- What operators read about schedules. What operators and workers do with schedules stands in functions/schedules.sql.

-- name: list_schedules
-- overdue_for: since when a slot, or working out the first one, has been left undone; NULL when nothing is.
SELECT s.name, s.cron, s.timezone, s.every, s.missed, s.event_type, s.source, s.target, s.priority,
       CASE WHEN :payload::boolean THEN s.payload::text END AS payload, s.generation, s.declared_at,
       s.attended_at AS served_at, core.is_living(s.attended_at) AS served, s.owed_after, s.next_slot,
       s.last_slot, s.last_fired_at, s.fired,
       s.paused_at, s.paused_by, now() AS looked_at,
       CASE WHEN s.paused_at IS NULL AND coalesce(s.next_slot, s.owed_after) < now() - :overdue::interval
            THEN extract(epoch FROM now() - coalesce(s.next_slot, s.owed_after))::float8 END AS overdue_for
FROM core.schedules s
WHERE :only::text IS NULL OR s.name = :only::text
ORDER BY s.name
LIMIT :most::int;
