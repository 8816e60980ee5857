"""Workers that join over TCP, as the front sees them: links, their data exchanges, and the tasks that each has."""
