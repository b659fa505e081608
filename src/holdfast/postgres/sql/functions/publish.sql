-- Publishing, on the database's side: what happens when a row is inserted into core.outbox, and what a producer does with
-- its pending events afterwards. The statements of producers stand in ../publish.sql.
--
-- Four triggers of core.outbox call the first functions. Migrations make them, with the conditions under which they do;
-- ../notify.sql makes the bell anew:
--
--   BEFORE INSERT     outbox_fill      checks what the caller wrote, fills in its key, and makes it due no earlier than now
--   BEFORE INSERT     outbox_source    refuses a source that belongs to another role, and keeps the keys of owned ones apart;
--                                      enabled once a source has an owner
--   AFTER UPDATE      outbox_changed   checks an UPDATE that no function of this schema makes
--   AFTER, at commit  outbox_bell      calls outbox_notify, which wakes a sleeping worker
--
-- There is no CHECK on core.outbox: each one is read and compiled anew for each statement, and those that are needed took
-- half the time of an INSERT and two thirds of that of a settle.

-- outbox_fill: a writer in another language names event_type, source and payload; the key defaults to the id, which a
-- column default cannot say. An event is due when it is written, at the earliest: else a producer could date its own before
-- those of others in the same lane, and make up how long they have waited.
-- A plain row, as nearly all are, passes at once; what the condition is not sure of is left to require_event, and nothing
-- that require_event refuses may pass here.
-- Every name is qualified instead of pinning the search_path, which would cost more than the rest.
CREATE OR REPLACE FUNCTION core.outbox_fill()
RETURNS trigger
LANGUAGE plpgsql SECURITY DEFINER
AS $$
BEGIN
    IF NEW.fairness_key IS NOT NULL AND NEW.ordering_key IS NULL THEN
        NEW.ordering_key := '';  -- out of the lanes, and in no order
    END IF;
    IF NEW.event_type OPERATOR(pg_catalog.~) '^[!-)+-.0-~]+$'
       AND pg_catalog.octet_length(NEW.event_type) OPERATOR(pg_catalog.<=) 200
       AND NEW.source OPERATOR(pg_catalog.~) '^[!-)+-.0-~]+$'
       AND pg_catalog.octet_length(NEW.source) OPERATOR(pg_catalog.<=) 200
       AND (NEW.target IS NULL
            OR NEW.target OPERATOR(pg_catalog.~) '^[!-)+-.0-~]+$'
               AND pg_catalog.octet_length(NEW.target) OPERATOR(pg_catalog.<=) 200)
       AND NEW.channel OPERATOR(pg_catalog.~) '^[ -~]+$'
       AND pg_catalog.octet_length(NEW.channel) OPERATOR(pg_catalog.<=) 63
       AND pg_catalog.jsonb_typeof(NEW.payload) OPERATOR(pg_catalog.=) 'object'
       -- As text: 1e131071 takes eight bytes in jsonb, and a few thousand of them would fail every claim that meets the row.
       AND pg_catalog.octet_length(NEW.payload::pg_catalog.text) OPERATOR(pg_catalog.<=) 262144
       AND (NEW.headers IS NULL
            OR pg_catalog.jsonb_typeof(NEW.headers) OPERATOR(pg_catalog.=) 'object'
               AND pg_catalog.octet_length(NEW.headers::pg_catalog.text) OPERATOR(pg_catalog.<=) 8192)
       AND pg_catalog.length(NEW.idempotency_key) OPERATOR(pg_catalog.>) 0
       AND pg_catalog.octet_length(NEW.idempotency_key) OPERATOR(pg_catalog.<=) 1020
       AND (NEW.trace_context IS NULL OR pg_catalog.octet_length(NEW.trace_context) OPERATOR(pg_catalog.<=) 1020)
       AND pg_catalog.length(NEW.content_class) OPERATOR(pg_catalog.>) 0
       AND pg_catalog.octet_length(NEW.content_class) OPERATOR(pg_catalog.<=) 800
       AND (NEW.handler_name IS NULL OR pg_catalog.strpos(NEW.handler_name, '/') OPERATOR(pg_catalog.=) 0)
       AND NEW.event_version OPERATOR(pg_catalog.>) 0
       AND NEW.generation OPERATOR(pg_catalog.>=) 0
       AND NEW.priority OPERATOR(pg_catalog.>=) 0 AND NEW.priority OPERATOR(pg_catalog.<=) 2
       AND NEW.occurred_at OPERATOR(pg_catalog.>) '0001-01-02 00:00:00+00'::pg_catalog.timestamptz
       AND NEW.occurred_at OPERATOR(pg_catalog.<) '9999-12-31 00:00:00+00'::pg_catalog.timestamptz
       AND NEW.available_at OPERATOR(pg_catalog.>) '0001-01-02 00:00:00+00'::pg_catalog.timestamptz
       AND (NEW.available_at OPERATOR(pg_catalog.>=) NEW.created_at OR NEW.origin_id IS NOT NULL)
       AND NEW.available_at OPERATOR(pg_catalog.<) '9999-12-31 00:00:00+00'::pg_catalog.timestamptz
       AND NEW.status OPERATOR(pg_catalog.=) 'pending' AND NEW.attempts OPERATOR(pg_catalog.=) 0
       AND (NEW.ordering_key IS NULL
            OR pg_catalog.octet_length(NEW.ordering_key) OPERATOR(pg_catalog.<=) 800
               AND (pg_catalog.length(NEW.ordering_key) OPERATOR(pg_catalog.=) 0)
                   OPERATOR(pg_catalog.=) (NEW.fairness_key IS NOT NULL)
               AND (NEW.fairness_key IS NULL
                    OR pg_catalog.length(NEW.fairness_key) OPERATOR(pg_catalog.>) 0
                       AND pg_catalog.octet_length(NEW.fairness_key) OPERATOR(pg_catalog.<=) 800))
       AND pg_catalog.num_nonnulls(
               NEW.expires_at, NEW.dedupe_key, NEW.settled_at, NEW.lease_token, NEW.lease_expires_at,
               NEW.failed_at, NEW.failure_reason) OPERATOR(pg_catalog.=) 0
       -- In a partition, whose table has another name, the id has to say when it was made.
       AND (TG_TABLE_NAME OPERATOR(pg_catalog.=) 'outbox'
            OR pg_catalog.substr(NEW.id::pg_catalog.text, 15, 1) OPERATOR(pg_catalog.=) '7')
    THEN
        RETURN NEW;
    END IF;
    -- What comes back from the archive, or is a sibling, may be older than the partitions. Producers may not write these columns.
    IF TG_TABLE_NAME OPERATOR(pg_catalog.<>) 'outbox' AND NEW.origin_id IS NULL AND NEW.handler_name IS NULL
       AND NEW.status OPERATOR(pg_catalog.=) 'pending'
       AND NEW.failure_history OPERATOR(pg_catalog.=) '[]'::pg_catalog.jsonb THEN
        PERFORM core.require_dated(NEW.id);
    END IF;
    NEW.idempotency_key := coalesce(NEW.idempotency_key, NEW.id::pg_catalog.text);
    -- As a record of no table: for the row of one, a function that somebody else made for it would be the better match.
    PERFORM core.require_event(whole) FROM (SELECT NEW.*) AS whole;
    IF NEW.origin_id IS NULL THEN  -- a sibling is due when its event was
        NEW.available_at := greatest(NEW.available_at, NEW.created_at);
    END IF;
    RETURN NEW;
