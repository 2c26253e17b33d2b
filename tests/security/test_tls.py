"""TLS of every engine: a wrong name, a wrong authority and a server without it are refused."""

from __future__ import annotations

import ssl
import tempfile
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import closing
from functools import partial
from pathlib import Path
from urllib.parse import urlsplit

import pytest

from pxrs.errors import ConfigError, PxrsError, StoreUnavailable
from pxrs.sources import RedisStream, Table
from pxrs.stores.open import open_stores
from pxrs.types import Committed, Put
from support.certificates import Certificates, TlsFront, make_certificates
from support.engine_fixtures import NewEngine, server_url
from support.node import LocalNode


@pytest.fixture
def files() -> Iterator[Certificates]:
    """In a folder that the users of all servers can read."""
    with tempfile.TemporaryDirectory() as name:
        folder = Path(name)
        folder.chmod(0o755)
        yield make_certificates(folder, owner="nobody")


def use(url: str) -> None:
    """Open the store, and write to it."""
    stores = open_stores(url)
    try:
        assert isinstance(stores.coord.commit([], [Put("k", b"1")]), Committed)
    finally:
        stores.close()


def refused(attempt: Callable[[], object]) -> str:
    with pytest.raises(StoreUnavailable) as caught:
        attempt()
    return str(caught.value)


def to_localhost(url: str) -> str:
    """The same server by a name that its certificate does not have."""
    return url.replace("127.0.0.1", "localhost")


@pytest.mark.engine("postgres")
def test_postgresql(new_engine: NewEngine, files: Certificates) -> None:
    tls = {"ssl": "on", "ssl_cert_file": str(files.cert), "ssl_key_file": str(files.key)}
    url = f"{new_engine('postgres', settings=tls).url}?sslmode=verify-full&sslrootcert="
    use(f"{url}{files.ca}")
    assert "does not match host name" in refused(partial(use, to_localhost(f"{url}{files.ca}")))
    assert "certificate verify failed" in refused(partial(use, f"{url}{files.other_ca}"))
    table = Table("t", value="v", url=f"{url}{files.other_ca}")
    assert "certificate verify failed" in refused(partial(table.open, "memory://"))


@pytest.mark.engine("postgres")
def test_postgresql_without_tls(postgres_url: str, files: Certificates) -> None:
    url = f"{postgres_url}?sslmode=verify-full&sslrootcert={files.ca}"
    assert "does not support SSL" in refused(partial(use, url))


@pytest.mark.engine("mariadb")
def test_mariadb(new_engine: NewEngine, files: Certificates) -> None:
    tls = {"ssl-cert": str(files.cert), "ssl-key": str(files.key), "ssl-ca": str(files.ca)}
    engine = new_engine("mariadb", settings=tls)
    place = engine.url
    use(f"{place}?ssl_ca={files.ca}")
    mine = f"ssl_cert={files.client_cert}&ssl_key={files.client_key}"
    use(f"{place}?ssl_ca={files.ca}&{mine}")
    use(to_localhost(f"{place}?ssl_ca={files.ca}&ssl_check_hostname=false"))
    for wrong in (f"ssl_ca={files.other_ca}", "tls=true", "ssl_verify_identity=true", mine):
        assert "certificate verify failed" in refused(partial(use, f"{place}?{wrong}"))
    name = to_localhost(f"{place}?ssl_ca={files.ca}")
    assert "Hostname mismatch" in refused(partial(use, name))
    assert "Hostname mismatch" in refused(lambda: Table("t", value="v", url=name).open("memory://"))


@pytest.mark.engine("mariadb")
def test_mariadb_without_tls(mariadb_url: str, files: Certificates) -> None:
    for asked in (f"ssl_ca={files.ca}", "tls=true", "ssl_verify_identity=true"):
        said = refused(partial(use, f"{mariadb_url}?{asked}"))
        assert "TLS" in said or "SSL" in said
    for wrong in ("ssl_ca=/no/such.pem", "tls=maybe", "ssl_cert=x", "tls=false&ssl_ca=x"):
        with pytest.raises(ConfigError):
            use(f"{mariadb_url}?{wrong}")


@pytest.mark.engine("etcd")
def test_etcd(new_engine: NewEngine, files: Certificates) -> None:
    flags = [f"--cert-file={files.cert}", f"--key-file={files.key}"]
    url = new_engine("etcd", flags=flags, scheme="https").url
    asked = f"{url}/x?timeout=1&ca="
    use(f"{url}/x?ca={files.ca} log=memory://")
    wrong = refused(partial(use, f"{asked}{files.other_ca} log=memory://"))
    assert "verif" in wrong.lower()
    # What is said last may be of ::1, where nobody listens.
    refused(partial(use, to_localhost(f"{asked}{files.ca} log=memory://")))


@pytest.mark.engine("etcd")
def test_etcd_without_tls(etcd_url: str) -> None:
    assert "over TLS" in refused(partial(use, f"{etcd_url}?tls=true&timeout=1 log=memory://"))


@pytest.mark.engine("valkey")
def test_valkey(files: Certificates) -> None:
    port = urlsplit(server_url("valkey")).port or 0

    def look(url: str) -> None:
        with closing(RedisStream(url, "s").open("memory://")) as stream:
            stream.check()

    with TlsFront(files, port) as front, ThreadPoolExecutor() as pool:
        url = f"rediss://127.0.0.1:{front.port}?ssl_ca_certs="
        look(f"{url}{files.ca}")
        wrong = [
            f"{url}{files.other_ca}",
            to_localhost(f"{url}{files.ca}"),
            f"rediss://127.0.0.1:{port}?socket_timeout=1&socket_connect_timeout=1",
        ]
        # At once: the client tries each of them several times.
        said = list(pool.map(lambda url: refused(partial(look, url)), wrong))
    assert "certificate" in said[0]
    assert "certificate" in said[1]


@pytest.mark.engine("sqlite")
def test_nodes(files: Certificates, tmp_path: Path) -> None:
    """Of pxrs serve, for clients that are engines."""
    store = f"sqlite:///{tmp_path}/node.db"
    with LocalNode(store, tls_cert=str(files.cert), tls_key=str(files.key)) as node:
        asked = f"pxrs://{node.address}?timeout=1&ca="
        use(f"{asked}{files.ca}")
        assert "verif" in refused(partial(use, f"{asked}{files.other_ca}")).lower()
        refused(partial(use, to_localhost(f"{asked}{files.ca}")))
        # What does not speak TLS gets nothing, the token of the URL least of all.
        refused(partial(use, f"pxrs://{node.address}?timeout=1"))
    with LocalNode(store) as node:
        refused(partial(use, f"pxrs://token@{node.address}?timeout=1&tls=true"))


def test_files_for_tls_that_are_none(tmp_path: Path) -> None:
    none = tmp_path / "none.pem"
    none.write_text("none")
    for url in (f"mysql://127.0.0.1:1/db?ssl_ca={none}", f"nats://127.0.0.1:1?ca={none}"):
        with pytest.raises(PxrsError) as caught:
            use(f"{url} {'coord' if url.startswith('nats') else 'log'}=memory://")
        assert not isinstance(caught.value, ssl.SSLError)
        assert "TLS files" in str(caught.value)
