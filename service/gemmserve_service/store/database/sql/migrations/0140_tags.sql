-- The name of an array, and its labels as a JSON object; NULL: none. Of an upload in parts: those of the array to be.
ALTER TABLE arrays ADD COLUMN name TEXT;
ALTER TABLE arrays ADD COLUMN labels TEXT;
ALTER TABLE uploads ADD COLUMN name TEXT;
ALTER TABLE uploads ADD COLUMN labels TEXT;
