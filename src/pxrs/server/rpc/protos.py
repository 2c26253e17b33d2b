"""The messages of the .proto files beside this module.

They are made from descriptors that `./run protos` has built, in a pool of their own: a program that
has a NoriKV client in it registers messages of the same names, and one pool refuses that.
"""

from __future__ import annotations

from importlib.resources import files
from typing import Any

from google.protobuf.descriptor_pb2 import FileDescriptorSet
from google.protobuf.descriptor_pool import DescriptorPool
from google.protobuf.message import DecodeError
from google.protobuf.message_factory import GetMessageClass

from pxrs.errors import InvalidRequest


def message_classes(name: str) -> dict[str, Any]:
    """The classes of the messages that `name`.proto declares, by their names."""
    pool = DescriptorPool()
    described = FileDescriptorSet.FromString((files(__package__) / f"{name}.binpb").read_bytes())
    for each in described.file:
        pool.AddSerializedFile(each.SerializeToString())
    found = pool.FindFileByName(f"{name}.proto").message_types_by_name
    return {name: GetMessageClass(descriptor) for name, descriptor in found.items()}


def decoded(kind: Any, data: bytes) -> Any:
    """A message of this kind from its bytes; `InvalidRequest` if they are none."""
    try:
        return kind.FromString(data)
    except DecodeError:
        name = kind.DESCRIPTOR.full_name
        raise InvalidRequest(f"the request must be a {name}; it can't be read as one") from None
