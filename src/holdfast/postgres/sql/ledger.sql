-- Which migrations this database has, and as what text: a file that was changed after it ran is noticed.
CREATE TABLE IF NOT EXISTS core.migrations (
    version     int         PRIMARY KEY CHECK (version >= 0),   -- 0: the functions, which are replaced as a whole
    name        text        NOT NULL,
    checksum    text        NOT NULL CHECK (checksum ~ '^[0-9a-f]{64}$'),
    applied_at  timestamptz NOT NULL DEFAULT clock_timestamp(),
    applied_by  text        NOT NULL DEFAULT session_user
);

-- What this schema promises to code, and to code of which releases. One row, written together with the functions.
CREATE TABLE IF NOT EXISTS core.contract (
    one             boolean PRIMARY KEY DEFAULT true CHECK (one),
    provides        int     NOT NULL CHECK (provides >= 1),
    oldest_code     int     NOT NULL CHECK (oldest_code BETWEEN 1 AND provides),
    release         text    NOT NULL,   -- the first of the contract `provides`
    oldest_release  text    NOT NULL    -- the first of the contract `oldest_code`
);
