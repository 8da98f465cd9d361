"""`accelplane inspect --cluster --fleet`: the devices of a cluster, with state and holders, from the fleet's server."""

import asyncio
import contextlib
from collections.abc import AsyncGenerator, Sequence
from urllib.parse import quote

from msgspec import Struct

from accelplane.cli.portforward import PortForwardError, forwarded
from accelplane.cli.refresh import show
from accelplane.cli.tables import (
    UNKNOWN,
    Column,
    Document,
    Format,
    Row,
    Table,
    UsageError,
    print_problems,
    sort_tables,
    time_text,
)
from accelplane.fleet.devicelist import MAX_BYTES, PATH, DeviceItem, FleetDeviceList, decode
from accelplane.http.client import HttpClient, HttpClientError
from accelplane.report.inventory import Holder

TARGET = "deployment/accelplane-fleet"
PORT = 8080

_COLUMNS = (
    Column("NODE"), Column("PLUGIN"), Column("DEVICE"), Column("ADDRESS"), Column("MODEL", wide=True),
    Column("NUMA", wide=True), Column("STATE"), Column("STATE SINCE"), Column("REASON", wide=True), Column("IDS"),
    Column("ALLOCATED"), Column("HOLDERS"), Column("HOLDER SINCE", wide=True),
)  # fmt: skip


class FleetRequest(Struct, frozen=True, kw_only=True):
    """The flags. `namespace` limits the devices to those that pods of this namespace hold."""

    kubeconfig: str = ""
    context: str = ""
    timeout: float = 15.0
    fleet_namespace: str = "accelplane-fleet"
    namespace: str = ""
    node: str = ""
    resource: str = ""


class FleetError(Exception):
    """The fleet's server did not return the devices."""


def run(request: FleetRequest, form: Format, *, interval: float, once: bool, program: str) -> int:
    """Prints the devices. Returns the exit code, 1 if something could not be read.

    `program` begins the lines on standard error. Raises `UsageError` and `OutputError`.
    """
    sort_tables(document(FleetDeviceList(), request).tables, form.sort_by)
    try:
        problems = asyncio.run(_show(request, form, interval=interval, once=once, program=program))
    except (PortForwardError, FleetError) as error:
        problems = [str(error)]
    return print_problems(program, problems)


def check_target(name: str) -> None:
    """Raises `UsageError` for a namespace that kubectl could take for a flag."""
    if not name or not name.isascii() or not name.replace("-", "").isalnum() or name.startswith("-"):
        raise UsageError(f"--fleet-namespace: found {name[:80]!a}, expected the name of a namespace")


async def _show(request: FleetRequest, form: Format, *, interval: float, once: bool, program: str) -> Sequence[str]:
    """Shows the devices until the end. Returns the last read errors."""
    async with _connected(request) as client:

        async def read() -> tuple[Document[DeviceItem], Sequence[str]]:
            listed = await _devices(client, request)
            return document(listed, request), problems_of(listed)

        return await show(read, form, interval, once=once, program=program)


@contextlib.asynccontextmanager
async def _connected(request: FleetRequest) -> AsyncGenerator[HttpClient]:
    options = [f"--kubeconfig={request.kubeconfig}"] if request.kubeconfig else []
    options += [f"--context={request.context}"] if request.context else []
    forward = forwarded(
        TARGET, PORT, namespace=request.fleet_namespace, options=options, limit=max(request.timeout, 1.0)
    )
    async with forward as port:
        # The server accepts names of this machine only. Each request has a separate connection.
        client = HttpClient("127.0.0.1", port, idle_timeout=0)
        try:
            yield client
        finally:
            client.close()


async def _devices(client: HttpClient, request: FleetRequest) -> FleetDeviceList:
    """Raises `FleetError`."""
    path = f"{PATH}?node={quote(request.node, safe='')}" if request.node else PATH
    try:
        async with (
            asyncio.timeout(request.timeout),
            client.request("GET", path, (("Accept", "application/json"),)) as response,
        ):
            if response.status != 200:
                raise FleetError(f"{PATH}: found status {response.status} {response.phrase}, expected 200")
            return decode(await response.read(MAX_BYTES))
    except TimeoutError:
        raise FleetError(f"{PATH}: no complete response within {request.timeout:g} s") from None
    except (HttpClientError, ValueError) as error:
        raise FleetError(f"{PATH}: {error}") from None


def problems_of(listed: FleetDeviceList) -> Sequence[str]:
    """The objects that the fleet could not read."""
    found = [f"API server: {listed.problem}"] if listed.problem else []
    return [*found, *(f"node {each.node}: {each.problem}" for each in listed.problems)]


def document(listed: FleetDeviceList, request: FleetRequest) -> Document[DeviceItem]:
    """The table of the devices that the request selects."""
    rows = [_row(item) for item in listed.devices if _matches(item, request)]
    empty = "" if problems_of(listed) else "No node has devices."
    table = Table("devices", _COLUMNS, rows, empty=empty)
    return Document((table,), {"source": "fleet", "problems": list(problems_of(listed))}, "DeviceStateList")


def _matches(item: DeviceItem, request: FleetRequest) -> bool:
    return (
        request.node in ("", item.node)
        and any(resource.startswith(request.resource) for resource in item.ids or ("",))
        and (not request.namespace or any(holder.namespace == request.namespace for holder in item.holders))
    )


def _row(item: DeviceItem) -> Row[DeviceItem]:
    since = [text for holder in item.holders if (text := time_text(holder.since))]
    cells = (
        item.node,
        item.plugin,
        item.device or item.unit,
        item.bdf or UNKNOWN,
        item.model or UNKNOWN,
        UNKNOWN if item.numa is None else str(item.numa),
        item.state if item.current else f"{item.state} (outdated)",
        time_text(item.state_since) or UNKNOWN,
        ": ".join(part for part in (item.reason, item.text) if part) or UNKNOWN,
        str(sum(item.ids.values())),
        str(sum(holder.count for holder in item.holders)),
        ", ".join(_holder(holder) for holder in item.holders) or UNKNOWN,
        min(since, default=UNKNOWN),
    )
    return Row(f"{item.node}/{item.plugin}/{item.unit}", cells, item)


def _holder(holder: Holder) -> str:
    name = f"{holder.namespace}/{holder.pod}/{holder.container}"
    return f"{name} ({holder.count})" if holder.count > 1 else name
