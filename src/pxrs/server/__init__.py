"""`pxrs serve`: one node that serves an embedded store to clients in any language.

Requests come in through `rest` and become calls of the services here, which know no wire:
`messages`, `groups`, `leases`. Safety stays in the store's fences, so any node may serve any
request. Only the command line imports this room.
"""
