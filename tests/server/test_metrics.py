"""What a node counts."""

from __future__ import annotations

import pytest

from pxrs import metrics as names
from pxrs.metrics import Metric
from support.node import Client


@pytest.fixture
def url() -> str:
    return "memory://"


def test_every_metric_is_shown(client: Client) -> None:
    client.post("/v1/topics", {"name": "orders", "partitions": 1})
    client.post("/v1/topics/orders/messages", {"messages": [{"value": "a"}, {"value": "b"}]})
    client.get("/v1/topics/orders/partitions/0/messages?offset=0")
    client.post("/v1/groups/billing/members", {"member": "a", "topics": ["orders"]})
    client.post("/v1/queues/mail/items", {"items": [{"value": "a"}]})
    client.post("/v1/queues/mail/take", {})
    for number in range(3):
        client.get(f"/made/up/{number}")
    shown = client.get("/metrics")
    assert shown.headers["content-type"].startswith("text/plain")
    text = shown.body.decode()
    for metric in vars(names).values():
        if isinstance(metric, Metric):
            assert f"# HELP {metric.name}" in text, metric.name
    assert 'pxrs_produced_messages_total{topic="orders"} 2.0' in text
    assert 'pxrs_requests_total{method="",route="none",status="404"} 3.0' in text
    assert 'pxrs_queue_items{queue="mail",state="held"} 1.0' in text
    assert "pxrs_leases 1.0" in text
    assert "pxrs_held_members 1.0" in text
    assert 'pxrs_group_lag_messages{group="billing"}' in text
    assert "made/up" not in text
