"""Work queues on MariaDB and MySQL; Oracle as compiled."""
