"""No password or token is shown: not in errors and their causes, nor in what settings print."""

from __future__ import annotations

import json
import logging
import pickle
import sys
import time
import traceback
from collections.abc import Callable, Iterator
from contextlib import closing
from urllib.parse import quote

import pytest

from pxrs import config, urls
from pxrs.cli import main as cli_main
from pxrs.errors import ConfigError, PxrsError, StoreError
from pxrs.operations.doctor import examine
from pxrs.redaction import HIDDEN, hidden, remember
from pxrs.server.node import JsonLines, TextLines
from pxrs.server.settings import ServeSettings
from pxrs.sources import KafkaTopic, RedisStream, Table
from pxrs.stores.open import open_stores
from pxrs.urls import LONGEST_URL, public
from support.shown import secrets, shown_of, words

# Nobody listens there.
CLOSED = "127.0.0.1:1"
LOGINS = [
    "postgresql://app:{}@HOST/db",
    "POSTGRESQL://app:{}@HOST/db",
    "postgres://app:{}@HOST/db",
    "mysql://app:{}@HOST/db",
    "MariaDB+pymysql://app:{}@HOST/db",
    "oracle://app:{}@HOST/db",
    "etcd://root:{}@HOST/p?timeout=0.1",
    "zookeeper://app:{}@HOST/p?timeout=0.1",
    "nats://app:{}@HOST/p?timeout=0.1",
    "Nats://{}@HOST",
    "pxrs://{}@HOST?timeout=0.1",
    "pxrs://app:{}@HOST?timeout=0.1",
    "redis://:{}@HOST/0",
    "REDISS://app:{}@HOST",
    "sqlite://app:{}@HOST/db",
    "mongodb://app:{}@HOST/db",
    "memory://app:{}@HOST/db",
    "sqlite:///app.db coord=etcd://root:{}@HOST",
]
OPTIONS = [
    "postgresql://HOST/db?password={}",
    "postgresql://HOST/db?user=app&sslpassword={}&sslmode=require",
    "mysql://HOST/db?password={}",
    "mysql://HOST/db?user=app&passwd={}&charset=utf8mb4",
    "redis://HOST/0?password={}",
    "nats://HOST/p?password={}",
    "pxrs://HOST?token={}",
]
HOSTS = [CLOSED, "127.0.0.1:port", "127.0.0.1:99999", "[::1", "a,b:x", "", "h/../..", "h?x=1&x=2"]
SETTINGS: dict[str, Callable[[urls.StoreUrl], object]] = {
    "postgresql": config.postgres_settings,
    "postgres": config.postgres_settings,
    "mysql": config.sql_settings,
    "mariadb": config.sql_settings,
    "oracle": config.sql_settings,
    "etcd": config.etcd_settings,
    "zookeeper": config.zookeeper_settings,
    "nats": config.nats_settings,
    "pxrs": config.remote_settings,
}


def said_of(url: str) -> Iterator[str]:
    """What is printed of a URL, with no server anywhere."""
    yield public(url)
    for attempt in (_split, _serve, _redis, _table, _parse, _settings):
        try:
            found = attempt(url)
        except PxrsError as error:
            yield words(error)
        else:
            yield f"{found} {found!r}"


def _split(url: str) -> object:
    return config.split_url(url, coord=url if " " not in url else None)


def _serve(url: str) -> object:
    return ServeSettings(store=url)


def _redis(url: str) -> object:
    return RedisStream(url, "s")


def _table(url: str) -> object:
    table = Table("t", value="v", url=url)
    return [table, table.settings()]


def _parse(url: str) -> object:
    return [config.parse_url(place) for place in config.split_url(url).urls()]


def _settings(url: str) -> object:
    parsed = [config.parse_url(place) for place in config.split_url(url).urls()]
    schemes = [(each.scheme.partition("+")[0], each) for each in parsed]
    return [SETTINGS[scheme](each) for scheme, each in schemes if scheme in SETTINGS]


@pytest.mark.parametrize("form", LOGINS + OPTIONS)
@pytest.mark.parametrize("is_encoded", [False, True])
def test_nothing_shows_a_secret_of_a_url(form: str, is_encoded: bool) -> None:
    for secret in secrets(3, seed=form):
        if form.startswith("Nats") and ":" in secret and not is_encoded:
            # To NATS that is a user and a password.
            continue
        written = quote(secret, safe="") if is_encoded else secret
        for host in HOSTS:
            for rest in ("", "&nonsense=1&timeout=x&connections=y"):
                url = form.format(written).replace("HOST", host)
                url += rest if "?" in form else rest.replace("&", "?", 1)
                for text in said_of(url):
                    assert shown_of(secret, text) is None, f"{secret!r} in {text}"


