"""A program of controllers: shared caches, leader election, probes, metrics, and an orderly shutdown.

    manager = Manager(client, election=Election.of("widgets.example.com", "default"))
    widgets = manager.cache(Widget)
    manager.controller("widget", reconcile).for_object(widgets)
    await manager.run()

Caches, servers and other runnables run in every replica; controllers run in the leader only, after all caches are
synced. A cache of a kind that the API server may not serve is optional: only its own controllers wait for it. An error
of any part ends the program: the kubelet restarts it.
"""

import asyncio
import contextlib
import io
import logging
import os
import signal
import socket
from collections.abc import Callable, Coroutine
from contextlib import AbstractAsyncContextManager, AsyncExitStack
from functools import partial
from typing import TYPE_CHECKING, NamedTuple, TypeVar, cast

from prometheus_client import CONTENT_TYPE_LATEST, generate_latest

from accelplane.apiserver import StatusError
from accelplane.authorized import Authorized
from accelplane.http.handler import Handler, PendingResponse
from accelplane.http.listening import split_address
from accelplane.http.messages import PAGE_LIMITS, HttpError, Request, Response
from accelplane.http.server import HttpServer
from accelplane.http.tls import ConnectionContext

from .cache import Cache
from .client import FENCE, Client, Selection, path_of
from .controller import RESYNC, Controller, Reconcile
from .events import Recorder
from .informer import Informer, WatchTimeouts
from .leader import Election, LeaderElector, LeaseLost
from .objects import Object, trim
from .tasks import Supervisor, cancel

if TYPE_CHECKING:
    from cProfile import Profile

log = logging.getLogger(__name__)

T = TypeVar("T", bound=Object)
Runnable = Callable[[], Coroutine[object, object, None]]
Check = Callable[[], bool | Coroutine[object, object, bool]]

OFF = "0"
"""The address of a server that is disabled."""

_EVENT_FLUSH_TIMEOUT = 5.0
# Seconds between lists of a kind that is not served. A CustomResourceDefinition can be created at any time.
_UNSERVED_RETRY = 10.0

_TEXT = "text/plain; charset=utf-8"


class _CacheKey(NamedTuple):
    kind: type[Object]
    selection: Selection
    transform: object


