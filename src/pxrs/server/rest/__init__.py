"""HTTP in front of the service: connections and limits, paths and their structs, tokens.

Every path is a `Route`; `v1*` are our own, `dmq*` those of DMQ's document and of its existing
client. Only `server.node` imports this room.
"""
