-- How many workers were lost while they had the job: what it fails for, however often the server itself was restarted.
ALTER TABLE jobs ADD COLUMN crashes INTEGER NOT NULL DEFAULT 0;
