-- Seconds of device time by owner ('' where the server has no API keys) and day (days since 1970, UTC).
CREATE TABLE device_use (
    owner       TEXT NOT NULL,
    day         INTEGER NOT NULL,
    seconds     REAL NOT NULL,
    PRIMARY KEY (owner, day)
) WITHOUT ROWID;
