-- The traceparent of the request that submitted a job, or once it is over of the job's own span; NULL: neither is traced.
ALTER TABLE jobs ADD COLUMN trace TEXT;
