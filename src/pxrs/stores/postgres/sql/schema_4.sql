-- A unit of work is remembered until its committer knows what became of it. One that was given up
-- (`void`) has a record too, which is in its way when it comes.
ALTER TABLE @.pxrs_queue_commits ADD COLUMN void bool NOT NULL DEFAULT false;
UPDATE @.pxrs_queue_commits c SET tx = c.tx || '#' || c.n WHERE EXISTS (
    SELECT 1 FROM @.pxrs_queue_commits o
    WHERE o.session = c.session AND o.tx = c.tx AND o.n < c.n);
DROP INDEX @.pxrs_queue_commits_session;
CREATE UNIQUE INDEX pxrs_queue_commits_unit ON @.pxrs_queue_commits (session, tx);

-- Up to version 3 a session was not noted as the holder of what it took from a queue that was made
-- again under an old name: nobody would ever have freed it.
INSERT INTO @.pxrs_queue_holders
    SELECT DISTINCT i.queue, i.session FROM @.pxrs_queue_items i
    WHERE i.state = 2 AND i.session IS NOT NULL ON CONFLICT DO NOTHING;

-- As versions up to 3 had it: it knew by the server's clock since when the caller was in touch.
DROP FUNCTION IF EXISTS @.pxrs_reap(text[], timestamptz, timestamptz);
