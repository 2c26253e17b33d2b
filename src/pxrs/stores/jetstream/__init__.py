"""LogStore on NATS JetStream: one stream per topic, one subject per partition.

A batch is one message; its header has its offset and place (`entries.py`), because a stream's
sequences count the batches of all partitions. Every publish names the sequence that the
subject has to end with, so offsets are dense whichever process appends, and a publish that lost its
answer can be sent again.

Acknowledged means in memory on a quorum of the stream's replicas. NATS writes to disk at once
but syncs every two minutes: a power cut of a quorum can lose what was acknowledged since, unless
the servers run with `jetstream { sync_interval: always }`.
"""
