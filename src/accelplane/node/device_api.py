"""Which API hands devices out: the setting `dra-api`.

It is one of `plugin`, `dra` and `none` for all plugins, or a list of `plugin name=api` and `PCI address=api`, separated
by commas. An address counts before a plugin's name. That of a physical function counts for its virtual functions, and
that of a function for its parts.
"""

import functools
import re
from collections.abc import Mapping
from typing import Any, Literal, get_args

from msgspec import Struct

from accelplane.devices import Unit
from accelplane.host.pci import pci_address
from accelplane.plugins.base import Plugin

Api = Literal["plugin", "dra", "none"]

_FAMILY = re.compile(r"[a-z0-9]([a-z0-9_.-]{0,61}[a-z0-9])?", re.IGNORECASE)
_APIS: tuple[str, ...] = get_args(Api)


class DeviceApis(Struct, frozen=True, kw_only=True):
    """The API by plugin name, by PCI address, and for all other plugins."""

    default: Api = "plugin"
    families: Mapping[str, Api] = {}
    devices: Mapping[str, Api] = {}

    @classmethod
    @functools.lru_cache(maxsize=8)
    def of(cls, text: str) -> "DeviceApis":
        """Raises `ValueError` with what was found and expected."""
        default: Api = "plugin"
        families: dict[str, Api] = {}
        devices: dict[str, Api] = {}
        for entry in filter(None, (part.strip() for part in text.split(","))):
            name, equals, word = (part.strip() for part in entry.rpartition("="))
            api = next((api for api in get_args(Api) if api == word), None)
            if api is None:
                raise ValueError(f"found {entry[:80]!a}, expected one of {', '.join(_APIS)}, as in gpu=dra")
            if not equals:
                default = api
            elif pci_address(name.lower()):
                devices[name.lower()] = api
            elif _FAMILY.fullmatch(name):
                families[name] = api
            else:
                raise ValueError(f"found {name[:80]!a}, expected a plugin's name or a PCI address as 0000:03:00.0")
        return cls(default=default, families=families, devices=devices)

    @property
    def text(self) -> str:
        """The setting that `of` reads."""
        default = () if self.default == "plugin" else (self.default,)
        return ",".join((*default, *(f"{name}={api}" for name, api in (*self.families.items(), *self.devices.items()))))

    def of_family(self, family: str) -> Api:
        """The API of units without an entry of their own."""
        return self.families.get(family, self.default)

    def may_differ(self, family: str) -> bool:
        """Whether units of the family may belong to another API than the device plugin API."""
        return self.of_family(family) != "plugin" or any(api != "plugin" for api in self.devices.values())

    def of_unit(self, family: str, unit: Unit) -> Api:
        """The API of a unit by its own address, else by that of its parent, else by its family."""
        for address in (unit.id, unit.text("pciAddress"), unit.parent):
            if address in self.devices:
                return self.devices[address]
        return self.of_family(family)


def record_name(name: str, plugin: Plugin[Any]) -> str:
    """The name of the record of owners of a plugin: plugins with another namespace have other units."""
    is_own = getattr(type(plugin), "namespace", "") == plugin.namespace
    return name if is_own else f"{name}-{plugin.namespace}"
