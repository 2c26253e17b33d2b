"""Coordination in any SQL database, through SQLAlchemy: MariaDB and MySQL; Oracle as compiled."""
