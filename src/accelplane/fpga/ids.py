"""Ids of interfaces and accelerator functions (AFUs), and the resource names derived from them.

An interface id identifies the type of a region, an AFU id the programmed function. Drivers report 32 hexadecimal
digits; requests may have more (the id of an OpenCL design is a hash of 40 digits). There are two naming schemes, and
the plugin and the webhook of a cluster must use the same one:

    default   af-695.d84.aVKNtusxV3qMNmj5-qCB9thCTcSko8QT-J5DNoP5BAs    region-69528db6eb31577a8c3668f9faa081f6
    legacy63  69528db6eb31577a8c3668f9faa081fd8424dc4a4a3c413f89e433683f9040b    the same

The second one is the scheme of April 2020. Its names are too long for a socket in the kubelet's default directory.
"""

import re
from typing import Literal, TypeAlias

from accelplane.fpga import FpgaError, quote

Naming: TypeAlias = Literal["default", "legacy63"]

NAMESPACE = "fpga.intel.com"
MODE_ANNOTATION = "com.intel.fpga.mode"
REGION_MODE = f"{NAMESPACE}/region"
REGION_VARIABLE = "FPGA_REGION_"
AFU_VARIABLE = "FPGA_AFU_"
# The number of pairs of the two others that the webhook granted.
COUNT_VARIABLE = "FPGA_REGIONS"

# The value of both ids after a crash of the card's firmware.
CRASHED = "f" * 32

_LONGEST = 63  # of the part after the slash
_HARDWARE = re.compile(r"[0-9a-f]{32}")
_WANTED = re.compile(r"[0-9a-f]{8,40}")
_DIGITS = re.compile(r"[0-9a-f]+")
_LEGACY_INTERFACE = 31


class IdError(FpgaError, ValueError):
    """An invalid id, or ids that give no valid resource name."""


def canonical(text: str) -> str:
    """Returns the id in lower case, without dashes and surrounding white space."""
    return text.strip().replace("-", "").lower()


def hardware_id(text: str, what: str = "id") -> str:
    """Returns the canonical form of a driver's id, 32 hexadecimal digits. Raises `IdError`."""
    found = canonical(text)
    if not _HARDWARE.fullmatch(found):
        raise IdError(f"{what} {quote(text)}: expected 32 hexadecimal digits")
    return found


def requested_id(text: str, what: str = "id") -> str:
    """Returns the canonical form of a requested id, 8 to 40 hexadecimal digits. Raises `IdError`."""
    found = canonical(text)
    if not _WANTED.fullmatch(found):
        raise IdError(f"{what} {quote(text)}: expected 8 to 40 hexadecimal digits")
    return found


def region_type(interface: str) -> str:
    """Returns the resource type of regions with that interface. Raises `IdError`."""
    return _check_length(f"region-{_digits(interface, 'interface id')}")


def af_type(interface: str, afu: str, naming: Naming = "default") -> str:
    """Returns the resource type of an AFU in regions with that interface. Raises `IdError`."""
    interface, afu = _digits(interface, "interface id"), _digits(afu, "AFU id")
    if naming == "legacy63":
        if len(interface) < _LEGACY_INTERFACE:
            raise IdError(f"interface id {interface}: legacy63 names need at least {_LEGACY_INTERFACE} digits")
        return _check_length(f"{interface[:_LEGACY_INTERFACE]}{afu}")
    digits = interface + afu
    if len(digits) % 2:
        raise IdError(
            f"interface id {interface} and AFU id {afu}: {len(digits)} digits together, expected an even number"
        )
    import base64  # noqa: PLC0415 - not used by the hook

    encoded = base64.urlsafe_b64encode(bytes.fromhex(digits)).decode().rstrip("=")
    return _check_length(f"af-{interface[:3]}.{afu[:3]}.{encoded}")


def resource(device_type: str) -> str:
    """Returns the full name of the resource."""
    return f"{NAMESPACE}/{device_type}"


def _digits(text: str, what: str) -> str:
    if len(text) < 3 or not _DIGITS.fullmatch(text):
        raise IdError(f"{what} {quote(text)}: expected at least 3 lower-case hexadecimal digits")
    return text


def _check_length(device_type: str) -> str:
    if len(device_type) > _LONGEST:
        raise IdError(f"resource {device_type}: {len(device_type)} characters, expected at most {_LONGEST}")
    if not device_type[-1].isalnum():
        raise IdError(f"resource {device_type}: expected a letter or digit at its end")
    return device_type
