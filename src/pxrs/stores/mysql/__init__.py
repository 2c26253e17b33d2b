"""Coordination and work queues in MariaDB or MySQL, in SQL text through PyMySQL.

`oracle.py` renders the same statements for Oracle; they were never executed there. SQLAlchemy is
for callers' own transactions only: `atomic.py`.
"""
