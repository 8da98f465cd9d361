"""Requests and reports on the socket of `accelplane clients`: JSON after its length in four bytes, big-endian.

A connection has one request and one report.
"""

import asyncio
import contextlib
from collections.abc import Iterable, Mapping
from typing import Annotated, TypeVar

import msgspec
from msgspec import Meta, Struct

MAX_BYTES = 256 * 1024
MAX_PODS = 1024
# Seconds for the complete exchange.
TIMEOUT = 2.0

_LENGTH_BYTES = 4
_NUMBER = Meta(ge=0, le=1e20)

PodUid = Annotated[str, Meta(pattern="^[0-9a-f-]{32,36}$", max_length=36)]
Word = Annotated[str, Meta(pattern="^[a-z0-9][a-z0-9_-]*$", max_length=32)]

MessageT = TypeVar("MessageT", bound=Struct)


class MessageError(Exception):
    """The peer sent no valid message."""


class ClientsError(Exception):
    """The socket returned no report; the text names the socket."""


class Request(Struct, frozen=True, rename="kebab"):
    """The UIDs of the pods whose use is reported."""

    pods: Annotated[tuple[PodUid, ...], Meta(max_length=MAX_PODS)]


class DeviceUse(Struct, frozen=True, kw_only=True, rename="kebab"):
    """The use of a GPU by a container: open clients, busy seconds by engine class, bytes by region and kind."""

    bdf: Annotated[str, Meta(pattern=r"^[0-9a-f]{4}:[0-9a-f]{2}:[01][0-9a-f]\.[0-7]$", max_length=12)]
    driver: Word
    clients: Annotated[int, Meta(ge=0)]
    busy_seconds: Annotated[Mapping[Word, Annotated[float, _NUMBER]], Meta(max_length=64)] = {}
    memory_bytes: Annotated[
        Mapping[Word, Annotated[Mapping[Word, Annotated[int, Meta(ge=0)]], Meta(max_length=3)]], Meta(max_length=64)
    ] = {}


class ContainerUse(Struct, frozen=True, kw_only=True, rename="kebab"):
    """The use of GPUs by a container. `name` is empty if it is not known."""

    pod: PodUid
    name: Annotated[str, Meta(pattern="^[a-z0-9-]*$", max_length=63)] = ""
    devices: Annotated[tuple[DeviceUse, ...], Meta(max_length=256)] = ()


class Report(Struct, frozen=True, kw_only=True, rename="kebab"):
    """The use of GPUs by all requested pods. `incomplete`: a limit was reached, values of some clients are older."""

    containers: Annotated[tuple[ContainerUse, ...], Meta(max_length=4096)] = ()
    incomplete: bool = False
    processes: Annotated[int, Meta(ge=0)] = 0


def encode(message: Request | Report) -> bytes:
    """Raises `MessageError` if the message is too long."""
    content = msgspec.json.encode(message)
    if len(content) > MAX_BYTES:
        raise MessageError(f"message of {len(content)} bytes, expected at most {MAX_BYTES}")
    return len(content).to_bytes(_LENGTH_BYTES, "big") + content


def encode_report(report: Report) -> bytes:
    """The report, without its last containers and `incomplete` if it is too long."""
    while True:
        try:
            return encode(report)
        except MessageError:
            shorter = report.containers[: len(report.containers) // 2]
            report = Report(containers=shorter, incomplete=True, processes=report.processes)


def decode(content: bytes, kind: type[MessageT]) -> MessageT:
    """Raises `MessageError`."""
    try:
        return msgspec.json.decode(content, type=kind)
    except (msgspec.MsgspecError, UnicodeDecodeError, RecursionError) as error:
        raise MessageError(f"invalid {kind.__name__.lower()}: {error}") from None


async def receive(reader: asyncio.StreamReader, kind: type[MessageT]) -> MessageT:
    """Reads a message. The caller limits the time. Raises `MessageError` or `OSError`."""
    try:
        length = int.from_bytes(await reader.readexactly(_LENGTH_BYTES), "big")
        if length > MAX_BYTES:
            raise MessageError(f"message of {length} bytes, expected at most {MAX_BYTES}")
        return decode(await reader.readexactly(length), kind)
    except asyncio.IncompleteReadError as error:
        raise MessageError(f"connection closed after {len(error.partial)} bytes, expected a message") from None


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
