"""Names: what the kubelet accepts as a resource and as a device id, and the order in which people read them."""

import re

_SUBDOMAIN = re.compile(r"[a-z0-9]([-a-z0-9]*[a-z0-9])?(\.[a-z0-9]([-a-z0-9]*[a-z0-9])?)*")
_NAME = re.compile(r"[A-Za-z0-9]([-A-Za-z0-9_.]*[A-Za-z0-9])?")
_DIGITS = re.compile(r"(\d+)")
# A PCI address, or the bus of one: hexadecimal numbers of equal length.
_PCI = re.compile(r"[0-9a-f]{4,8}:[0-9a-f]{2}(:[0-9a-f]{2}\.[0-9a-f])?")

# The kubelet checks `requests.<resource name>` as a qualified name, whose prefix may have 253 characters.
MAX_NAMESPACE = 253 - len("requests.")
MAX_TYPE = 63
MAX_DEVICE_ID = 253


class ResourceNameError(ValueError):
    """A resource name that no kubelet would accept."""


class DeviceIdError(ValueError):
    """A device id that cannot be told to a kubelet."""


def check_resource_name(namespace: str, resource: str) -> str:
    """The full name `<namespace>/<resource>`, if a kubelet would register it.

    Raises `ResourceNameError` with what was found and what is allowed. The rules are the kubelet's own at
    registration (extended resource names).
    """
    name = f"{namespace}/{resource}"
    if len(namespace) > MAX_NAMESPACE or not _SUBDOMAIN.fullmatch(namespace):
        raise ResourceNameError(
            f"resource {_shown(name)}: the part before the slash must be a lower-case DNS name of at most "
            f"{MAX_NAMESPACE} characters"
        )
    if namespace.endswith("kubernetes.io") or namespace.startswith("requests."):
        raise ResourceNameError(
            f"resource {_shown(name)}: the prefix belongs to Kubernetes itself, use your own domain"
        )
    if len(resource) > MAX_TYPE or not _NAME.fullmatch(resource):
        raise ResourceNameError(
            f"resource {_shown(name)}: the part after the slash must have 1 to {MAX_TYPE} characters of "
            "[A-Za-z0-9_.-] and begin and end with a letter or digit"
        )
    return name


def check_device_id(device_id: str) -> str:
    """The id itself; raises `DeviceIdError` when it is empty, too long or not printable."""
    if not device_id:
        raise DeviceIdError("a device id is empty")
    if len(device_id) > MAX_DEVICE_ID:
        raise DeviceIdError(
            f"device id {_shown(device_id)} has {len(device_id)} characters, at most {MAX_DEVICE_ID} fit"
        )
    if not device_id.isprintable():
        raise DeviceIdError(f"device id {_shown(device_id)} has characters that cannot be printed")
    return device_id


def natural(text: str) -> tuple[tuple[int, str], ...]:
    """A sort key under which `card2` comes before `card10`, and `0000:6b:00.7` before `0000:6b:0a.0`."""
    if _PCI.fullmatch(text):
        return ((-1, text),)
    pieces = _DIGITS.split(text)
    # Odd positions are the digit runs; a fixed shape keeps keys of any two texts comparable.
    return tuple(
        [(int(piece), piece) if index % 2 and len(piece) < 20 else (-1, piece) for index, piece in enumerate(pieces)]
    )


def _shown(text: str) -> str:
    return ascii(text if len(text) <= 120 else text[:117] + "...")
