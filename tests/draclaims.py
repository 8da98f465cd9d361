"""A node with claims: a tree of devices with their plugin, claims of an API server, and a preparer of DRA."""

import itertools
import json
import os
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any, Self

import msgspec
from msgspec.structs import replace
from trees import write

from accelplane.apiserver import NotFound, Unreachable
from accelplane.devices import Allocation, CdiDevice, Device, DeviceNode, Unit
from accelplane.dra.model import ClaimError, ClaimRef, DeviceName, Offer, PreparedDevice
from accelplane.dra.preparer import Preparer
from accelplane.host import Host
from accelplane.kubelet.podresources import ClaimHolder, NodeHolders
from accelplane.node.units import units_of
from accelplane.plugins.base import Plugin

NODE = "node-1"


def ref(uid: str, name: str = "") -> ClaimRef:
    return ClaimRef("shop", uid, name or f"claim-{uid}")


class Claims:
    """What an API server has: claims by path. The methods are those of `ApiServer`."""

    def __init__(self, version: str = "v1") -> None:
        self.version = version
        self.objects: dict[str, dict[str, Any]] = {}
        self.requests: list[str] = []
        self.away = False

    def without_rate_limit(self) -> Self:
        return self

    async def get(self, path: str, kind: Any, **_options: Any) -> Any:
        self.requests.append(path)
        if self.away:
            raise Unreachable(f"GET {path}", "connection refused")
        if path == "/apis/resource.k8s.io":
            found: Any = {"versions": [{"version": self.version}]}
        elif path in self.objects:
            found = self.objects[path]
        else:
            raise NotFound(f"GET {path}", code=404)
        return msgspec.json.decode(json.dumps(found), type=kind)

    def add(
        self,
        claim: ClaimRef,
        results: Sequence[Mapping[str, Any]],
        *,
        config: Sequence[Mapping[str, Any]] = (),
        requests: Sequence[Mapping[str, Any]] = (),
        reserved: bool = True,
    ) -> ClaimRef:
        """An allocated claim; its results need `device` and have defaults for the rest."""
        allocation = {"devices": {"results": [dict(each) for each in results], "config": [dict(one) for one in config]}}
        status: dict[str, Any] = {"allocation": allocation}
        if reserved:
            status["reservedFor"] = [{"resource": "pods", "name": "pod", "uid": "1"}]
        self.objects[self.path(claim)] = {
            "metadata": {"uid": claim.uid, "resourceVersion": "1"},
            "spec": {"devices": {"requests": [dict(each) for each in requests]}},
            "status": status,
        }
        return claim

    def remove(self, claim: ClaimRef) -> None:
        del self.objects[self.path(claim)]

    def path(self, claim: ClaimRef) -> str:
        return f"/apis/resource.k8s.io/{self.version}/namespaces/{claim.namespace}/resourceclaims/{claim.name}"


class PluginOffers:
    """The units of a plugin's scan, all owned by DRA, with allocations by the plugin's hooks."""

    def __init__(self, host: Host, plugin: Plugin[Any]) -> None:
        self.host = host
        self.plugin = plugin
        self.allocations = 0
        self.scan()

    def scan(self) -> None:
        devices = [each for each in self.plugin.scan(self.host.fresh()) if isinstance(each, Device)]
        self.devices = {device.id: device for device in devices}
        self.offers = {unit.id: Offer(unit=unit, owner="dra") for unit in units_of(self.host.fresh(), devices)}

    def units(self) -> Mapping[str, Offer]:
        return self.offers

    async def changed(self) -> None:
        raise NotImplementedError

    async def allocation(self, units: Sequence[str]) -> Allocation:
        self.allocations += 1
        ids = [next(iter(self.offers[unit].unit.ids.values()))[0] for unit in units]
        devices = [self.devices[id_] for id_ in ids]
        found = await self.plugin.allocate(devices)
        return found or await self.plugin.post_allocate(devices, Allocation.of(devices))

    def cdi_devices(self, names: Sequence[str]) -> Sequence[CdiDevice]:
        found = {device.cdi.qualified_name: device.cdi for device in self.devices.values() if device.cdi is not None}
        return [found[name] for name in names]


class UnitOffers:
    """Units without a plugin: a container gets the nodes of a unit, and `UNIT<number>` with its ID."""

    def __init__(self, *units: Unit) -> None:
        self.offers = {unit.id: Offer(unit=unit, owner="dra") for unit in units}

    def units(self) -> Mapping[str, Offer]:
        return self.offers

    async def changed(self) -> None:
        raise NotImplementedError

    async def allocation(self, units: Sequence[str]) -> Allocation:
        nodes = [DeviceNode(node.path) for unit in units for node in self.offers[unit].unit.nodes]
        return Allocation(nodes=nodes, envs={f"UNIT{number}": unit for number, unit in enumerate(units)})

    def cdi_devices(self, names: Sequence[str]) -> Sequence[CdiDevice]:
        return ()


