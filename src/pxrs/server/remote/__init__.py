"""Serves `pxrs://` clients: the store's seams, over one stream of frames for each client.

`stores.py` has the streams, `rights.py` and `gate.py` what a token may call. `rest` carries the
frames, over a WebSocket.
"""
