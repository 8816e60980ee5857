-- The residual of a first result that was wrong and computed again.
ALTER TABLE jobs ADD COLUMN mismatch REAL;
