"""The names of all metrics, declared once: for `pxrs serve` now, for workers later."""

from __future__ import annotations

from typing import Literal, NamedTuple


class Metric(NamedTuple):
    """A metric as Prometheus knows it."""

    name: str
    kind: Literal["counter", "gauge", "histogram"]
    help: str
    labels: tuple[str, ...] = ()


REQUESTS = Metric(
    "pxrs_requests", "counter", "Requests by route and status.", ("method", "route", "status")
)
REQUEST_SECONDS = Metric(
    "pxrs_request_seconds", "histogram", "Seconds from request to answer.", ("route",)
)
PRODUCE_SECONDS = Metric(
    "pxrs_produce_seconds", "histogram", "Seconds until produced messages were durable."
)
COMMIT_SECONDS = Metric(
    "pxrs_commit_seconds", "histogram", "Seconds until checkpoints were written."
)
PRODUCED = Metric("pxrs_produced_messages", "counter", "Messages produced.", ("topic",))
FETCHED = Metric("pxrs_fetched_messages", "counter", "Messages fetched.", ("topic",))
FENCED = Metric("pxrs_fenced_commits", "counter", "Commits of partitions that another member owns.")
WAITING = Metric("pxrs_waiting_fetches", "gauge", "Fetches that wait for messages.")
HELD_MEMBERS = Metric("pxrs_held_members", "gauge", "Members that this node holds for clients.")
LEASES = Metric("pxrs_leases", "gauge", "Leases on items of queues.")
GENERATION = Metric("pxrs_group_generation", "gauge", "Rebalances of a group so far.", ("group",))
REBALANCES = Metric(
    "pxrs_group_rebalances",
    "counter",
    "Rebalances of all groups since the node looks, by reason (a rebalance may have several).",
    ("reason",),
)
LAG = Metric(
    "pxrs_group_lag_messages", "gauge", "Messages that a group has not handled.", ("group",)
)
LAG_SECONDS = Metric(
    "pxrs_group_lag_seconds", "gauge", "Age of the oldest message not handled.", ("group",)
)
QUEUE_ITEMS = Metric("pxrs_queue_items", "gauge", "Items of a queue.", ("queue", "state"))
QUEUE_AGE = Metric(
    "pxrs_queue_oldest_seconds", "gauge", "Age of a queue's oldest item.", ("queue",)
)
NOT_SHOWN = Metric(
    "pxrs_not_shown", "gauge", "Groups and queues that are too many to be shown here.", ("kind",)
)
STORE_UP = Metric("pxrs_store_up", "gauge", "1 while the store answers.")
STORE_OUTAGES = Metric("pxrs_store_outages", "counter", "Times that the store stopped answering.")
SLOTS_LED = Metric("pxrs_slots_led", "gauge", "Slots that this node leads.")
# Metrics of the clients of nodes.
CLIENT_STREAMS = Metric("pxrs_client_streams", "gauge", "Open streams to nodes.")
CLIENT_STREAMS_OPENED = Metric("pxrs_client_streams_opened", "counter", "Streams opened to nodes.")
CLIENT_NODES = Metric("pxrs_client_nodes", "gauge", "Nodes that are known.")
CLIENT_EPOCH = Metric("pxrs_client_epoch", "gauge", "Epoch of the view of the nodes.")
CLIENT_ROUTED = Metric(
    "pxrs_client_routed", "counter", "Requests for keys, to their leader or elsewhere.", ("to",)
)
CLIENT_HINTS = Metric("pxrs_client_hints", "counter", "Leaders that another node has named.")
CLIENT_RETRIES = Metric("pxrs_client_retries", "counter", "Attempts beyond the first of a call.")
CLIENT_EXHAUSTED = Metric("pxrs_client_exhausted", "counter", "Calls that were given up.")
CLIENT_CALLS = Metric("pxrs_client_calls", "counter", "Calls to nodes.", ("method",))
CLIENT_SECONDS = Metric(
    "pxrs_client_call_seconds", "counter", "Seconds that calls to nodes took.", ("method",)
)
