"""The secure listener of the fleet page with a scripted API server, and the sign-in of its viewers."""

import ssl
from collections.abc import AsyncIterator
from contextlib import AsyncExitStack
from pathlib import Path
from urllib.parse import urlencode

from cluster.pki import Authority
from fleetpages import Answer, Caller, Reviews

from accelplane.fleet.options import PageOptions
from accelplane.fleet.program import serving
from accelplane.fleet.serve import listen
from accelplane.fleet.simulated import SimulatedFleet
from accelplane.fleet.web.access import Access
from accelplane.fleet.web.gate import SecureGate
from accelplane.fleet.web.live import LiveLimits
from accelplane.fleet.web.sessions import Sessions
from accelplane.fleet.web.site import Screens

SERVER = Authority("servers")
PROXIES = Authority("proxies")
LIMITS = LiveLimits(interval=0.01, keepalive=0.05, share=10, check=0.05)


class Clock:
    now = 1000.0

    def __call__(self) -> float:
        return self.now


class Setup:
    """The secure listener with a scripted API server."""

    def __init__(self, directory: Path) -> None:
        self.reviews = Reviews()
        self.view = SimulatedFleet(40, now=1764000000)
        self.screens = Screens(self.view, limits=LIMITS)
        self.clock = Clock()
        self.directory = directory
        self._stack = AsyncExitStack()
        self.port = 0

    async def start(self) -> None:
        credentials = SERVER.server("127.0.0.1", "127.0.0.1")
        (self.directory / "tls.crt").write_bytes(credentials.certificate)
        (self.directory / "tls.key").write_bytes(credentials.key)
        (self.directory / "proxies.crt").write_bytes(PROXIES.credentials.certificate)
        client = await self._stack.enter_async_context(self.reviews.serving())
        pages = PageOptions(
            address="", secure_address="127.0.0.1:0", tls_directory=str(self.directory),
            proxy_ca=str(self.directory / "proxies.crt"), proxy_names=("front-proxy",),
        )  # fmt: skip
        self.port = (await self._stack.enter_async_context(serving(client, self.screens, pages)))["secure"]
        # A listener with a clock of its own, for what changes with time.
        self.sessions = Sessions(clock=self.clock)
        self.access = Access(client.server, ("accelplane-fleet",), clock=self.clock)
        gate = SecureGate(
            self.access,
            self.screens.assets.links,
            sessions=self.sessions,
        )
        self.timed = Caller(await self._stack.enter_async_context(listen(self.screens, gate, "127.0.0.1:0")))

    async def stop(self) -> None:
        await self._stack.aclose()

    def caller(self, identity: str = "", *, authority: Authority = PROXIES, **fields: str) -> Caller:
        context = ssl.create_default_context(cadata=SERVER.credentials.certificate.decode())
        if identity:
            credentials = authority.client(identity)
            (self.directory / "c.crt").write_bytes(credentials.certificate)
            (self.directory / "c.key").write_bytes(credentials.key)
            context.load_cert_chain(self.directory / "c.crt", self.directory / "c.key")
        return Caller(self.port, context, **fields)

    def user(self, name: str, *rights: str) -> str:
        """Makes a user known, with the right to open the page. Returns the token."""
        self.reviews.users[f"token-of-{name}"] = name
        self.reviews.allow(name, "get /fleet", *rights)
        return f"token-of-{name}"


async def secure_page(tmp_path: Path) -> AsyncIterator[Setup]:
    """A fixture: the listener serves until the end of the test."""
    instance = Setup(tmp_path)
    await instance.start()
    yield instance
    await instance.stop()


async def sign_in(caller: Caller, token: str, target: str = "", **fields: str) -> Answer:
    origin = {"origin": f"https://127.0.0.1:{caller.port}"} | fields
    return await caller.send("POST", "/login", urlencode({"token": token, "next": target}).encode(), **origin)


def cookie_in(answer: Answer) -> str:
    return answer.fields["set-cookie"].partition(";")[0]
