"""The pages behind one listener: routes, rights, and what each page needs."""

import asyncio
import hashlib
import time
from collections import OrderedDict
from collections.abc import Awaitable, Callable, Sequence
from http import HTTPStatus

import msgspec
from msgspec import Struct

from accelplane.apiserver import ApiError
from accelplane.http.handler import PendingResponse
from accelplane.http.messages import HttpError, Request, Response, accepts_gzip, method_error
from accelplane.report.inventory import Holder, ReportedUnit

from ..devicelist import PATH as DEVICES_PATH
from ..devicelist import device_list
from ..model import Node, NodeReadings
from ..view import FleetView
from .access import Viewer, names_of
from .assets import AssetFiles
from .gate import Gate
from .html import element
from .live import Live, LiveLimits
from .page import Assets, Context, Frame, document, plain_document
from .query import Query, ScreenName, fields_of, query_of
from .screens import PATHS, SCREENS
from .security import FIELDS, compressed, page_response, redirect
from .selection import Selection, SelectorError
from .summaries import Summaries

_METRICS = "text/plain; version=0.0.4; charset=utf-8"
_TEXT = "text/plain; charset=utf-8"
_JSON = "application/json"
_CSV = "text/csv; charset=utf-8"
_FORMS = ("/login", "/logout")
# Paths for programs, which get errors as text.
_TEXT_PATHS = ("/api/", "/metrics", "/assets/")
_MAX_DEPTH = 16
_READINGS_TIMEOUT = 3.0
# Viewers of the same screen share it; values that change by themselves are at most 2 s old.
_MAX_RENDERED = 16
_RENDERED_AGE = 2.0


class Rendered(Struct, frozen=True):
    """A page with the hash of its content, made at a time of the event loop."""

    generation: int
    made: float
    status: int
    text: str
    etag: str


class Screens:
    """Renders screens for viewers, and announces changes. Shared by all listeners."""

    def __init__(self, view: FleetView, *, grafana_url: str = "", limits: LiveLimits | None = None) -> None:
        self.view = view
        self.assets = AssetFiles()
        self.live = Live(view, limits or LiveLimits())
        self._grafana_url = grafana_url
        self._summaries = Summaries()
        self._rendered: OrderedDict[tuple[ScreenName, Query, str], Rendered] = OrderedDict()
        self._download = asyncio.Lock()

    def namespaces(self, holders: Sequence[Holder] = ()) -> frozenset[str]:
        """The namespaces whose names the screens may show."""
        cluster = self.view.cluster()
        return frozenset[str]().union(
            *(each.namespaces for each in self._summaries.of(cluster).values()),
            (pod.namespace for pod in cluster.waiting),
            (namespace for namespace, _ in cluster.held_seconds),
            (holder.namespace for holder in holders),
        )

    async def context(self, screen: ScreenName, query: Query, gate: Gate, viewer: Viewer) -> Context:
        """The input of a screen, with the names that the viewer may see. Raises `HttpError`."""
        needs = SCREENS[screen]
        readings = await self._readings(query.node) if needs.needs_readings and query.node else None
        holders, problem = await self._holders(query.node) if needs.needs_holders and query.node else (None, "")
        names = await names_of(gate.access, viewer, self.namespaces(holders or ()))
        cluster = self.view.cluster()
        if names.unknown:
            text = f"names of {names.unknown} namespaces are hidden, their rights are not known yet; refresh the page"
            problems = [each for each in (cluster.problem, text) if each]
            cluster = msgspec.structs.replace(cluster, problem="; ".join(problems))
        return Context(
            cluster=cluster,
            summaries=self._summaries.of(cluster),
            visible=names.visible,
            now=time.time(),
            use=self.view.use,
            grafana_url=self._grafana_url,
            readings=readings,
            holders=holders,
            holders_problem=problem,
        )

    async def render(self, screen: ScreenName, query: Query, gate: Gate, viewer: Viewer) -> Rendered:
        """A page. Viewers who may see all names share it for a moment. Raises `HttpError`."""
        everything = (await names_of(gate.access, viewer, ())).everything
        user = viewer.name if viewer.session else ""
        key = screen, query, user
        loop, generation = asyncio.get_running_loop(), self.view.cluster().generation
        known = self._rendered.get(key) if everything else None
        if known is not None and known.generation == generation and loop.time() - known.made < _RENDERED_AGE:
            return known
        context = await self.context(screen, query, gate, viewer)
        started = time.thread_time()
        page = SCREENS[screen].make(context, query)
        text = document(page, Frame(assets=self.assets.links, screen=screen, query=query, user=user), context)
        same = text.replace(f' data-generation="{context.cluster.generation}"', "", 1)
        digest = hashlib.blake2b(same.encode("utf-8", "replace"), digest_size=16).hexdigest()
        self.live.spent(screen, time.thread_time() - started)
        rendered = Rendered(context.cluster.generation, loop.time(), 200 if page.found else 404, text, f'"{digest}"')
        if everything:
            self._rendered[key] = rendered
            self._rendered.move_to_end(key)
        if len(self._rendered) > _MAX_RENDERED:
            self._rendered.popitem(last=False)
        return rendered

    async def download(self, make: Callable[[], bytes]) -> bytes:
        """Makes a large document in a thread, one at a time."""
        async with self._download:
            return await asyncio.to_thread(make)

    async def _readings(self, node: str) -> NodeReadings:
        try:
            async with asyncio.timeout(_READINGS_TIMEOUT):
                return await self.view.readings(node)
        except TimeoutError:
            return NodeReadings(time.time(), problem=f"the agent did not answer in {_READINGS_TIMEOUT:g} s")

    async def _holders(self, node: str) -> tuple[tuple[Holder, ...] | None, str]:
        """The holders by the API server for a node without devices of an agent, or why they are not known."""
        found = self.view.cluster().nodes.get(node)
        if found is None or found.units:
            return None, ""
        try:
            return await self.view.holders(node), ""
        except ApiError as error:
            return None, str(error)


