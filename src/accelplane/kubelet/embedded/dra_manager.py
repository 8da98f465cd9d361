"""Dynamic resource allocation in the embedded kubelet: claims of pods are prepared before their containers start.

The order of steps and the texts are those of the kubelet, because pods' events show them.
"""

import asyncio
import logging
from collections.abc import Callable, Collection, Coroutine, Iterator, Mapping, Sequence
from typing import Protocol, TypeVar

from accelplane.kubelet import dra_v1_pb2 as pb
from accelplane.kubelet import podresources_v1_pb2 as podresources_pb2
from accelplane.kubelet.embedded.connection import PluginError
from accelplane.kubelet.embedded.dra_claims import ClaimInfo, Claims
from accelplane.kubelet.embedded.dra_health import DraHealth
from accelplane.kubelet.embedded.dra_model import (
    AllocatedClaim,
    ClaimApi,
    ClaimApiError,
    ClaimDevice,
    DraBehaviour,
    PodStartError,
)
from accelplane.kubelet.embedded.dra_plugins import DraPlugin, DraPlugins
from accelplane.kubelet.embedded.model import Pod

log = logging.getLogger(__name__)


class _Answer(Protocol):
    """A driver's answer for one claim."""

    @property
    def error(self) -> str: ...


_AnyAnswer = TypeVar("_AnyAnswer", bound=_Answer)


class _PrepareError(Exception):
    """The claims of a pod are not prepared; the text is the kubelet's."""


