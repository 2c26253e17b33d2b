"""Coordination in etcd, by gRPC.

`coord.EtcdCoord` is the `CoordStore`; only `stores.open` makes one. `nodes` sends requests to
whichever node answers, `commits` finds out what became of transactions, `history` whether the
cluster was wiped, `failures` says what errors mean; queues are made of the `CoordStore` by
`stores.queues_on_coord`.
"""
