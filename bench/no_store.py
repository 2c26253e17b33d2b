"""The HTTP server of a node with a produce route that writes nothing: what HTTP alone costs."""

from __future__ import annotations

import asyncio
import signal

import uvloop

from bench.workload import TOPIC
from pxrs.clock import SYSTEM_CLOCK
from pxrs.server.cluster import NodeInfo
from pxrs.server.metrics import Metrics
from pxrs.server.rest.forwarding import Forwarding
from pxrs.server.rest.http import HttpServer
from pxrs.server.rest.routes import Call, Route
from pxrs.server.rest.v1 import Produce, Produced, ProduceText, pairs_of
from pxrs.server.sends import Placed
from pxrs.server.settings import ServeSettings


async def produce(call: Call) -> Produced:
    return Produced([Placed(0, number) for number, _ in enumerate(pairs_of(call.body))])


async def main() -> None:
    server = HttpServer(ServeSettings(listen="127.0.0.1:0"), Metrics(SYSTEM_CLOCK))
    path = f"/v1/topics/{TOPIC}/messages"
    route = Route(
        method="POST", path=path, handler=produce, summary="", body=Produce, usual=ProduceText
    )
    server.route([route], Forwarding(NodeInfo("none", 1, ""), tuple, b"", 1.0, None), None)
    print(f"http://{await server.start()}", flush=True)
    stop = asyncio.Event()
    asyncio.get_running_loop().add_signal_handler(signal.SIGTERM, stop.set)
    await stop.wait()
    await server.stop()


if __name__ == "__main__":
    with asyncio.Runner(loop_factory=uvloop.new_event_loop) as runner:
        runner.run(main())
