"""Where the engines' programs come from: the system, wheels of PyPI, packages of Debian.

Debian packages are downloaded and unpacked into `.engines/`, once; nothing is installed and no
root is needed. Whoever has `apt-get` can do it, with package lists of its own if the system has
none. A server's new data folder is made once too, and copied from there.
"""

from __future__ import annotations

import fcntl
import os
import shutil
import subprocess
import sys
import sysconfig
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from importlib.util import find_spec
from pathlib import Path

CACHE = Path(__file__).parents[1] / ".engines"


class Missing(Exception):  # noqa: N818 - what it is
    """An engine can't be had here; the text says why and how to get it."""


def in_path(*names: str) -> Path | None:
    """The folder of these programs, if the system has all of them."""
    found = [shutil.which(name, path=f"{os.environ.get('PATH', '')}:/usr/sbin") for name in names]
    if None in found:
        return None
    return Path(str(found[0])).resolve().parent


def in_wheel(package: str, inside: str) -> Path | None:
    """A file or folder that a wheel brought, if the wheel is installed."""
    spec = find_spec(package)
    if spec is None or not spec.submodule_search_locations:
        return None
    matches = sorted(Path(spec.submodule_search_locations[0]).glob(inside))
    return matches[0] if matches else None


def script(name: str) -> Path | None:
    """A program that a wheel put beside this Python."""
    path = Path(sysconfig.get_path("scripts")) / name
    return path if path.exists() else None


def debian(name: str, packages: Sequence[str]) -> Path:
    """The folder into which these packages are unpacked, downloaded on first use."""
    folder = CACHE / name
    if folder.exists():
        return folder
    if not shutil.which("apt-get") or not shutil.which("dpkg-deb"):
        raise Missing(f"{name}: not installed, and without apt-get it can't be fetched")
    with _only_one():
        if not folder.exists():
            _download(name, packages, folder)
    return folder


def new_data(kind: str, data: Path, make: Callable[[], None]) -> None:
    """Make a server's new data folder; after the first time as a copy, which takes no second.

    `kind` names the program, its version and all that is chosen when the folder is made.
    """
    made = CACHE / f"{kind}-data-{os.getuid()}"
    if made.exists():
        _copy(made, data)
        return
    make()
    with _only_one():
        if not made.exists():
            part = made.with_name(f"{made.name}.part")
            shutil.rmtree(part, ignore_errors=True)
            _copy(data, part)
            part.rename(made)


def _copy(source: Path, target: Path) -> None:
    """With owners and rights."""
    subprocess.run(["cp", "-a", str(source), str(target)], check=True)


def _download(name: str, packages: Sequence[str], folder: Path) -> None:
    print(f"engines: fetching {name} from Debian (once) …", file=sys.stderr, flush=True)
    work = CACHE / f"{name}.part"
    shutil.rmtree(work, ignore_errors=True)
    (work / "root").mkdir(parents=True)
    said = _apt(["download", *packages], work)
    if said is not None:
        lists = _own_lists()
        said = _apt([*lists, "update"], work) or _apt([*lists, "download", *packages], work)
    if said is not None:
        raise Missing(
            f"{name}: 'apt-get download {' '.join(packages)}' failed; "
            f"install them, or mend apt's sources ({said})"
        )
    for package in sorted(work.glob("*.deb")):
        print(f"engines:   {package.name} {package.stat().st_size >> 10} KB", file=sys.stderr)
        subprocess.run(["dpkg-deb", "-x", package, work / "root"], check=True)
    (work / "root").rename(folder)
    shutil.rmtree(work)


def _apt(arguments: Sequence[str], folder: Path) -> str | None:
    """Run apt-get there; None if it went well, else the last line it said."""
    done = subprocess.run(
        ["apt-get", "-q", "-o", "APT::Sandbox::User=", *arguments],
        cwd=folder,
        capture_output=True,
        text=True,
        env={**os.environ, "LC_ALL": "C"},
    )
    if done.returncode == 0:
        return None
    return (done.stderr.strip() or done.stdout.strip() or "no reason given").splitlines()[-1]


def _own_lists() -> list[str]:
    """Options that make apt keep package lists in our cache: no root, nothing changed."""
    for part in ("lists/partial", "archives/partial"):
        (CACHE / "apt" / part).mkdir(parents=True, exist_ok=True)
    options = {
        "Dir::State": CACHE / "apt",
        "Dir::State::status": "/var/lib/dpkg/status",
        "Dir::Cache": CACHE / "apt",
    }
    return [word for name, value in options.items() for word in ("-o", f"{name}={value}")]


@contextmanager
def _only_one() -> Iterator[None]:
    CACHE.mkdir(exist_ok=True)
    with (CACHE / "lock").open("w") as lock:
        fcntl.flock(lock, fcntl.LOCK_EX)
        yield
