"""`Unit`: one thing of the hardware that can be handed out, and its attributes."""

from collections.abc import Mapping, Sequence
from typing import Literal, TypeAlias

from msgspec import Struct


class Version(Struct, frozen=True):
    """A semantic version 2.0.0 as an attribute."""

    text: str


Attribute: TypeAlias = str | int | bool | Version
ATTRIBUTE_TYPES = (str, int, bool, Version)


class UnitNode(Struct, frozen=True):
    """A device node of a unit: `c` or `b` with its numbers, or an empty type if it is not a device node now.

    `permissions` are the access modes of containers: letters of r, w and m.
    """

    path: str
    type: Literal["c", "b", ""] = ""
    major: int = 0
    minor: int = 0
    permissions: str = "rw"


class Unit(Struct, frozen=True, kw_only=True):
    """A GPU, a virtual function, a work queue: what a container gets as a whole or shares with others.

    `id` is the same after a reboot: the PCI address, followed by the name of the part if the unit is a part of a
    function (`0000:6a:01.0-wq1`). `parent` is the ID of the physical function or of the function that the unit is a
    part of, empty if it is neither: a failure of the parent is a failure of the unit. Units without a PCI function have
    the name of their health unit as ID.

    `health` is the name under which health is stored, `Device.unit`. `ids` are the device IDs by resource.

    Names of attributes are those of DRA (dynamic resource allocation): `model`, or `resource.kubernetes.io/pcieRoot`.
    """

    id: str
    parent: str = ""
    health: str
    ids: Mapping[str, Sequence[str]] = {}
    attributes: Mapping[str, Attribute] = {}
    capacities: Mapping[str, int] = {}
    nodes: Sequence[UnitNode] = ()

    def text(self, attribute: str) -> str:
        """The attribute as text, empty if there is none."""
        return text_of(self.attributes, attribute)


def plain(attributes: Mapping[str, Attribute]) -> dict[str, str | bool | int]:
    """The attributes as values of JSON."""
    return {name: value.text if isinstance(value, Version) else value for name, value in attributes.items()}


def text_of(attributes: Mapping[str, Attribute], name: str) -> str:
    value = attributes.get(name, "")
    return value.text if isinstance(value, Version) else str(value)
