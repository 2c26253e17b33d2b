"""Coordination on etcd."""
