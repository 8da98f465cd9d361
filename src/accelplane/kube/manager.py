"""A program of controllers: shared caches, leader election, probes, metrics, and an end in order.

    manager = Manager(client, election=Election.of("widgets.example.com", "default"))
    widgets = manager.cache(Widget)
    manager.controller("widget", reconcile).for_object(widgets)
    await manager.run()

Caches, servers and background work run in every process; controllers only in the leader's, once all caches are synced.
What fails beyond repair ends the program: whoever started it starts it again.
"""

import asyncio
import contextlib
import io
import logging
import os
import signal
import socket
import ssl
from collections.abc import Callable, Coroutine, Sequence
from contextlib import AbstractAsyncContextManager, AsyncExitStack
from functools import partial
from typing import TYPE_CHECKING, NamedTuple, Protocol, TypeVar, cast

from prometheus_client import CONTENT_TYPE_LATEST, generate_latest

from accelplane.http import (
    PAGE_LIMITS,
    Handler,
    HttpError,
    HttpServer,
    PendingResponse,
    Request,
    Response,
    split_address,
)

from .authorized import Authorized
from .cache import Cache, WatchTimeouts
from .client import FENCE, Client, Selection
from .controller import RESYNC, Controller, Reconcile
from .events import Recorder
from .leader import Election, LeaderElector, LeaseLost
from .objects import Object, trim

if TYPE_CHECKING:
    from cProfile import Profile

log = logging.getLogger(__name__)

T = TypeVar("T", bound=Object)
Work = Callable[[], Coroutine[object, object, None]]
Check = Callable[[], bool | Coroutine[object, object, bool]]

OFF = "0"
"""As an address: no such server."""

# for the last events, when what was begun has ended
_EVENT_FLUSH_TIMEOUT = 5.0

_TEXT = "text/plain; charset=utf-8"


class _Cache(Protocol):
    """A cache, of whatever it is."""

    @property
    def synced(self) -> asyncio.Event: ...
    async def run(self) -> None: ...


class _Which(NamedTuple):
    kind: type[Object]
    selection: Selection
    transform: object


