"""Overview of the server for people: what it does now, its last hour, and a stream of both."""
