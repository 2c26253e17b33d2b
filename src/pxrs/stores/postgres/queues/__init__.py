"""Work queues on PostgreSQL: each call is one statement that calls a function of the database."""