END
$$;

-- require_dated: ids of a partitioned outbox are of version 7, or its partitions could not tell them apart by time.
CREATE OR REPLACE FUNCTION core.require_dated(p_id uuid)
RETURNS void
LANGUAGE plpgsql STABLE
AS $$
BEGIN
    IF pg_catalog.substr(p_id::pg_catalog.text, 15, 1) OPERATOR(pg_catalog.<>) '7' THEN
        RAISE EXCEPTION 'id must be a UUID of version 7 while the outbox is partitioned by time, not of version %',
                        pg_catalog.substr(p_id::pg_catalog.text, 15, 1)
            USING ERRCODE = 'check_violation', CONSTRAINT = 'outbox_dated', TABLE = 'outbox', SCHEMA = 'core',
                  HINT = 'Leave id out of the INSERT: the database makes one. Or make it of version 7 (RFC 9562).';
    END IF;
END
$$;

-- outbox_changed: what require_row says of a row is true after an UPDATE by hand as well. The functions of this schema, which
-- make all the others, check what they write by themselves: they run as the owner of the schema, with their search_path.
CREATE OR REPLACE FUNCTION core.outbox_changed()
RETURNS trigger
LANGUAGE plpgsql SECURITY DEFINER
SET search_path = pg_catalog, pg_temp
AS $$
BEGIN
    PERFORM core.require_row(whole) FROM (SELECT NEW.*) AS whole;
    RETURN NULL;
