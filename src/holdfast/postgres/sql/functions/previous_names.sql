-- Names of contract 1, for code that was started before migration 0006 and still runs: each answers as the function it
-- calls. They go, with their grants, in the release of contract 3.

-- For calls of the replaced functions that were running when the tables got other names.
CREATE OR REPLACE VIEW core.registry AS SELECT one, version FROM core.subscriptions_version;
CREATE OR REPLACE VIEW core.stops AS
    SELECT id, requested_by AS stopped_by, requested_at AS stopped_at FROM core.stop_requests;

CREATE OR REPLACE FUNCTION core.interest()
RETURNS TABLE (version bigint, context text, handler_name text, event_type text)
LANGUAGE plpgsql STABLE SECURITY DEFINER
SET search_path = pg_catalog, pg_temp
AS $$
BEGIN
    RETURN QUERY SELECT * FROM core.subscriptions_read();
END
$$;

CREATE OR REPLACE FUNCTION core.outbox_consume(
    p_ids uuid[], p_tokens uuid[], p_routes text[], p_handlers text[], p_record boolean)
RETURNS SETOF uuid
LANGUAGE plpgsql SECURITY DEFINER
SET search_path = pg_catalog, pg_temp
AS $$
BEGIN
    RETURN QUERY SELECT * FROM core.outbox_deliver_and_delete(p_ids, p_tokens, p_routes, p_handlers, p_record);
END
$$;

CREATE OR REPLACE FUNCTION core.outbox_forget(p_id uuid, p_handler text)
RETURNS void
LANGUAGE plpgsql SECURITY DEFINER
SET search_path = pg_catalog, pg_temp
AS $$
BEGIN
    PERFORM core.outbox_delete_delivered(p_id, p_handler);
END
$$;

CREATE OR REPLACE FUNCTION core.outbox_lanes(p_channel text, p_generation bigint)
RETURNS SETOF text
LANGUAGE plpgsql STABLE SECURITY DEFINER
SET search_path = pg_catalog, pg_temp
AS $$
BEGIN
    RETURN QUERY SELECT core.outbox_routes(p_channel, p_generation);
END
$$;

CREATE OR REPLACE FUNCTION core.outbox_lanes_within(
    p_channel text, p_generation bigint, p_begins text[], p_ends text[], p_after text, p_most int, p_most_steps int)
RETURNS TABLE (route text, within boolean)
LANGUAGE plpgsql STABLE SECURITY DEFINER
SET search_path = pg_catalog, pg_temp
AS $$
BEGIN
    RETURN QUERY
    SELECT * FROM core.outbox_routes_within(p_channel, p_generation, p_begins, p_ends, p_after, p_most, p_most_steps);
END
$$;

CREATE OR REPLACE FUNCTION core.outbox_stop(p_id uuid, p_stopped_by text, p_reason text DEFAULT NULL)
RETURNS int
LANGUAGE plpgsql SECURITY DEFINER
SET search_path = pg_catalog, pg_temp
AS $$
BEGIN
    RETURN core.outbox_cancel_event(p_id, p_stopped_by, p_reason);
END
$$;

CREATE OR REPLACE FUNCTION core.retention_registry()
RETURNS SETOF core.retention_policies
LANGUAGE plpgsql STABLE SECURITY DEFINER
SET search_path = pg_catalog, pg_temp
AS $$
BEGIN
    RETURN QUERY SELECT p.* FROM core.retention_policies p ORDER BY p.entity, p.content_class;
END
$$;

CREATE OR REPLACE FUNCTION core.sweep_turn(p_sweeper uuid, p_rest interval, p_force boolean DEFAULT false)
RETURNS bigint
LANGUAGE plpgsql SECURITY DEFINER
SET search_path = pg_catalog, pg_temp
AS $$
BEGIN
    RETURN core.sweep_acquire(p_sweeper, p_rest, p_force);
END
$$;

CREATE OR REPLACE FUNCTION core.sweep_done(p_sweeper uuid, p_counts jsonb, p_inbox_page bigint)
RETURNS void
LANGUAGE plpgsql SECURITY DEFINER
SET search_path = pg_catalog, pg_temp
AS $$
BEGIN
    PERFORM core.sweep_finish(p_sweeper, p_counts, p_inbox_page);
END
$$;

CREATE OR REPLACE FUNCTION core.plan_turn(p_plan bigint, p_verb text, p_actor text, p_reason text DEFAULT NULL)
RETURNS TABLE (before text, after text, running boolean)
LANGUAGE plpgsql SECURITY DEFINER
SET search_path = pg_catalog, pg_temp
AS $$
BEGIN
    RETURN QUERY SELECT * FROM core.plan_change_state(p_plan, p_verb, p_actor, p_reason);
END
$$;

CREATE OR REPLACE FUNCTION core.schedule_turn(p_name text, p_verb text, p_actor text, p_reason text DEFAULT NULL)
RETURNS TABLE (before boolean, after boolean)
LANGUAGE plpgsql SECURITY DEFINER
SET search_path = pg_catalog, pg_temp
AS $$
BEGIN
    RETURN QUERY SELECT * FROM core.schedule_change_state(p_name, p_verb, p_actor, p_reason);
END
$$;

CREATE OR REPLACE FUNCTION core.schedules_look(p_names text[])
RETURNS TABLE (name text, cron text, timezone text, every interval, missed text, version bigint, owed_after timestamptz,
               looked_at timestamptz, due_in float8)
LANGUAGE plpgsql SECURITY DEFINER
SET search_path = pg_catalog, pg_temp
AS $$
BEGIN
    RETURN QUERY SELECT * FROM core.schedules_watch(p_names);
END
$$;
