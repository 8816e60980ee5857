"""The SQLite database: its writer, its statements, its migrations."""
