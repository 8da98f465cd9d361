"""The agents' pages: one waiting request per agent, and the current values on demand.

An agent answers with its inventory when that changes. Whatever it does instead affects its own node only: answers have
limits of size and time, redirects are not followed, and failed requests are repeated with growing delays.
"""

import asyncio
import contextlib
import random
import time
from collections.abc import Callable, Iterator

from msgspec import Struct

from accelplane.apiserver import ApiError, ClientConfig
from accelplane.apiserver.credentials import Credentials
from accelplane.http.client import HttpClient, HttpClientError, ProtocolError, Response
from accelplane.kube.interning import StringPool
from accelplane.report.decoding import ReportError, decode_inventory, decode_readings
from accelplane.report.inventory import NodeInventory
from accelplane.report.limits import MAX_BYTES

from .model import Agent, AgentState, NodeReadings
from .options import FleetOptions

_CONNECTING = 64
# Larger answers are read a few at a time, so that hostile agents cannot fill the memory together.
_SMALL_ANSWER = 64 * 1024
_LARGE_ANSWERS = 8
_share = StringPool(50_000)


class AgentTimes(Struct, frozen=True):
    """Seconds: of a waiting request, for an answer, between retries, between requests, until an inventory expires."""

    wait: int = 55
    answer: float = 5.0
    first_delay: float = 1.0
    max_delay: float = 60.0
    min_interval: float = 1.0
    # For agents that do not wait: the time between two requests.
    poll: float = 10.0
    expiry: float = 600.0
    # Between two checks of what has expired, and whether the API server answers.
    check: float = 5.0


class Place(Struct, frozen=True):
    """Where an agent serves its pages; no `host` before the pod has a usable address, no `port` without pages.

    `problem` is the reason why its address cannot be used.
    """

    namespace: str
    pod: str
    node: str
    host: str = ""
    port: int = 0
    problem: str = ""

    @property
    def name(self) -> str:
        return f"{self.namespace}/{self.pod}"


class Report(Struct, frozen=True):
    """The state of one agent: the result of requests, and its last inventory with the time of its last response."""

    place: Place
    state: AgentState
    problem: str = ""
    answered: float = 0.0
    inventory: NodeInventory | None = None

    @property
    def agent(self) -> Agent:
        """The agent in a snapshot."""
        found = self.inventory
        return Agent(
            pod=self.place.name,
            name=found.agent if found else "",
            version=found.versions.get("accelplane", "") if found else "",
            state=self.state,
            problem=self.problem,
            answered=self.answered,
            holders_source=found.holders.source if found else "",
            holders_age=(found.holders.age or 0.0) if found else 0.0,
        )


class UnexpectedAnswer(Exception):
    """An answer that is no inventory. `permanent` ones are no matter of load or rights: this is not an agent."""

    def __init__(self, problem: str, *, permanent: bool = True) -> None:
        super().__init__(problem)
        self.permanent = permanent


