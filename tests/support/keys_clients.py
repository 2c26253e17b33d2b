"""Clients of keys and values: over `pxrs://`, over gRPC and over HTTP, and what each was told.

Those of gRPC and HTTP talk to one node only. Each says of a write that it was done, refused or
never done, or that this is unknown.
"""

from __future__ import annotations

import http.client
import re
from abc import ABC, abstractmethod
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from typing import Any, NamedTuple
from urllib.parse import quote

import pxrs
from pxrs.errors import AlreadyExists, OutcomeUnknown, PxrsError, VersionMismatch
from pxrs.server.settings import Endpoint
from pxrs.types import ABSENT, Version
from support import rpc
from support.keys_history import NOTHING, Seen
from support.node import Client, Reply
from support.rpc import RpcClient, Told

# A client waits so long for its node; a frozen one does not answer.
ANSWER_WITHIN = 1.0
# So long does a call over pxrs:// try.
GIVES_UP_AFTER = 10.0
_HAS = re.compile(r"(?:has|already exists with) version (\d+)\.(\d+)")
# Answers after which nothing was done, and nothing will be.
_NOT_DONE = {
    "leader_unreachable", "leader_moving", "starting", "stopping", "overloaded", "store_busy",
    "store_unavailable", "buffer_full", "transaction_conflict",
}  # fmt: skip


class Written(NamedTuple):
    """What a write came to. `version` is what it made; after a refusal, what the key has."""

    outcome: str
    version: Version | None = None
    existed: bool | None = None


UNKNOWN = Written("unknown")
NEVER = Written("never")


class WrongAnswerError(Exception):
    """An answer that no client may get."""


class KeysClient(ABC):
    """One client, used by one thread. A read that gets no answer is None."""

    name: str

    @abstractmethod
    def get(self, key: str, consistency: str) -> Seen | None: ...

    def get_many(self, keys: list[str]) -> dict[str, Seen] | None:
        found = {key: self.get(key, "lease") for key in keys}
        return None if None in found.values() else found  # type: ignore[return-value]

    @abstractmethod
    def put(self, key: str, value: str, if_match: Version | None, once: str) -> Written: ...

    @abstractmethod
    def delete(self, key: str, if_match: Version | None) -> Written: ...

    @abstractmethod
    def close(self) -> None: ...


class PxrsKeys(KeysClient):
    """`px.kv` over `pxrs://`, which goes to any of the nodes.

    Whatever happens to one of them, a caller gets no error but that of a write whose outcome nobody
    knows: the client tries everything else again.
    """

    def __init__(self, number: int, px: pxrs.Pxrs) -> None:
        self.name = f"pxrs-{number}"
        self._keys = px.kv

    def get(self, key: str, consistency: str) -> Seen | None:
        with _no_error():
            return _seen(self._keys.get(key, consistency=consistency))

    def get_many(self, keys: list[str]) -> dict[str, Seen] | None:
        with _no_error():
            found = self._keys.get_many(keys)
        return {key: _seen(found.get(key.encode())) for key in keys}

    def put(self, key: str, value: str, if_match: Version | None, once: str) -> Written:
        try:
            with _no_error(VersionMismatch, AlreadyExists, OutcomeUnknown):
                version = self._keys.put(
                    key, value, if_match=if_match, idempotency_key=once or None
                )
        except PxrsError as error:
            return _failed(error)
        return Written("done", version)

    def delete(self, key: str, if_match: Version | None) -> Written:
        try:
            with _no_error(VersionMismatch, OutcomeUnknown):
                return Written("done", existed=self._keys.delete(key, if_match=if_match))
        except PxrsError as error:
            return _failed(error)

    def close(self) -> None:
        """The store is of all clients of its kind."""


@contextmanager
def _no_error(*but: type[PxrsError]) -> Iterator[None]:
    """Has a call of a client that does nothing wrong raise no error, but these."""
    try:
        yield
    except but:
        raise
    except PxrsError as error:
        raise WrongAnswerError(f"{type(error).__name__}: {error}") from error


def _seen(entry: pxrs.Entry | None) -> Seen:
    return NOTHING if entry is None else Seen(entry.value.decode(), entry.version)


def _failed(error: PxrsError) -> Written:
    if isinstance(error, VersionMismatch | AlreadyExists):
        return Written("refused", ABSENT if error.current is None else error.current)
    return UNKNOWN


