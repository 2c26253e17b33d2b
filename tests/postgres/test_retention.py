"""Retention by age goes by the server's clock, not by that of the host that applies it."""

from __future__ import annotations

import time

import pytest

import pxrs

DAY = 86_400.0

pytestmark = pytest.mark.engine("postgres")


def test_a_host_whose_clock_is_ahead_trims_nothing(
    postgres_url: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    with pxrs.connect(postgres_url) as px:
        px.topics.create("kept", partitions=1, retention=DAY / 2)
        with px.producer() as producer:
            for _ in range(3):
                producer.send("kept", b"x").result()
        ahead = time.time_ns() + int(DAY * 1e9)
        monkeypatch.setattr(time, "time_ns", lambda: ahead)
        px.topics.apply_retention("kept")
        assert px.reader("kept").bounds(0) == (0, 3)