class Manager:
    """One program. Everything is added before `run`.

    Addresses are `host:port`, an empty host being all, or `OFF`. With `metrics_authorized` only those read metrics
    whom the cluster's roles let `get` the path `/metrics`, and then they should go over TLS. With `profiling` the
    health server has `/debug/tasks`, and `/debug/profile`, which begins a profile and at the second call shows it.
    """

    def __init__(
        self,
        client: Client,
        *,
        election: Election | None = None,
        health_address: str = ":8081",
        metrics_address: str = ":8080",
        metrics_tls: ssl.SSLContext | None = None,
        metrics_authorized: bool = False,
        profiling: bool = False,
        watch_timeouts: WatchTimeouts = WatchTimeouts(),  # noqa: B008 a frozen value
        graceful_shutdown_timeout: float = 25.0,
        end: Callable[[int], None] = os._exit,
    ) -> None:
        self.client = client
        self.metrics = client.metrics
        self.events = Recorder(client, client.field_manager, socket.gethostname())
        self.elector = LeaderElector(client, election) if election else None
        self.ports: dict[str, int] = {}
        self._health_address = health_address
        self._metrics_address = metrics_address
        self._metrics_tls = metrics_tls
        self._metrics: Handler = (
            Authorized(client, self._answer_metrics) if metrics_authorized else self._answer_metrics
        )
        self._profiling = profiling
        self.watch_timeouts = watch_timeouts
        self._graceful_shutdown_timeout = graceful_shutdown_timeout
        self._end = end
        self._caches: dict[_Which, _Cache] = {}
        self._controllers: list[Controller] = []
        self._running: list[asyncio.Task[None]] = []
        self._led: list[asyncio.Task[None]] = []
        self._contexts: list[AbstractAsyncContextManager[object]] = []
        self._work: list[tuple[Work, bool]] = []
        self._checks: dict[str, Check] = {}
        self._profile: Profile | None = None
        self._stopping = asyncio.Event()

    def cache(
        self,
        kind: type[T],
        selection: Selection = Selection(),  # noqa: B008 a frozen value
        *,
        transform: Callable[[T], None] = trim,
    ) -> Cache[T]:
        """The cache of a kind and selection, the same one for all who ask for it."""
        which = _Which(kind, selection, transform)
        if which not in self._caches:
            self._caches[which] = Cache(
                self.client, kind, selection, transform=transform, watch_timeouts=self.watch_timeouts
            )
        return cast("Cache[T]", self._caches[which])  # its key has the type

    def controller(
        self, name: str, reconcile: Reconcile, *, workers: int = 1, resync: float = RESYNC, max_delay: float = 1000.0
    ) -> Controller:
        """A controller; say with `for_object`, `owns` and `watches` what it is for."""
        made = Controller(name, reconcile, workers=workers, resync=resync, max_delay=max_delay, metrics=self.metrics)
        self._controllers.append(made)
        return made

    def add_context(self, context: AbstractAsyncContextManager[object]) -> None:
        """Has a server or the like run from the beginning to the end of the program."""
        self._contexts.append(context)

    def add_runnable(self, work: Work, *, leader_only: bool = False) -> None:
        """Has `work` run for as long as the program does, or leads; if it ends by itself that is a failure."""
        self._work.append((work, leader_only))

    def add_readyz_check(self, name: str, check: Check) -> None:
        """Has `/readyz` wait for one thing more than the caches."""
        self._checks[name] = check

    def stop(self) -> None:
        """Ends `run`: what was begun is finished, the Lease released."""
        self._stopping.set()

    async def run(self) -> None:
        """Runs the program until SIGTERM, SIGINT or `stop`; the second signal ends the process at once.

        Raises what ended any part of it. A lost Lease ends the process.
        """
        loop = asyncio.get_running_loop()
        async with AsyncExitStack() as stack:
            for number in (signal.SIGTERM, signal.SIGINT):
                loop.add_signal_handler(number, self._signalled)
                stack.callback(loop.remove_signal_handler, number)
            await self._serve(stack)
            for context in self._contexts:
                await stack.enter_async_context(context)
            parts = [asyncio.create_task(cache.run(), name=f"cache {cache}") for cache in self._caches.values()]
            parts += [asyncio.create_task(work(), name="background") for work, leading in self._work if not leading]
            parts.append(asyncio.create_task(self.events.run(), name="events"))
            stopped = asyncio.create_task(self._stopping.wait(), name="stop")
            leading = asyncio.create_task(self._lead(), name="controllers")
            try:
                await asyncio.wait([*parts, stopped, leading], return_when=asyncio.FIRST_COMPLETED)
                if self._stopping.is_set():
                    log.info("stops: finishes what was begun")
                    await self._finish()
                else:
                    await _end_of([*parts, leading])
            finally:
                await _cancel([*parts, stopped, leading])
                if self.elector is not None:
                    await self.elector.release()

    async def _lead(self) -> None:
        for cache in self._caches.values():
            await cache.synced.wait()
        log.info("all caches are synced")
        async with asyncio.TaskGroup() as tasks:
            if self.elector is not None:
                await self.elector.acquire()
                tasks.create_task(self._renew(self.elector))
                FENCE.set(partial(self._check_lease, self.elector))
            self._led = [tasks.create_task(work()) for work, leading in self._work if leading]
            self._running = [
                tasks.create_task(controller.run(), name=f"controller {controller.name}")
                for controller in self._controllers
            ]
            # without controllers, too, there is something to be the leader of
            await self._stopping.wait()

    async def _renew(self, elector: LeaderElector) -> None:
        try:
            await elector.renew()
        except LeaseLost as error:
            self._lost(error)
            raise

    def _check_lease(self, elector: LeaderElector) -> None:
        """Before each write of what only the leader does: one that stood still must not go on where it was."""
        try:
            elector.check()
        except LeaseLost as error:
            self._lost(error)
            raise

    def _lost(self, error: LeaseLost) -> None:
        log.critical("%s; ends at once", error)
        logging.shutdown()
        self._end(1)

    async def _finish(self) -> None:
        """Lets controllers end what they do, or makes them, the Lease being held meanwhile."""
        for controller in self._controllers:
            controller.stop()
        if self._running:
            _, left = await asyncio.wait(self._running, timeout=self._graceful_shutdown_timeout)
            for task in left:
                log.warning("%s: not finished within %g s", task.get_name(), self._graceful_shutdown_timeout)
        await _cancel([*self._running, *self._led])
        with contextlib.suppress(TimeoutError):
            async with asyncio.timeout(min(_EVENT_FLUSH_TIMEOUT, self._graceful_shutdown_timeout)):
                await self.events.flush()

    def _signalled(self) -> None:
        if self._stopping.is_set():
            log.critical("second signal: ends at once")
            logging.shutdown()
            self._end(1)
        self._stopping.set()

    # Probes, metrics, profiles

    async def _serve(self, stack: AsyncExitStack) -> None:
        for name, address, handler, tls in (
            ("health", self._health_address, self._answer_health, None),
            ("metrics", self._metrics_address, self._metrics, self._metrics_tls),
        ):
            if address == OFF:
                continue
            server = HttpServer(handler, PAGE_LIMITS)
            try:
                self.ports[name] = await server.start(*split_address(address), tls)
            except OSError as error:
                raise OSError(error.errno, f"{name} at {address}: {error.strerror or error}") from error
            log.info("%s at port %d", name, self.ports[name])
            stack.push_async_callback(server.stop, 1.0)

    def _answer_health(self, request: Request) -> Response | PendingResponse:
        if request.path == "/healthz":
            return Response(200, b"ok", _TEXT)
        if request.path == "/readyz":
            return self._answer_ready()
        if self._profiling and request.path == "/debug/tasks":
            return Response(200, _tasks().encode(), _TEXT)
        if self._profiling and request.path == "/debug/profile":
            return Response(200, self._profiled().encode(), _TEXT)
        raise HttpError(404, "no such page")

    async def _answer_ready(self) -> Response:
        waits = [f"cache {cache}" for cache in self._caches.values() if not cache.synced.is_set()]
        for name, check in self._checks.items():
            found = check()
            if not (found if isinstance(found, bool) else await found):
                waits.append(name)
        return Response(503, f"waits for {', '.join(waits)}".encode(), _TEXT) if waits else Response(200, b"ok", _TEXT)

    def _answer_metrics(self, request: Request) -> Response:
        if request.path != "/metrics":
            raise HttpError(404, "no such page")
        return Response(200, generate_latest(self.metrics.registry), CONTENT_TYPE_LATEST)

    def _profiled(self) -> str:
        from cProfile import Profile  # noqa: PLC0415 - memory of programs that nobody profiles
        from pstats import Stats  # noqa: PLC0415 - as above

        if self._profile is None:
            self._profile = Profile()
            self._profile.enable()
            return "profiling until this page is asked for again\n"
        self._profile.disable()
        text = io.StringIO()
        Stats(self._profile, stream=text).sort_stats("cumulative").print_stats(80)
        self._profile = None
        return text.getvalue()


def _tasks() -> str:
    text = io.StringIO()
    for task in asyncio.all_tasks():
        task.print_stack(file=text)
    return text.getvalue()


async def _end_of(tasks: Sequence[asyncio.Task[None]]) -> None:
    """Raises what ended the first of them that has ended, which is always too early."""
    ended = next(task for task in tasks if task.done())
    await ended
    raise RuntimeError(f"{ended.get_name()}: ended by itself")


async def _cancel(tasks: Sequence[asyncio.Task[object]]) -> None:
    for task in tasks:
        task.cancel()
    await asyncio.gather(*tasks, return_exceptions=True)
