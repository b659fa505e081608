-- The first statement in the transaction of a handler, on a session that another one has used. On a new one the function
-- is called by its name. One statement for both, with a parameter, would be planned anew each time.
--
-- What a handler prepared, or listens for, outlives the reset that comes with the next BEGIN. Functions and blocks can do
-- both unseen, so the server is asked, here and not in a statement of its own: that would cost a round trip each time.
-- Then the result is NULL, and nothing was entered. For the same reason the advisory locks of the last handler are given
-- up here; that is never NULL.

-- name: enter_at_once
-- Sent with the values in its text, in one message with the BEGIN and the savepoint.
SELECT core.outbox_enter_at_once(:id, :token, :handler, :idle, :look);

-- name: retry_entered
-- Sent with the values in its text, in one message with the rollback to the savepoint and the COMMIT. The error is in
-- hexadecimal: what a handler has set decides how the server reads other texts, until it has rolled back.
SELECT core.outbox_retry_entered(
    :id, :handler, :delay, pg_catalog.convert_from(pg_catalog.decode(:error, 'hex'), 'UTF8'));

-- name: enter_message_at_once
-- As enter_at_once, for what comes from a broker. Source and key are in hexadecimal: they may have any characters.
SELECT core.broker_enter_at_once(
    :handler, :event, pg_catalog.convert_from(pg_catalog.decode(:source, 'hex'), 'UTF8'),
    pg_catalog.convert_from(pg_catalog.decode(:key, 'hex'), 'UTF8'), :generation, :idle, :look);

-- name: enter_message
SELECT CASE WHEN EXISTS (SELECT FROM pg_catalog.pg_prepared_statements p
                         WHERE p.from_sql OR NOT pg_catalog.starts_with(p.name, '__asyncpg_'))
              OR EXISTS (SELECT FROM pg_catalog.pg_listening_channels())
              OR pg_catalog.pg_advisory_unlock_all() IS NULL
            THEN NULL
            ELSE core.broker_enter(:handler::text, :event::uuid, :source::text, :key::text, :generation::bigint,
                                   :idle::interval) END

-- name: enter_messages
SELECT CASE WHEN EXISTS (SELECT FROM pg_catalog.pg_prepared_statements p
                         WHERE p.from_sql OR NOT pg_catalog.starts_with(p.name, '__asyncpg_'))
              OR EXISTS (SELECT FROM pg_catalog.pg_listening_channels())
              OR pg_catalog.pg_advisory_unlock_all() IS NULL
            THEN NULL
            ELSE core.broker_enter_batch(:handler::text, :events::uuid[], :sources::text[], :keys::text[],
                                         :generation::bigint, :idle::interval) END

-- name: enter_handler
SELECT CASE WHEN EXISTS (SELECT FROM pg_catalog.pg_prepared_statements p
                         WHERE p.from_sql OR NOT pg_catalog.starts_with(p.name, '__asyncpg_'))
              OR EXISTS (SELECT FROM pg_catalog.pg_listening_channels())
              OR pg_catalog.pg_advisory_unlock_all() IS NULL
            THEN NULL
            ELSE core.outbox_enter(:id::uuid, :token::uuid, :handler::text, :idle::interval) END

-- name: enter_batch
SELECT CASE WHEN EXISTS (SELECT FROM pg_catalog.pg_prepared_statements p
                         WHERE p.from_sql OR NOT pg_catalog.starts_with(p.name, '__asyncpg_'))
              OR EXISTS (SELECT FROM pg_catalog.pg_listening_channels())
              OR pg_catalog.pg_advisory_unlock_all() IS NULL
            THEN NULL
            ELSE core.outbox_enter_batch(:ids::uuid[], :tokens::uuid[], :handler::text, :idle::interval) END

-- name: reopen_batch
-- The ids that this transaction has not entered.
SELECT t.id
FROM ROWS FROM (pg_catalog.unnest(:ids::uuid[]), pg_catalog.unnest(:tokens::uuid[]), pg_catalog.unnest(:routes::text[]))
    AS t (id, token, route)
WHERE NOT core.outbox_reopen(t.id, t.token, :handler::text, t.route)

-- name: delete_delivered_batch
SELECT core.outbox_delete_delivered(t.id, :handler::text) FROM pg_catalog.unnest(:ids::uuid[]) AS t (id)

-- name: enter_reaction
SELECT CASE WHEN EXISTS (SELECT FROM pg_catalog.pg_prepared_statements p
                         WHERE p.from_sql OR NOT pg_catalog.starts_with(p.name, '__asyncpg_'))
              OR EXISTS (SELECT FROM pg_catalog.pg_listening_channels())
              OR pg_catalog.pg_advisory_unlock_all() IS NULL
            THEN NULL
            ELSE core.reaction_enter(:handler::text, :event::uuid, :source::text, :key::text, :idle::interval) END

-- name: keep_open
-- A thread past its time limit computes, and its transaction keeps the row locked. The time allowed for a whole transaction
-- begins anew only when it was switched off before.
SELECT pg_catalog.set_config(s.name, :milliseconds::text, true)
FROM (SELECT s.name, pg_catalog.set_config(s.name, '0', true) AS off FROM pg_catalog.pg_settings s
      WHERE s.name OPERATOR(pg_catalog.=) ANY (ARRAY['idle_in_transaction_session_timeout', 'transaction_timeout'])
      OFFSET 0) s
WHERE s.off OPERATOR(pg_catalog.=) '0'

-- name: mark_handler
-- What the handler does from here on can be undone, and the row stays settled or locked.
SAVEPOINT holdfast_handler;

-- name: undo_handler
ROLLBACK TO SAVEPOINT holdfast_handler;

-- name: release_handler
-- Fails if a statement has failed, and if this is no longer the transaction that was marked.
RELEASE SAVEPOINT holdfast_handler;

-- name: begin_handler
BEGIN;

-- name: rollback_handler
ROLLBACK;

-- name: commit_handler
COMMIT;

-- name: describe_application
-- Whether the connections of the application lead to the worker's own database, and what its login may not do there.
SELECT pg_catalog.current_database()::text AS database, 
       extract(epoch FROM pg_catalog.pg_postmaster_start_time())::text AS started,
       session_user::text AS login,
       (SELECT pg_catalog.string_agg(p.proname, ', ' ORDER BY p.proname)
        FROM pg_catalog.pg_proc p JOIN pg_catalog.pg_namespace n ON n.oid = p.pronamespace
        WHERE n.nspname = 'core'
          AND p.proname IN ('outbox_enter', 'outbox_enter_batch', 'outbox_reopen', 'outbox_retry', 'outbox_fail', 'outbox_archive',
                            'outbox_release', 'outbox_blocked', 'outbox_delete_delivered')
          AND NOT pg_catalog.has_function_privilege(p.oid, 'EXECUTE')) AS denied;
