"""Requests a report from `accelplane clients`."""

import asyncio
import contextlib
from collections.abc import Iterable

from accelplane.clients.messages import TIMEOUT, MessageError, Report, Request, encode, receive


class ClientsError(Exception):
    """The socket returned no report; the text names the socket."""


async def request_report(socket: str, pods: Iterable[str], *, limit: float = TIMEOUT) -> Report:
    """The report on the pods with these UIDs. Raises `ClientsError`."""
    try:
        async with asyncio.timeout(limit):
            return await _exchange(socket, encode(Request(tuple(pods))))
    except TimeoutError:
        raise ClientsError(f"{socket}: no report within {limit:g} s") from None
    except OSError as error:
        raise ClientsError(f"{socket}: {error.strerror or error}") from error
    except (MessageError, ValueError) as error:
        raise ClientsError(f"{socket}: {error}") from error


async def _exchange(socket: str, request: bytes) -> Report:
    reader, writer = await asyncio.open_unix_connection(socket)
    try:
        writer.write(request)
        await writer.drain()
        return await receive(reader, Report)
    finally:
        writer.close()
        with contextlib.suppress(OSError):
            await writer.wait_closed()
