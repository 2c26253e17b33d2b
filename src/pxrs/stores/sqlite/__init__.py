"""SQLite: several processes of one host on one file."""
