"""Leader election by a Lease: one of several replicas leads, and a leader that loses its Lease exits.

The protocol is client-go's, so that both can compete for the same Lease. Clocks of different machines are not compared:
a holder has lost its Lease when the Lease has not changed for its whole duration by the clock of the observer. That
clock cannot be set and advances during suspend, so a leader detects after a resume that its Lease has expired.

A leader that cannot renew its Lease stops before it expires. It exits immediately, because another replica may already
do the same work.
"""

import asyncio
import logging
import random
import socket
import time
import uuid
from collections.abc import Callable
from datetime import UTC, datetime
from typing import Literal

import msgspec

from accelplane.apiserver import AlreadyExists, ApiError, Conflict, NotFound

from .client import Client
from .models import Lease, LeaseSpec
from .objects import Metadata, micro_time

log = logging.getLogger(__name__)


def boot_time() -> float:
    """Returns the seconds since boot, including the time in which the machine was suspended."""
    return time.clock_gettime(time.CLOCK_BOOTTIME)


class LeaseLost(Exception):
    """This process does not lead any more."""


class Election(msgspec.Struct, frozen=True, kw_only=True):
    """The Lease to compete for, the identity of the candidate, and the times in seconds, as in client-go.

    A candidate takes a Lease over after `lease_duration`; a leader exits if it could not renew for `renew_deadline`;
    both try every `retry_period`.
    """

    name: str
    namespace: str
    identity: str
    lease_duration: int = 15
    renew_deadline: float = 10.0
    retry_period: float = 2.0

    @classmethod
    def of(cls, name: str, namespace: str) -> "Election":
        """Returns an election with default times and a unique identity."""
        return cls(name=name, namespace=namespace, identity=f"{socket.gethostname()}_{uuid.uuid4()}")

    def __post_init__(self) -> None:
        if not self.lease_duration > self.renew_deadline > self.retry_period > 0:
            raise ValueError(
                f"lease {self.namespace}/{self.name}: expected lease_duration > renew_deadline > retry_period > 0, "
                f"found {self.lease_duration}, {self.renew_deadline}, {self.retry_period}"
            )


