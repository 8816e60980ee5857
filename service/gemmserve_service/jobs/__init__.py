"""Jobs: accepted, kept in the database, run, recorded, recovered after a restart, forgotten."""
