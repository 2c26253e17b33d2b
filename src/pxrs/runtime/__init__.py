"""Threads: producer, reader and what they share."""
