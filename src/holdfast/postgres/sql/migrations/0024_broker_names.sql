-- By which names a broker is used for a handler, and which it had before: functions/broker_reports.sql.

ALTER TABLE core.broker_reports
    -- The templates of the address, as options of it; NULL where names make no difference.
    ADD COLUMN naming text,
    -- Those that the handler had before, and how many messages for it are left by them; null: not known.
    ADD COLUMN former jsonb NOT NULL DEFAULT '{}';
