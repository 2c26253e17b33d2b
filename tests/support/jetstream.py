"""Handles of a log on a real server, for its tests."""

from __future__ import annotations

from pxrs.config import nats_settings, parse_url
from pxrs.stores.jetstream.log import JetStreamLog


def opened(url: str) -> JetStreamLog:
    return JetStreamLog(nats_settings(parse_url(url)))
