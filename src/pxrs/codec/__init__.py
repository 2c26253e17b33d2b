"""The record batch format: Kafka's RecordBatch v2.

It turns messages into bytes that any Kafka tool reads, and back; serdes turn bytes into keys and
values. Stores and all rooms above may import it.
"""
