-- SHA-256 of the chunks of an array's object in the tier, one behind the other; NULL: it has none. With an extent its bytes
-- are in both places, without one in the tier alone.
ALTER TABLE arrays ADD COLUMN tier BLOB;
-- Ids of arrays that are gone, and whose objects are to be deleted.
CREATE TABLE tier_garbage (id TEXT PRIMARY KEY) WITHOUT ROWID;
-- Name of this data directory, by which the tier knows whose objects it has.
CREATE TABLE tier_server (name TEXT PRIMARY KEY) WITHOUT ROWID;