class RpcKeys(KeysClient):
    """`norikv.v1` on one node."""

    def __init__(self, number: int, address: str) -> None:
        self.name = f"rpc-{number}"
        self._client = RpcClient(address, timeout=ANSWER_WITHIN, wait_for_ready=False)

    def get(self, key: str, consistency: str) -> Seen | None:
        answer = self._ask("Get", rpc.get(key.encode(), consistency))
        if isinstance(answer, Written):
            return None
        if 2 not in answer:
            return NOTHING
        return Seen(answer.get(1, [b""])[0].decode(), _rpc_version(answer[2][0]))

    def put(self, key: str, value: str, if_match: Version | None, once: str) -> Written:
        answer = self._ask(
            "Put", rpc.put(key.encode(), value.encode(), 0, once, _condition(if_match))
        )
        if isinstance(answer, Written):
            return answer
        return Written("done", _rpc_version(answer[1][0]))

    def delete(self, key: str, if_match: Version | None) -> Written:
        answer = self._ask("Delete", rpc.delete(key.encode(), if_match=_condition(if_match)))
        if isinstance(answer, Written):
            return answer
        if not answer.get(1, [0])[0]:
            return Written("done", ABSENT, existed=False)
        return Written("done", _rpc_version(answer[2][0]), existed=True)

    def _ask(self, method: str, request: bytes) -> rpc.Fields | Written:
        answer = self._client.raw(f"/norikv.v1.Kv/{method}", request)
        if not isinstance(answer, Told):
            return rpc.fields(answer)
        if answer.code in ("FAILED_PRECONDITION", "ALREADY_EXISTS"):
            return _refused(answer.details)
        if answer.code == "ABORTED" or "failed to connect" in answer.details:
            return NEVER
        if answer.code in ("UNAVAILABLE", "UNKNOWN", "DEADLINE_EXCEEDED", "CANCELLED"):
            return UNKNOWN
        raise WrongAnswerError(f"{method}: {answer}")

    def close(self) -> None:
        self._client.close()


def _rpc_version(data: bytes) -> Version:
    found = rpc.fields(data)
    return Version(found.get(1, [0])[0], found.get(2, [0])[0])


def _condition(version: Version | None) -> bytes | None:
    return None if version is None else rpc.version(version.term, version.index)


def _refused(detail: str) -> Written:
    """A refusal, and what it says that the key has."""
    if has := _HAS.search(detail):
        return Written("refused", Version(int(has[1]), int(has[2])))
    return Written("refused", ABSENT if "does not exist" in detail else None)


class RestKeys(KeysClient):
    """`/v1/kv` on one node. What is sent may be answered later: `end_get` and `end_put` wait."""

    def __init__(self, number: int, endpoint: Endpoint, timeout: float = ANSWER_WITHIN) -> None:
        self.name = f"rest-{number}"
        self._endpoint = endpoint
        self._timeout = timeout
        self._client: Client | None = None

    def get(self, key: str, consistency: str) -> Seen | None:
        return self.end_get(self.begin_get(key, consistency))

    def begin_get(self, key: str, consistency: str = "lease") -> Written | None:
        return self._begin("GET", f"{_path(key)}?consistency={consistency}")

    def end_get(self, failed: Written | None = None) -> Seen | None:
        answer = failed or self._end()
        if isinstance(answer, Written):
            return None
        if answer.status == 404:
            return NOTHING
        return Seen(answer.json["value"], _rest_version(answer))

    def put(self, key: str, value: str, if_match: Version | None, once: str) -> Written:
        return self.end_put(self.begin_put(key, value, if_match, once))

    def begin_put(
        self, key: str, value: str, if_match: Version | None = None, once: str = ""
    ) -> Written | None:
        body: dict[str, Any] = {"value": value}
        if if_match is not None:
            body["if_match"] = {"term": if_match.term, "index": if_match.index}
        if once:
            body["idempotency_key"] = once
        return self._begin("PUT", _path(key), body)

    def end_put(self, failed: Written | None = None) -> Written:
        answer = failed or self._end()
        return answer if isinstance(answer, Written) else Written("done", _rest_version(answer))

    def delete(self, key: str, if_match: Version | None) -> Written:
        condition = "" if if_match is None else f"?if_match={if_match.term}.{if_match.index}"
        answer = self._begin("DELETE", _path(key) + condition) or self._end()
        if isinstance(answer, Written):
            return answer
        return Written("done", _rest_version(answer), existed=answer.json["deleted"])

    def _begin(self, method: str, path: str, body: Any = None) -> Written | None:
        """Sends a request; what came of it, if it could not be sent."""
        if self._client is None:
            self._client = Client(self._endpoint, self._timeout)
        try:
            self._client.send(method, path, body)
        except ConnectionRefusedError:
            self.close()
            return NEVER
        except (OSError, http.client.HTTPException):
            self.close()
            return UNKNOWN
        return None

    def _end(self) -> Reply | Written:
        assert self._client is not None
        try:
            answer = self._client.receive()
        except (OSError, http.client.HTTPException):
            self.close()
            return UNKNOWN
        if answer.status == 200:
            return answer
        problem = answer.json
        if problem["code"] == "key_not_found":
            return answer
        if problem["code"] in ("version_mismatch", "already_exists"):
            return _refused(problem["detail"])
        if problem["code"] in _NOT_DONE:
            return NEVER
        if problem["status"] in (503, 504):
            return UNKNOWN
        raise WrongAnswerError(str(problem))

    def close(self) -> None:
        if self._client is not None:
            with suppress(OSError):
                self._client.close()
            self._client = None


def _path(key: str) -> str:
    return f"/v1/kv/{quote(key, safe='')}"


def _rest_version(answer: Reply) -> Version:
    told = answer.json["version"]
    return Version(told["term"], told["index"])
