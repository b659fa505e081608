"""The control's SQL, in the order of an event's life."""

BATCH = 500
INSERT = """
INSERT INTO core.outbox (id, event_type, source, payload, idempotency_key, channel, generation, occurred_at)
VALUES ($1, 'order.placed', 'shop', $2, $3, 'outbox_default', 0, now())
"""
INSERT_MANY = """
INSERT INTO core.outbox (id, event_type, source, payload, idempotency_key, channel, generation, occurred_at)
SELECT id, 'order.placed', 'shop', payload, key, 'outbox_default', 0, now()
FROM unnest($1::uuid[], $2::jsonb[], $3::text[]) AS e (id, payload, key)
"""
# What is updated by hand is checked by a trigger; what Holdfast's functions update is not.
UNCHECKED = "ALTER TABLE core.outbox DISABLE TRIGGER outbox_changed"
CLAIM = """
WITH due AS MATERIALIZED (
    SELECT id FROM core.outbox
    WHERE settled_at IS NULL AND ordering_key IS NULL AND channel = 'outbox_default' AND generation = 0
      AND route = '*/order.placed' AND priority = 1 AND available_at <= now()
      AND (status = 'pending' OR lease_expires_at < now()) AND (available_at, id) >= ($4, $5)
    ORDER BY available_at, id LIMIT $1 FOR UPDATE SKIP LOCKED)
UPDATE core.outbox o
SET status = 'in_flight', attempts = attempts + 1, claimed_by = $2, lease_token = $3,
    lease_expires_at = now() + interval '30 s'
WHERE o.id = ANY (ARRAY(SELECT id FROM due))
RETURNING o.id, event_type, event_version, occurred_at, source, target, domain_id, payload, idempotency_key,
          trace_context, attempts, available_at
"""
SETTLE = """
WITH done AS (
    UPDATE core.outbox
    SET status = 'delivered', delivered_at = now(), settled_at = now(), handler_name = 'bench.handle',
        lease_token = NULL, lease_expires_at = NULL
    WHERE id = ANY ($1::uuid[]) AND lease_token = $2 RETURNING idempotency_key)
INSERT INTO core.event_handled (handler_name, idempotency_key, source)
SELECT 'bench.handle', idempotency_key, 'shop' FROM done
"""

# The least that keeps rows: no inbox. The rules of the table are in a trigger, which is off here.
SETTLE_LEAN = """
UPDATE core.outbox
SET status = 'delivered', delivered_at = now(), settled_at = now(), handler_name = 'bench.handle',
    lease_token = NULL, lease_expires_at = NULL
WHERE id = ANY ($1::uuid[]) AND lease_token = $2
"""

# A transaction per event.
ENTER = """
SELECT 1 FROM core.outbox WHERE id = $1 AND lease_token = $2 AND status = 'in_flight' FOR NO KEY UPDATE
"""
INBOX = (
    "INSERT INTO core.event_handled (handler_name, idempotency_key, source) VALUES ('bench.handle', $1, 'shop') "
    "ON CONFLICT DO NOTHING"
)
LEAVE = """
UPDATE core.outbox
SET status = 'delivered', delivered_at = now(), settled_at = now(), handler_name = 'bench.handle',
    lease_token = NULL, lease_expires_at = NULL
WHERE id = $1 AND lease_token = $2 AND status = 'in_flight'
"""

# Events that fail, for good or for the first time.
FAIL = """
UPDATE core.outbox
SET status = 'failed', failed_at = now(), settled_at = now(), first_failed_at = now(),
    failure_reason = 'retry_terminal',
    last_error = $3, error_signature = 'x', handler_name = 'bench.handle', lease_token = NULL, lease_expires_at = NULL
WHERE id = ANY ($1::uuid[]) AND lease_token = $2
"""
RETRY = """
UPDATE core.outbox
SET status = 'pending', available_at = now() + interval '1 ms', first_failed_at = now(), last_error = $3,
    handler_name = 'bench.handle', lease_token = NULL, lease_expires_at = NULL
WHERE id = ANY ($1::uuid[]) AND lease_token = $2
"""

# Several handlers per event.
SPLIT = """
WITH origin AS MATERIALIZED (
    SELECT * FROM core.outbox
    WHERE settled_at IS NULL AND ordering_key IS NULL AND channel = 'outbox_default' AND generation = 0
      AND route = '*/order.placed' AND priority = 1 AND available_at <= now() AND status = 'pending'
    ORDER BY available_at, id LIMIT $1 FOR UPDATE SKIP LOCKED),
sibling AS (
    INSERT INTO core.outbox (id, origin_id, handler_name, event_type, event_version, occurred_at, source, target,
                             content_class, channel, generation, payload, idempotency_key)
    SELECT core.sibling_id(o.id, h, ''), o.id, h, event_type, event_version, occurred_at, source, target,
           content_class, channel, generation, payload, idempotency_key
    FROM origin o CROSS JOIN unnest($2::text[]) AS h ON CONFLICT (id) DO NOTHING)
UPDATE core.outbox SET status = 'delivered', handler_name = '*', delivered_at = now(), settled_at = now()
WHERE id = ANY (ARRAY(SELECT id FROM origin))
"""
SETTLE_SIBLINGS = """
WITH done AS (
    UPDATE core.outbox
    SET status = 'delivered', delivered_at = now(), settled_at = now(), lease_token = NULL, lease_expires_at = NULL
    WHERE id = ANY ($1::uuid[]) AND lease_token = $2 RETURNING handler_name, idempotency_key)
INSERT INTO core.event_handled (handler_name, idempotency_key, source)
SELECT handler_name, idempotency_key, 'shop' FROM done
"""

# What a look at the state needs to know, by the same partial indexes and with the same limits.
STATE = """
SELECT count(*) FILTER (WHERE o.status = 'pending'), count(*) FILTER (WHERE o.status = 'in_flight'),
       (SELECT count(*) FROM (SELECT FROM core.outbox WHERE failed_at IS NOT NULL AND deleted_at IS NULL
                              ORDER BY failed_at LIMIT 100000) f)
FROM (SELECT status FROM core.outbox WHERE settled_at IS NULL AND ordering_key IS NULL LIMIT 100000) o
"""

# What a broker has confirmed, and what was taken from it.
RELAYED = """
UPDATE core.outbox
SET status = 'delivered', delivered_at = now(), settled_at = now(), handler_name = 'bench.relay', lease_token = NULL,
    lease_expires_at = NULL
WHERE id = ANY ($1::uuid[]) AND lease_token = $2
"""
TAKEN = """
INSERT INTO core.event_handled (handler_name, idempotency_key, source)
SELECT 'bench.handle', key, source FROM unnest($1::text[], $2::text[]) AS t (key, source) ON CONFLICT DO NOTHING
"""
