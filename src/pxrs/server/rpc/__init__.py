"""The node's gRPC door: one server, the services that it offers, and what these share.

`norikv.py` serves existing NoriKV clients, `health.py` load balancers. Only `pxrs.server.node`
imports this room, and only if a node listens for gRPC.
"""