@pytest.mark.parametrize("form", [*LOGINS[:5], *LOGINS[6:12], *OPTIONS[:4]])
def test_no_error_of_a_driver_shows_a_secret(form: str) -> None:
    """Nobody answers, or the driver does not know an option."""
    for number, secret in enumerate(secrets(4, seed=1)):
        written = quote(secret, safe="") if number % 2 else secret
        url = form.format(written).replace("HOST", CLOSED)
        for wrong in (url, f"{url}{'&' if '?' in url else '?'}nonsense=1"):
            with pytest.raises(PxrsError) as caught:
                open_stores(wrong, log="memory://").close()
            assert shown_of(secret, words(caught.value)) is None, words(caught.value)
        for place in examine(url).places:
            assert shown_of(secret, repr(place)) is None


def test_no_error_of_a_source_shows_a_secret() -> None:
    for number, secret in enumerate(secrets(2, seed=2)):
        written = quote(secret, safe="") if number % 2 else secret
        for url in (f"redis://app:{written}@{CLOSED}", f"redis://{CLOSED}?password={written}"):
            for rest in ("", f"{'&' if '?' in url else '?'}max_connections=x"):
                with (
                    pytest.raises(PxrsError) as caught,
                    closing(RedisStream(url + rest, "s").open("memory://")) as source,
                ):
                    source.check()
                assert shown_of(secret, words(caught.value)) is None, words(caught.value)
        for form in ("postgresql", "mysql"):
            table = f"{form}://app:{written}@{CLOSED}/db"
            for rest in ("", "?nonsense=1"):
                with pytest.raises(PxrsError) as caught:
                    Table("t", value="v", url=table + rest).open("memory://")
                assert shown_of(secret, words(caught.value)) is None, words(caught.value)
        kafka = KafkaTopic(
            CLOSED, "t", config={"sasl.password": secret, "security.protocol": secret}
        )
        assert shown_of(secret, repr(kafka)) is None
        with pytest.raises(PxrsError) as caught:
            kafka.open("memory://")
        assert hidden(secret) == HIDDEN
        assert shown_of(secret, str(caught.value)) is None


@pytest.mark.parametrize(
    "url",
    [
        "postgresql://app:s3/cret@db/app",
        "mysql://app:s3?cret@db/app",
        "etcd://app:s3@c/ret@db",
        "nats://s3/cret@db",
        "postgresql://app:s3%cret@db/app",
        "postgresql://app:s3cret/app",
    ],
)
def test_an_ambiguous_password_is_to_be_encoded(url: str) -> None:
    with pytest.raises(ConfigError, match="percent-encode"):
        config.parse_url(url)


def test_hostile_passwords_reach_the_driver_as_they_are() -> None:
    for secret in secrets(200, seed=3):
        url = f"mysql://app:{quote(secret, safe='')}@db/app"
        settings = config.sql_settings(config.parse_url(url))
        assert settings.options["password"] == secret.encode()
        assert config.sql_settings(config.parse_url(settings.url)) == settings
        nats = config.nats_settings(config.parse_url(url.replace("mysql", "nats")))
        assert (nats.user, nats.password) == ("app", secret)


def test_postgresql_gets_passwords_as_they_are() -> None:
    conninfo = pytest.importorskip("psycopg.conninfo")
    for secret in secrets(200, seed=4):
        written = quote(secret, safe="")
        for url in (
            f"postgres://app:{written}@db/app",
            f"postgres://app@db/app?password={written}",
        ):
            settings = config.postgres_settings(config.parse_url(f"{url}"))
            assert conninfo.conninfo_to_dict(settings.conninfo) == {
                "user": "app", "password": secret, "host": "db", "dbname": "app",
            }  # fmt: skip
            again = config.postgres_settings(config.parse_url(settings.url))
            assert again.conninfo == settings.conninfo


