"""One gRPC server in the node's event loop: where it listens, its limits, and how it stops."""

from __future__ import annotations

from collections.abc import Iterable
from pathlib import Path
from typing import Any

import grpc
import grpc.aio

from pxrs.errors import ConfigError
from pxrs.server.rpc.calls import LARGEST_MESSAGE
from pxrs.server.settings import Endpoint, ServeSettings

# How many calls there may be at a time: `max_inflight` divided by this.
_CALL_BYTES = 2**17
_HANDSHAKE_MS = 10_000
# A connection without calls is closed after this; clients open another when they need one.
_IDLE_MS = 300_000
# Calls that wait until they are begun. gRPC cancels some from 1,000 on, by chance, and all from
# 3,000 on; clients take that for a cancellation of their own, and do not try again.
_MOST_PENDING = 3000
_OPTIONS = (
    # Else a second node would listen on the same port, and get some of its calls.
    ("grpc.so_reuseport", 0),
    # Clients ping while they call nothing, which gRPC would punish by closing the connection.
    ("grpc.http2.max_ping_strikes", 0),
    ("grpc.max_receive_message_length", LARGEST_MESSAGE),
    # Answers are as large as what was asked for.
    ("grpc.max_send_message_length", -1),
    ("grpc.max_metadata_size", 16 * 1024),
    ("grpc.server_handshake_timeout_ms", _HANDSHAKE_MS),
    ("grpc.max_connection_idle_ms", _IDLE_MS),
    ("grpc.server.max_pending_requests", _MOST_PENDING),
    ("grpc.server.max_pending_requests_hard_limit", _MOST_PENDING),
)


class GrpcServer:
    """Listens at `grpc_listen`. Used by one event loop.

    `bind` takes the port, so that it can be published; clients that connect wait until `start` has
    the handlers. Any object with the methods of `grpc.GenericRpcHandler` can be one.
    """

    def __init__(self, settings: ServeSettings) -> None:
        self._settings = settings
        most = min(settings.max_connections, max(1, settings.max_inflight // _CALL_BYTES))
        self._server: Any = grpc.aio.server(
            options=(
                *_OPTIONS,
                ("grpc.max_allowed_incoming_connections", settings.max_connections),
            ),
            maximum_concurrent_rpcs=most,
        )
        self.endpoint = Endpoint("", 0)

    def bind(self) -> Endpoint:
        """Take the port; returns where. `ConfigError` if it can't be taken."""
        wanted = self._settings.grpc_endpoint
        credentials = self._credentials()
        try:
            if credentials is None:
                port = self._server.add_insecure_port(str(wanted))
            else:
                port = self._server.add_secure_port(str(wanted), credentials)
        except RuntimeError:
            port = 0
        if not port:
            raise ConfigError(
                f"can't listen on {self._settings.grpc_listen}: the address is in use, or is none "
                "of this host; choose another --grpc-listen"
            )
        self.endpoint = wanted._replace(port=port)
        return self.endpoint

    async def start(self, handlers: Iterable[grpc.GenericRpcHandler]) -> None:
        """Answer calls."""
        self._server.add_generic_rpc_handlers(tuple(handlers))
        await self._server.start()

    async def stop(self) -> None:
        """Accept nothing more, let calls finish for a while, close all connections."""
        await self._server.stop(self._settings.drain)

    def _credentials(self) -> grpc.ServerCredentials | None:
        settings = self._settings
        if not settings.tls_cert:
            return None
        authority = _read(settings.tls_client_ca) if settings.tls_client_ca else None
        return grpc.ssl_server_credentials(
            [(_read(settings.tls_key), _read(settings.tls_cert))],
            root_certificates=authority,
            require_client_auth=authority is not None,
        )


def _read(file: str) -> bytes:
    try:
        return Path(file).read_bytes()
    except OSError as error:
        raise ConfigError(f"{file} could not be read: {error.strerror}") from None
