"""A DRA driver's service, a preparer with values in memory, and the kubelet's side of the registration."""

import asyncio
import contextlib
import os
from collections.abc import AsyncGenerator, AsyncIterator, Callable, Mapping, Sequence

from waiting import until

from accelplane import rpc
from accelplane.dra.model import ClaimError, ClaimPreparer, ClaimRef, DeviceHealth, PreparedDevice
from accelplane.dra.registration_policy import Version
from accelplane.dra.service import DriverService
from accelplane.kubelet import dra_v1_pb2 as pb
from accelplane.kubelet import drahealth_v1_pb2 as health_pb
from accelplane.kubelet import pluginregistration_v1_pb2 as registration_pb
from accelplane.kubelet.notifier import Notifier

DRIVER = "gpu.example.com"
REGISTRATION = "/pluginregistration.Registration/"
Result = Sequence[PreparedDevice] | ClaimError | Exception


class FakePreparer:
    """Prepares one device per claim, named as the claim. `results` has other results, by the claim's name."""

    def __init__(self) -> None:
        self.results: dict[str, Result] = {}
        self.holders: dict[str, ClaimRef] = {}
        self.calls: list[tuple[str, tuple[str, ...]]] = []
        self.proceed = asyncio.Event()
        self.proceed.set()

    async def prepare(self, claims: Sequence[ClaimRef]) -> Mapping[str, Sequence[PreparedDevice] | ClaimError]:
        self.calls.append(("prepare", tuple(claim.name for claim in claims)))
        await self.proceed.wait()
        results: dict[str, Sequence[PreparedDevice] | ClaimError] = {}
        for claim in claims:
            result = self.results.get(claim.name)
            if isinstance(result, ClaimError):
                results[claim.uid] = result
                continue
            if isinstance(result, Exception):
                raise result
            self.holders[claim.uid] = claim
            results[claim.uid] = result or (
                PreparedDevice(("gpu",), "node-1", claim.name, (f"k8s.{DRIVER}/claim={claim.uid}-{claim.name}",)),
            )
        return results

    async def unprepare(self, claims: Sequence[ClaimRef]) -> Mapping[str, ClaimError | None]:
        self.calls.append(("unprepare", tuple(claim.name for claim in claims)))
        results: dict[str, ClaimError | None] = {}
        for claim in claims:
            result = self.results.get(claim.name)
            results[claim.uid] = result if isinstance(result, ClaimError) else None
            if results[claim.uid] is None:
                self.holders.pop(claim.uid, None)
        return results

    def prepared(self) -> Mapping[str, Sequence[str]]:
        return {claim.name: (f"{claim.namespace}/{claim.name}",) for claim in self.holders.values()}


class ServedDriver:
    """A running service. `published` has the calls of `registered`, `events` those of `on_event`."""

    def __init__(
        self,
        directory: str,
        *,
        version: Version | None = (1, 37),
        instance: str = "",
        health: Callable[[], Sequence[DeviceHealth]] = tuple,
        preparer: FakePreparer | None = None,
        claims: ClaimPreparer | None = None,
        driver: str = DRIVER,
        check_interval: float = 0.0,
    ) -> None:
        """`claims` prepares in place of `preparer`."""
        self.preparer = preparer or FakePreparer()
        self.health_changed = Notifier()
        self.published: list[bool] = []
        self.events: list[tuple[str, str, ClaimRef | None]] = []
        self.version = version
        self.service = DriverService(
            driver,
            directory,
            claims or self.preparer,
            health,
            self.health_changed,
            pool="node-1",
            kubelet_version=lambda: self.version,
            registered=self.published.append,
            on_event=lambda *event: self.events.append(event),
            instance=instance,
            **({"check_interval": lambda: check_interval} if check_interval else {}),
        )
        suffix = f"-{instance}" if instance else ""
        self.registration = f"{directory}/plugins_registry/{driver}{suffix}-reg.sock"
        self.endpoint = f"{directory}/plugins/{driver}/dra{suffix}.sock"
        self.task: asyncio.Task[None] | None = None

    async def get_info(self) -> registration_pb.PluginInfo:
        async with rpc.Channel(self.registration) as channel:
            request = registration_pb.InfoRequest()
            return await channel.call(f"{REGISTRATION}GetInfo", request, registration_pb.PluginInfo, deadline=5)

    async def notify(self, error: str = "") -> None:
        """The kubelet has accepted the registration, or rejected it with an error."""
        async with rpc.Channel(self.registration) as channel:
            await channel.call(
                f"{REGISTRATION}NotifyRegistrationStatus",
                registration_pb.RegistrationStatus(plugin_registered=not error, error=error),
                registration_pb.RegistrationStatusResponse,
                deadline=5,
            )

    async def waits_for_registration(self) -> None:
        await until(lambda: os.path.exists(self.registration))

    async def registered(self) -> None:
        """Registers at a kubelet, and waits until the driver publishes."""
        await self.waits_for_registration()
        await self.notify()
        await until(lambda: self.service.status.publishing)


@contextlib.asynccontextmanager
async def serving(driver: ServedDriver) -> AsyncIterator[ServedDriver]:
    """Runs the service, and cancels it at the end unless it has ended."""
    driver.task = asyncio.create_task(driver.service.run())
    try:
        yield driver
    finally:
        driver.task.cancel()
        with contextlib.suppress(asyncio.CancelledError):
            await driver.task


def claim(name: str, uid: str = "", namespace: str = "default") -> pb.Claim:
    return pb.Claim(namespace=namespace, uid=uid or f"uid-{name}", name=name)


async def prepare(
    channel: rpc.Channel, *claims: pb.Claim, version: str = "v1"
) -> Mapping[str, pb.NodePrepareResourceResponse]:
    response = await channel.call(
        f"/k8s.io.kubelet.pkg.apis.dra.{version}.DRAPlugin/NodePrepareResources",
        pb.NodePrepareResourcesRequest(claims=claims),
        pb.NodePrepareResourcesResponse,
        deadline=5,
    )
    return response.claims


async def unprepare(channel: rpc.Channel, *claims: pb.Claim, version: str = "v1") -> Mapping[str, str]:
    """The error by UID."""
    response = await channel.call(
        f"/k8s.io.kubelet.pkg.apis.dra.{version}.DRAPlugin/NodeUnprepareResources",
        pb.NodeUnprepareResourcesRequest(claims=claims),
        pb.NodeUnprepareResourcesResponse,
        deadline=5,
    )
    return {uid: entry.error for uid, entry in response.claims.items()}


async def watch(
    channel: rpc.Channel, version: str = "v1"
) -> AsyncGenerator[health_pb.NodeWatchResourcesResponse, None]:
    """The messages of a health stream."""
    async for response in channel.stream(
        f"/{version}.DRAResourceHealth/NodeWatchResources",
        health_pb.NodeWatchResourcesRequest(),
        health_pb.NodeWatchResourcesResponse,
    ):
        yield response
