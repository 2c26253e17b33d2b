"""Work queues on PostgreSQL: each call is one statement, done by a function in the database."""
