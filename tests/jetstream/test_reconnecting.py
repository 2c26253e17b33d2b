"""A connection that breaks is made again, whatever stood in its way meanwhile."""

from __future__ import annotations

import secrets
from collections.abc import Callable
from contextlib import closing
from pathlib import Path

import nkeys
import pytest

from pxrs.errors import ConfigError, StoreUnavailable
from pxrs.stores.jetstream import wire
from pxrs.testing.conformance.tools import append, batch, values_in
from pxrs.types import LogPartition
from support.engine_fixtures import NewEngine
from support.jetstream import opened
from support.proxy import Proxy

pytestmark = pytest.mark.engine("nats")

HERE = LogPartition("t-1", 0)
# Not a user's JWT: the server of these tests knows the key.
CREDENTIALS = """-----BEGIN NATS USER JWT-----
e30.e30.e30
------END NATS USER JWT------

-----BEGIN USER NKEY SEED-----
{seed}
------END USER NKEY SEED------
"""


def new_key() -> tuple[str, str]:
    """A seed, and the public key that a server knows."""
    seed = nkeys.encode_seed(secrets.token_bytes(32), nkeys.PREFIX_BYTE_USER)
    return seed.decode(), nkeys.from_seed(bytearray(seed)).public_key.decode()


def half(text: str) -> bytes:
    return text[: len(text) // 2].encode()


@pytest.mark.parametrize(
    ("written", "why"),
    [
        (half, "login in file"),
        (lambda text: b"\xff" + text.encode(), "must be text"),
    ],
    ids=["half", "not text"],
)
def test_a_login_that_is_just_written_is_read_again(
    new_engine: NewEngine, tmp_path: Path, written: Callable[[str], bytes], why: str
) -> None:
    seed, public = new_key()
    file = tmp_path / "user.nk"
    file.write_text(seed)
    engine = new_engine("nats", settings={"authorization": {"users": [{"nkey": public}]}})
    with (
        Proxy(engine.ports[0]) as proxy,
        closing(opened(f"nats://{proxy.address}?nkey={file}&timeout=2")) as log,
    ):
        log.create("t-1", 1)
        append(log, HERE, batch(b"a"))
        file.write_bytes(written(seed))
        proxy.reset()
        with pytest.raises(StoreUnavailable, match=why) as caught:
            log.bounds("t-1")
        assert half(seed).decode() not in str(caught.value)
        file.write_text(seed)
        append(log, HERE, batch(b"b"))
        assert list(values_in(log, HERE).values()) == [b"a", b"b"]


def test_a_server_of_an_old_version_is_left_when_it_is_a_new_one(
    nats_url: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    """As while servers are replaced one after the other, some of them too old."""
    with Proxy(int(nats_url.rpartition(":")[2])) as proxy:
        url = f"nats://{proxy.address}/t-{secrets.token_hex(6)}?timeout=2"
        with closing(opened(url)) as log:
            log.create("t-1", 1)
            with monkeypatch.context() as patch:
                patch.setattr(wire, "_LEAST_VERSION", (99, 0))
                proxy.reset()
                with pytest.raises(StoreUnavailable, match=r"pxrs needs NATS"):
                    log.bounds("t-1")
                with pytest.raises(ConfigError, match=r"pxrs needs NATS"):
                    opened(url)
            assert append(log, HERE, batch(b"a")) == [0]
            log.drop("t-1")


def test_a_file_that_is_no_login_is_refused(new_engine: NewEngine, tmp_path: Path) -> None:
    seed, public = new_key()
    engine = new_engine("nats", settings={"authorization": {"users": [{"nkey": public}]}})
    file = tmp_path / "login"
    whole = CREDENTIALS.format(seed=seed)
    jwt, mark, key = whole.partition("-----BEGIN USER NKEY SEED")
    for text, option, why in (
        (jwt, "credentials", "JWT and seed"),
        # nats-py would read it for ever.
        (mark + key, "credentials", "JWT and seed"),
        (whole.replace(seed, seed[:20]), "credentials", "login in file"),
        (seed[:20], "nkey", "login in file"),
    ):
        file.write_text(text)
        with pytest.raises(ConfigError, match=why) as caught:
            opened(f"{engine.url}?{option}={file}")
        assert seed[:20] not in str(caught.value)
