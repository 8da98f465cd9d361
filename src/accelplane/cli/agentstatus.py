"""What the agents of this node know about its devices: read from their Unix sockets, or from the pages of one agent."""

import asyncio
import os
from collections.abc import Mapping, Sequence

from msgspec import Struct

from accelplane.cli.tables import UsageError
from accelplane.http.client import HttpClient, HttpClientError
from accelplane.http.listening import split_address
from accelplane.node import status_socket
from accelplane.node.settings import Settings
from accelplane.report.decoding import ReportError, decode_inventory
from accelplane.report.inventory import AdvertisedResource, ReportedUnit
from accelplane.report.limits import MAX_BYTES
from accelplane.report.local import MAX_LOCAL_BYTES, LocalStatus, decode_status

REGISTERED = "registered"

_TIMEOUT = 10.0
_HEALTHY = ("healthy", "suspect")


class AgentStates(Struct, frozen=True):
    """The states that agents report. `units` are by plugin and unit, `unit_names` by resource and ID."""

    plugins: frozenset[str] = frozenset()
    units: Mapping[tuple[str, str], ReportedUnit] = {}
    resources: Mapping[str, AdvertisedResource] = {}
    unit_names: Mapping[tuple[str, str], str] = {}
    problems: Sequence[str] = ()
    where: str = ""

    def missing(self, plugins: Sequence[str]) -> list[str]:
        """A problem that names the plugins whose health is not known."""
        unknown = [name for name in dict.fromkeys(plugins) if name not in self.plugins]
        if not unknown:
            return []
        return [f"{', '.join(unknown)}: no agent answers at {self.where}: the health of devices is not known"]


def health_of(unit: ReportedUnit | None) -> str | None:
    """The health that the kubelet knows; None if the agent, or the source of the health, does not know it."""
    if unit is None or not unit.known:
        return None
    return "Healthy" if unit.phase in _HEALTHY else "Unhealthy"


async def read_states(settings: Settings, agent: str) -> AgentStates:
    """The states of all agents of the node, or those of `agent`: `host:port` of its pages, or the path of its socket.

    Raises `UsageError` for another text.
    """
    if agent and "/" not in agent:
        return await _from_pages(agent)
    directory = status_socket.directory(settings)
    if agent:
        paths = [agent]
    else:
        try:
            paths = [f"{directory}/{name}" for name in sorted(os.listdir(directory)) if name.endswith(".sock")]
        except OSError:
            paths = []
    found: list[LocalStatus] = []
    problems: list[str] = []
    for path in paths:
        try:
            found.append(await _from_socket(path))
        except (OSError, TimeoutError, ReportError) as error:
            cause = error.strerror if isinstance(error, OSError) else str(error)
            problems.append(f"agent at {path}: {cause or f'no answer in {_TIMEOUT:g} s'}")
    return _states(found, problems, agent or directory)


def _states(found: Sequence[LocalStatus], problems: Sequence[str], where: str) -> AgentStates:
    plugins = [plugin for status in found for plugin in status.inventory.plugins]
    return AgentStates(
        plugins=frozenset(plugin.name for plugin in plugins),
        units={(plugin.name, unit.unit): unit for plugin in plugins for unit in plugin.units},
        resources={resource.name: resource for plugin in plugins for resource in plugin.resources},
        unit_names={
            (resource, id_): unit
            for status in found
            for resource, units in status.units.items()
            for id_, unit in units.items()
        },
        problems=[*problems, *(problem for status in found for problem in status.inventory.problems)],
        where=where,
    )


async def _from_socket(path: str) -> LocalStatus:
    """Raises `OSError`, `TimeoutError` and `ReportError`."""
    async with asyncio.timeout(_TIMEOUT):
        reader, writer = await asyncio.open_unix_connection(path)
        try:
            content = bytearray()
            while part := await reader.read(65536):
                content += part
                if len(content) > MAX_LOCAL_BYTES:
                    raise ReportError(f"found more than {MAX_LOCAL_BYTES} bytes")
        finally:
            writer.close()
    return decode_status(bytes(content))


async def _from_pages(address: str) -> AgentStates:
    """Raises `UsageError` for a text that is no address."""
    try:
        host, port = split_address(address)
    except ValueError:
        raise UsageError(f"--agent: found {address[:80]!a}, expected HOST:PORT or the path of a socket") from None
    client = HttpClient(host or "localhost", port, idle_timeout=0)
    try:
        async with asyncio.timeout(_TIMEOUT), client.request("GET", "/api/v1/inventory") as response:
            if response.status != 200:
                raise ReportError(f"found status {response.status}, expected 200")
            inventory = decode_inventory(await response.read(MAX_BYTES))
    except (HttpClientError, TimeoutError, ReportError) as error:
        text = str(error) or f"no answer in {_TIMEOUT:g} s"
        return AgentStates(problems=[f"agent at {address}: /api/v1/inventory: {text}"], where=address)
    finally:
        client.close()
    return _states([LocalStatus(inventory)], (), address)
