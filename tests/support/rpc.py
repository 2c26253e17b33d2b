"""gRPC with nothing but its transport: messages are built from field numbers, byte for byte."""

from __future__ import annotations

from types import TracebackType
from typing import Any, NamedTuple

import grpc

from support.child import PATIENCE

Fields = dict[int, list[Any]]
HEALTH = "/grpc.health.v1.Health/"
# The answers of gRPC's health service.
SERVING, NOT_SERVING, UNKNOWN = (bytes([8, status]) for status in (1, 2, 3))


def varint(number: int) -> bytes:
    out = bytearray()
    while number > 0x7F:
        out.append(number & 0x7F | 0x80)
        number >>= 7
    return bytes([*out, number])


def field(number: int, value: int | bytes | str) -> bytes:
    """One field: a number as a varint, else a length and the bytes."""
    if isinstance(value, int):
        return varint(number << 3) + varint(value)
    data = value.encode() if isinstance(value, str) else value
    return varint(number << 3 | 2) + varint(len(data)) + data


def fields(data: bytes) -> Fields:
    """A message as its field numbers; each field may come several times."""
    found: Fields = {}
    at = 0

    def read() -> int:
        nonlocal at
        number = shift = 0
        while True:
            byte = data[at]
            at += 1
            number |= (byte & 0x7F) << shift
            shift += 7
            if byte < 0x80:
                return number

    while at < len(data):
        tag = read()
        assert tag & 7 in (0, 2), f"wire type {tag & 7}"
        number = read()
        if tag & 7 == 0:
            found.setdefault(tag >> 3, []).append(number)
        else:
            assert at + number <= len(data)
            found.setdefault(tag >> 3, []).append(data[at : at + number])
            at += number
    return found


def version(term: int, index: int) -> bytes:
    """As clients write it: a number that is 0 is left out."""
    return (field(1, term) if term else b"") + (field(2, index) if index else b"")


def put(
    key: bytes, value: bytes, ttl_ms: int = 0, once: str = "", if_match: bytes | None = None
) -> bytes:
    return (
        field(1, key)
        + field(2, value)
        + (field(3, ttl_ms) if ttl_ms else b"")
        + (field(4, once) if once else b"")
        + (field(5, if_match) if if_match is not None else b"")
    )


def get(key: bytes, consistency: str = "") -> bytes:
    return field(1, key) + (field(2, consistency) if consistency else b"")


def delete(key: bytes, once: str = "", if_match: bytes | None = None) -> bytes:
    return (
        field(1, key)
        + (field(2, once) if once else b"")
        + (field(3, if_match) if if_match is not None else b"")
    )


class Told(NamedTuple):
    """How a call was refused."""

    code: str
    details: str
    trailing: dict[str, str]


class RpcClient:
    """A channel to one node. `agent` is what the client says that it is, before gRPC's own name.

    `wait_for_ready` false: a call fails at once while the node can't be reached.
    """

    def __init__(
        self,
        address: object,
        *,
        token: str = "",
        agent: str = "",
        credentials: Any = None,
        timeout: float = PATIENCE,
        wait_for_ready: bool = True,
        **metadata: str,
    ) -> None:
        options: list[tuple[str, object]] = [
            # Else two channels to one address would share a connection, and its user agent.
            ("grpc.use_local_subchannel_pool", 1),
            # A node that was started again is found soon.
            ("grpc.initial_reconnect_backoff_ms", 100),
            ("grpc.max_reconnect_backoff_ms", 200),
        ]
        self._how = {"timeout": timeout, "wait_for_ready": wait_for_ready}
        if agent:
            options.append(("grpc.primary_user_agent", agent))
        self._channel = (
            grpc.insecure_channel(str(address), options)
            if credentials is None
            else grpc.secure_channel(str(address), credentials, options)
        )
        self._metadata = [(name.replace("_", "-"), value) for name, value in metadata.items()]
        if token:
            self._metadata.append(("authorization", f"Bearer {token}"))

    def __enter__(self) -> RpcClient:
        return self

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        trace: TracebackType | None,
    ) -> None:
        self.close()

    def close(self) -> None:
        self._channel.close()

    def raw(self, path: str, request: bytes) -> bytes | Told:
        """The answer's bytes, or how it was refused."""
        call = self._channel.unary_unary(path)
        try:
            answer: bytes = call(request, metadata=self._metadata, **self._how)
            return answer
        except grpc.RpcError as error:
            trailing = dict(error.trailing_metadata() or ())
            return Told(error.code().name, error.details(), trailing)

    def __call__(self, path: str, request: bytes) -> Fields:
        """The answer's fields; a refusal fails."""
        answer = self.raw(f"/norikv.v1.{path}", request)
        assert isinstance(answer, bytes), answer
        return fields(answer)

    def refused(self, path: str, request: bytes) -> Told:
        """How it was refused; an answer fails."""
        answer = self.raw(f"/norikv.v1.{path}", request)
        assert isinstance(answer, Told), answer
        return answer

    def watch(self, request: bytes = b"", path: str = "/norikv.v1.Meta/WatchCluster") -> Any:
        """The answers of a stream, such as the views: an iterator that can be cancelled."""
        stream = self._channel.unary_stream(path)
        return stream(request, metadata=self._metadata, **self._how)
