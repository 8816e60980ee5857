-- What became of each step of a program, as JSON.
ALTER TABLE jobs ADD COLUMN steps TEXT;