END
$$;

-- require_event: what must be true of a new event, beside what must be true of every row.
CREATE OR REPLACE FUNCTION core.require_event(p_row record)
RETURNS void
LANGUAGE plpgsql STABLE
SET search_path = pg_catalog, pg_temp
AS $$
DECLARE
    -- As in is_name.
    c_unseen CONSTANT text :=
        '[[:cntrl:]\u007f-\u00a0\u00ad\u034f\u0600-\u0605\u061c\u06dd\u070f\u0890\u0891\u08e2\u115f\u1160\u1680\u17b4\u17b5\u180b-\u180f'
        '\u2000-\u200f\u2028-\u202f\u205f-\u206f\u2800\u3000\u3164\ufe00-\ufe0f\ufeff\uffa0\ufff0-\ufffb\U000110bd\U000110cd'
        '\U00013430-\U0001343f\U0001bca0-\U0001bca3\U0001d173-\U0001d17a\U000e0000-\U000e0fff]';
BEGIN
    IF jsonb_typeof(p_row.payload) IS DISTINCT FROM 'object' THEN
        RAISE EXCEPTION 'payload must be a JSON object, not %', coalesce(jsonb_typeof(p_row.payload), 'NULL')
            USING ERRCODE = 'invalid_parameter_value', HINT = 'Wrap the value: {"value": ...}.';
    ELSIF p_row.event_type !~ '^[^/*[:space:][:cntrl:]]+$' OR char_length(p_row.event_type) > 200 THEN
        RAISE EXCEPTION 'event_type must be 1 to 200 characters without spaces, "/" or "*"'
            USING ERRCODE = 'invalid_parameter_value', HINT = 'Write it like order.placed.';
    ELSIF p_row.source !~ '^[^/*[:space:][:cntrl:]]+$' OR char_length(p_row.source) > 200 THEN
        RAISE EXCEPTION 'source must be 1 to 200 characters without spaces, "/" or "*"'
            USING ERRCODE = 'invalid_parameter_value', HINT = 'Name the producing context, like shop.';
    ELSIF p_row.target !~ '^[^/*[:space:][:cntrl:]]+$' OR char_length(p_row.target) > 200 THEN
        RAISE EXCEPTION 'target must be NULL or 1 to 200 characters without spaces, "/" or "*"'
            USING ERRCODE = 'invalid_parameter_value', HINT = 'Name one context, like billing, or leave it NULL for all.';
    ELSIF p_row.event_type ~ c_unseen OR p_row.source ~ c_unseen OR p_row.target ~ c_unseen THEN
        RAISE EXCEPTION 'event_type, source and target must have no characters that cannot be seen'
            USING ERRCODE = 'invalid_parameter_value', HINT = 'Write them in letters, digits, "." and "_".';
    ELSIF p_row.origin_id IS NULL AND p_row.attempts = 0 AND (CASE current_setting('server_encoding') WHEN 'UTF8' THEN
              (p_row.event_type IS NFC NORMALIZED AND p_row.source IS NFC NORMALIZED
               AND coalesce(p_row.target, '') IS NFC NORMALIZED) IS FALSE END) THEN
        -- Siblings, and what comes back from the archive, have been asked when the event was published.
        RAISE EXCEPTION 'event_type, source and target must be in the Unicode form NFC'
            USING ERRCODE = 'invalid_parameter_value', HINT = 'Write them as normalize(name, NFC) returns them.';
    ELSIF p_row.channel ~ c_unseen THEN
        RAISE EXCEPTION 'channel must have no control characters'
            USING ERRCODE = 'invalid_parameter_value', HINT = 'Name it like hot, or leave it out for the current one.';
    ELSIF octet_length(p_row.payload::text) > 524288 THEN
        RAISE EXCEPTION 'payload has % bytes of JSON text, 524288 are allowed', octet_length(p_row.payload::text)
            USING ERRCODE = 'check_violation', CONSTRAINT = 'outbox_payload_size',
                  HINT = 'Store the data elsewhere and publish a reference to it.';
    ELSIF jsonb_typeof(p_row.headers) <> 'object' THEN
        RAISE EXCEPTION 'headers must be NULL or a JSON object, not %', jsonb_typeof(p_row.headers)
            USING ERRCODE = 'invalid_parameter_value', HINT = 'Write them like {"tenant": "acme"}.';
    ELSIF octet_length(p_row.headers::text) > 65536 THEN
        RAISE EXCEPTION 'headers have % bytes of JSON text, 65536 are allowed', octet_length(p_row.headers::text)
            USING ERRCODE = 'check_violation', CONSTRAINT = 'outbox_headers_size',
                  HINT = 'Put the data into the payload.';
    END IF;
    PERFORM core.require_row(p_row);
