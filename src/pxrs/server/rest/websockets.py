"""A WebSocket that carries frames, one in each message, both ways."""

from __future__ import annotations

import logging
from collections.abc import AsyncIterator
from contextlib import aclosing

from aiohttp import WSCloseCode, WSMsgType, web

from pxrs.client.frames import MOST_FRAME_BYTES
from pxrs.errors import InvalidRequest, PxrsError
from pxrs.server.rest.problems import HttpError
from pxrs.server.rest.room import Room
from pxrs.server.rest.routes import Identify, Talk

_LOG = logging.getLogger("pxrs.serve")
# A close frame has room for this many bytes of text.
_REASON = 120
# What fits into the buffer of a connection, if that is empty.
_SMALL = 2**14


async def converse(
    request: web.BaseRequest, talk: Talk, identify: Identify, room: Room, seconds: float
) -> web.StreamResponse:
    """Run `talk` over a WebSocket. A client that does not read for `seconds` is cut off."""
    # aiohttp refuses messages that have this size, too.
    socket = web.WebSocketResponse(max_msg_size=MOST_FRAME_BYTES + 1, compress=False)
    if not socket.can_prepare(request).ok:
        raise HttpError(
            426, "upgrade_required", "this is a WebSocket for pxrs:// clients", _UPGRADE
        )
    await socket.prepare(request)
    code, reason = WSCloseCode.GOING_AWAY, ""
    try:
        async with aclosing(talk(_frames(socket), identify)) as answers:
            async for answer in answers:
                if _is_gone_at_once(request, len(answer)):
                    await socket.send_bytes(answer)
                else:
                    async with room.moving(len(answer), seconds):
                        await socket.send_bytes(answer)
    except (TimeoutError, ConnectionError):
        _LOG.info("a client is cut off: it does not read, or has gone")
        if request.transport is not None:
            request.transport.abort()
    except HttpError as error:
        is_final = error.status in (401, 403)
        code = WSCloseCode.POLICY_VIOLATION if is_final else WSCloseCode.TRY_AGAIN_LATER
        reason = str(error)
    except PxrsError as error:
        code, reason = WSCloseCode.INVALID_TEXT, str(error)
    await socket.close(code=code, message=reason.encode()[:_REASON])
    return socket


def _is_gone_at_once(request: web.BaseRequest, size: int) -> bool:
    """Whether `size` bytes are sent without waiting, so that no timeout is needed."""
    transport = request.transport
    return size < _SMALL and transport is not None and not transport.get_write_buffer_size()


_UPGRADE = {"Upgrade": "websocket", "Connection": "Upgrade"}


async def _frames(socket: web.WebSocketResponse) -> AsyncIterator[bytes]:
    async for message in socket:
        if message.type is not WSMsgType.BINARY:
            raise InvalidRequest("a frame must be a binary message")
        yield message.data
