"""The client of nodes: streams to them, leaders of keys, retries, and writes that happen once."""
