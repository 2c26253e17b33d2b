"""The descriptors that are shipped are those of the .proto files."""

from __future__ import annotations

from importlib.resources import as_file, files
from pathlib import Path

import pytest
from grpc_tools import protoc


@pytest.mark.parametrize("name", ["norikv", "health"])
def test_descriptors_are_built_from_their_files(name: str, tmp_path: Path) -> None:
    with as_file(files("pxrs.server.rpc")) as folder:
        built = tmp_path / "built"
        code = protoc.main(
            ["protoc", f"-I{folder}", f"--descriptor_set_out={built}", f"{folder}/{name}.proto"]
        )
        assert code == 0
        shipped = (folder / f"{name}.binpb").read_bytes()
    assert built.read_bytes() == shipped, "run ./run protos"