class Manager:
    """One program. All parts are added before `run`.

    Addresses are `host:port`, where an empty host means all interfaces, or `OFF`. With `metrics_authorized`, only
    clients with the right to `get` the path `/metrics` may read metrics; these should be served over TLS then. With
    `profiling`, the health server has `/debug/tasks` and `/debug/profile`.

    After SIGTERM the manager reports that it is not ready and serves for another `shutdown_delay` seconds, until no
    endpoint leads to it any more; meanwhile controllers have `graceful_shutdown_timeout` seconds to finish.
    """

    def __init__(
        self,
        client: Client,
        *,
        election: Election | None = None,
        health_address: str = ":8081",
        metrics_address: str = ":8080",
        metrics_tls: ConnectionContext | None = None,
        metrics_authorized: bool = False,
        profiling: bool = False,
        watch_timeouts: WatchTimeouts = WatchTimeouts(),  # noqa: B008 - a frozen value
        graceful_shutdown_timeout: float = 25.0,
        shutdown_delay: float = 3.0,
        end: Callable[[int], None] = os._exit,
    ) -> None:
        self.client = client
        self.metrics = client.metrics
        self.events = Recorder(client, client.field_manager, socket.gethostname())
        self.elector = LeaderElector(client.without_rate_limit(), election) if election else None
        self.ports: dict[str, int] = {}
        self.watch_timeouts = watch_timeouts
        self._health_address = health_address
        self._metrics_address = metrics_address
        self._metrics_tls = metrics_tls
        self._metrics: Handler = (
            Authorized(client.server, self._answer_metrics) if metrics_authorized else self._answer_metrics
        )
        self._profiling = profiling
        self._graceful_shutdown_timeout = graceful_shutdown_timeout
        self._shutdown_delay = shutdown_delay
        self._end = end
        self._informers: dict[tuple[str, Selection], Informer] = {}
        self._optional: set[Informer] = set()
        self._caches: dict[_CacheKey, Cache[Object]] = {}
        self._controllers: list[Controller] = []
        self._contexts: list[AbstractAsyncContextManager[object]] = []
        self._drains: list[Callable[[], None]] = []
        self._runnables: list[tuple[Runnable, bool]] = []
        self._checks: dict[str, Check] = {}
        self._profile: Profile | None = None
        self._controller_tasks: list[asyncio.Task[None]] = []
        self._leader_tasks: list[asyncio.Task[None]] = []
        self._renewal: asyncio.Task[None] | None = None
        self._stopping = asyncio.Event()

    def cache(
        self,
        kind: type[T],
        selection: Selection = Selection(),  # noqa: B008 - a frozen value
        *,
        transform: Callable[[T], None] = trim,
        optional: bool = False,
    ) -> Cache[T]:
        """Returns the cache of a kind and selection; the same cache for the same arguments.

        Caches of different types for the same resource and selection share one watch. An `optional` cache is of a kind
        that the API server may not serve: it is synced as soon as the kind is served and can be listed, and controllers
        that it does not trigger do not wait for it. A definition that is deleted later leaves the cache as it is.
        """
        key = _CacheKey(kind, selection, transform)
        if key not in self._caches:
            where = (path_of(kind), selection)
            if where not in self._informers:
                self._informers[where] = Informer(self.client, selection, watch_timeouts=self.watch_timeouts)
                self._optional.add(self._informers[where])
            informer_cache = self._informers[where].cache(kind, transform=transform)
            self._caches[key] = cast("Cache[Object]", informer_cache)
        if not optional:
            self._optional.discard(self._informers[path_of(kind), selection])
        return cast("Cache[T]", self._caches[key])  # the key contains the type

    def controller(
        self, name: str, reconcile: Reconcile, *, workers: int = 1, resync: float = RESYNC, max_delay: float = 1000.0
    ) -> Controller:
        """Adds a controller. Its triggers are added with `for_object`, `owns` and `watches`."""
        new_controller = Controller(
            name, reconcile, workers=workers, resync=resync, max_delay=max_delay, metrics=self.metrics
        )
        self._controllers.append(new_controller)
        return new_controller

    def add_context(
        self, context: AbstractAsyncContextManager[object], *, drain: Callable[[], None] | None = None
    ) -> None:
        """Adds a server as an asynchronous context manager, which is entered before and left after everything else.

        `drain` is called when the shutdown starts: the server should lead its clients to other replicas.
        """
        self._contexts.append(context)
        if drain is not None:
            self._drains.append(drain)

    def add_runnable(self, run: Runnable, *, leader_only: bool = False) -> None:
        """Adds a function that runs as long as the program runs, or leads. If it returns, that is an error."""
        self._runnables.append((run, leader_only))

    def add_readyz_check(self, name: str, check: Check) -> None:
        """Adds a condition of `/readyz`, beside the caches."""
        self._checks[name] = check

    def stop(self) -> None:
        """Starts the orderly shutdown, as SIGTERM does."""
        self._stopping.set()

    async def run(self) -> None:
        """Runs the program until SIGTERM, SIGINT or `stop`. A second signal ends the process immediately.

        Raises the exception of the first part that fails, and `RuntimeError` for a part that returns. A lost Lease ends
        the process.
        """
        loop = asyncio.get_running_loop()
        async with AsyncExitStack() as stack:
            for number in (signal.SIGTERM, signal.SIGINT):
                loop.add_signal_handler(number, self._on_signal)
                stack.callback(loop.remove_signal_handler, number)
            await self._serve(stack)
            servers = await stack.enter_async_context(AsyncExitStack())
            for context in self._contexts:
                await servers.enter_async_context(context)
            tasks = Supervisor()
            try:
                leading = self._start(tasks)
                await self._wait_for_stop(tasks)
                await self._shut_down(tasks, leading, servers)
            finally:
                await tasks.cancel_all()
                if self.elector is not None:
                    await self.elector.release()

    def _start(self, tasks: Supervisor) -> asyncio.Task[None]:
        for informer in self._informers.values():
            if informer in self._optional:
                served = informer.run_when_served(partial(_log_unserved, informer), retry=_UNSERVED_RETRY)
                tasks.start(f"cache {informer}", served)
            else:
                tasks.start(f"cache {informer}", informer.run())
        for run, leader_only in self._runnables:
            if not leader_only:
                tasks.start(_name(run), run())
        tasks.start("cache log", self._log_synced())
        tasks.start("events", self.events.run())
        return tasks.start("leader", self._lead(tasks))

    async def _wait_for_stop(self, tasks: Supervisor) -> None:
        """Raises the exception that ended a part of the program."""
        stopping = asyncio.create_task(self._stopping.wait(), name="stop")
        ended = asyncio.create_task(tasks.wait(), name="supervisor")
        try:
            await asyncio.wait((stopping, ended), return_when=asyncio.FIRST_COMPLETED)
            if ended.done():
                await ended
        finally:
            await cancel(stopping, ended)

    # Leading

    async def _lead(self, tasks: Supervisor) -> None:
        for informer in self._informers.values():
            if informer not in self._optional:
                await informer.synced.wait()
        if self.elector is not None:
            await self.elector.acquire()
            self._renewal = tasks.start("lease", self._renew(self.elector))
            FENCE.set(partial(self._check_lease, self.elector))
        # The tasks inherit the fence from this one.
        starting = asyncio.gather(*(self._start_when_synced(tasks, controller) for controller in self._controllers))
        self._leader_tasks = [tasks.start(_name(run), run()) for run, leader_only in self._runnables if leader_only]
        await starting
        await asyncio.Event().wait()

    async def _log_synced(self) -> None:
        for informer in self._informers.values():
            await (informer.initialized if informer in self._optional else informer.synced).wait()
        if self._informers:
            log.info("all caches are synced")
        await asyncio.Event().wait()

    async def _start_when_synced(self, tasks: Supervisor, controller: Controller) -> None:
        await controller.wait_for([informer.synced for informer in self._optional])
        self._controller_tasks.append(tasks.start(f"controller {controller.name}", controller.run()))

    async def _renew(self, elector: LeaderElector) -> None:
        try:
            await elector.renew()
        except LeaseLost as error:
            self._end_process(error)
            raise

    def _check_lease(self, elector: LeaderElector) -> None:
        """Runs before each write of the leader: a process that was suspended must not write any more."""
        try:
            elector.check()
        except LeaseLost as error:
            self._end_process(error)
            raise

    def _end_process(self, error: LeaseLost) -> None:
        log.critical("%s; exiting", error)
        logging.shutdown()
        self._end(1)

    # Shutdown

    async def _shut_down(self, tasks: Supervisor, leading: asyncio.Task[None], servers: AsyncExitStack) -> None:
        """Stops leading while the servers continue, then closes the servers."""
        log.info("shutting down")
        for drain in self._drains:
            drain()
        stopped = asyncio.create_task(self._stop_leading(tasks, leading), name="stop leading")
        try:
            if self._contexts:
                # Endpoints follow readiness with a delay; until then requests arrive.
                await asyncio.sleep(self._shutdown_delay)
            await servers.aclose()
            await stopped
        finally:
            await cancel(stopped)
        with contextlib.suppress(TimeoutError):
            async with asyncio.timeout(min(_EVENT_FLUSH_TIMEOUT, self._graceful_shutdown_timeout)):
                await self.events.flush()

    async def _stop_leading(self, tasks: Supervisor, leading: asyncio.Task[None]) -> None:
        """Completes running reconciliations, cancels other tasks of the leader, and releases the Lease."""
        await tasks.cancel(leading)
        for controller in self._controllers:
            controller.stop()
        if self._controller_tasks:
            _, late = await asyncio.wait(self._controller_tasks, timeout=self._graceful_shutdown_timeout)
            for task in late:
                log.warning("%s: not finished after %g s", task.get_name(), self._graceful_shutdown_timeout)
        await tasks.cancel(*self._controller_tasks, *self._leader_tasks)
        if self._renewal is not None:
            await tasks.cancel(self._renewal)
        if self.elector is not None:
            await self.elector.release()

    def _on_signal(self) -> None:
        if self._stopping.is_set():
            log.critical("second signal: exiting")
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
        failed = ["shutting down"] if self._stopping.is_set() else []
        failed += [f"cache {informer}" for informer in self._informers.values() if not self._is_known(informer)]
        for name, check in self._checks.items():
            passed = check()
            if not (passed if isinstance(passed, bool) else await passed):
                failed.append(name)
        if failed:
            return Response(503, f"not ready: {', '.join(failed)}".encode(), _TEXT)
        return Response(200, b"ok", _TEXT)

    def _is_known(self, informer: Informer) -> bool:
        """Whether a cache is synced, or is of a kind that is certainly not served while another optional one is."""
        if informer.synced.is_set():
            return True
        is_useful = any(each.synced.is_set() for each in self._optional)
        return informer in self._optional and informer.initialized.is_set() and is_useful

    def _answer_metrics(self, request: Request) -> Response:
        if request.path != "/metrics":
            raise HttpError(404, "no such page")
        return Response(200, generate_latest(self.metrics.registry), CONTENT_TYPE_LATEST)

    def _profiled(self) -> str:
        from cProfile import Profile  # noqa: PLC0415 - loaded only if profiling is requested
        from pstats import Stats  # noqa: PLC0415 - as above

        if self._profile is None:
            self._profile = Profile()
            self._profile.enable()
            return "profiling until the next request of this page\n"
        self._profile.disable()
        text = io.StringIO()
        Stats(self._profile, stream=text).sort_stats("cumulative").print_stats(80)
        self._profile = None
        return text.getvalue()


def _log_unserved(informer: Informer, error: StatusError) -> None:
    log.warning("%s: not served, so its objects are managed when its definition exists: %s", informer, error)


def _tasks() -> str:
    text = io.StringIO()
    for task in asyncio.all_tasks():
        task.print_stack(file=text)
    return text.getvalue()


def _name(run: Runnable) -> str:
    return f"runnable {getattr(run, '__qualname__', run)}"
