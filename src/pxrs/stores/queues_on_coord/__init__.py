"""Work queues on any `CoordStore`, for etcd and ZooKeeper: the recipe.

`queues.RecipeQueues` is the `QueueStore`; only `stores.open` makes one. `layout` says which records
a queue consists of, `drafts` remembers queues, builds commits and repeats them, `holds` keeps and
frees what is held, `receipts` keeps evidence of units, `taking` hands out items and `listing` reads
whole queues.
"""
