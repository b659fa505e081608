-- Partitions of core.outbox by time, which an operator may ask for (functions/partitions.sql). The table stays plain here.

-- The one row is also the turn of who makes or drops partitions: the session's that has locked it.
CREATE TABLE core.partitioning (
    one             boolean PRIMARY KEY DEFAULT true CHECK (one),
    every           text    NOT NULL DEFAULT 'week' CHECK (every IN ('day', 'week')),
    -- Whether retention has ever left rows without their contents, which stay for good and which no index finds.
    keeps_metadata  boolean NOT NULL
);
-- Only an audited change of a policy can have made it so.
INSERT INTO core.partitioning (keeps_metadata)
SELECT EXISTS (SELECT FROM core.audit a WHERE a.action = 'retention.set');