class Agents:
    """The agents of a cluster. `on_change` is called with the name of the node whose reports changed.

    `on_answer` is called with the seconds and bytes of each inventory that was read.
    """

    def __init__(
        self,
        options: FleetOptions,
        on_change: Callable[[str], None],
        *,
        times: AgentTimes = AgentTimes(),  # noqa: B008 - a frozen value
        on_answer: Callable[[float, int], None] = lambda _seconds, _size: None,
    ) -> None:
        self.times = times
        self._on_change = on_change
        self._exchange = _Exchange(options, times.answer, on_answer)
        self._links: dict[str, dict[str, _Link]] = {}
        # The last reports of deleted pods, until another agent replaces them or they expire.
        self._departed: dict[str, dict[str, Report]] = {}
        self._tasks: asyncio.TaskGroup | None = None

    async def run(self) -> None:
        """Keeps the reports current until cancelled."""
        async with asyncio.TaskGroup() as self._tasks:
            for link in self._all_links():
                link.start(self._tasks)
            await asyncio.Event().wait()

    def nodes(self) -> set[str]:
        """The nodes with an agent, or with the stored inventory of a deleted one."""
        return self._links.keys() | self._departed.keys()

    def reports(self, node: str) -> list[Report]:
        """The reports about a node."""
        reports = [link.report for link in self._links.get(node, {}).values()]
        return reports + list(self._departed.get(node, {}).values())

    def all_reports(self) -> Iterator[Report]:
        """The reports about all nodes."""
        for node in self.nodes():
            yield from self.reports(node)

    def set(self, place: Place) -> None:
        """Adds an agent, or changes where it serves."""
        links = self._links.setdefault(place.node, {})
        known = links.get(place.name)
        if known is not None and known.report.place == place:
            return
        if known is not None:
            known.stop()
        link = links[place.name] = _Link(place, self._exchange, self.times, self._changed)
        if known is not None and known.report.inventory is not None:
            self._keep(known.report, "the pod has another address")
        if self._tasks is not None:
            link.start(self._tasks)
        self._on_change(place.node)

    def remove(self, node: str, name: str) -> None:
        """Removes the agent of a deleted pod. Its inventory is stored until another agent replaces it or it expires."""
        links = self._links.get(node, {})
        link = links.pop(name, None)
        if link is None:
            return
        link.stop()
        if not links:
            del self._links[node]
        if link.report.inventory is not None:
            self._keep(link.report, "the pod was deleted")
        self._on_change(node)

    def expire(self, now: float) -> None:
        """Drops the inventories of agents that have not answered for too long."""
        for link in self._all_links():
            link.expire(now - self.times.expiry)
        for node, reports in list(self._departed.items()):
            kept = {name: each for name, each in reports.items() if each.answered > now - self.times.expiry}
            if len(kept) < len(reports):
                self._set_departed(node, kept)
                self._on_change(node)

    async def readings(self, node: str) -> NodeReadings:
        """The current values of a node's devices by all its agents."""
        links = [link for link in self._links.get(node, {}).values() if link.report.state == "connected"]
        if not links:
            return NodeReadings(time.time(), problem="no agent of this node answers")
        answers = await asyncio.gather(*(link.readings() for link in links))
        return NodeReadings(
            min((answer.time for answer in answers if not answer.problem), default=time.time()),
            tuple(device for answer in answers for device in answer.devices),
            "; ".join(answer.problem for answer in answers if answer.problem),
        )

    def _all_links(self) -> list["_Link"]:
        return [link for links in self._links.values() for link in links.values()]

    def _keep(self, report: Report, problem: str) -> None:
        stale_report = Report(report.place, "stale", problem, report.answered, report.inventory)
        self._departed.setdefault(report.place.node, {})[report.place.name] = stale_report

    def _changed(self, report: Report) -> None:
        node, found = report.place.node, report.inventory
        if report.state == "connected" and found is not None and node in self._departed:
            plugins = {plugin.name for plugin in found.plugins}
            self._set_departed(
                node,
                {
                    name: each
                    for name, each in self._departed[node].items()
                    if each.inventory is not None
                    and not plugins.issuperset(plugin.name for plugin in each.inventory.plugins)
                },
            )
        self._on_change(node)

    def _set_departed(self, node: str, reports: dict[str, Report]) -> None:
        if reports:
            self._departed[node] = reports
        else:
            self._departed.pop(node, None)


class _Link:
    """The connection to one agent. `run` requests its inventory until cancelled."""

    def __init__(
        self, place: Place, exchange: "_Exchange", times: AgentTimes, on_change: Callable[[Report], None]
    ) -> None:
        self.report = _first_report(place)
        self._exchange = exchange
        self._times = times
        self._on_change = on_change
        self._http = exchange.client(place.host, place.port) if place.host and place.port else None
        self._task: asyncio.Task[None] | None = None

    def start(self, tasks: asyncio.TaskGroup) -> None:
        if self._http is not None:
            self._task = tasks.create_task(self._run(self._http), name=f"agent {self.report.place.name}")

    def stop(self) -> None:
        if self._task is not None:
            self._task.cancel()

    def expire(self, before: float) -> None:
        """Drops the inventory if the last answer is older."""
        if self.report.inventory is not None and self.report.state != "connected" and self.report.answered <= before:
            self._set(Report(self.report.place, self.report.state, self.report.problem, self.report.answered))

    async def readings(self) -> NodeReadings:
        """The current values by this agent; `problem` is the reason if there are none."""
        name = self.report.place.name
        if self._http is None:
            return NodeReadings(0.0, problem=f"{name}: no address")
        try:
            body = await self._exchange.get(self._http, "/api/v1/readings")
            found = decode_readings(body or b"", _share)
        except (HttpClientError, UnexpectedAnswer, ReportError, ApiError) as error:
            return NodeReadings(0.0, problem=f"{name}: {error}")
        return NodeReadings(found.time, tuple(each for plugin in found.plugins for each in plugin.devices))

    async def _run(self, http: HttpClient) -> None:
        loop, failures = asyncio.get_running_loop(), 0
        try:
            while True:
                started = loop.time()
                try:
                    changed = await self._ask(http)
                except (HttpClientError, UnexpectedAnswer, ReportError, ApiError) as error:
                    self._fail(error)
                    delay = min(self._times.max_delay, self._times.first_delay * 2 ** min(failures, 16))
                    delay *= 0.5 + random.random() / 2  # noqa: S311 - not a secret
                    failures += 1
                else:
                    failures = 0
                    interval = self._times.min_interval if changed else min(self._times.poll, self._times.wait / 2)
                    delay = started + interval - loop.time()
                if delay > 0:
                    await asyncio.sleep(delay)
        finally:
            http.close()

    async def _ask(self, http: HttpClient) -> bool:
        """Requests the inventory. Returns whether it has changed."""
        inventory, wait = self.report.inventory, 0
        if inventory is None or self.report.state != "connected":
            body = await self._exchange.get(http, "/api/v1/inventory")
        else:
            wait, etag = self._times.wait, f'"{inventory.generation}"'
            body = await self._exchange.get(http, f"/api/v1/inventory?wait={wait}", wait=wait, etag=etag)
        place = self.report.place
        if body is not None:
            inventory = decode_inventory(body, _share)
            if inventory.node not in ("", place.node):
                raise ReportError(f"found the inventory of another node, expected {place.node!a}")
        report = Report(place, "connected", "", time.time(), inventory)
        if body is not None:
            self._set(report)
        else:
            self.report = report
        return body is not None

    def _fail(self, error: Exception) -> None:
        known = self.report
        junk = isinstance(error, ProtocolError | ReportError) or (
            isinstance(error, UnexpectedAnswer) and error.permanent
        )
        state: AgentState = "invalid" if junk else "stale" if known.answered else "connecting"
        failed = Report(known.place, state, str(error), known.answered, known.inventory)
        if failed != known:
            self._set(failed)

    def _set(self, report: Report) -> None:
        self.report = report
        self._on_change(report)


