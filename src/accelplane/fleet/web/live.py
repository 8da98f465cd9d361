"""Server-sent events that say that something has changed.

The page then requests its own content again. All viewers share one budget of processor time: each event waits for its
turn, which is the later, the longer the screens take that were made before. So many viewers with different filters get
their updates seldom, but the page still answers.
"""

import asyncio
from collections import Counter
from collections.abc import AsyncGenerator, Awaitable, Callable, Sequence
from typing import Literal, NamedTuple

from msgspec import Struct

from accelplane.http.messages import HttpError
from accelplane.kube.tasks import cancel

from ..view import FleetView
from .access import Viewer
from .query import ScreenName

_KEEPALIVE = b": keepalive\n\n"
_BEGIN = b"retry: 3000\n\n"
_FIRST_COST = 0.01
_SMOOTHING = 0.2

StillAdmitted = Callable[[], Awaitable[bool]]


class LiveLimits(Struct, frozen=True, kw_only=True):
    """Limits of updates; times are seconds. The screens of all viewers take about a `share` of the processor's time.

    `viewers` limits the open streams of all, `account` those of one user, or of one address without users, and
    `credential` those of one session or token: one viewer does not take the streams of the others. A stream has at most
    one event in each `interval`.
    """

    viewers: int = 200
    account: int = 100
    credential: int = 20
    interval: float = 0.5
    keepalive: float = 15.0
    check: float = 60.0
    share: float = 0.25


class Live:
    """The open event streams."""

    def __init__(self, view: FleetView, limits: LiveLimits) -> None:
        self._view = view
        self.limits = limits
        self._streams: Counter[_Share] = Counter()
        # The mean processor time of each screen, and the time of the next turn.
        self._costs: dict[ScreenName, float] = {}
        self._turn = asyncio.Lock()
        self._next_turn = 0.0
        self.viewers = 0

    def spent(self, screen: ScreenName, seconds: float) -> None:
        """Records the processor time that a screen took."""
        known = self._costs.get(screen, seconds)
        self._costs[screen] = known + _SMOOTHING * (seconds - known)

    def subscribe(
        self, viewer: Viewer, screen: ScreenName, seen: int, still_admitted: StillAdmitted, refresh: float = 0.0
    ) -> AsyncGenerator[bytes, None]:
        """An event for each change since the generation that the client has seen, and after `refresh` seconds.

        Raises `HttpError` with too many open streams.
        """
        if self.viewers >= self.limits.viewers:
            raise HttpError(503, f"expected at most {self.limits.viewers} viewers; the page can be refreshed")
        shares = _shares(viewer, self.limits)
        for share, limit in shares.items():
            if self._streams[share] >= limit:
                raise HttpError(
                    503,
                    f"found {limit} pages with live updates of this {share.kind}, expected fewer; "
                    "close some of them, or refresh this one",
                )
        return self._events(tuple(shares), screen, seen, still_admitted, refresh)

    async def _events(
        self, shares: Sequence["_Share"], screen: ScreenName, seen: int, still_admitted: StillAdmitted, refresh: float
    ) -> AsyncGenerator[bytes, None]:
        loop, cluster = asyncio.get_running_loop(), self._view.cluster()
        checked = sent = loop.time()
        # Generations of another process are not comparable: the page is requested again.
        if not int(cluster.started * 1000) <= seen <= cluster.generation:
            seen = -1
        self.viewers += 1
        self._streams.update(shares)
        waiting = asyncio.create_task(self._due(screen, seen, sent + refresh if refresh else None))
        try:
            yield _BEGIN
            while True:
                done, _ = await asyncio.wait({waiting}, timeout=self.limits.keepalive)
                if loop.time() - checked >= self.limits.check:
                    checked = loop.time()
                    if not await still_admitted():
                        yield _event("end", seen)
                        return
                if not done:
                    yield _KEEPALIVE
                    continue
                waiting.result()
                seen, sent = self._view.cluster().generation, loop.time()
                yield _event("changed", seen)
                await asyncio.sleep(self.limits.interval)
                waiting = asyncio.create_task(self._due(screen, seen, sent + refresh if refresh else None))
        finally:
            self.viewers -= 1
            self._streams.subtract(shares)
            self._streams += Counter()  # removes zeros
            await cancel(waiting)

    async def _due(self, screen: ScreenName, seen: int, refresh_at: float | None) -> None:
        """Waits for a change or the time of a refresh, and for the turn of the screen."""
        try:
            async with asyncio.timeout_at(refresh_at):
                await self._view.changed(seen)
        except TimeoutError:
            pass
        loop = asyncio.get_running_loop()
        async with self._turn:
            await asyncio.sleep(self._next_turn - loop.time())
            self._next_turn = loop.time() + self._costs.get(screen, _FIRST_COST) / self.limits.share


class _Share(NamedTuple):
    """Whose streams are counted together."""

    kind: Literal["address", "user", "session or token"]
    key: str | bytes


def _shares(viewer: Viewer, limits: LiveLimits) -> dict[_Share, int]:
    """What the streams of a viewer count for, with the limits."""
    if viewer.user is None:
        return {_Share("address", viewer.source): limits.account}
    return {
        _Share("session or token", viewer.credential or viewer.name): limits.credential,
        _Share("user", viewer.name): limits.account,
    }


def _event(kind: str, generation: int) -> bytes:
    return b"id: %d\nevent: %b\ndata: {}\n\n" % (generation, kind.encode())
