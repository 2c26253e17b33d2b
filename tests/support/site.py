"""An engine behind a network that can fail."""

from __future__ import annotations

import secrets
from contextlib import ExitStack

from pxrs.clock import SYSTEM_CLOCK, Clock
from pxrs.config import etcd_settings, parse_url, zookeeper_settings
from pxrs.stores.api import CoordStore
from pxrs.stores.etcd.coord import EtcdCoord
from pxrs.stores.zookeeper.coord import ZooKeeperCoord
from support.proxy import Proxy


def open_coord(url: str, clock: Clock = SYSTEM_CLOCK) -> CoordStore:
    """The coordination store of a URL, with a clock of one's own."""
    parsed = parse_url(url)
    if parsed.scheme == "etcd":
        return EtcdCoord(etcd_settings(parsed), clock)
    return ZooKeeperCoord(zookeeper_settings(parsed), clock)


class Site:
    """A place in a shared engine, reached directly or through a proxy."""

    def __init__(self, server: str, stack: ExitStack) -> None:
        self._stack = stack
        self.place = f"t-{secrets.token_hex(6)}"
        self.url = f"{server}/{self.place}"
        self.engine, _, address = server.partition("://")
        self.proxy = stack.enter_context(Proxy(int(address.rpartition(":")[2])))

    @property
    def proxied(self) -> str:
        return f"{self.engine}://{self.proxy.address}/{self.place}"

    def near(self) -> CoordStore:
        """A handle that nothing can disturb."""
        return self._opened(self.url, SYSTEM_CLOCK)

    def far(self, clock: Clock = SYSTEM_CLOCK) -> CoordStore:
        """A handle behind the proxy."""
        return self._opened(self.proxied, clock)

    def _opened(self, url: str, clock: Clock) -> CoordStore:
        coord = open_coord(url, clock)
        self._stack.callback(coord.close)
        return coord
