"""The pages behind one listener: routes, rights, and what each page needs."""

import asyncio
import time
from collections.abc import Awaitable, Callable
from http import HTTPStatus

import msgspec
from msgspec import Struct

from accelplane.apiserver import ApiError
from accelplane.http.handler import PendingResponse
from accelplane.http.messages import HttpError, Request, Response, accepts_gzip, method_error
from accelplane.report.inventory import Holder

from ..devicelist import PATH as DEVICES_PATH
from ..devicelist import DeviceList, device_list
from ..model import NodeReadings
from ..view import FleetView
from .access import Viewer, VisibleNames
from .assets import AssetFiles
from .gate import Gate
from .html import Element, blocks, element
from .live import Content, Live, LiveLimits, Subject
from .page import Assets, Context, Frame, Page, ScreenName, document, header_blocks, plain_document
from .query import PlaceQuery, Query, fields_of
from .screens import NAMES, PATHS, SCREENS
from .security import FIELDS, compressed, page_response, redirect
from .summaries import Summaries, totals

_METRICS = "text/plain; version=0.0.4; charset=utf-8"
_TEXT = "text/plain; charset=utf-8"
_JSON = "application/json"
_FORMS = ("/login", "/logout")
# Paths for programs, which get errors as text.
_TEXT_PATHS = ("/api/", "/metrics", "/assets/")
_MAX_DEPTH = 16
# Seconds after which current values are read again, and rights are checked again, without a change of the cluster.
_REFRESH = 2.0
_RIGHTS_REFRESH = 60.0
_READINGS_TIMEOUT = 3.0
# Names without a decision are hidden: a screen is rendered again with the decisions, at most this many times.
_ATTEMPTS = 3


class SiteOptions(Struct, frozen=True, kw_only=True):
    """What does not change while the server runs."""

    grafana_url: str = ""
    limits: LiveLimits = LiveLimits()


class Screens:
    """Renders screens for viewers, and updates them. Shared by all listeners."""

    def __init__(self, view: FleetView, options: SiteOptions = SiteOptions()) -> None:  # noqa: B008 - a frozen value
        self.view = view
        self.assets = AssetFiles()
        self.live = Live(view, options.limits)
        self._options = options
        self._summaries = Summaries()

    async def page(self, name: ScreenName, query: Query, names: VisibleNames) -> tuple[Page, Context]:
        """A screen with the names that may be seen, and its context. Raises `HttpError`."""
        screen = SCREENS[name]
        node = query.node if isinstance(query, PlaceQuery) else ""
        readings = await self._readings(node) if screen.needs_readings and node else None
        holders, problem = await self._holders(node) if screen.needs_holders and node else (None, "")
        attempt = 0
        while True:
            attempt += 1
            cluster = self.view.cluster()
            context = Context(
                cluster=cluster,
                summaries=self._summaries.of(cluster),
                visible=names.visible,
                now=time.time(),
                grafana_url=self._options.grafana_url,
                readings=readings,
                holders=holders,
                holders_problem=problem,
            )
            page = screen.make(context, query)
            if attempt == _ATTEMPTS or not await names.ask():
                return page, context

    async def devices(self, node: str, names: VisibleNames) -> DeviceList:
        """The devices of a node, or of all nodes if it is empty. Raises `HttpError`."""
        attempt = 0
        while True:
            attempt += 1
            listed = device_list(self.view.cluster(), names.visible, node=node)
            if attempt == _ATTEMPTS or not await names.ask():
                return listed

    async def content(self, name: ScreenName, query: Query, names: VisibleNames) -> Content:
        """A screen for updates. Raises `HttpError`."""
        return live_content(*await self.page(name, query, names))

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
        if path == "/api/v1/events":
            return await self._events(request)
        if path == DEVICES_PATH:
            return await self._devices(request)
        name = PATHS.get(path)
        # The form to sign in is for paths of screens only: its links are relative.
        admitted = await self._gate.admit(request, page=name is not None)
        if isinstance(admitted, Response):
            return admitted
        if name is None:
            raise HttpError(404, "no such page")
        return await self._page(name, request, admitted)

    async def _page(self, name: ScreenName, request: Request, viewer: Viewer) -> Response:
        """Raises `HttpError`."""
        query = SCREENS[name].read(fields_of(request.query))
        names = VisibleNames(self._gate.access, viewer)
        await names.ask_everything()
        page, context = await self._screens.page(name, query, names)
        user = viewer.name if viewer.session else ""
        frame = Frame(assets=self._screens.assets.links, screen=name, query=query, user=user)
        shown = _subject(name, query, viewer, everything=names.everything)
        self._screens.live.remember(shown, live_content(page, context))
        return page_response(200 if page.found else 404, document(page, frame, context))

    async def _devices(self, request: Request) -> Response:
        """The devices of one node or all as JSON. Raises `HttpError`."""
        viewer = await self._gate.admit(request, page=False)
        if isinstance(viewer, Response):
            return viewer
        names = VisibleNames(self._gate.access, viewer)
        await names.ask_everything()
        listed = await self._screens.devices(fields_of(request.query).get("node", ""), names)
        return Response(200, msgspec.json.encode(listed), _JSON, FIELDS)

    async def _events(self, request: Request) -> Response:
        """Raises `HttpError`."""
        admitted = await self._gate.admit(request, page=False)
        if isinstance(admitted, Response):
            return admitted
        fields = fields_of(request.query)
        name = NAMES.get(fields.get("screen", ""))
        if name is None:
            raise HttpError(400, f"screen: found {fields.get('screen', '')!a}, expected one of {', '.join(SCREENS)}")
        query = SCREENS[name].read(fields)
        access, viewer = self._gate.access, admitted
        # Whether all names may be seen decides who shares a channel.
        names = VisibleNames(access, viewer)
        await names.ask_everything()
        everything = names.everything
        subject = _subject(name, query, viewer, everything=everything)

        def make() -> Awaitable[Content]:
            names = VisibleNames(None, Viewer()) if everything else VisibleNames(access, viewer)
            return self._screens.content(name, query, names)

        def still_admitted() -> Awaitable[bool]:
            return self._gate.still_admitted(request, viewer, everything=everything)

        seen = _seen(request.fields.get("last-event-id") or fields.get("generation", ""))
        stream = self._screens.live.subscribe(viewer, subject, make, seen, still_admitted)
        return Response(200, b"", "text/event-stream; charset=utf-8", {**FIELDS, "X-Accel-Buffering": "no"}, stream)


def live_content(page: Page, context: Context) -> Content:
    """What of a page is updated."""
    whole = Element("div", {}, (*header_blocks(context), *page.content))
    return Content(context.cluster.generation, blocks(whole), totals(context.cluster, context.summaries))


def _subject(name: ScreenName, query: Query, viewer: Viewer, *, everything: bool) -> Subject:
    refresh = _REFRESH if SCREENS[name].needs_readings else 0.0 if everything else _RIGHTS_REFRESH
    return Subject(name, query, "" if everything else viewer.key, refresh)


def _seen(text: str) -> int | None:
    return int(text) if text.isascii() and text.isdigit() and len(text) < 20 else None
