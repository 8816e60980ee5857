"""The SQLite database: one writer thread, its statements, its migrations."""