END
$$;

-- require_row: what must be true of every row. A settled row is delivered or failed, and a leased row is in flight: every
-- reader may rely on these. An index row must stay under 2,704 bytes, whatever a writer sends. Every driver can represent the
-- years, and every claim looks at them; an event may be held until infinity. A handler's lane is its name, an event's lane
-- has a slash: they never meet. A row that has a fairness key, and no other, has the ordering key ''. Refuses as a CHECK with
-- the name would.
CREATE OR REPLACE FUNCTION core.require_row(p_row record)
RETURNS void
LANGUAGE plpgsql STABLE
SET search_path = pg_catalog, pg_temp
AS $$
DECLARE
    c_first CONSTANT timestamptz := '0001-01-02 00:00:00+00';
    c_end   CONSTANT timestamptz := '9999-12-31 00:00:00+00';
    v_rule  text;
BEGIN
    v_rule := CASE
        WHEN p_row.status NOT IN ('pending', 'in_flight', 'delivered', 'failed') THEN 'outbox_status'
        WHEN (p_row.settled_at IS NOT NULL) <> (p_row.status IN ('delivered', 'failed')) THEN 'outbox_settled'
        WHEN (p_row.lease_token IS NOT NULL) <> (p_row.status = 'in_flight')
             OR (p_row.lease_token IS NULL) <> (p_row.lease_expires_at IS NULL) THEN 'outbox_leased'
        WHEN (p_row.failed_at IS NOT NULL) <> (p_row.status = 'failed')
             OR (p_row.failure_reason IS NOT NULL) <> (p_row.status = 'failed') THEN 'outbox_failed'
        WHEN p_row.failure_reason NOT IN ('max_deliveries', 'retry_terminal', 'rejected', 'cancelled', 'expired')
            THEN 'outbox_failure_reason'
        WHEN p_row.payload IS NULL AND p_row.deleted_at IS NULL THEN 'outbox_payload_present'
        WHEN octet_length(p_row.payload::text) > 524288 THEN 'outbox_payload_size'
        WHEN octet_length(p_row.headers::text) > 65536 THEN 'outbox_headers_size'
        WHEN octet_length(p_row.channel) NOT BETWEEN 1 AND 63 THEN 'outbox_channel'
        WHEN octet_length(p_row.idempotency_key) NOT BETWEEN 1 AND 1020
             OR octet_length(p_row.dedupe_key) NOT BETWEEN 1 AND 1020 THEN 'outbox_keys'
        WHEN octet_length(p_row.trace_context) > 1020 OR octet_length(p_row.content_class) NOT BETWEEN 1 AND 800
            THEN 'outbox_texts'
        WHEN p_row.event_version < 1 OR p_row.generation < 0 OR p_row.attempts < 0 OR p_row.priority NOT BETWEEN 0 AND 2
            THEN 'outbox_numbers'
        WHEN p_row.occurred_at < c_first OR p_row.occurred_at >= c_end OR p_row.available_at < c_first
             OR p_row.available_at >= c_end AND p_row.available_at <> 'infinity'
             OR p_row.expires_at < c_first OR p_row.expires_at >= c_end THEN 'outbox_times'
        WHEN strpos(p_row.handler_name, '/') > 0 THEN 'outbox_handler_name'
        WHEN octet_length(p_row.ordering_key) > 800 OR (p_row.ordering_key = '') <> (p_row.fairness_key IS NOT NULL)
            THEN 'outbox_ordering_key'
        WHEN octet_length(p_row.fairness_key) NOT BETWEEN 1 AND 800 OR p_row.fairness_key IS NOT NULL AND p_row.ordering_key IS NULL
            THEN 'outbox_fairness_key'
    END;
    IF v_rule IS NOT NULL THEN
        RAISE EXCEPTION 'new row for relation "outbox" violates check constraint "%"', v_rule
            USING ERRCODE = 'check_violation', CONSTRAINT = v_rule, TABLE = 'outbox', SCHEMA = 'core';
    END IF;
