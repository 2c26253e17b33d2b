"""The client of nodes: streams to them, leaders of keys, retries, and writes that happen once.

Calls to nodes come in; frames go out, over one stream to each node, and answers or typed errors
come back. `stores/remote` and `kv` are carried by it; `server` imports its frames, `aio` its verbs.
"""