class _Exchange:
    """Requests to agents within the limits that all agents share."""

    def __init__(self, options: FleetOptions, timeout: float, on_answer: Callable[[float, int], None]) -> None:
        self._timeout = timeout
        self._on_answer = on_answer
        self._server_name = options.agent_server_name
        self._credentials: Credentials | None = None
        if options.agent_ca:
            # Without TLS the token would be readable by whatever has the address of the pod.
            self._credentials = Credentials(
                ClientConfig(server="https://agents", authority=options.agent_ca, token=options.agent_token or None)
            )
        self._connecting = asyncio.Semaphore(_CONNECTING)
        self._large = asyncio.Semaphore(_LARGE_ANSWERS)

    def client(self, host: str, port: int) -> HttpClient:
        """A client for one agent."""
        if self._credentials is None:
            return HttpClient(host, port)
        return HttpClient(host, port, context=self._credentials.context, server_name=self._server_name)

    async def get(self, http: HttpClient, target: str, *, wait: float = 0.0, etag: str = "") -> bytes | None:
        """The body, None if it still has the `etag`. Raises `HttpClientError`, `UnexpectedAnswer`, `ApiError`."""
        fields = [("Accept", "application/json"), ("Accept-Encoding", "identity"), ("User-Agent", "accelplane")]
        if etag:
            fields.append(("If-None-Match", etag))
        if self._credentials is not None and (authorization := await self._credentials.authorization()):
            fields.append(("Authorization", authorization))
        loop = asyncio.get_running_loop()
        with contextlib.ExitStack() as turn:
            await self._connecting.acquire()
            turn.callback(self._connecting.release)
            try:
                async with asyncio.timeout(self._timeout) as deadline:

                    def on_connected() -> None:
                        turn.close()
                        deadline.reschedule(loop.time() + wait + self._timeout)

                    async with http.request("GET", target, fields, before_send=on_connected) as response:
                        deadline.reschedule(loop.time() + self._timeout)
                        if response.status == 304 and etag:
                            return None
                        return await self._read(response, deadline)
            except TimeoutError:
                raise UnexpectedAnswer(f"no complete answer within {self._timeout:g} s", permanent=False) from None

    async def _read(self, response: Response, deadline: asyncio.Timeout) -> bytes:
        _check_head(response)
        loop = asyncio.get_running_loop()
        started = loop.time()
        length = response.fields.get("content-length", "")
        if length and int(length) <= _SMALL_ANSWER:
            body = await response.read(MAX_BYTES)
        else:
            deadline.reschedule(None)
            async with self._large:
                deadline.reschedule(loop.time() + self._timeout)
                body = await response.read(MAX_BYTES)
        self._on_answer(loop.time() - started, len(body))
        return body


def _first_report(place: Place) -> Report:
    if not place.port:
        problem = "found no port named pages in the pod, expected one; set -http-address of the agent"
        return Report(place, "none", problem)
    if place.problem:
        return Report(place, "invalid", place.problem)
    return Report(place, "connecting", "" if place.host else "the pod has no address yet")


def _check_head(response: Response) -> None:
    """Raises `UnexpectedAnswer`, without text of the response: everyone who may open the page can read the message."""
    if response.status != 200:
        hint = "; grant it accelplane-inventory-reader" if response.status in (401, 403) else ""
        temporary = response.status in (401, 403, 429) or response.status >= 500
        raise UnexpectedAnswer(f"found status {response.status}, expected 200{hint}", permanent=not temporary)
    if response.fields.get("content-encoding", "identity").lower() != "identity":
        raise UnexpectedAnswer("found a content-encoding, expected none")
    length = response.fields.get("content-length", "")
    if length and int(length) > MAX_BYTES:
        raise UnexpectedAnswer(f"found {int(length)} bytes, expected at most {MAX_BYTES}")
