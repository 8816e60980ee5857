-- name: insert
INSERT INTO jobs (id, op, state, request, created_at, deadline_at, owner, trace, attempt, started_at)
VALUES (:id, :op, :state, :request, :created_at, :deadline_at, :owner, :trace, :attempt, :started_at)

-- name: insert_ended
INSERT INTO jobs (id, op, state, request, created_at, deadline_at, owner, trace, attempt, started_at, finished_at, result,
    error, timings, algorithm, residual, mismatch, elements, steps)
VALUES (:id, :op, :state, :request, :created_at, :deadline_at, :owner, :trace, :attempt, :started_at, :finished_at, :result,
    :error, :timings, :algorithm, :residual, :mismatch, :elements, :steps)

-- name: start
UPDATE jobs SET state = 'running', attempt = :attempt, started_at = :started_at
WHERE id = :id AND state IN ('queued', 'running')

-- name: requeue
UPDATE jobs SET state = 'queued', attempt = :attempt, crashes = :crashes, started_at = NULL
WHERE id = :id AND state IN ('queued', 'running')

-- name: finish
UPDATE jobs SET state = :state, attempt = :attempt, started_at = :started_at, finished_at = :finished_at,
    result = :result, error = :error, timings = :timings, algorithm = :algorithm, residual = :residual, mismatch = :mismatch,
    elements = :elements, steps = :steps, trace = :trace
WHERE id = :id AND state IN ('queued', 'running')

-- name: recover
UPDATE jobs SET state = 'queued', started_at = NULL WHERE state = 'running' AND state <> 'succeeded'

-- name: unfinished
SELECT * FROM jobs WHERE state IN ('queued', 'running') AND state <> 'succeeded' ORDER BY id

-- name: get
SELECT * FROM jobs WHERE id = :id

-- name: page
SELECT id, op, state, attempt, created_at, started_at, finished_at, result, error, timings, algorithm, residual, mismatch,
    elements, owner, trace, NULL AS steps, CASE op WHEN 'program' THEN NULL ELSE request END AS request
FROM jobs WHERE id < :before ORDER BY id DESC LIMIT :limit

-- name: purge
DELETE FROM jobs WHERE id > :after AND id < :until AND finished_at < :before
    AND id NOT IN (SELECT job FROM arrays WHERE written = 0 AND job IS NOT NULL)

-- name: succeeded
SELECT * FROM jobs WHERE id IN (SELECT value FROM json_each(:ids)) AND state = 'succeeded' ORDER BY id

-- name: set_error
UPDATE jobs SET error = :error WHERE id = :id

-- name: remember_key
INSERT INTO idempotency (owner, key, digest, job_id, created_at)
VALUES (:owner, :key, :digest, :job_id, :created_at)

-- name: keys
SELECT * FROM idempotency ORDER BY created_at, rowid

-- name: purge_keys
DELETE FROM idempotency WHERE created_at < :before

-- name: shift
UPDATE jobs SET deadline_at = deadline_at + :seconds, finished_at = finished_at + :seconds

-- name: shift_keys
UPDATE idempotency SET created_at = created_at + :seconds
