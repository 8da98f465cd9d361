"""Names: the kubelet's rules for resources and device IDs, and natural order."""

import re

_SUBDOMAIN = re.compile(r"[a-z0-9]([-a-z0-9]*[a-z0-9])?(\.[a-z0-9]([-a-z0-9]*[a-z0-9])?)*")
_NAME = re.compile(r"[A-Za-z0-9]([-A-Za-z0-9_.]*[A-Za-z0-9])?")
_DIGITS = re.compile(r"(\d+)")
# A PCI address, or its domain and bus. The numbers are hexadecimal and have equal lengths.
_PCI = re.compile(r"[0-9a-f]{4,8}:[0-9a-f]{2}(:[0-9a-f]{2}\.[0-9a-f])?")

# The kubelet validates `requests.<resource name>` as a qualified name. Its prefix has at most 253 characters.
MAX_NAMESPACE = 253 - len("requests.")
MAX_TYPE = 63
MAX_DEVICE_ID = 253


class ResourceNameError(ValueError):
    """A resource name that the kubelet does not accept."""


class DeviceIdError(ValueError):
    """A device ID that cannot be sent to the kubelet."""


def check_resource_name(namespace: str, resource: str) -> str:
    """Returns `<namespace>/<resource>`. Raises `ResourceNameError` if the kubelet would not let it register."""
    name = f"{namespace}/{resource}"
    if len(namespace) > MAX_NAMESPACE or not _SUBDOMAIN.fullmatch(namespace):
        raise ResourceNameError(
            f"resource {_format(name)}: the part before the slash must be a lower-case DNS name of at most "
            f"{MAX_NAMESPACE} characters"
        )
    if namespace.endswith("kubernetes.io") or namespace.startswith("requests."):
        raise ResourceNameError(f"resource {_format(name)}: the prefix is reserved by Kubernetes, use your own domain")
    if len(resource) > MAX_TYPE or not _NAME.fullmatch(resource):
        raise ResourceNameError(
            f"resource {_format(name)}: the part after the slash must have 1 to {MAX_TYPE} characters of "
            "[A-Za-z0-9_.-] and begin and end with a letter or digit"
        )
    return name


def check_device_id(device_id: str) -> str:
    """Returns the ID. Raises `DeviceIdError` if it is empty, too long or not printable."""
    if not device_id:
        raise DeviceIdError("a device id is empty, expected 1 or more characters")
    if len(device_id) > MAX_DEVICE_ID:
        raise DeviceIdError(
            f"device id {_format(device_id)} has {len(device_id)} characters, expected at most {MAX_DEVICE_ID}"
        )
    if not device_id.isprintable():
        raise DeviceIdError(f"device id {_format(device_id)} has unprintable characters")
    return device_id


def natural(text: str) -> tuple[tuple[int, str], ...]:
    """Returns a sort key that orders `card2` before `card10` and `0000:6b:00.7` before `0000:6b:0a.0`."""
    if _PCI.fullmatch(text):
        return ((-1, text),)
    pieces = _DIGITS.split(text)
    # Pieces at odd positions are digits. All items have one type, so keys of any two texts are comparable.
    return tuple(
        [(int(piece), piece) if index % 2 and len(piece) < 20 else (-1, piece) for index, piece in enumerate(pieces)]
    )


def _format(text: str) -> str:
    return ascii(text if len(text) <= 120 else text[:117] + "...")
