"""`pxrs demo` on the engines that are servers, and what it shows of their URLs."""

from __future__ import annotations

import secrets

import pytest

import pxrs
from support.command import Shell

pytestmark = pytest.mark.thorough

QUICK = ("--pace", "0", "--burst", "200", "--round", "2")
_PATIENCE = 300.0
_SECRET = "hunter2"
_PROOFS = 9


@pytest.fixture
def engine(request: pytest.FixtureRequest) -> str:
    """The shared server that the test is marked with, under a password if it takes any."""
    name: str = request.node.get_closest_marker("engine").args[0]
    url: str = request.getfixturevalue(f"{name}_url")
    return url.replace("postgres@", f"postgres:{_SECRET}@")


@pytest.fixture
def messages(nats_url: str) -> str:
    """A place of its own in NATS, which does not ask for passwords and takes them."""
    return f"{nats_url}/demo-{secrets.token_hex(6)}".replace("://", f"://joe:{_SECRET}@")


def play(shell: Shell, engine: str) -> str:
    """What the demo shows when all that it promises has held."""
    result = shell.run("demo", "--plain", "--engine", engine, *QUICK, patience=_PATIENCE)
    shown = result.stdout.decode()
    assert result.returncode == 0, shown + result.stderr.decode()
    assert f"All {_PROOFS} held." in shown
    assert "refused (Fenced)" in shown
    assert _SECRET not in shown + result.stderr.decode()
    return shown


@pytest.mark.engine("postgres")
def test_postgres(shell: Shell, engine: str) -> None:
    shown = play(shell, engine)
    assert "store postgresql://postgres@127.0.0.1" in shown
    assert "effectively once" in shown
    with pxrs.connect(engine) as px:
        assert (px.topics.list(), px.stores.coord.list("")) == ([], [])


@pytest.mark.parametrize(
    "often",
    [
        pytest.param("effectively once", marks=pytest.mark.engine("mariadb"), id="mariadb"),
        pytest.param("at least once", marks=pytest.mark.engine("zookeeper"), id="zookeeper"),
    ],
)
def test_messages_are_in_a_file_where_the_engine_keeps_none(
    shell: Shell, engine: str, often: str
) -> None:
    shown = play(shell, engine)
    assert " log=sqlite:///" in shown
    assert often in shown
    with pxrs.connect("memory://", coord=engine) as px:
        # The consumers that were killed at the end have a session for a while yet, and the store
        # has an identity, as every store has whose messages are elsewhere.
        left = [each.key for each in px.stores.coord.list("") if each.session is None]
        assert left == ["store/identity"]


@pytest.mark.engine("nats")
def test_etcd_and_jetstream(shell: Shell, etcd_url: str, messages: str) -> None:
    shown = play(shell, f"{etcd_url} log={messages}")
    assert " log=nats://joe@127.0.0.1" in shown
