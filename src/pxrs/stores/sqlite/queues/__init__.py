"""Work queues on SQLite: one row per item, one writer for all."""