END
$$;

-- outbox_source: a source that has a role in core.sources is written to by that role alone, by a plain INSERT as well, and its
-- keys are apart from those of others. What functions insert, as the owner, they have asked about already.
-- Every name is qualified instead of pinning the search_path, which would cost more than the rest. Until a source has an
-- owner the trigger is disabled, and an insert pays nothing.
CREATE OR REPLACE FUNCTION core.outbox_source()
RETURNS trigger
LANGUAGE plpgsql SECURITY DEFINER
AS $$
BEGIN
    IF EXISTS (SELECT FROM core.sources s WHERE s.source OPERATOR(pg_catalog.=) NEW.source) THEN
        PERFORM core.require_source(NEW.source);
    END IF;
    IF NEW.fairness_key IS NOT NULL THEN
        NEW.fairness_key := core.key_of_source(NEW.source, NEW.fairness_key);
    ELSIF NEW.ordering_key IS NOT NULL THEN
        NEW.ordering_key := core.key_of_source(NEW.source, NEW.ordering_key);
    END IF;
    RETURN NEW;
END
$$;

-- key_of_source: an ordering or fairness key as the row has it. An event that waits, fails or is many keeps back what has the same
-- key, so the keys of a source that has an owner begin with its name and a slash, which no source has in it, and those of
-- other sources must not. One that has it already stays; one that would be too long is hashed.
CREATE OR REPLACE FUNCTION core.key_of_source(p_source text, p_key text)
RETURNS text
LANGUAGE plpgsql STABLE SECURITY DEFINER
SET search_path = pg_catalog, pg_temp
AS $$
DECLARE
    v_key text := p_source || '/' || p_key;
BEGIN
    IF starts_with(p_key, p_source || '/')
       OR NOT EXISTS (SELECT FROM core.sources s WHERE s.source IN (p_source, split_part(p_key, '/', 1))) THEN
        RETURN p_key;
    ELSIF octet_length(v_key) > 800 THEN
        v_key := p_source || '/' || encode(sha256(convert_to(p_key, 'UTF8')), 'hex');
    END IF;
    IF octet_length(v_key) > 800 THEN
        RAISE EXCEPTION 'the source and the key of the event have more than 800 bytes'
            USING ERRCODE = 'check_violation', CONSTRAINT = 'outbox_ordering_key', TABLE = 'outbox', SCHEMA = 'core',
                  HINT = 'Shorten the name of the source.';
    END IF;
    RETURN v_key;
