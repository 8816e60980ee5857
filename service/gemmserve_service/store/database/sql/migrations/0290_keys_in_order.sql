-- Keys are looked up in memory, and are random: in their own order each would be written to a page of its own, which is
-- to be read first. In the order in which they came they follow each other; of a key that came again the last row counts.
CREATE TABLE keys_in_order (
    owner       TEXT NOT NULL,
    key         TEXT NOT NULL,
    digest      TEXT NOT NULL,
    job_id      TEXT NOT NULL,
    created_at  REAL NOT NULL
);
INSERT INTO keys_in_order (owner, key, digest, job_id, created_at)
    SELECT owner, key, digest, job_id, created_at FROM idempotency ORDER BY created_at;
DROP TABLE idempotency;
ALTER TABLE keys_in_order RENAME TO idempotency;
