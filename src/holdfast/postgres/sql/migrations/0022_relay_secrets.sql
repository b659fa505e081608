-- What relays sign messages with, so that nobody else who may write to a broker can send an event in their name:
-- functions/relay_secrets.sql. Only functions of the owner read it.
CREATE TABLE core.relay_secrets (
    id              bigint      GENERATED ALWAYS AS IDENTITY PRIMARY KEY,
    secret          bytea       NOT NULL
                    DEFAULT decode(replace(gen_random_uuid()::text || gen_random_uuid()::text, '-', ''), 'hex'),
    created_at      timestamptz NOT NULL DEFAULT now(),
    -- Accepted before anybody signs with it: every worker knows it by then.
    signs_at        timestamptz NOT NULL DEFAULT now() + interval '1 minute',
    accepted_until  timestamptz                                 -- NULL: it has no successor
);
INSERT INTO core.relay_secrets (signs_at) VALUES (now());
