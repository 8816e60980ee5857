-- A page of each index is written again with every job that it has. So they have the jobs that are looked for by them and
-- no others: those in another state than most, those of servers with API keys. Old jobs are found by their ids, which
-- sort by time.
DROP INDEX jobs_by_state;
DROP INDEX jobs_by_owner;
DROP INDEX jobs_by_finish;
CREATE INDEX jobs_not_succeeded ON jobs (state, id) WHERE state <> 'succeeded';
CREATE INDEX jobs_of_owners ON jobs (owner, id) WHERE owner <> '';
