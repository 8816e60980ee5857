-- Results that are on a device and not in their extent yet: written is 0, and job names the job that they can be computed
-- from again; -1: they could not be, and are lost.
ALTER TABLE arrays ADD COLUMN written INTEGER NOT NULL DEFAULT 1;
ALTER TABLE arrays ADD COLUMN job TEXT;

CREATE INDEX arrays_unwritten ON arrays (job) WHERE written = 0;
