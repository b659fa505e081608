-- Publishing, on the database's side: what happens when a row is inserted into core.outbox, and what a producer does with
-- its pending events afterwards. The statements of producers stand in ../publish.sql.
--
-- Three triggers of core.outbox call the first functions. Migrations make them, with the conditions under which they do;
-- ../notify.sql makes the bell anew:
--
--   BEFORE INSERT     outbox_fill      checks what the caller wrote, and fills in its key
--   BEFORE INSERT     outbox_source    refuses a source that belongs to another role; enabled once a source has an owner
--   AFTER, at commit  outbox_bell      calls outbox_notify, which wakes a sleeping worker

-- outbox_fill: a writer in another language names event_type, source and payload; the key defaults to the id, which a
-- column default cannot say. What never changes after the insert is checked here and not by a CHECK, because a CHECK runs
-- on every update, and this one would read large payloads back from storage each time.
CREATE OR REPLACE FUNCTION core.outbox_fill()
RETURNS trigger
LANGUAGE plpgsql
SET search_path = pg_catalog, pg_temp
AS $$
DECLARE
    -- As in is_name, which a producer may not call.
    c_unseen CONSTANT text :=
        '[[:cntrl:]\u007f-\u009f\u00ad\u0600-\u0605\u061c\u06dd\u070f\u0890\u0891\u08e2\u180e\u200b-\u200f\u2028-\u202e\u2060-\u206f'
        '\ufeff\ufff9-\ufffb\U000110bd\U000110cd\U00013430-\U0001343f\U0001bca0-\U0001bca3\U0001d173-\U0001d17a\U000e0000-\U000e007f]';
BEGIN
    IF jsonb_typeof(NEW.payload) IS DISTINCT FROM 'object' THEN
        RAISE EXCEPTION 'payload must be a JSON object, not %', coalesce(jsonb_typeof(NEW.payload), 'NULL')
            USING ERRCODE = 'invalid_parameter_value', HINT = 'Wrap the value: {"value": ...}.';
    ELSIF NEW.event_type !~ '^[^/*[:space:][:cntrl:]]+$' OR char_length(NEW.event_type) > 200 THEN
        RAISE EXCEPTION 'event_type must be 1 to 200 characters without spaces, "/" or "*"'
            USING ERRCODE = 'invalid_parameter_value', HINT = 'Write it like order.placed.';
    ELSIF NEW.source !~ '^[^/*[:space:][:cntrl:]]+$' OR char_length(NEW.source) > 200 THEN
        RAISE EXCEPTION 'source must be 1 to 200 characters without spaces, "/" or "*"'
            USING ERRCODE = 'invalid_parameter_value', HINT = 'Name the producing context, like shop.';
    ELSIF NEW.target !~ '^[^/*[:space:][:cntrl:]]+$' OR char_length(NEW.target) > 200 THEN
        RAISE EXCEPTION 'target must be NULL or 1 to 200 characters without spaces, "/" or "*"'
            USING ERRCODE = 'invalid_parameter_value', HINT = 'Name one context, like billing, or leave it NULL for all.';
    ELSIF NEW.event_type ~ c_unseen OR NEW.source ~ c_unseen OR NEW.target ~ c_unseen THEN
        RAISE EXCEPTION 'event_type, source and target must have no characters that cannot be seen'
            USING ERRCODE = 'invalid_parameter_value', HINT = 'Write them in letters, digits, "." and "_".';
    ELSIF NEW.channel ~ c_unseen THEN
        RAISE EXCEPTION 'channel must have no control characters'
            USING ERRCODE = 'invalid_parameter_value', HINT = 'Name it like hot, or leave it out for the current one.';
    ELSIF octet_length(NEW.payload::text) > 524288 THEN
        RAISE EXCEPTION 'payload has % bytes of JSON text, 524288 are allowed', octet_length(NEW.payload::text)
            USING ERRCODE = 'check_violation', CONSTRAINT = 'outbox_payload_size',
                  HINT = 'Store the data elsewhere and publish a reference to it.';
    ELSIF jsonb_typeof(NEW.headers) <> 'object' THEN
        RAISE EXCEPTION 'headers must be NULL or a JSON object, not %', jsonb_typeof(NEW.headers)
            USING ERRCODE = 'invalid_parameter_value', HINT = 'Write them like {"tenant": "acme"}.';
    ELSIF octet_length(NEW.headers::text) > 65536 THEN
        RAISE EXCEPTION 'headers have % bytes of JSON text, 65536 are allowed', octet_length(NEW.headers::text)
            USING ERRCODE = 'check_violation', CONSTRAINT = 'outbox_headers_size',
                  HINT = 'Put the data into the payload.';
    END IF;
    NEW.idempotency_key := coalesce(NEW.idempotency_key, NEW.id::text);
    RETURN NEW;
