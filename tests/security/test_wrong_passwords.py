"""What real servers say to a wrong password does not show it."""

from __future__ import annotations

from contextlib import closing
from urllib.parse import quote

import pytest

from pxrs.errors import PxrsError
from pxrs.sources import RedisStream
from pxrs.stores.open import open_stores
from support.engine_fixtures import server_url
from support.shown import secrets, shown_of, words


@pytest.mark.parametrize(
    "engine",
    [
        pytest.param(name, marks=pytest.mark.engine(name))
        for name in ("postgres", "mariadb", "etcd")
    ],
)
def test_a_wrong_password(engine: str) -> None:
    scheme, _, place = server_url(engine).partition("://")
    place = place.rpartition("@")[2]
    for secret in secrets(3):
        url = f"{scheme}://stranger:{quote(secret, safe='')}@{place}"
        with pytest.raises(PxrsError) as caught:
            open_stores(url, log="memory://").close()
        assert shown_of(secret, words(caught.value)) is None


@pytest.mark.engine("valkey")
def test_a_wrong_password_of_valkey() -> None:
    place = server_url("valkey").partition("://")[2]
    for secret in secrets(3):
        stream = RedisStream(f"redis://stranger:{quote(secret, safe='')}@{place}", "s")
        with pytest.raises(PxrsError) as caught, closing(stream.open("memory://")) as source:
            source.check()
        assert shown_of(secret, words(caught.value)) is None
