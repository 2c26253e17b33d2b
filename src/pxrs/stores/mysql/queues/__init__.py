"""Work queues on MariaDB and MySQL; for Oracle the statements are rendered, not executed."""
