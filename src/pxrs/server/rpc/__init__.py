"""gRPC: what existing clients and `pxrs://` call."""