class DraManager:
    """Prepares claims for pods with the plugins of `root`. `active_pods` returns the UIDs of the pods that run."""

    def __init__(
        self,
        root: str,
        version: str,
        api: ClaimApi,
        *,
        wipe_delay: float,
        unprepare_interval: float,
        active_pods: Callable[[], Collection[str]],
        on_change: Callable[[], None],
    ) -> None:
        """`version` is one of `DRA_BEHAVIOURS`. `unprepare_interval` is how often ended pods are looked for."""
        self._behaviour = DraBehaviour(version)
        self._api = api
        self._interval = unprepare_interval
        self._active_pods = active_pods
        self._on_change = on_change
        self._tasks: set[asyncio.Task[None]] = set()
        self._unpreparing: set[str] = set()  # UIDs of pods
        self.claims = Claims(root)
        self.health = DraHealth(on_change, announced_only=bool(self._behaviour.health_services))
        self.plugins = DraPlugins(
            root,
            self._behaviour,
            api,
            wipe_delay=wipe_delay,
            watch_health=self.health.watch,
            on_change=on_change,
        )

    def start(self) -> None:
        """Reads the checkpoint and starts. Raises `OSError`, `dra_claims.CheckpointError`."""
        self.claims.read()
        self.plugins.start()
        self._spawn(self._unprepare_loop())

    async def close(self) -> None:
        tasks = list(self._tasks)
        for task in tasks:
            task.cancel()
        await asyncio.gather(*tasks, return_exceptions=True)
        await self.plugins.close()

    async def prepare(self, pod: Pod, uid: str) -> None:
        """Prepares the claims of a pod that are not prepared yet. Raises `PodStartError`."""
        try:
            await self._prepare(pod, uid)
        except (_PrepareError, PluginError) as error:
            raise PodStartError(f"Failed to prepare dynamic resources: prepare dynamic resources: {error}") from error
        finally:
            self._on_change()

    def end_pod(self, uid: str) -> None:
        """Unprepares the claims that no other pod uses, in the background."""
        self._spawn(self._unprepare_logged(uid))

    def describe(self) -> Iterator[str]:
        """The drivers and the claims as lines of text."""
        for driver in self.plugins.names():
            yield f"DRA driver {driver}"
        for info in self.claims:
            yield f"claim {info.namespace}/{info.name}: {'prepared' if info.prepared else 'not prepared'}"
            for driver, devices in info.devices.items():
                for device in devices:
                    yield f"  {driver} {device.device}  {self.health.status(driver, device.pool, device.device)[0]}"

    def cdi_ids(self, pod: Pod, container: str) -> tuple[str, ...]:
        """The CDI devices of a container, each once."""
        found: dict[str, None] = {}
        for reference in pod.container_claims.get(container, ()):
            claim, _, request = reference.partition("/")
            if info := self.claims.get(pod.namespace, pod.claims[claim]):
                found.update(dict.fromkeys(info.cdi_ids(request)))
        return tuple(found)

    def dynamic_resources(self, pod: Pod, container: str) -> Iterator[podresources_pb2.DynamicResource]:
        """The claims of a container for the pod resources API, with all of their devices."""
        if not self._behaviour.lists_claims:
            return
        names = {reference.partition("/")[0] for reference in pod.container_claims.get(container, ())}
        for claim, name in pod.claims.items():
            if claim in names and (info := self.claims.get(pod.namespace, name)):
                yield podresources_pb2.DynamicResource(
                    claim_name=info.name,
                    claim_namespace=info.namespace,
                    claim_resources=[
                        podresources_pb2.ClaimResource(
                            cdi_devices=[podresources_pb2.CDIDevice(name=cdi_id) for cdi_id in device.cdi_ids],
                            driver_name=driver,
                            pool_name=device.pool,
                            device_name=device.device,
                            share_id=(device.share_id or None) if self._behaviour.lists_share_ids else None,
                        )
                        for driver, devices in info.devices.items()
                        for device in devices
                    ],
                )

    async def _prepare(self, pod: Pod, uid: str) -> None:
        plugins: dict[str, DraPlugin] = {}
        allocated = [await self._allocated(pod, name) for name in dict.fromkeys(pod.claims.values())]
        for claim in allocated:
            for driver in claim.drivers:
                plugins[driver] = self.plugins.find(driver)
        batches: dict[str, list[ClaimInfo]] = {}
        for claim in allocated:
            info = self.claims.get(claim.namespace, claim.name) or self.claims.add(claim)
            if info.uid != claim.uid:
                raise _PrepareError(
                    f"old ResourceClaim with same name {claim.name} and different UID {info.uid} still exists "
                    "(previous pod force-deleted?!)"
                )
            if info.unpreparing and self._behaviour.refuses_unpreparing:
                raise _PrepareError(f"ResourceClaim {claim.name} is being unprepared")
            info.pods.add(uid)
            self._save()
            if not info.prepared:
                for driver in claim.drivers:
                    batches.setdefault(driver, []).append(info)
        for driver, infos in batches.items():
            await self._prepare_batch(plugins[driver], infos)
        for infos in batches.values():
            for info in infos:
                info.prepared = True
        self._save()

    async def _allocated(self, pod: Pod, name: str) -> AllocatedClaim:
        try:
            claim = await self._api.claim(pod.namespace, name)
        except ClaimApiError as error:
            raise _PrepareError(f"fetch ResourceClaim {name}: {error}") from error
        if pod.name not in claim.reserved_for:
            raise _PrepareError(f"pod {pod.name} is not allowed to use ResourceClaim {name} ({claim.uid})")
        return claim

    async def _prepare_batch(self, plugin: DraPlugin, infos: Sequence[ClaimInfo]) -> None:
        """Calls one driver. Raises `_PrepareError`."""
        try:
            results = await plugin.prepare(_messages(infos))
        except PluginError as error:
            raise _PrepareError(f"NodePrepareResources: {error}") from error
        for info, result in _checked("NodePrepareResources", infos, results):
            if not self._behaviour.replaces_devices:
                info.devices[plugin.driver].extend(map(_device, result.devices))
            else:
                info.devices[plugin.driver] = [_device(device) for device in result.devices]

    async def _unprepare_loop(self) -> None:
        while True:
            await asyncio.sleep(self._interval)
            active = set(self._active_pods())
            for uid in {pod for info in self.claims for pod in info.pods} - active:
                await self._unprepare_logged(uid)

    async def _unprepare_logged(self, uid: str) -> None:
        if uid in self._unpreparing:
            return
        self._unpreparing.add(uid)
        try:
            await self._unprepare(uid)
        except (_PrepareError, PluginError) as error:
            log.warning("unprepare dynamic resources of the pod with UID %s: %s", uid, error)
        finally:
            self._unpreparing.discard(uid)
            self._on_change()

    async def _unprepare(self, uid: str) -> None:
        batches: dict[str, list[ClaimInfo]] = {}
        last: list[ClaimInfo] = []
        for info in self.claims.of_pod(uid):
            if len(info.pods) > 1:
                info.pods.discard(uid)
                continue
            info.unpreparing = True
            last.append(info)
            for driver in info.devices:
                batches.setdefault(driver, []).append(info)
        for driver, infos in batches.items():
            plugin = self.plugins.find(driver)
            try:
                results = await plugin.unprepare(_messages(infos))
            except PluginError as error:
                raise _PrepareError(f"NodeUnprepareResources: {error}") from error
            for _ in _checked("NodeUnprepareResources", infos, results):
                pass
        for info in last:
            self.claims.remove(info)
        self._save()

    def _save(self) -> None:
        try:
            self.claims.write()
        except OSError as error:
            raise _PrepareError(f"checkpoint ResourceClaim cache: {error}") from error

    def _spawn(self, coroutine: Coroutine[None, None, None]) -> None:
        task = asyncio.create_task(coroutine)
        self._tasks.add(task)
        task.add_done_callback(self._tasks.discard)


def _messages(infos: Sequence[ClaimInfo]) -> list[pb.Claim]:
    return [pb.Claim(namespace=info.namespace, uid=info.uid, name=info.name) for info in infos]


def _checked(
    method: str, infos: Sequence[ClaimInfo], results: Mapping[str, _AnyAnswer]
) -> Iterator[tuple[ClaimInfo, _AnyAnswer]]:
    """The result of each claim. Raises `_PrepareError` at the first that failed, and if the answer is incomplete."""
    by_uid = {info.uid: info for info in infos}
    for uid, result in results.items():
        if (info := by_uid.get(uid)) is None:
            raise _PrepareError(f"{method} returned result for unknown claim UID {uid}")
        if result.error:
            raise _PrepareError(f"{method} failed for ResourceClaim {info.name}: {result.error}")
        yield info, result
    if missing := len(infos) - len(results):
        raise _PrepareError(f"{method} skipped {missing} ResourceClaims")


def _device(device: pb.Device) -> ClaimDevice:
    return ClaimDevice(
        device.pool_name, device.device_name, tuple(device.request_names), tuple(device.cdi_device_ids), device.share_id
    )
