-- name: device_use_since
SELECT owner, day, seconds FROM device_use WHERE day >= :day

-- name: add_device_use
INSERT INTO device_use (owner, day, seconds) VALUES (:owner, :day, :seconds)
ON CONFLICT (owner, day) DO UPDATE SET seconds = seconds + excluded.seconds

-- name: forget_device_use
DELETE FROM device_use WHERE day < :before
