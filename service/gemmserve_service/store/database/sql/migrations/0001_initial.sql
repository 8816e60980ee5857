-- State of an array: live, deleted or expired. A deleted array whose bytes a job still needs keeps its row until the
-- job ends; an expired one keeps it (without an extent) so that its id is answered with 410.
CREATE TABLE arrays (
    id          TEXT PRIMARY KEY,
    dtype       TEXT NOT NULL,
    shape       TEXT NOT NULL,
    memory_order TEXT NOT NULL,
    nbytes      INTEGER NOT NULL,
    sha256      TEXT,
    created_at  REAL NOT NULL,
    expires_at  REAL,
    extent      TEXT,
    state       TEXT NOT NULL DEFAULT 'live'
) WITHOUT ROWID;

CREATE TABLE jobs (
    id          TEXT PRIMARY KEY,
    op          TEXT NOT NULL,
    state       TEXT NOT NULL,
    request     TEXT NOT NULL,
    attempt     INTEGER NOT NULL DEFAULT 0,
    created_at  REAL NOT NULL,
    deadline_at REAL,
    started_at  REAL,
    finished_at REAL,
    result      TEXT,
    error       TEXT,
    timings     TEXT,
    algorithm   TEXT,
    residual    REAL
) WITHOUT ROWID;

CREATE INDEX jobs_by_state ON jobs (state, id);

CREATE TABLE idempotency (
    key         TEXT PRIMARY KEY,
    digest      TEXT NOT NULL,
    job_id      TEXT NOT NULL,
    created_at  REAL NOT NULL
) WITHOUT ROWID;
