"""Users, tokens and certificates, on servers that demand them."""

from __future__ import annotations

import json
import secrets
import socket
import threading
from pathlib import Path

import nkeys
import pytest

from pxrs.errors import ConfigError, StoreUnavailable
from pxrs.stores.api import LogStore
from pxrs.stores.open import open_stores
from pxrs.testing.conformance.tools import append, batch, values_in
from pxrs.types import LogPartition
from support.certificates import make_certificates
from support.child import PATIENCE
from support.engine_fixtures import NewEngine

pytestmark = pytest.mark.engine("nats")

HERE = LogPartition("t-1", 0)

_TRIES = 20


def use(url: str) -> None:
    """Make a topic and write to it."""
    stores = open_stores("memory://", log=url)
    try:
        log: LogStore = stores.log
        log.create("t-1", 1)
        append(log, HERE, batch(b"a"))
        assert values_in(log, HERE) == {0: b"a"}
        log.drop("t-1")
    finally:
        stores.close()


def refused(url: str) -> str:
    """What is said to who may not come in.

    The server says why and hangs up. Its hanging up may be heard first, but not every time.
    """
    for _ in range(_TRIES):
        with pytest.raises(StoreUnavailable) as caught:
            use(url)
        if "authorization" in str(caught.value).lower():
            break
    else:
        raise AssertionError(f"nobody said why: {caught.value}")
    return str(caught.value)


def with_login(url: str, login: str) -> str:
    return url.replace("nats://", f"nats://{login}@")


def test_user_and_password(new_engine: NewEngine) -> None:
    settings = {"authorization": {"user": "ann", "password": "s3cr@t/"}}
    engine = new_engine("nats", settings=settings)
    use(with_login(engine.url, "ann:s3cr%40t%2F"))
    for login in ("ann:wrong", "bob:s3cr%40t%2F"):
        assert "wrong" not in refused(with_login(engine.url, login))
    refused(engine.url)


def test_token(new_engine: NewEngine) -> None:
    engine = new_engine("nats", settings={"authorization": {"token": "t0ken"}})
    use(with_login(engine.url, "t0ken"))


def test_nkey(new_engine: NewEngine, tmp_path: Path) -> None:
    """A key pair whose public half the server knows."""
    seed = nkeys.encode_seed(secrets.token_bytes(32), nkeys.PREFIX_BYTE_USER)
    public = nkeys.from_seed(bytearray(seed)).public_key.decode()
    file = tmp_path / "user.nk"
    file.write_bytes(seed)
    engine = new_engine("nats", settings={"authorization": {"users": [{"nkey": public}]}})
    use(f"{engine.url}?nkey={file}")
    refused(engine.url)


def test_only_its_own_subjects(new_engine: NewEngine) -> None:
    """The permissions that the documents name are enough."""
    own = ["$JS.API.>", "mine.>", "mine-bell.>", "_INBOX.>"]
    user = {"user": "ann", "password": "pw", "permissions": {"publish": own, "subscribe": own}}
    engine = new_engine("nats", settings={"authorization": {"users": [user]}})
    use(with_login(engine.url, "ann:pw") + "/mine")


def test_tls_with_client_certificates(new_engine: NewEngine, tmp_path: Path) -> None:
    files = make_certificates(tmp_path)
    tls = {"cert_file": str(files.cert), "key_file": str(files.key), "verify": True}
    engine = new_engine("nats", settings={"tls": {**tls, "ca_file": str(files.ca)}})
    use(f"{engine.url}?ca={files.ca}&cert={files.client_cert}&key={files.client_key}")
    with pytest.raises(StoreUnavailable):
        use(f"{engine.url}?ca={files.ca}")
    with pytest.raises(StoreUnavailable, match=r"(?i)certificate"):
        use(f"{engine.url}?tls=true")
    with pytest.raises(ConfigError, match="given together"):
        use(f"{engine.url}?cert={files.cert}")


def test_files_that_are_not_there(nats_url: str) -> None:
    for option in ("ca=/no/such.pem", "credentials=/no/such.creds"):
        with pytest.raises(ConfigError, match="/no/such"):
            use(f"{nats_url}?{option}")


class Greeter:
    """A server that greets without asking for TLS, and keeps what it is sent then."""

    def __init__(self, greeting: dict[str, object]) -> None:
        self._greeting = greeting
        self._listening = socket.create_server(("127.0.0.1", 0))
        self.address = f"127.0.0.1:{self._listening.getsockname()[1]}"
        self.heard = b""
        self._thread = threading.Thread(target=self._greet)
        self._thread.start()

    def _greet(self) -> None:
        caller, _ = self._listening.accept()
        with caller:
            caller.sendall(b"INFO " + json.dumps(self._greeting).encode() + b"\r\n")
            while more := caller.recv(4096):
                self.heard += more
                if b"PING" in more:
                    caller.sendall(b"PONG\r\n")

    def close(self) -> None:
        self._listening.close()
        self._thread.join(PATIENCE)


@pytest.mark.parametrize("said", [{}, {"tls_available": True}, {"tls_required": False}])
def test_a_greeting_without_tls_gets_no_password(said: dict[str, object]) -> None:
    """Who stands between takes TLS out of the greeting: nothing is sent to it."""
    info = {"server_id": "x", "version": "2.15.0", "max_payload": 2**20, "auth_required": True}
    greeter = Greeter({**info, **said})
    with pytest.raises(StoreUnavailable, match="TLS"):
        use(f"nats://ann:s3cret@{greeter.address}?tls=true&timeout=2")
    greeter.close()
    assert greeter.heard == b""


def test_certificates_of_others_are_refused(new_engine: NewEngine, tmp_path: Path) -> None:
    """Another name than the one that was dialled, and another one who vouches for it."""
    files = make_certificates(tmp_path)
    tls = {"cert_file": str(files.cert), "key_file": str(files.key)}
    engine = new_engine("nats", settings={"tls": tls})
    use(f"{engine.url}?ca={files.ca}")
    with pytest.raises(StoreUnavailable, match=r"(?i)certificate"):
        use(f"{engine.url}?ca={files.other_ca}")
    with pytest.raises(StoreUnavailable, match=r"(?i)certificate"):
        use(f"{engine.url.replace('127.0.0.1', 'localhost')}?ca={files.ca}")


def test_a_server_without_tls_is_refused(nats_url: str) -> None:
    with pytest.raises(StoreUnavailable, match="TLS"):
        use(f"{nats_url}?tls=true")
