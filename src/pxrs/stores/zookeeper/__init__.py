"""Coordination in ZooKeeper, by kazoo.

`coord.ZooKeeperCoord` is the `CoordStore`; only `stores.open` makes one. `names` maps keys to
znodes, `link` sends requests and `failures` translates errors, `reading` reads records, `plans`
turns checks and writes into a multi and `commits` finds out its outcome; queues are built on the
`CoordStore` by `stores.queues_on_coord`.
"""
