"""A browser, and the fleet page with a simulated cluster in a thread of its own."""

import asyncio
import shutil
import threading
from collections.abc import Callable, Iterator
from concurrent.futures import Future
from pathlib import Path
from typing import Any, Self

import pytest
from cluster.pki import Authority
from fleetpages import Reviews

from accelplane.fleet.options import PageOptions
from accelplane.fleet.program import serving
from accelplane.fleet.serve import listen, open_gate
from accelplane.fleet.simulated import SimulatedFleet
from accelplane.fleet.web.site import Screens
from accelplane.http.handler import PendingResponse
from accelplane.http.messages import HttpError, Request, Response
from accelplane.http.server import HttpServer

NAMES = ("chromium", "chromium-browser", "google-chrome")


class Served:
    """The page at `url`; `call` runs a function in its thread."""

    def __init__(self) -> None:
        self.view = SimulatedFleet(60)
        self.view.read_use(4)
        self.url = ""
        self.log: list[str] = []
        self._loop = asyncio.new_event_loop()
        self._ended = asyncio.Event()
        self._ready: Future[str] = Future()
        self._thread = threading.Thread(target=lambda: self._loop.run_until_complete(self._serve()))

    def __enter__(self) -> Self:
        self._thread.start()
        self.url = self._ready.result(60)
        return self

    def __exit__(self, *error: object) -> None:
        self._loop.call_soon_threadsafe(self._ended.set)
        self._thread.join(60)
        self._loop.close()

    def call(self, function: Callable[[], Any]) -> Any:
        """Runs a function where the fleet is, and returns its result."""
        done: Future[Any] = Future()

        def run() -> None:
            try:
                done.set_result(function())
            except BaseException as error:  # noqa: BLE001 - the caller raises it
                done.set_exception(error)

        self._loop.call_soon_threadsafe(run)
        return done.result(60)

    async def _serve(self) -> None:
        screens = Screens(self.view)
        async with listen(screens, open_gate("127.0.0.1:0"), "127.0.0.1:0") as port:
            self._ready.set_result(f"http://127.0.0.1:{port}/")
            await self._ended.wait()


class SecureServed(Served):
    """The secure listener with a scripted API server, which `reviews` is."""

    def __init__(self, directory: Path) -> None:
        super().__init__()
        self._directory = directory
        self.reviews = Reviews()

    async def _serve(self) -> None:
        credentials = Authority("servers").server("localhost", "127.0.0.1")
        (self._directory / "tls.crt").write_bytes(credentials.certificate)
        (self._directory / "tls.key").write_bytes(credentials.key)
        pages = PageOptions(address="", secure_address="127.0.0.1:0", tls_directory=str(self._directory))
        async with (
            self.reviews.serving() as client,
            serving(client, Screens(self.view), pages) as ports,
        ):
            self._ready.set_result(f"https://127.0.0.1:{ports['secure']}/")
            await self._ended.wait()


@pytest.fixture
def secure_page(tmp_path: Path) -> Iterator[SecureServed]:
    with SecureServed(tmp_path) as instance:
        yield instance


@pytest.fixture(scope="module")
def page_server() -> Iterator[Served]:
    with Served() as instance:
        yield instance


@pytest.fixture(scope="session")
def browser() -> Iterator[Any]:
    api = pytest.importorskip("playwright.sync_api", reason="no playwright: make test-browser installs it")
    program = next((found for name in NAMES if (found := shutil.which(name))), None)
    if program is None:
        pytest.skip(f"found none of {', '.join(NAMES)} in PATH: install Debian's package chromium")
    with api.sync_playwright() as started:
        running = started.chromium.launch(executable_path=program, args=["--no-sandbox"])
        yield running
        running.close()


class PrefixProxy:
    """A proxy that serves the pages below a path, as an ingress that removes it; streams included."""

    def __init__(self, target: str, prefix: str) -> None:
        self._port = int(target.rpartition(":")[2].strip("/"))
        self._prefix = prefix
        self.paths: list[str] = []

    def __call__(self, request: Request) -> Response | PendingResponse:
        self.paths.append(request.path)
        if not request.path.startswith(self._prefix):
            raise HttpError(404, "not below the prefix")
        return self._forward(request)

    async def _forward(self, request: Request) -> Response:
        reader, writer = await asyncio.open_connection("127.0.0.1", self._port)
        path = request.path.removeprefix(self._prefix.rstrip("/")) + (f"?{request.query}" if request.query else "")
        writer.write(f"GET {path} HTTP/1.1\r\nHost: localhost\r\nConnection: close\r\n\r\n".encode())
        head = (await reader.readuntil(b"\r\n\r\n")).decode().split("\r\n")
        fields = {name.lower(): value for name, _, value in (line.partition(": ") for line in head[1:] if line)}
        kept = {name: value for name, value in fields.items() if name in ("content-security-policy", "location")}
        kind = fields["content-type"]
        if "content-length" in fields:
            body = await reader.readexactly(int(fields["content-length"]))
            writer.close()
            return Response(int(head[0].split()[1]), body, kind, kept)

        async def parts() -> Any:
            try:
                while part := await reader.read(65536):
                    yield part
            finally:
                writer.close()

        return Response(200, b"", kind, kept, parts())


@pytest.fixture
def prefixed(page_server: Served) -> Iterator[tuple[str, PrefixProxy]]:
    """The page below `/tools/fleet/`."""
    proxy = PrefixProxy(page_server.url, "/tools/fleet/")
    loop, ready, ended = asyncio.new_event_loop(), Future[int](), asyncio.Event()

    async def serve() -> None:
        server = HttpServer(proxy, fields=())
        ready.set_result(await server.start("127.0.0.1", 0))
        await ended.wait()
        await server.stop(0.1)

    thread = threading.Thread(target=lambda: loop.run_until_complete(serve()))
    thread.start()
    try:
        yield f"http://127.0.0.1:{ready.result(60)}/tools/fleet/", proxy
    finally:
        loop.call_soon_threadsafe(ended.set)
        thread.join(60)
        loop.close()
