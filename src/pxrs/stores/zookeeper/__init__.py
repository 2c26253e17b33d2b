"""Coordination in ZooKeeper, by kazoo.

`coord.ZooKeeperCoord` is the `CoordStore`; only `stores.open` makes one. `names` maps keys to
znodes, `link` sends requests and `failures` says what errors mean, `reading` reads records, `plans`
turns checks and writes into a multi and `commits` finds out what became of it; queues are made of
the `CoordStore` by `stores.queues_on_coord`.
"""
