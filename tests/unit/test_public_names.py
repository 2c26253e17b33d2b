"""The public names, and what importing them costs."""

from __future__ import annotations

import inspect
import json
import subprocess
import sys

import pxrs
from pxrs import errors

# Loaded when they are needed: a store, a codec, the command line.
LAZY = ("sqlite3", "_sqlite3", "aiokafka", "cramjam", "click", "rich", "asyncio")


def test_all_names_what_is_there() -> None:
    assert dir(pxrs) == sorted(pxrs.__all__)
    own = {name for name in vars(pxrs) if not name.startswith("_")}
    public = {name for name in own if not inspect.ismodule(getattr(pxrs, name))}
    assert public <= set(pxrs.__all__)
    assert len(pxrs.__all__) == len(set(pxrs.__all__))


def test_every_error_is_public() -> None:
    tree = {
        name
        for name, value in vars(errors).items()
        if inspect.isclass(value) and issubclass(value, errors.PxrsError)
    }
    assert tree <= set(pxrs.__all__)


def test_public_classes_and_functions_say_what_they_are() -> None:
    for name in pxrs.__all__:
        value = getattr(pxrs, name)
        if inspect.isclass(value) or inspect.isfunction(value):
            assert value.__doc__, name


def loaded_by(code: str) -> set[str]:
    """The modules a new interpreter has loaded after running the code."""
    program = f"{code}\nimport json, sys; print(json.dumps(list(sys.modules)))"
    done = subprocess.run(
        [sys.executable, "-c", program], capture_output=True, text=True, check=True
    )
    return set(json.loads(done.stdout))


def test_importing_loads_no_engine_no_codec_and_no_command_line() -> None:
    assert loaded_by("import pxrs") & set(LAZY) == set()


def test_memory_needs_no_sqlite() -> None:
    loaded = loaded_by(
        "import pxrs\n"
        "with pxrs.connect('memory://') as px:\n"
        "    px.topics.create('t', partitions=1)\n"
        "    with px.producer() as p: p.send('t', 'v')\n"
        "    assert px.reader('t').read(0, 0)[0].value == b'v'"
    )
    assert "sqlite3" not in loaded
    assert "click" not in loaded