END
$$;

-- outbox_source: a source that has a role in core.sources is written to by that role alone, by a plain INSERT as well. What
-- functions insert, as the owner, they have asked about already.
-- Every name is qualified instead of pinning the search_path, which would cost more than the rest. Where no source has an
-- owner, the table has no pages, and asking for its size is all that an insert pays.
CREATE OR REPLACE FUNCTION core.outbox_source()
RETURNS trigger
LANGUAGE plpgsql SECURITY DEFINER
AS $$
BEGIN
    IF EXISTS (SELECT FROM core.sources s WHERE s.source OPERATOR(pg_catalog.=) NEW.source) THEN
        PERFORM core.require_source(NEW.source);
    END IF;
    RETURN NEW;
END
$$;

-- sources_owned: enables outbox_source with the first line in core.sources. The condition of a trigger is compiled for each
-- statement, which costs a tenth of an insert.
CREATE OR REPLACE FUNCTION core.sources_owned()
RETURNS trigger
LANGUAGE plpgsql SECURITY DEFINER
SET search_path = pg_catalog, pg_temp SET lock_timeout = '5s'
AS $$
BEGIN
    IF EXISTS (SELECT FROM pg_trigger t
               WHERE t.tgrelid = 'core.outbox'::regclass AND t.tgname = 'outbox_source' AND t.tgenabled = 'D') THEN
        ALTER TABLE core.outbox ENABLE TRIGGER outbox_source;
    END IF;
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
    PERFORM pg_catalog.set_config('holdfast.rung', NEW.channel, true), pg_catalog.pg_notify(NEW.channel, '');
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
    holder uuid;
BEGIN
    PERFORM core.require_key(p_source, p_key);
    PERFORM core.require_source(p_source);
    SELECT k.event_id INTO holder FROM core.outbox_keys k
    WHERE k.source = p_source AND k.dedupe_key = p_key FOR UPDATE;
    UPDATE core.outbox o
    SET status = 'failed', failure_reason = 'cancelled', failed_at = now(), settled_at = now(), deleted_at = now(),
        last_error = 'cancelled by its producer', traceback = NULL
    WHERE o.id = holder AND o.source = p_source AND o.status = 'pending';
    IF NOT FOUND THEN
        RETURN 0;   -- a running event keeps its key: it may be pending again
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

-- outbox_retime: a pending event to another time. Workers look again: it may be due earlier than they sleep, or lie below
-- their marks. Like the bell, it is silent in a transaction that opted out for two-phase commit.
CREATE OR REPLACE FUNCTION core.outbox_retime(p_id uuid, p_source text, p_available_at timestamptz)
RETURNS int
LANGUAGE plpgsql SECURITY DEFINER
SET search_path = pg_catalog, pg_temp
AS $$
DECLARE
    v_channel text;
BEGIN
    UPDATE core.outbox o SET available_at = p_available_at
    WHERE o.id = p_id AND o.source = p_source AND o.status = 'pending'
    RETURNING o.channel INTO v_channel;
    IF NOT FOUND THEN
        RETURN 0;
    END IF;
    IF current_setting('holdfast.notify', true) IS DISTINCT FROM 'off' THEN
        PERFORM pg_notify(v_channel, 'rescan');
    END IF;
    RETURN 1;
END
$$;
