"""Keys stay where they are: published values, dumb twins and the properties routing rests on."""

from __future__ import annotations

import json
from collections import Counter
from collections.abc import Callable
from fractions import Fraction
from pathlib import Path
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from xxhash import xxh64_intdigest

from pxrs.core import routing
from pxrs.core.kv import shard_of
from pxrs.errors import InvalidRequest

GOLDEN = json.loads((Path(__file__).parent / "golden" / "routing.json").read_text())

keys = st.binary(max_size=100)
keys64 = st.integers(0, 2**64 - 1)
counts = st.integers(1, 100_000)
each_partitioner = pytest.mark.parametrize("name", routing.PARTITIONERS)


def golden(section: str) -> list[list[Any]]:
    rows: list[list[Any]] = GOLDEN[section]["rows"]
    assert len(rows) >= 60
    return rows


def signed(number: int) -> int:
    """The 32-bit number as Java prints it."""
    return number - (1 << 32) if number >> 31 else number


def test_xxhash_keeps_its_golden_values() -> None:
    for key, digest, partitions, partition in golden("xxhash"):
        assert xxh64_intdigest(bytes.fromhex(key)) == int(digest)
        assert routing.xxhash(bytes.fromhex(key), partitions) == partition


def test_xxhash_agrees_with_the_values_its_author_published() -> None:
    assert xxh64_intdigest(b"") == 0xEF46DB3751D8E999
    assert routing.xxhash(b"abc", 2**64) == 0x44BC2CF5AD770999


@pytest.mark.parametrize(
    ("key", "expected"),
    [
        (b"21", -973932308),
        (b"foobar", -790332482),
        (b"a-little-bit-long-string", -985981536),
        (b"a-little-bit-longer-string", -1486304829),
        (b"lkjh234lh9fiuh90y23oiuhsafujhadof229phr9h19h89h8", -58897971),
        (b"abc", 479470107),
    ],
)
def test_murmur2_agrees_with_kafkas_own_test(key: bytes, expected: int) -> None:
    assert signed(routing.murmur2_hash(key)) == expected


def test_md5_keeps_its_golden_values() -> None:
    """As PostgreSQL and MariaDB compute it, from the digest in hex."""
    for key, digest, partitions, partition in golden("md5"):
        assert int(digest[:8], 16) % partitions == partition
        assert routing.md5(bytes.fromhex(key), partitions) == partition


def test_murmur2_keeps_its_golden_values() -> None:
    for key, digest, partitions, partition in golden("murmur2"):
        assert signed(routing.murmur2_hash(bytes.fromhex(key))) == digest
        assert routing.murmur2(bytes.fromhex(key), partitions) == partition


def test_jump_agrees_with_the_published_code() -> None:
    """Rows from the paper's code, compiled. The last ones have a product of doubles that
    rounds to just below an integer, so that another order of operations gives another bucket."""
    for key, buckets, bucket in golden("jump"):
        assert routing.jump(int(key), buckets) == bucket, (key, buckets)


def test_jump_shard_keeps_its_golden_values() -> None:
    for key, shards, shard in golden("jump_shard"):
        assert routing.jump_shard(bytes.fromhex(key), shards) == shard


@pytest.mark.parametrize(("key", "digest", "of_1024", "of_256", "of_16"), GOLDEN["norikv"]["rows"])
def test_a_key_has_the_hash_and_the_shards_that_clients_of_norikv_compute(
    key: str, digest: str, of_1024: int, of_256: int, of_16: int
) -> None:
    data = bytes.fromhex(key)
    assert xxh64_intdigest(data) == int(digest)
    assert [routing.jump_shard(data, it) for it in (1024, 256, 16)] == [of_1024, of_256, of_16]
    assert shard_of(data) == of_1024


def rounded(exact: Fraction) -> Fraction:
    """The double nearest to an exact number: dividing two integers rounds once, correctly."""
    return Fraction(exact.numerator / exact.denominator)


def dumb_jump(key: int, buckets: int) -> int:
    """Jump hash with fractions: each operation exact, then rounded to a double as C does."""
    steps = [0]
    while steps[-1] < buckets:
        key = (key * 2862933555777941757 + 1) % 2**64
        quotient = rounded(Fraction(2**31, key // 2**33 + 1))
        product = rounded((steps[-1] + 1) * quotient)
        assert product < 2**63, "C would cut this to 64 bits"
        steps.append(product.numerator // product.denominator)
    return steps[-2]


@settings(max_examples=5 * settings().max_examples)
@given(keys64, st.one_of(counts, st.integers(1, 2**31 - 1)))
def test_jump_agrees_with_its_dumb_twin(key: int, buckets: int) -> None:
    assert routing.jump(key, buckets) == dumb_jump(key, buckets)


def test_the_twin_agrees_with_the_published_code() -> None:
    for key, buckets, bucket in golden("jump"):
        assert dumb_jump(int(key), buckets) == bucket


@given(keys64, counts)
def test_a_new_bucket_only_takes_keys(key: int, buckets: int) -> None:
    assert routing.jump(key, buckets + 1) in (routing.jump(key, buckets), buckets)


def test_a_new_bucket_takes_its_share() -> None:
    moved = sum(routing.jump(mixed, 10) != routing.jump(mixed, 9) for mixed in mixed_keys(20_000))
    assert 1_800 < moved < 2_200


def mixed_keys(number: int) -> list[int]:
    return [xxh64_intdigest(b"%d" % index) for index in range(number)]


@each_partitioner
@given(key=keys, partitions=counts)
def test_every_partition_is_in_range_and_the_same_again(
    name: str, key: bytes, partitions: int
) -> None:
    route = routing.partitioner(name)
    assert 0 <= route(key, partitions) < partitions
    assert route(key, partitions) == route(bytes(bytearray(key)), partitions)


@each_partitioner
@pytest.mark.parametrize("partitions", [2, 12, 64])
def test_keys_spread_evenly(name: str, partitions: int) -> None:
    route = routing.partitioner(name)
    each = 1_000
    found = Counter(route(b"order-%d" % index, partitions) for index in range(each * partitions))
    assert len(found) == partitions
    assert min(found.values()) > each * 0.85
    assert max(found.values()) < each * 1.15


@pytest.mark.parametrize("buckets", [0, -1, 2**31])
def test_jump_refuses_bucket_counts_it_was_not_made_for(buckets: int) -> None:
    with pytest.raises(InvalidRequest, match="buckets"):
        routing.jump(1, buckets)


@pytest.mark.parametrize("key", [-1, 2**64])
def test_jump_refuses_keys_of_more_than_64_bits(key: int) -> None:
    with pytest.raises(InvalidRequest, match="64-bit"):
        routing.jump(key, 3)


@pytest.mark.parametrize(
    ("name", "function"),
    [("xxhash", routing.xxhash), ("murmur2", routing.murmur2), ("jump", routing.jump_shard)],
)
def test_partitioners_by_name(name: str, function: Callable[[bytes, int], int]) -> None:
    assert routing.partitioner(name) is function


def test_an_unknown_partitioner_names_the_known_ones() -> None:
    with pytest.raises(InvalidRequest, match="xxhash, murmur2, jump, md5; got 'crc32'"):
        routing.partitioner("crc32")
