"""A stand-in for a store, a session or a watch: what it does not do itself it forwards."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any


class Forwarding:
    """Stands before an object that implements one of the seams of `pxrs.stores.api`.

    A subclass names the seam (`class Slow(Forwarding, seam=LogStore)`) and defines what it does
    otherwise. The rest of the seam, and nothing beyond it, is the inner object's: an ability that
    only some stores have, to be asked for with `isinstance`, would pass the subclass by.
    """

    def __init__(self, inner: Any) -> None:
        self._inner = inner

    def __init_subclass__(cls, seam: type | None = None) -> None:
        for name in vars(seam) if seam is not None else ():
            if not name.startswith("_") and not hasattr(cls, name):
                setattr(cls, name, _Forwarded(name))

    if TYPE_CHECKING:

        def __getattr__(self, name: str) -> Any: ...


class _Forwarded:
    """An attribute of the inner object; one that the instance sets itself comes first."""

    def __init__(self, name: str) -> None:
        self._name = name

    def __get__(self, proxy: Forwarding | None, owner: type) -> Any:
        return self if proxy is None else getattr(proxy._inner, self._name)
