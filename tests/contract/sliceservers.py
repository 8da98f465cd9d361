"""The API server's handling of ResourceSlices on the test double: versions, feature gates and validation.

Facts: strategy and validation of ResourceSlices in Kubernetes 1.34.4 and 1.37.2.
"""

import json
from collections.abc import Collection, Iterable
from typing import Any

import msgspec

from accelplane.dra.resourceslice import ResourceSlice, from_api
from accelplane.dra.validation import problems
from accelplane.kube.testing import FakeApiServer
from accelplane.kube.testing.handlers import Failure

NODE = "node-1"
DRIVER = "gpu.intel.com"
GATES = frozenset(("taints", "counters", "consumable"))

Json = dict[str, Any]


class SliceServer(FakeApiServer):
    """Serves one node, and slices as Kubernetes 1.`minor` with `gates` does; `refused` devices get status 422."""

    def __init__(self, minor: int = 37, gates: Collection[str] = GATES, versions: Iterable[str] = ("v1",)) -> None:
        super().__init__()
        self.gates = set(gates)
        self.refused: set[str] = set()
        self.minor = 0
        self.versions = versions
        self.become(minor)
        self.admit = self._admit
        self.put("nodes", {"metadata": {"name": NODE}})

    def become(self, minor: int, gates: Collection[str] | None = None) -> None:
        """Replaces the program, as in an upgrade."""
        self.minor = minor
        self.gates = set(self.gates if gates is None else gates)
        self.faults = [fault for fault in self.faults if not fault.pattern.startswith("GET /(")]
        release = json.dumps({"minor": str(minor), "gitVersion": f"v1.{minor}.0"}).encode()
        group = json.dumps({"versions": [{"version": each} for each in self.versions]}).encode()
        self.fault("GET /(version)$", 200, times=-1, body=release)
        self.fault("GET /(apis/resource.k8s.io)$", 200, times=-1, body=group)

    @property
    def slices(self) -> list[ResourceSlice]:
        return [from_api(msgspec.convert(each, ResourceSlice)) for each in self.all("resourceslices")]

    @property
    def writes(self) -> list[str]:
        """The requests that changed slices."""
        changing = ("POST", "PUT", "DELETE", "PATCH")
        return [
            each.method
            for each in self.requests
            if each.method in changing and "resourceslices" in each.path and not each.dry_run
        ]

    def devices(self) -> dict[str, str]:
        """The names of devices with their taints, of all slices."""
        return {
            device.name: ",".join(f"{taint.key}={taint.value}:{taint.effect}" for taint in device.taints or ())
            for each in self.slices
            for device in each.spec.devices or ()
        }

    def _admit(self, thing: Json) -> Json:
        if "resourceSliceCount" not in thing.get("spec", {}).get("pool", {}):
            return thing
        before = self.get("resourceslices", thing["metadata"]["name"])
        used = _used(before) if before is not None else set[str]()
        devices: list[Json] = thing["spec"].get("devices") or []
        contents = [device.get("basic", device) for device in devices]
        if not {"taints"} & (self.gates | used):
            _remove(contents, "taints")
        if not {"counters"} & (self.gates | used):
            thing["spec"].pop("sharedCounters", None)
            _remove(contents, "consumesCounters")
        if not {"consumable"} & (self.gates | used):
            _remove(contents, "allowMultipleAllocations")
            for content in contents:
                _remove((content.get("capacity") or {}).values(), "requestPolicy")
        for content in contents:
            for taint in content.get("taints") or ():
                taint.setdefault("timeAdded", "2026-01-01T00:00:00Z")
        self._validate(thing, devices)
        return thing

    def _validate(self, thing: Json, devices: list[Json]) -> None:
        found = list(
            problems(from_api(msgspec.convert(thing, ResourceSlice)), "separate" if self.minor >= 35 else "together")
        )
        causes = [{"reason": "FieldValueInvalid", "field": each.field, "message": each.text} for each in found]
        causes += [
            {"reason": "FieldValueInvalid", "field": f"spec.devices[{number}].name", "message": "refused"}
            for number, device in enumerate(devices)
            if device["name"] in self.refused
        ]
        if causes:
            raise Failure(422, "; ".join(each["field"] for each in causes), details={"causes": causes})


def _used(thing: Json) -> set[str]:
    """The gates whose fields an object uses: those are not dropped."""
    text = json.dumps(thing)
    fields = {"taints": '"taints"', "counters": '"sharedCounters"', "consumable": '"allowMultipleAllocations"'}
    return {gate for gate, field in fields.items() if field in text} | (
        {"counters"} if "consumesCounters" in text else set()
    )


def _remove(contents: Iterable[Json], field: str) -> None:
    for content in contents:
        content.pop(field, None)
