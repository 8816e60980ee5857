-- Whose an array or a job is: the id of an API key; '' where the server has none. An Idempotency-Key belongs to its
-- owner too: two owners may use the same one.
ALTER TABLE arrays ADD COLUMN owner TEXT NOT NULL DEFAULT '';
ALTER TABLE jobs ADD COLUMN owner TEXT NOT NULL DEFAULT '';

CREATE INDEX jobs_by_owner ON jobs (owner, id);
CREATE INDEX jobs_by_finish ON jobs (finished_at) WHERE finished_at IS NOT NULL;

CREATE TABLE owned_idempotency (
    owner       TEXT NOT NULL,
    key         TEXT NOT NULL,
    digest      TEXT NOT NULL,
    job_id      TEXT NOT NULL,
    created_at  REAL NOT NULL,
    PRIMARY KEY (owner, key)
) WITHOUT ROWID;
INSERT INTO owned_idempotency (owner, key, digest, job_id, created_at)
    SELECT '', key, digest, job_id, created_at FROM idempotency;
DROP TABLE idempotency;
ALTER TABLE owned_idempotency RENAME TO idempotency;