END
$$;

-- sources_owned: enables outbox_source with the first line in core.sources. The condition of a trigger is compiled for each
-- statement, which costs a tenth of an insert. The lock waits for every transaction that has written an event, and whoever
-- comes after it waits for the lock: so it is tried for a moment, again and again, and who is in its way is named.
CREATE OR REPLACE FUNCTION core.sources_owned()
RETURNS trigger
LANGUAGE plpgsql SECURITY DEFINER
SET search_path = pg_catalog, pg_temp SET lock_timeout = '50ms'
AS $$
DECLARE
    c_patience CONSTANT interval := '5 s';
    v_since    CONSTANT timestamptz := clock_timestamp();
    v_blocking text;
BEGIN
    WHILE EXISTS (SELECT FROM pg_trigger t
                  WHERE t.tgrelid = 'core.outbox'::regclass AND t.tgname = 'outbox_source' AND t.tgenabled = 'D') LOOP
        BEGIN
            ALTER TABLE core.outbox ENABLE TRIGGER outbox_source;
        EXCEPTION WHEN lock_not_available THEN
            IF clock_timestamp() - v_since > c_patience THEN
                SELECT string_agg(format('pid %s, login %s', held.pid, coalesce(a.usename::text, '?')), '; ' ORDER BY held.pid)
                INTO v_blocking
                FROM (SELECT DISTINCT l.pid FROM pg_locks l
                      WHERE l.locktype = 'relation' AND l.granted AND l.pid <> pg_backend_pid()
                        AND l.database = (SELECT d.oid FROM pg_database d WHERE d.datname = current_database())
                        AND (l.relation = 'core.outbox'::regclass OR l.relation IN (
                                SELECT i.inhrelid FROM pg_inherits i WHERE i.inhparent = 'core.outbox'::regclass))
                        AND l.mode IN ('RowExclusiveLock', 'ShareUpdateExclusiveLock', 'ShareLock', 'ShareRowExclusiveLock',
                                       'ExclusiveLock', 'AccessExclusiveLock')
                      ORDER BY l.pid LIMIT 5) held
                LEFT JOIN pg_stat_activity a ON a.pid = held.pid;
                RAISE EXCEPTION 'the first source cannot get an owner: a transaction that has written events does not end (%)',
                                coalesce(v_blocking, 'it just did')
                    USING ERRCODE = 'lock_not_available',
                          HINT = 'Wait until it ends, or end it with pg_terminate_backend(pid), and insert the line again.';
            END IF;
            PERFORM pg_sleep(0.2);  -- for those who waited behind the lock
        END;
    END LOOP;
    RETURN NULL;
END
$$;

-- require_source: a source that no role owns is open to every producer; an owned one only to its roles, and to the owner
-- of the schema. Inside a SECURITY DEFINER function current_user is its owner; who called is the role that was SET, or
-- else the login.
CREATE OR REPLACE FUNCTION core.require_source(p_source text)
RETURNS void
LANGUAGE plpgsql STABLE SECURITY DEFINER
SET search_path = pg_catalog, pg_temp
AS $$
DECLARE
    caller name := coalesce(nullif(current_setting('role'), 'none'), session_user);
BEGIN
    IF EXISTS (SELECT FROM core.sources s WHERE s.source = p_source)
       AND NOT EXISTS (SELECT FROM core.sources s WHERE s.source = p_source
                       AND pg_has_role(caller, to_regrole(quote_ident(s.role_name)), 'MEMBER'))
       AND NOT pg_has_role(caller, current_user, 'MEMBER') THEN
        RAISE EXCEPTION 'source % belongs to another role', p_source
            USING ERRCODE = 'insufficient_privilege', HINT = 'Ask the owner of the schema for a line in core.sources.';
    END IF;
END
$$;

