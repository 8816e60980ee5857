-- Uploads in parts that are not arrays yet: what was declared, where the bytes lie, which of them have come (JSON list
-- of [start, end) of the body), and what of the .npy header is known. State: open, sealed (its bytes are being put into
-- the machine's order: useless after a crash) or complete (the array of array_id, kept for those who ask again).
CREATE TABLE uploads (
    id           TEXT PRIMARY KEY,
    owner        TEXT NOT NULL,
    state        TEXT NOT NULL DEFAULT 'open',
    media_type   TEXT NOT NULL,
    length       INTEGER,
    head         BLOB NOT NULL,
    received     TEXT NOT NULL,
    created_at   REAL NOT NULL,
    ttl_s        REAL,
    array_id     TEXT,
    dtype        TEXT,
    shape        TEXT,
    memory_order TEXT,
    nbytes       INTEGER,
    byteswap     INTEGER,
    kept_s       REAL,
    extent       TEXT
) WITHOUT ROWID;
