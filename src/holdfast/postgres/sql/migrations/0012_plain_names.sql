-- Names of plain characters pass at once. Whether others can be seen, core.outbox_fill asks: what the condition says is
-- read anew for each statement, so it has to be short. Rows that are there keep their names.
CREATE OR REPLACE TRIGGER outbox_fill BEFORE INSERT ON core.outbox FOR EACH ROW
    WHEN (NEW.idempotency_key IS NULL
          OR jsonb_typeof(NEW.payload) IS DISTINCT FROM 'object'
          OR NEW.event_type ~ '[^!-)+-.0-~]' OR char_length(NEW.event_type) NOT BETWEEN 1 AND 200
          OR NEW.source ~ '[^!-)+-.0-~]' OR char_length(NEW.source) NOT BETWEEN 1 AND 200
          OR NEW.target ~ '[^!-)+-.0-~]' OR char_length(NEW.target) NOT BETWEEN 1 AND 200
          OR NEW.channel ~ '[^ -~]'
          OR octet_length(NEW.payload::text) > 524288
          OR jsonb_typeof(NEW.headers) <> 'object' OR octet_length(NEW.headers::text) > 65536)
    EXECUTE FUNCTION core.outbox_fill();
