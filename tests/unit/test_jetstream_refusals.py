"""Which refusals of JetStream pass by themselves, and what the others mean."""

from __future__ import annotations

import pytest

from pxrs.errors import ConfigError, StoreFull, StoreUnavailable
from pxrs.stores.jetstream.failures import passing, translated
from pxrs.stores.jetstream.wire import ApiError

NO_PEERS = "no suitable peers for placement"


@pytest.mark.parametrize(
    ("code", "text", "passes", "error"),
    [
        (10005, f"{NO_PEERS}, peer offline", True, StoreUnavailable),
        (10005, f"{NO_PEERS}, insufficient storage", False, ConfigError),
        (10074, "replicas > 1 not supported in non-clustered mode", False, ConfigError),
        (10008, "JetStream system temporarily unavailable", True, StoreUnavailable),
        (10077, "maximum messages exceeded", False, StoreFull),
    ],
)
def test_refusals(code: int, text: str, passes: bool, error: type[Exception]) -> None:
    refused = ApiError(400, code, text)
    assert passing(refused) is passes
    assert isinstance(translated(refused), error)
