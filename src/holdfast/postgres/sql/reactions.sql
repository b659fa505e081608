-- What a process sends that reacts to its own events. The reasons stand in functions/reactions.sql.

-- name: reaction_open
SELECT core.reaction_open(:handlers::text[], :key::text);

-- name: reaction_enter
SELECT core.reaction_enter(:handler::text, :event::uuid, :source::text, :key::text, :idle::interval);

-- name: reaction_settle
SELECT core.reaction_settle(
    :event::text::jsonb, :done::text[], :failed::text[], :reasons::text[], :errors::text[], :signatures::text[],
    :alone::boolean);
