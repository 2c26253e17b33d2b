"""PostgreSQL through psycopg 3: coordination, messages and work queues in one schema.

Calls of the seams come in; statements go out, on connections of its own or on a caller's. Only
`stores.open` imports it, and `sources` its failures.
"""
