-- What the example keeps. Holdfast's own tables are in the schema core, and know nothing of these.

CREATE TABLE IF NOT EXISTS conversations (
    id                uuid        PRIMARY KEY,
    subject           text        NOT NULL,
    -- The event that this conversation began with; NULL when a person began it. Once: a second delivery finds it.
    trigger_event_id  uuid        UNIQUE,
    created_at        timestamptz NOT NULL DEFAULT now()
);

CREATE TABLE IF NOT EXISTS messages (
    id               bigint      PRIMARY KEY GENERATED ALWAYS AS IDENTITY,
    conversation_id  uuid        NOT NULL REFERENCES conversations,
    agent_task_id    uuid,
    author           text        NOT NULL,
    text             text        NOT NULL,
    at               timestamptz NOT NULL DEFAULT now()
);

CREATE TABLE IF NOT EXISTS agent_tasks (
    id                uuid        PRIMARY KEY,
    conversation_id   uuid        NOT NULL REFERENCES conversations,
    trigger_event_id  uuid,
    kind              text        NOT NULL,
    status            text        NOT NULL CHECK (status IN (
                                  'awaiting_approval', 'dispatched', 'running', 'cancelling', 'stuck',
                                  'done', 'failed', 'refused', 'cancelled')),
    steps             jsonb       NOT NULL,
    transcript        jsonb       NOT NULL DEFAULT '[]',  -- one line for each step that is done
    result            text,                               -- of a stuck one: what is in its way
    decided_by        text,                               -- who approved, refused or cancelled it
    created_at        timestamptz NOT NULL DEFAULT now(),
    finished_at       timestamptz,
    forgotten_at      timestamptz,                        -- retention has taken steps, transcript and result
    CHECK ((finished_at IS NOT NULL) = (status IN ('done', 'failed', 'refused', 'cancelled')))
);

-- Whose events these are: so the office may look after them, in core.my_outbox.
INSERT INTO core.sources (source, role_name) VALUES ('agents', current_user) ON CONFLICT DO NOTHING;
