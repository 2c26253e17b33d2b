"""A place in an engine, behind a network that can fail."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import ExitStack

import pytest

from support.engine_fixtures import server_url
from support.site import Site


@pytest.fixture(
    params=[
        pytest.param("etcd", marks=pytest.mark.engine("etcd")),
        pytest.param("zookeeper", marks=pytest.mark.engine("zookeeper")),
    ]
)
def site(request: pytest.FixtureRequest) -> Iterator[Site]:
    with ExitStack() as stack:
        site = Site(server_url(request.param), stack)
        # Handles are closed before the proxy is; they should not have to wait for it.
        stack.callback(site.proxy.heal)
        yield site
        site.proxy.heal()