-- outbox_notify: the bell. A NOTIFY takes a lock that is held across the commit's flush, so producers that notify cannot
-- commit together. It asks first whether a worker sleeps: a sleeping worker holds (or queues for) the channel's lock
-- exclusively. The shared lock lives until this transaction ends, when its row is visible: a worker that falls asleep
-- waits for it and then looks once more, so no wake-up is lost. See docs/architecture/waking-up.md.
-- It says that there is something to claim, and not what: every login of the database may listen.
-- A queue of notifications that is full makes the commit fail, and any login can fill it, by listening and not reading. While
-- it is half full nothing is said: workers poll. That is asked only by who would notify, once in a transaction.
-- Every name is qualified instead of pinning the search_path, which would cost as much as all the rest of it does.
CREATE OR REPLACE FUNCTION core.outbox_notify()
RETURNS trigger
LANGUAGE plpgsql
AS $$
BEGIN
    -- For two-phase commit, which refuses NOTIFY.
    IF pg_catalog.texteq(pg_catalog.current_setting('holdfast.notify', true), 'off') THEN
        RETURN NULL;
    END IF;
    IF pg_catalog.texteq(TG_ARGV[0], 'when_idle')
       AND pg_catalog.pg_try_advisory_xact_lock_shared(
               pg_catalog.hashtextextended(pg_catalog.concat('core.', NEW.channel), 0)) THEN
        RETURN NULL;
    END IF;
    -- Once per transaction and channel, however many rows it writes.
    IF pg_catalog.texteq(pg_catalog.current_setting('holdfast.rung', true), NEW.channel) THEN
        RETURN NULL;
    END IF;
    PERFORM pg_catalog.set_config('holdfast.rung', NEW.channel, true);
    IF pg_catalog.float8lt(pg_catalog.pg_notification_queue_usage(), 0.5) THEN
        PERFORM pg_catalog.pg_notify(NEW.channel, '');
    END IF;
    RETURN NULL;
END
$$;

-- --- a producer's key --------------------------------------------------------------------------------------------

-- require_key: a producer's key, and the source it belongs to.
CREATE OR REPLACE FUNCTION core.require_key(p_source text, p_key text)
RETURNS void
LANGUAGE plpgsql IMMUTABLE
SET search_path = pg_catalog, pg_temp
AS $$
BEGIN
    IF (octet_length(p_key) BETWEEN 1 AND 1020 AND octet_length(p_source) BETWEEN 1 AND 800) IS NOT TRUE THEN
        PERFORM core.refuse_argument('p_key must have 1 to 1020 bytes, p_source 1 to 800');
    END IF;
END
$$;

-- The functions below lock the key before the event, so that they never wait for each other in a circle; and they move
-- only events of the source that was asked about, because a caller chooses the id that a key is held for.

-- outbox_hold_key: a producer's key belongs to one pending event. Answers the id of the event that holds it: the new
-- one, which the caller then inserts, or the one that is there, which p_available_at (if given) reschedules.
CREATE OR REPLACE FUNCTION core.outbox_hold_key(p_source text, p_key text, p_id uuid, p_reschedule boolean, p_available_at timestamptz)
RETURNS uuid
LANGUAGE plpgsql SECURITY DEFINER
SET search_path = pg_catalog, pg_temp
AS $$
DECLARE
    holder uuid;
BEGIN
    PERFORM core.require_key(p_source, p_key);
    IF (p_id IS NOT NULL AND p_reschedule IS NOT NULL
        AND coalesce(p_available_at BETWEEN '0001-01-02 00:00:00+00' AND '9999-12-30 00:00:00+00'
                     OR p_available_at = 'infinity', true)) IS NOT TRUE THEN
        PERFORM core.refuse_argument('p_id and p_reschedule must not be NULL, p_available_at a time until the year 9999');
    END IF;
    PERFORM core.require_source(p_source);
    INSERT INTO core.outbox_keys AS k (source, dedupe_key, event_id) VALUES (p_source, p_key, p_id)
    ON CONFLICT (source, dedupe_key) DO UPDATE SET event_id = k.event_id   -- takes the row lock: one producer at a time
    RETURNING k.event_id INTO holder;
    IF holder = p_id THEN
        RETURN p_id;
    END IF;
    IF p_reschedule AND core.outbox_retime(holder, p_source, coalesce(p_available_at, now())) > 0 THEN
        RETURN holder;
    END IF;
    IF EXISTS (SELECT FROM core.outbox o WHERE o.id = holder AND o.source = p_source AND o.status = 'pending') THEN
        RETURN holder;
    END IF;
    UPDATE core.outbox_keys k SET event_id = p_id WHERE k.source = p_source AND k.dedupe_key = p_key;
    RETURN p_id;
