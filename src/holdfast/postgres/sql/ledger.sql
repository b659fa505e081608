-- Which migrations this database has, and as what text: a file that was changed after it ran is noticed.
CREATE TABLE IF NOT EXISTS core.migrations (
    version     int         PRIMARY KEY CHECK (version >= 0),   -- 0: the functions, which are replaced as a whole
    name        text        NOT NULL,
    checksum    text        NOT NULL CHECK (checksum ~ '^[0-9a-f]{64}$'),
    applied_at  timestamptz NOT NULL DEFAULT clock_timestamp(),
    applied_by  text        NOT NULL DEFAULT session_user
);
