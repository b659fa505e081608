-- Refuses a schema that another migration 0001 has made than the one of this script, as `holdfast migrate apply` does.
DO $$
BEGIN
    IF NOT EXISTS (SELECT FROM core.migrations m
                   WHERE m.version = 1 AND m.checksum = current_setting('holdfast.baseline')) THEN
        RAISE EXCEPTION 'another migration 0001 has made the schema %', 'core'
            USING ERRCODE = 'HF001', HINT = 'No schema is converted before 1.0: holdfast migrate apply says what to do.';
    END IF;
END
$$;
