"""The field `dra` of custom resources: which devices are for claims (dynamic resource allocation) instead of resources.

The fields are the options `-dra-…` of the plugins.
"""

from collections.abc import Mapping
from typing import Annotated, Literal

from msgspec import Meta

from accelplane.kube.wire import Wire

Api = Literal["dra", "plugin", "none"]

# A node has fewer functions of a family, and the API server limits the cost of rules.
_MAX_DEVICES = 64


class Dra(Wire, frozen=True):
    api: Annotated[
        Api | None,
        Meta(
            description="Who hands devices out: dra (claims), plugin (resources of the device plugin) or none. "
            "dra when not set."
        ),
    ] = None
    devices: Annotated[
        Mapping[str, Api],
        Meta(
            description="Who hands single devices out, by PCI address, for example 0000:03:00.0.",
            extra_json_schema={"maxProperties": _MAX_DEVICES},
        ),
    ] = {}
    evict: Annotated[
        Literal["gone", "sick", "never"] | None,
        Meta(
            description="Whether pods are evicted if their device is gone, also if it is sick, or never. "
            "gone when not set."
        ),
    ] = None
    manage_binding: Annotated[
        bool | None,
        Meta(
            description="Whether devices are bound to the kernel driver that a claim needs, such as vfio-pci. "
            "If true, the pods can write sysfs. When not set: only the QAT plugin binds, as without dra."
        ),
    ] = None
    device_status: Annotated[
        bool, Meta(description="Whether the status of a claim has the state of its prepared devices.")
    ] = False
    take_over: Annotated[
        bool, Meta(description="Whether claims are taken over that another driver of the same name has prepared.")
    ] = False

    @property
    def is_used(self) -> bool:
        """Whether any device may be for claims."""
        return "dra" in (self.api or "dra", *self.devices.values())

    @property
    def is_exclusive(self) -> bool:
        """Whether no device has a resource of the device plugin."""
        return "plugin" not in (self.api or "dra", *self.devices.values())