def test_what_is_said_by_others_is_hidden() -> None:
    remember("correct horse")
    error = StoreError("the server says: no such password: correct horse, or correct%20horse")
    assert str(error) == "the server says: no such password: …, or …"
    assert str(pickle.loads(pickle.dumps(error))) == str(error)
    try:
        try:
            raise ValueError("correct horse")
        except ValueError as cause:
            raise StoreError("it failed") from cause
    except StoreError:
        record = logging.LogRecord(
            "pxrs", logging.ERROR, "", 0, "failed: %s", ("correct horse",), sys.exc_info()
        )
        for line in (TextLines("%(message)s").format(record), JsonLines().format(record)):
            assert "horse" not in line.replace('ValueError("correct horse")', "")
            assert "ValueError: …" in line
        assert json.loads(JsonLines().format(record))["message"] == "failed: …"


def test_a_traceback_of_the_command_line_hides_secrets(capsys: pytest.CaptureFixture[str]) -> None:
    remember("battery staple")
    error = ValueError("battery" + " staple")
    cli_main._print_traceback(ValueError, error, None)
    assert capsys.readouterr().err == "ValueError: …\n"


def test_what_is_shown_anyway_is_not_hidden() -> None:
    config.parse_url("postgresql://postgres:postgres@db/app")
    assert hidden("user postgres of postgresql://db") == "user postgres of postgresql://db"


def test_few_secrets_are_kept() -> None:
    for number in range(1000):
        remember(f"secret number {number}")
    assert hidden("secret number 999") == HIDDEN
    assert hidden("secret number 1") != HIDDEN


@pytest.mark.parametrize(
    "url",
    [
        "postgresql://app:{}%2F@db/app",
        "mysql://app:{}%2F@db/app?password=another%2F{}&ssl_key_password=third%2F{}",
    ],
)
def test_the_secrets_of_32_urls_are_kept(url: str) -> None:
    """However many each has, and however it is written; one that is used again counts as new."""

    def use(number: int) -> None:
        config.parse_url(url.format(*[f"secret-{number:02}-of-a-url"] * 3))

    for number in range(32):
        use(number)
    for number in range(32):
        assert hidden(f"secret-{number:02}-of-a-url/") == HIDDEN
    use(0)
    use(32)
    assert hidden("secret-00-of-a-url/") == HIDDEN
    assert hidden("secret-00-of-a-url%2F") == HIDDEN
    assert hidden("secret-01-of-a-url/") != HIDDEN


@pytest.mark.parametrize("letter", ["a", " ", "@", ":", "/", "%", "&", "x=1&", "[", " coord="])
def test_long_urls(letter: str) -> None:
    """A megabyte is refused; what is taken is read in linear time, or this would take minutes."""
    url = "postgresql://app:pw@db/" + letter * (2**20 // len(letter))
    for read in (config.split_url, config.parse_url):
        with pytest.raises(ConfigError):
            read(url)
    assert public(url) == HIDDEN
    for size in (LONGEST_URL, 3 * LONGEST_URL):
        for _ in range(20):
            assert public(url[:size])


def test_long_urls_are_read_in_linear_time() -> None:
    """Eight times as long is about eight times the work, not 64 times."""

    def took(url: str) -> float:
        times = []
        for _ in range(7):
            before = time.thread_time_ns()
            for _ in range(10):
                public(url)
            times.append(time.thread_time_ns() - before)
        return min(times)

    for letter in ["a", "@", ":", "/", "%41", "%", "&x=1", "?", ",", "+"]:
        for form in ("postgresql://app:pw@db/{}", "postgresql://app:{}@db/app", "nats://{}"):
            long, short = (form.format(letter * (size // len(letter))) for size in (8000, 1000))
            assert took(long) < 24 * took(short), f"{letter} in {form}"


@pytest.mark.parametrize(
    "url",
    [
        f"postgresql://{CLOSED}/db?password=correct&horse=battery&sslmode=require",
        f"mysql://{CLOSED}/db?password=correct&horse=battery&charset=utf8mb4",
        f"redis://{CLOSED}/0?password=correct&horse=battery&socket_timeout=1",
    ],
)
def test_what_follows_an_unencoded_ampersand_in_a_password_is_not_shown(url: str) -> None:
    said = [*said_of(url)]
    for form in (url, f"{url}&nonsense=1"):
        with pytest.raises(PxrsError) as caught:
            if form.startswith("redis"):
                with closing(RedisStream(form, "s").open("memory://")) as source:
                    source.check()
            else:
                open_stores(form, log="memory://").close()
        said += [repr(caught.value), "".join(traceback.format_exception(caught.value))]
    # A harmless option is shown.
    assert url.rpartition("&")[2] in said[0]
    for text in said:
        assert not any(word in text for word in ("correct", "horse", "battery")), text
