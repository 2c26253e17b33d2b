"""The client of nodes: streams to them, who leads what, retries, and writes that happen once."""
