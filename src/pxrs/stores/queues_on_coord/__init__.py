"""Work queues on any `CoordStore`, for etcd and ZooKeeper: items, session-bound locks, commits."""