def device_name(unit: Unit) -> str:
    """Intel's name of a GPU."""
    return f"{unit.id.replace(':', '-').replace('.', '-')}-{unit.text('pciId')}".strip("-")


class World:
    """A node below `root` with claims, whose preparers are made by `start`."""

    def __init__(
        self,
        root: Path,
        plugin: Plugin[Any] | UnitOffers,
        *,
        driver: str = "gpu.intel.com",
        host: Host | None = None,
    ) -> None:
        self.root = root
        self.driver = driver
        self.host = host or Host(root)
        self.api = Claims()
        self.offers = plugin if isinstance(plugin, UnitOffers) else PluginOffers(self.host, plugin)
        self.names: dict[str, DeviceName] = {}
        self.containers: list[ClaimHolder] = []
        self.events: list[tuple[str, str]] = []
        self.directory = root / "var/lib/kubelet/plugins" / driver
        self.cdi_dir = root / "var/run/cdi"
        self._boots = (f"0f5a5f5e-{number:04}" for number in itertools.count())
        write(root / "proc/sys/kernel/random/boot_id", f"{next(self._boots)}\n")
        self.name_units()

    def name_units(self) -> None:
        self.names = {device_name(offer.unit): DeviceName(unit=unit) for unit, offer in self.offers.units().items()}

    def change_offer(self, unit: str, **fields: Any) -> None:
        self.offers.offers = {**self.offers.offers, unit: replace(self.offers.offers[unit], **fields)}

    def scan(self) -> None:
        assert isinstance(self.offers, PluginOffers)
        self.offers.scan()

    def device(self, number: int = 0) -> str:
        return list(self.names)[number]

    async def start(self, **options: Any) -> Preparer:
        """A new instance, as after the start of the process."""
        preparer = self.preparer(**options)
        await preparer.restore()
        await preparer.idle()
        return preparer

    def preparer(self, **options: Any) -> Preparer:
        async def holders() -> NodeHolders:
            return NodeHolders((), tuple(self.containers))

        arguments: dict[str, Any] = {
            "directory": str(self.directory), "cdi_dir": str(self.cdi_dir), "host": self.host, "manage_binding": True,
            "holders": holders, "names": lambda: self.names, "on_event": lambda *event: self.events.append(event),
            "orphan_delay": 0.0, **options,
        }  # fmt: skip
        return Preparer(self.api, self.driver, NODE, self.offers, **arguments)  # pyright: ignore[reportArgumentType]

    def claim(self, uid: str, *devices: str, **options: Any) -> ClaimRef:
        """An allocated claim with one request for each device."""
        results = [self.result(device, f"r{number}") for number, device in enumerate(devices)]
        return self.api.add(ref(uid), results, **options)

    def result(self, device: str, request: str = "r0", **fields: Any) -> dict[str, Any]:
        return {"request": request, "driver": self.driver, "pool": NODE, "device": device, **fields}

    def cdi_file(self, uid: str) -> Any:
        """The content of the claim's file by device name, None without a file."""
        path = self.cdi_dir / f"k8s.{self.driver}-claim_{uid}.json"
        if not path.exists():
            return None
        content = json.loads(path.read_text())
        return {device["name"]: device["containerEdits"] for device in content["devices"]}

    def journal(self) -> dict[str, Any]:
        """The entries by UID."""
        return {path.stem: self.read(path) for path in sorted((self.directory / "claims").glob("*.json"))}

    def read(self, path: Path) -> Any:
        return json.loads(path.read_text())

    def leftovers(self) -> list[str]:
        """All files of claims and journal, without the marker of the boot, locks and directories."""
        files = [path for path in (*self.directory.rglob("*"), *self.cdi_dir.rglob("*")) if path.is_file()]
        known = {".accelplane-boot", "journal.lock"}
        return sorted(path.name for path in files if path.name not in known and not path.name.startswith("instance-"))

    def reboot(self, *, keep_marker: bool = False) -> None:
        """Removes what is in memory, and gives the kernel another boot ID."""
        for path in self.cdi_dir.iterdir():
            if not keep_marker or path.name != ".accelplane-boot":
                path.unlink()
        write(self.root / "proc/sys/kernel/random/boot_id", f"{next(self._boots)}\n")


def kill(preparer: Preparer) -> None:
    """What the kernel does for a process that ends: locks are released, nothing is removed."""
    journal = preparer._store._journal
    if journal._owner is not None:
        os.close(journal._owner)
        journal._owner = None


def devices_of(answer: Sequence[PreparedDevice] | ClaimError) -> Sequence[PreparedDevice]:
    """The devices of an answer; fails with the error."""
    assert not isinstance(answer, ClaimError), str(answer)
    return answer


def error_of(answer: Any) -> str:
    assert isinstance(answer, ClaimError), answer
    assert len(str(answer)) <= 300
    assert "\n" not in str(answer)
    return str(answer)
