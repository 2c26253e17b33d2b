"""Coordination on ZooKeeper."""
