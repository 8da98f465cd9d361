"""Ids of interfaces and accelerator functions (AFUs), and the names of the resources made of them.

An interface id names what a region is built for, an AFU id what is programmed into it. Drivers give 32 hexadecimal
digits; what a user asks for may be longer (the id of an OpenCL design is a hash of 40 digits). A resource is called by
one of two schemes, on which the plugin and the webhook of a cluster must agree:

    default   af-695.d84.aVKNtusxV3qMNmj5-qCB9thCTcSko8QT-J5DNoP5BAs    region-69528db6eb31577a8c3668f9faa081f6
    legacy63  69528db6eb31577a8c3668f9faa081fd8424dc4a4a3c413f89e433683f9040b    the same

The second one is that of April 2020, with which a socket in the kubelet's usual directory cannot have the whole name of
its resource.
"""

import re
from typing import Literal, TypeAlias

from accelplane.fpga import FpgaError, shown

Naming: TypeAlias = Literal["default", "legacy63"]

NAMESPACE = "fpga.intel.com"
MODE_ANNOTATION = "com.intel.fpga.mode"
REGION_MODE = f"{NAMESPACE}/region"
REGION_VARIABLE = "FPGA_REGION_"
AFU_VARIABLE = "FPGA_AFU_"

# What both kinds of id read as once the card's firmware has crashed.
CRASHED = "f" * 32

_LONGEST = 63  # of the part of a resource's name behind the slash
_HARDWARE = re.compile(r"[0-9a-f]{32}")
_WANTED = re.compile(r"[0-9a-f]{8,40}")
_DIGITS = re.compile(r"[0-9a-f]+")
_LEGACY_INTERFACE = 31


class IdError(FpgaError, ValueError):
    """A text that is no id, or ids of which no resource name can be made."""


def canonical(text: str) -> str:
    """The id as it is compared: lower case, without dashes and white space around it."""
    return text.strip().replace("-", "").lower()


def hardware_id(text: str, what: str = "id") -> str:
    """The canonical form of what a driver gave: exactly 32 hexadecimal digits. Raises `IdError`."""
    found = canonical(text)
    if not _HARDWARE.fullmatch(found):
        raise IdError(f"{what} {shown(text)}: expected 32 hexadecimal digits")
    return found


def wanted_id(text: str, what: str = "id") -> str:
    """The canonical form of what somebody asks for: 8 to 40 hexadecimal digits. Raises `IdError`."""
    found = canonical(text)
    if not _WANTED.fullmatch(found):
        raise IdError(f"{what} {shown(text)}: expected 8 to 40 hexadecimal digits")
    return found


def region_type(interface: str) -> str:
    """The resource of regions with that interface. Raises `IdError`."""
    return _fitting(f"region-{_digits(interface, 'interface id')}")


def af_type(interface: str, afu: str, naming: Naming = "default") -> str:
    """The resource of AFUs programmed into regions with that interface. Raises `IdError`."""
    interface, afu = _digits(interface, "interface id"), _digits(afu, "AFU id")
    if naming == "legacy63":
        if len(interface) < _LEGACY_INTERFACE:
            raise IdError(f"interface id {interface}: legacy63 names need at least {_LEGACY_INTERFACE} digits")
        return _fitting(f"{interface[:_LEGACY_INTERFACE]}{afu}")
    digits = interface + afu
    if len(digits) % 2:
        raise IdError(
            f"interface id {interface} and AFU id {afu}: {len(digits)} digits together, expected an even number"
        )
    return _fitting(f"af-{interface[:3]}.{afu[:3]}.{_base64(bytes.fromhex(digits))}")


def resource(device_type: str) -> str:
    """The full name, as pods ask for it."""
    return f"{NAMESPACE}/{device_type}"


def _digits(text: str, what: str) -> str:
    if len(text) < 3 or not _DIGITS.fullmatch(text):
        raise IdError(f"{what} {shown(text)}: expected at least 3 lower-case hexadecimal digits")
    return text


def _base64(data: bytes) -> str:
    import base64  # noqa: PLC0415 - the hook makes no names

    return base64.urlsafe_b64encode(data).decode().rstrip("=")


def _fitting(device_type: str) -> str:
    if len(device_type) > _LONGEST:
        raise IdError(f"resource {device_type}: {len(device_type)} characters, at most {_LONGEST} are possible")
    if not device_type[-1].isalnum():
        raise IdError(f"resource {device_type}: the name of a resource must end in a letter or digit, not with its ids")
    return device_type
