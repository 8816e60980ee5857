-- Elements of a job's results by the way in which they were computed, as JSON; null where that does not depend on the data.
ALTER TABLE jobs ADD COLUMN elements TEXT;
