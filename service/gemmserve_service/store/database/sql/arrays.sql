-- name: insert
INSERT INTO arrays (id, dtype, shape, memory_order, nbytes, sha256, created_at, expires_at, extent, owner,
    written, job, name, labels, tier)
VALUES (:id, :dtype, :shape, :memory_order, :nbytes, :sha256, :created_at, :expires_at, :extent, :owner, :written, :job,
    :name, :labels, :tier)

-- name: load
SELECT * FROM arrays ORDER BY id

-- name: set_sha256
UPDATE arrays SET sha256 = :sha256, npy_sha256 = :npy_sha256 WHERE id = :id

-- name: set_written
UPDATE arrays SET written = :written, extent = coalesce(:extent, extent), tier = coalesce(:tier, tier) WHERE id = :id

-- name: set_state
UPDATE arrays SET state = :state WHERE id = :id

-- name: forget_extent
UPDATE arrays SET extent = NULL, written = 1, tier = NULL WHERE id = :id

-- name: remove
DELETE FROM arrays WHERE id = :id

-- name: set_expiry
UPDATE arrays SET expires_at = :expires_at WHERE id = :id

-- name: purge_expired
DELETE FROM arrays WHERE state = 'expired' AND extent IS NULL AND tier IS NULL AND written = 1 AND expires_at < :before

-- name: shift
UPDATE arrays SET expires_at = expires_at + :seconds WHERE expires_at IS NOT NULL
