-- name: load
SELECT * FROM uploads ORDER BY id

-- name: put
INSERT INTO uploads (id, owner, state, media_type, length, head, received, created_at, ttl_s,
                     array_id, dtype, shape, memory_order, nbytes, byteswap, kept_s, extent, name, labels)
VALUES (:id, :owner, :state, :media_type, :length, :head, :received, :created_at, :ttl_s,
        :array_id, :dtype, :shape, :memory_order, :nbytes, :byteswap, :kept_s, :extent, :name, :labels)
ON CONFLICT (id) DO UPDATE SET
    state = excluded.state, length = excluded.length, head = excluded.head, received = excluded.received,
    array_id = excluded.array_id, dtype = excluded.dtype, shape = excluded.shape, memory_order = excluded.memory_order,
    nbytes = excluded.nbytes, byteswap = excluded.byteswap, kept_s = excluded.kept_s, extent = excluded.extent

-- name: complete
UPDATE uploads SET state = 'complete', extent = NULL WHERE id = :id

-- name: seal
UPDATE uploads SET state = 'sealed' WHERE id = :id

-- name: remove
DELETE FROM uploads WHERE id = :id
