-- What brokers hold for handlers, as workers see it: functions/broker_reports.sql. One line for each handler and channel.

CREATE TABLE core.broker_reports (
    broker         text NOT NULL,
    channel        text NOT NULL,
    -- The empty name has what is known of the broker itself.
    handler_name   text NOT NULL,
    -- When a worker was last about to ask the broker, and when it last had an answer.
    asked_at       timestamptz NOT NULL DEFAULT now(),
    reported_at    timestamptz,
    -- Messages that nobody has taken, that were taken and are not acknowledged, and of those the ones delivered again.
    waiting        bigint,
    unacknowledged bigint,
    redelivered    bigint,
    -- Settings that break a promise, each with subject, problem and remedy; of the line with the empty name.
    weaknesses     jsonb NOT NULL DEFAULT '[]',
    PRIMARY KEY (broker, channel, handler_name)
);
