"""`pxrs://`: the stores of nodes, over the network. The code above them is the same as embedded.

Calls of the seams come in; `client` carries them to a node, whose `server/remote` answers them.
`stores.open` imports the stores; `server` imports `wire.py`, which has the format for both ends.
"""