class Site:
    """The handler of one listener. `metrics` returns the page for scrapers."""

    def __init__(self, screens: Screens, gate: Gate, metrics: Callable[[], bytes] | None = None) -> None:
        self._screens = screens
        self._gate = gate
        self._metrics = metrics

    def __call__(self, request: Request) -> Response | PendingResponse:
        if request.path.startswith("/assets/"):
            return self._asset(request)
        return self._answer(request)

    def _asset(self, request: Request) -> Response:
        found = self._screens.assets.response(request.path, compressed=accepts_gzip(request))
        if found is None or request.method == "POST":
            return Response(404, b"no such file\n", _TEXT, FIELDS)
        return found

    async def _answer(self, request: Request) -> Response:
        try:
            return compressed(await self._routed(request), request)
        except HttpError as error:
            if not request.path.startswith(_TEXT_PATHS) and not request.authorization:
                page = self._error_page(request.path, error)
                return msgspec.structs.replace(page, fields={**page.fields, **error.fields})
            return Response(error.status, f"{error}\n".encode(), _TEXT, {**FIELDS, **error.fields})

    def _error_page(self, path: str, error: HttpError) -> Response:
        """An error for a person. The path need not be that of a screen, so links lead to the directory of screens."""
        root = "../" * (path.count("/") - 1) if path.count("/") <= _MAX_DEPTH else ""
        links = self._screens.assets.links
        assets = Assets(root + links.style, root + links.script)
        note = element("p", str(error), element("br"), element("a", "Overview", href=root or "./"), class_="notice")
        return page_response(error.status, plain_document(HTTPStatus(error.status).phrase, (note,), assets))

    async def _routed(self, request: Request) -> Response:
        """Raises `HttpError`."""
        path, post = request.path, request.method == "POST"
        if path in _FORMS:
            if not post:
                return redirect("./")
            return await (self._gate.sign_in(request) if path == "/login" else self._gate.sign_out(request))
        if post:
            raise method_error(("GET", "HEAD"))
        if path == "/metrics" and self._metrics is not None:
            await self._gate.admit_scraper(request)
            return Response(200, self._metrics(), _METRICS, FIELDS)
        name, dot, kind = path.partition(".")
        screen = PATHS.get(name)
        # The form to sign in is for paths of screens only: its links are relative.
        admitted = await self._gate.admit(request, page=screen is not None)
        if isinstance(admitted, Response):
            return admitted
        query = query_of(fields_of(request.query))
        if path == "/api/v1/events":
            return await self._events(request, admitted)
        if path == DEVICES_PATH:
            return await self._devices(query, admitted)
        if screen is None or kind not in ("", "csv", "json") or bool(dot) is not bool(kind):
            raise HttpError(404, "no such page")
        if kind:
            return await self._table(screen, query, admitted, kind)
        page = await self._screens.render(screen, query, self._gate, admitted)
        if request.fields.get("if-none-match") == page.etag:
            return Response(304, b"", _TEXT, {**FIELDS, "ETag": page.etag})
        response = page_response(page.status, page.text)
        return msgspec.structs.replace(response, fields={**response.fields, "ETag": page.etag})

    async def _table(self, screen: ScreenName, query: Query, viewer: Viewer, kind: str) -> Response:
        """The main table of a screen, with all its rows. Raises `HttpError`."""
        context = await self._screens.context(screen, query, self._gate, viewer)

        def make() -> bytes:
            listing = SCREENS[screen].make(context, query).listing
            if listing is None:
                return b""
            return listing.as_csv() if kind == "csv" else listing.as_json()

        found = await self._screens.download(make)
        if not found:
            raise HttpError(404, f"the screen {screen} has no single table")
        fields = {**FIELDS, "Content-Disposition": f'attachment; filename="{screen}.{kind}"'}
        return Response(200, found, _CSV if kind == "csv" else _JSON, fields)

    async def _devices(self, query: Query, viewer: Viewer) -> Response:
        """The devices that the filters select as JSON. Raises `HttpError`."""
        context = await self._screens.context("devices", query, self._gate, viewer)
        try:
            selection = Selection(query, context.visible)
        except SelectorError as error:
            raise HttpError(400, str(error)) from None

        def select(node: Node) -> Sequence[ReportedUnit]:
            return selection.units(context.summaries[node.name])

        def make() -> bytes:
            return msgspec.json.encode(device_list(context.cluster, context.visible, node=query.node, select=select))

        return Response(200, await self._screens.download(make), _JSON, FIELDS)

    async def _events(self, request: Request, viewer: Viewer) -> Response:
        """Raises `HttpError`."""
        fields = fields_of(request.query)
        screen = PATHS.get(f"/{fields.get('screen', '').removeprefix('overview')}")
        if screen is None:
            raise HttpError(400, f"screen: found {fields.get('screen', '')!a}, expected one of {', '.join(SCREENS)}")
        names = await names_of(self._gate.access, viewer, ())

        def still_admitted() -> Awaitable[bool]:
            return self._gate.still_admitted(request, viewer, everything=names.everything)

        seen = _seen(request.fields.get("last-event-id") or fields.get("generation", ""))
        stream = self._screens.live.subscribe(viewer, screen, seen, still_admitted, SCREENS[screen].refresh)
        return Response(200, b"", "text/event-stream; charset=utf-8", {**FIELDS, "X-Accel-Buffering": "no"}, stream)


def _seen(text: str) -> int:
    return int(text) if text.isascii() and text.isdigit() and len(text) < 20 else -1
