"""Tables and views of the user's, each database in its own module.

`table.py` has what they share: which rows are final, and how a row becomes a message. A module here
knows one database: its statements, how it shows who is writing, and what its errors mean.
"""
