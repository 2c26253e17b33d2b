"""A stand-in for a store, a session or a watch: it forwards calls that it does not define."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any


class Forwarding:
    """Wraps an object that implements one of the seams of `pxrs.stores.api`.

    A subclass names the seam (`class Slow(Forwarding, seam=LogStore)`) and defines the calls that
    it changes. It forwards the rest of the seam, and nothing beyond it: an ability that only some
    stores have, and that callers look for with `isinstance`, would bypass the subclass.
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
    """An attribute of the inner object, unless the instance has set its own."""

    def __init__(self, name: str) -> None:
        self._name = name

    def __get__(self, proxy: Forwarding | None, owner: type) -> Any:
        return self if proxy is None else getattr(proxy._inner, self._name)
