"""Versioned keys and values: `px.kv`, the same verbs inside transactions, and sweeping.

Keys and values come in; versions, entries and changes go out, over any `CoordStore`. `app`, units
of work and the server import it; it knows no topics, groups or queues. Its rules: `core/kv.py`.
"""