END
$$;

-- outbox_cancel: cancels an event by its producer's key, while it is pending. Returns how many rows moved.
CREATE OR REPLACE FUNCTION core.outbox_cancel(p_source text, p_key text)
RETURNS int
LANGUAGE plpgsql SECURITY DEFINER
SET search_path = pg_catalog, pg_temp
AS $$
DECLARE
    holder       uuid;
    v_handler    text;
    v_generation bigint;
    v_attempts   int;
BEGIN
    PERFORM core.require_key(p_source, p_key);
    PERFORM core.require_source(p_source);
    SELECT k.event_id INTO holder FROM core.outbox_keys k
    WHERE k.source = p_source AND k.dedupe_key = p_key FOR UPDATE;
    UPDATE core.outbox o
    SET status = 'failed', failure_reason = 'cancelled', failed_at = now(), settled_at = now(), deleted_at = now(),
        last_error = 'cancelled by its producer', traceback = NULL
    WHERE o.id = holder AND o.source = p_source AND o.status = 'pending'
    RETURNING core.begun_for(o.handler_name, o.target, o.event_type, o.claimed_by), o.generation, o.attempts
    INTO v_handler, v_generation, v_attempts;
    IF NOT FOUND THEN
        RETURN 0;   -- a running event keeps its key: it may be pending again
    END IF;
    IF v_attempts > 0 THEN
        PERFORM core.rollup_count(v_handler, v_generation, 'cancelled', 1);
    END IF;
    DELETE FROM core.outbox_keys k WHERE k.source = p_source AND k.dedupe_key = p_key;
    RETURN 1;
END
$$;

-- outbox_reschedule: likewise, to another time.
CREATE OR REPLACE FUNCTION core.outbox_reschedule(p_source text, p_key text, p_available_at timestamptz)
RETURNS int
LANGUAGE plpgsql SECURITY DEFINER
SET search_path = pg_catalog, pg_temp
AS $$
DECLARE
    holder uuid;
BEGIN
    PERFORM core.require_key(p_source, p_key);
    PERFORM core.require_source(p_source);
    IF (p_available_at BETWEEN '0001-01-02 00:00:00+00' AND '9999-12-30 00:00:00+00') IS NOT TRUE THEN
        PERFORM core.refuse_argument('p_available_at must be a time until the year 9999');
    END IF;
    SELECT k.event_id INTO holder FROM core.outbox_keys k
    WHERE k.source = p_source AND k.dedupe_key = p_key FOR UPDATE;
    RETURN core.outbox_retime(holder, p_source, p_available_at);
END
$$;

-- outbox_retime: a pending event to another time, now at the earliest. Workers look again: it may be due earlier than they
-- sleep, or lie below their marks. Like the bell, it is silent in a transaction that opted out for two-phase commit.
CREATE OR REPLACE FUNCTION core.outbox_retime(p_id uuid, p_source text, p_available_at timestamptz)
RETURNS int
LANGUAGE plpgsql SECURITY DEFINER
SET search_path = pg_catalog, pg_temp
AS $$
DECLARE
    v_channel text;
BEGIN
    UPDATE core.outbox o SET available_at = greatest(p_available_at, now())
    WHERE o.id = p_id AND o.source = p_source AND o.status = 'pending'
    RETURNING o.channel INTO v_channel;
    IF NOT FOUND THEN
        RETURN 0;
    END IF;
    IF current_setting('holdfast.notify', true) IS DISTINCT FROM 'off' THEN
        PERFORM core.wake(v_channel, 'rescan');
    END IF;
    RETURN 1;
END
$$;