class LeaderElector:
    """One candidate: `acquire`, then `renew`, and `release` at the end."""

    def __init__(self, client: Client, election: Election, *, clock: Callable[[], float] = boot_time) -> None:
        self.election = election
        self.leading = False
        # A renewal must not wait behind the requests of controllers.
        self._client = client.without_rate_limit()
        self._clock = clock
        self._gauge = client.metrics.leader.labels(election.name)
        self._gauge.set(0)
        # the Lease as last read, and when it was first read like that
        self._observed: LeaseSpec | None = None
        self._observed_at = 0.0
        self._renewed_at = 0.0
        self._may_hold = False
        # the Lease as this process wrote it last
        self._written: Lease | None = None
        self._reported = ""

    def __str__(self) -> str:
        return f"lease {self.election.namespace}/{self.election.name}"

    async def acquire(self) -> None:
        """Returns when this process leads."""
        log.info("%s: %s waits for it", self, self.election.identity)
        while True:
            if await self._try("acquire"):
                break
            # spread, so that the candidates do not all try at the same time
            await asyncio.sleep(self.election.retry_period * (1 + 0.2 * random.random()))  # noqa: S311 - not a secret
        self.leading = True
        self._gauge.set(1)
        log.info("%s: %s leads", self, self.election.identity)

    async def renew(self) -> None:
        """Renews the Lease until cancelled. Raises `LeaseLost`."""
        while True:
            await asyncio.sleep(min(self.election.retry_period, self._remaining()))
            if await self._try("renew"):
                continue
            holder = (self._observed.holderIdentity or "") if self._observed is not None else self.election.identity
            if holder != self.election.identity:
                self._lose(f"held by {holder or 'no one'}")
            self.check()

    def check(self) -> None:
        """Raises `LeaseLost` if the Lease was not renewed in time, also if this process was suspended."""
        if not self._remaining():
            self._lose(f"not renewed for {self.election.renew_deadline:g} s")

    async def release(self) -> None:
        """Releases the Lease, so that the next leader need not wait. Errors are logged.

        Also a Lease whose acquisition was cancelled is released: the request may have arrived.
        """
        if not self._may_hold:
            return
        self._forget()
        try:
            async with asyncio.timeout(self.election.retry_period):
                try:
                    await self._release()
                except Conflict:
                    # A renewal that was cancelled has arrived.
                    await self._release()
        except NotFound:
            pass
        except (ApiError, TimeoutError) as error:
            log.warning("%s: not released: %s", self, str(error) or "no response in time")

    async def _release(self) -> None:
        lease = await self._client.get(Lease, self.election.name, self.election.namespace)
        if lease.spec and lease.spec.holderIdentity == self.election.identity:
            # The API server accepts no duration of 0.
            lease.spec.holderIdentity, lease.spec.leaseDurationSeconds = "", 1
            await self._client.replace(lease)

    def _remaining(self) -> float:
        return max(0.0, self._renewed_at + self.election.renew_deadline - self._clock())

    def _lose(self, reason: str) -> None:
        self._forget()
        raise LeaseLost(f"{self}: lost by {self.election.identity}: {reason}")

    def _forget(self) -> None:
        self.leading = self._may_hold = False
        self._gauge.set(0)

    async def _try(self, purpose: Literal["acquire", "renew"]) -> bool:
        # A renewal that takes longer than the Lease lasts is of no use.
        limit = self._remaining() if purpose == "renew" else self.election.renew_deadline
        try:
            async with asyncio.timeout(limit):
                acquired = await self._acquire_or_renew(purpose)
            self._reported = ""
            return acquired
        except (Conflict, AlreadyExists):
            return False
        except (ApiError, TimeoutError) as error:
            problem = f"cannot {purpose} it: {str(error) or 'no response in time'}"
            # The same problem of every retry is logged once.
            log.log(logging.DEBUG if problem == self._reported else logging.WARNING, "%s: %s", self, problem)
            self._reported = problem
            return False

    async def _acquire_or_renew(self, purpose: Literal["acquire", "renew"]) -> bool:
        election = self.election
        # The Lease counts from the start of the request: how long the response took, the others do not know.
        started = self._clock()
        if purpose == "renew" and self._written is not None and await self._renew_written(self._written):
            self._renewed_at = started
            return True
        try:
            lease = await self._client.get(Lease, election.name, election.namespace)
        except NotFound:
            spec = self._spec(LeaseSpec())
            metadata = Metadata(name=election.name, namespace=election.namespace)
            self._may_hold = True
            self._written = await self._client.create(Lease(metadata=metadata, spec=spec))
        else:
            found = lease.spec or LeaseSpec()
            self._observe(found)
            if not self._is_available(found, purpose):
                return False
            spec = lease.spec = self._spec(found)
            self._may_hold = True
            self._written = await self._client.replace(lease)
        self._renewed_at = started
        self._observe(spec)
        return True

    async def _renew_written(self, lease: Lease) -> bool:
        """Renews the Lease without reading it, which is possible while no other process writes it. As in client-go."""
        self._written = None
        spec = lease.spec = self._spec(lease.spec or LeaseSpec())
        try:
            self._written = await self._client.replace(lease)
        except (Conflict, NotFound):
            return False
        self._observe(spec)
        return True

    def _is_available(self, found: LeaseSpec, purpose: Literal["acquire", "renew"]) -> bool:
        holder = found.holderIdentity or ""
        if holder == self.election.identity:
            return True
        if purpose == "renew":
            return False
        # The duration is the holder's own: it may be configured differently.
        duration = found.leaseDurationSeconds or self.election.lease_duration
        return not holder or self._clock() >= self._observed_at + duration

    def _observe(self, found: LeaseSpec) -> None:
        if self._observed != found:
            self._observed, self._observed_at = found, self._clock()

    def _spec(self, before: LeaseSpec) -> LeaseSpec:
        election = self.election
        now = micro_time(datetime.now(UTC))
        is_holder = before.holderIdentity == election.identity
        return LeaseSpec(
            holderIdentity=election.identity,
            leaseDurationSeconds=election.lease_duration,
            acquireTime=before.acquireTime if is_holder else now,
            renewTime=now,
            leaseTransitions=(before.leaseTransitions or 0) + (0 if is_holder or before.holderIdentity is None else 1),
        )
