"""What an item is stored as, and what comes back."""

from __future__ import annotations

from typing import Any

import msgspec
import pytest

from pxrs import JSON, InvalidRequest
from pxrs.queues.item import decode_body, encode_body
from pxrs.types import Header

HEADERS: list[Header] = [("trace", b"\x00\xff"), ("empty", None), ("trace", b"")]


@pytest.mark.parametrize("headers", [None, [], HEADERS])
@pytest.mark.parametrize("value", ["", "grüße", b"", b"\x00\xffh", bytearray(b"x"), "h" * 100_000])
def test_text_and_bytes_come_back_as_they_were(value: Any, headers: list[Header] | None) -> None:
    found, found_headers = decode_body(encode_body(value, headers, None))
    assert found == value
    assert isinstance(found, str if isinstance(value, str) else bytes)
    assert list(found_headers) == (headers or [])


@pytest.mark.parametrize("headers", [None, HEADERS])
@pytest.mark.parametrize("value", [None, 0, [1, {"a": "b"}], "text", {}])
def test_a_serde_makes_the_value(value: Any, headers: list[Header] | None) -> None:
    found, found_headers = decode_body(encode_body(value, headers, JSON()), JSON())
    assert (found, list(found_headers)) == (value, headers or [])


@pytest.mark.parametrize("value", [None, 1, object(), ["x"], "\udc80"])
def test_what_needs_a_serde_is_refused(value: Any) -> None:
    with pytest.raises(InvalidRequest):
        encode_body(value, None, None)


@pytest.mark.parametrize("headers", [{"a": b"b"}, [("a", "b")], [("a",)], "ab", [(1, b"")]])
def test_bad_headers_are_refused(headers: Any) -> None:
    with pytest.raises(InvalidRequest, match="header"):
        encode_body("x", headers, None)


@pytest.mark.parametrize("body", [b"", b"z", b"zx", b"h\x00\x00\x00\x01\x90"])
def test_what_pxrs_did_not_put_is_an_error(body: bytes) -> None:
    with pytest.raises(InvalidRequest, match="not put by pxrs"):
        decode_body(body)


@pytest.mark.parametrize("body", [b"h\xff\xff\xff\xff", b"h\x00\x00\x00\x02\xc1\xc1tx", b"t\xff"])
def test_damaged_bodies_are_errors(body: bytes) -> None:
    with pytest.raises((msgspec.MsgspecError, ValueError)):
        decode_body(body)
