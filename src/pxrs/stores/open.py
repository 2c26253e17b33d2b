"""URL → stores. Backends are imported only when they are asked for."""

from __future__ import annotations

from pxrs.config import parse_url, refuse_unknown, sqlite_settings
from pxrs.stores.api import Stores


def open_stores(url: str) -> Stores:
    """Open what the URL names, creating it if need be."""
    parsed = parse_url(url)
    if parsed.scheme == "sqlite":
        from pxrs.stores.sqlite.stores import SqliteStores

        settings = sqlite_settings(parsed.options)
        return SqliteStores(
            parsed.place, durability=settings.durability, busy_timeout=settings.busy_timeout
        )
    from pxrs.stores.memory import open_memory

    refuse_unknown(parsed.options, set(), "memory://")
    return open_memory(parsed.place)
