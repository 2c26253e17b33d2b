"""SQLite: several processes of one host on one file.

Calls of the seams come in; statements go out to the file, and locks, sessions and wake-ups to the
folder beside it. Only `stores.open` imports it, and `sources` its failures and checks of links.
"""
