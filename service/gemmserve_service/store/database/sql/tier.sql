-- name: set_tier
UPDATE arrays SET tier = :tier, extent = CASE WHEN :gone THEN NULL ELSE extent END WHERE id = :id

-- name: set_extent
UPDATE arrays SET extent = :extent WHERE id = :id

-- name: forget_extents
UPDATE arrays SET extent = NULL WHERE id = :id AND tier IS NOT NULL

-- name: add_garbage
INSERT OR IGNORE INTO tier_garbage (id) VALUES (:id)

-- name: garbage
SELECT id FROM tier_garbage ORDER BY id

-- name: remove_garbage
DELETE FROM tier_garbage WHERE id = :id

-- name: server
SELECT name FROM tier_server

-- name: set_server
INSERT INTO tier_server (name) VALUES (:name)

-- name: known
SELECT 1 FROM arrays WHERE id = :id
