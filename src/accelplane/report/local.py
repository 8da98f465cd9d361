"""The document of the agent's Unix socket, for commands on the same node: its inventory, and the unit of each ID.

The agent sends one document to each client and closes the connection. Only root can connect.
"""

from collections.abc import Callable
from typing import Annotated

import msgspec
from msgspec import Meta, Struct

from accelplane.report.decoding import ReportError, decode_inventory
from accelplane.report.inventory import NodeInventory
from accelplane.report.limits import MAX_BYTES, Name

MAX_LOCAL_BYTES = 4 * MAX_BYTES

Units = Annotated[dict[Name, dict[str, Name]], Meta(max_length=4096)]


class LocalStatus(Struct, frozen=True):
    """`units` has the unit of each ID, by qualified resource."""

    inventory: NodeInventory
    units: Units = {}


class _Envelope(Struct, frozen=True):
    inventory: msgspec.Raw
    units: Units = {}


def encode_status(inventory: bytes, units: Units) -> bytes:
    """The document with an inventory that is already encoded."""
    return msgspec.json.encode(_Envelope(msgspec.Raw(inventory), units))


def decode_status(body: bytes, share: Callable[[str], str] = str) -> LocalStatus:
    """Raises `ReportError`."""
    try:
        found = msgspec.json.decode(body, type=_Envelope)
    except (msgspec.MsgspecError, UnicodeDecodeError, RecursionError) as error:
        raise ReportError(f"expected the status of an agent: {str(error)[:300]}") from None
    return LocalStatus(decode_inventory(bytes(found.inventory), share), found.units)
