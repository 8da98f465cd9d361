"""Leader election by a Lease: of several processes one is the leader, and one that is no longer it ends.

As client-go does it, so that both can compete for one Lease. Clocks are not compared, and none is used that can be
set: a holder is gone when its Lease has not changed for its whole duration by the clock of who looks. That clock goes
on while the machine sleeps, so a leader who wakes up knows that it is none any more. Who cannot renew its own gives up
earlier than that, and there is no way to give up gently: whatever it still does, somebody else may do already.
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
from lightkube.models.coordination_v1 import LeaseSpec
from lightkube.models.meta_v1 import ObjectMeta
from lightkube.resources.coordination_v1 import Lease

from accelplane.apiserver import AlreadyExists, ApiError, Conflict, NotFound

from .client import Client
from .objects import micro_time

log = logging.getLogger(__name__)


def boot_time() -> float:
    """Seconds since the machine was started, those included in which it slept."""
    return time.clock_gettime(time.CLOCK_BOOTTIME)


class LeaseLost(Exception):
    """This process is no longer the leader."""


class Election(msgspec.Struct, frozen=True, kw_only=True):
    """Which Lease is competed for, as whom, and how long (seconds): what a Lease is good for, how long renewing may
    fail, and how often it is tried."""

    name: str
    namespace: str
    identity: str
    lease_duration: int = 15
    renew_deadline: float = 10.0
    retry_period: float = 2.0

    @classmethod
    def of(cls, name: str, namespace: str) -> "Election":
        """With the usual times, as a candidate whose name no other process has."""
        return cls(name=name, namespace=namespace, identity=f"{socket.gethostname()}_{uuid.uuid4()}")

    def __post_init__(self) -> None:
        if not self.lease_duration > self.renew_deadline > self.retry_period > 0:
            raise ValueError(
                f"lease {self.namespace}/{self.name}: expected lease_duration > renew_deadline > retry_period > 0, "
                f"found {self.lease_duration}, {self.renew_deadline}, {self.retry_period}"
            )


class LeaderElector:
    """One candidate: `acquire`, then `renew`, and `release` in the end."""

    def __init__(self, client: Client, election: Election, *, clock: Callable[[], float] = boot_time) -> None:
        self.election = election
        self._clock = clock
        self.leading = False
        self._client = client
        self._gauge = client.metrics.leader.labels(election.name)
        self._gauge.set(0)
        # the Lease as last seen, and when it was first seen like that
        self._seen: LeaseSpec | None = None
        self._seen_at = 0.0
        self._renewed_at = 0.0
        self._trouble = ""

    async def acquire(self) -> None:
        """Returns when this process is the leader."""
        log.info("lease %s/%s: %s waits for it", self.election.namespace, self.election.name, self.election.identity)
        while True:
            if await self._try("acquire"):
                break
            # so that candidates do not all come at once
            await asyncio.sleep(self.election.retry_period * (1 + 0.2 * random.random()))  # noqa: S311 no secret
        self.leading = True
        self._gauge.set(1)
        log.info("lease %s/%s: %s leads", self.election.namespace, self.election.name, self.election.identity)

    async def renew(self) -> None:
        """Renews the Lease for as long as that works. Raises `LeaseLost`, and never returns."""
        while True:
            await asyncio.sleep(min(self.election.retry_period, self._remaining()))
            if await self._try("renew"):
                continue
            if self._seen is not None and (self._seen.holderIdentity or "") != self.election.identity:
                self._lose(f"{self._seen.holderIdentity or 'nobody'} holds it")
            self.check()

    def check(self) -> None:
        """Raises `LeaseLost` when it is not certain any more who leads: a process that stood still finds that first."""
        if not self._remaining():
            self._lose(f"not renewed for {self.election.renew_deadline:g} s")

    async def release(self) -> None:
        """Gives the Lease up, so that the next leader need not wait; what goes wrong with that is logged."""
        if not self.leading:
            return
        self.leading = False
        self._gauge.set(0)
        try:
            async with asyncio.timeout(self.election.retry_period):
                try:
                    await self._give_up()
                except Conflict:
                    # a renewal that nobody waited for any more arrived
                    await self._give_up()
        except (ApiError, TimeoutError) as error:
            log.warning("lease %s/%s: not released: %s", self.election.namespace, self.election.name, error)

    async def _give_up(self) -> None:
        lease = await self._client.get(Lease, self.election.name, self.election.namespace)
        if lease.spec and lease.spec.holderIdentity == self.election.identity:
            # a duration must be positive
            lease.spec.holderIdentity, lease.spec.leaseDurationSeconds = "", 1
            await self._client.replace(lease)

    def _remaining(self) -> float:
        return max(0.0, self._renewed_at + self.election.renew_deadline - self._clock())

    def _lose(self, why: str) -> None:
        self.leading = False
        self._gauge.set(0)
        raise LeaseLost(
            f"lease {self.election.namespace}/{self.election.name}: lost by {self.election.identity}: {why}"
        )

    async def _try(self, purpose: Literal["acquire", "renew"]) -> bool:
        # A request that began when the Lease was still ours must not be waited for longer than that.
        limit = self._remaining() if purpose == "renew" else self.election.renew_deadline
        try:
            async with asyncio.timeout(limit):
                taken = await self._take(purpose)
            self._trouble = ""
            return taken
        except (Conflict, AlreadyExists):
            return False
        except (ApiError, TimeoutError) as error:
            trouble = f"cannot {purpose} it: {str(error) or 'no answer in time'}"
            # Every two seconds it is no news any more.
            level = logging.DEBUG if trouble == self._trouble else logging.WARNING
            log.log(level, "lease %s/%s: %s", self.election.namespace, self.election.name, trouble)
            self._trouble = trouble
            return False

    async def _take(self, purpose: Literal["acquire", "renew"]) -> bool:
        election = self.election
        began = self._clock()
        try:
            lease = await self._client.get(Lease, election.name, election.namespace)
        except NotFound:
            spec = self._spec(LeaseSpec())
            metadata = ObjectMeta(name=election.name, namespace=election.namespace)
            await self._client.create(Lease(metadata=metadata, spec=spec))
            self._renewed_at = began
            self._look(spec)
            return True
        found = lease.spec or LeaseSpec()
        self._look(found)
        holder = found.holderIdentity or ""
        if holder and holder != election.identity:
            duration = found.leaseDurationSeconds or election.lease_duration
            if purpose == "renew" or self._clock() < self._seen_at + duration:
                return False
        if purpose == "renew" and not holder:
            return False
        lease.spec = self._spec(found)
        await self._client.replace(lease)
        self._renewed_at = began
        self._look(lease.spec)
        return True

    def _look(self, found: LeaseSpec) -> None:
        if self._seen != found:
            self._seen, self._seen_at = found, self._clock()

    def _spec(self, before: LeaseSpec) -> LeaseSpec:
        election = self.election
        now = micro_time(datetime.now(UTC))
        ours = before.holderIdentity == election.identity
        return LeaseSpec(
            holderIdentity=election.identity,
            leaseDurationSeconds=election.lease_duration,
            acquireTime=before.acquireTime if ours else now,
            renewTime=now,
            leaseTransitions=(before.leaseTransitions or 0) + (0 if ours or before.holderIdentity is None else 1),
        )
