"""Work queues on any `CoordStore`, for etcd and ZooKeeper: the recipe.

`queues.RecipeQueues` is the `QueueStore`; only `stores.open` makes one. `layout` defines the
records of a queue, `drafts` remembers queues, builds commits and repeats them, `holds` keeps and
frees held items, `receipts` keeps evidence of units, `taking` hands out items and `listing` reads
whole queues.
"""
