-- The first statement in the transaction of a handler, on a session that another one has used. On a new one the function
-- is called by its name. One statement for both, with a parameter, would be planned anew each time.
--
-- What a handler prepared, or listens for, outlives the reset that comes with the next BEGIN. Functions and blocks can do
-- both unseen, so the server is asked, here and not in a statement of its own: that would cost a round trip each time.
-- Then the result is NULL, and nothing was entered. For the same reason the advisory locks of the last handler are given
-- up here; that is never NULL.

-- name: enter_handler
SELECT CASE WHEN EXISTS (SELECT FROM pg_catalog.pg_prepared_statements p
                         WHERE p.from_sql OR NOT pg_catalog.starts_with(p.name, '__asyncpg_'))
              OR EXISTS (SELECT FROM pg_catalog.pg_listening_channels())
              OR pg_catalog.pg_advisory_unlock_all() IS NULL
            THEN NULL
            ELSE core.outbox_enter(:id::uuid, :token::uuid, :handler::text, :idle::interval) END

-- name: enter_reaction
SELECT CASE WHEN EXISTS (SELECT FROM pg_catalog.pg_prepared_statements p
                         WHERE p.from_sql OR NOT pg_catalog.starts_with(p.name, '__asyncpg_'))
              OR EXISTS (SELECT FROM pg_catalog.pg_listening_channels())
              OR pg_catalog.pg_advisory_unlock_all() IS NULL
            THEN NULL
            ELSE core.reaction_enter(:handler::text, :event::uuid, :source::text, :key::text, :idle::interval) END
