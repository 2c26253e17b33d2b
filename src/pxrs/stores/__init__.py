"""The seams (`api`), the URLs that open them (`open`), and one folder for each engine.

An engine keeps keys, versions, batches and items, and reports the outcome of each write. Rooms
above see the seams only; engines do not import each other.
"""
