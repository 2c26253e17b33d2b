"""Coordination in etcd, by gRPC.

`coord.EtcdCoord` is the `CoordStore`; only `stores.open` makes one. `nodes` sends requests to
whichever node answers, `commits` finds out the outcome of transactions, `history` notices that the
cluster was wiped, `failures` translates errors; queues are built on the `CoordStore` by
`stores.queues_on_coord`.
"""
