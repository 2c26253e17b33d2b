"""The record batch format: Kafka's RecordBatch v2.

Messages come in, bytes that any Kafka tool reads go out, and the other way round. Stores and all
rooms above may import it.
"""
