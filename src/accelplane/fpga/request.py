"""The programming request of a container: parses the OCI state and the configuration of its bundle.

Source: the OCI runtime specification (runtime.md#state, config.md: `process.env`, `linux.devices`). The admission
webhook sets the variables `FPGA_REGION_1` and `FPGA_AFU_1`, 2 and so on, and their number, `FPGA_REGIONS`. Authors of
pods can add variables by images and envFrom, and devices by volumes: more pairs than that number are rejected, and only
character devices of allocated ports are used. Pure functions of bytes.
"""

import json
import re
from collections.abc import Mapping, Sequence
from typing import NamedTuple

from accelplane.fpga import FpgaError, Json, quote
from accelplane.fpga.allocation import ANY, HOOK, allocated_ports
from accelplane.fpga.drivers import parse_name
from accelplane.fpga.ids import AFU_VARIABLE, COUNT_VARIABLE, MODE_ANNOTATION, REGION_VARIABLE, requested_id

STATE_LIMIT = 1024 * 1024
CONFIG_LIMIT = 16 * 1024 * 1024

_NUMBER = re.compile(r"[1-9][0-9]{0,3}")
_COUNT = re.compile(r"0|[1-9][0-9]{0,3}")
_STATE = "the container's state"


class State(NamedTuple):
    """The directory of the bundle, and the mode annotation, empty without one."""

    bundle: str
    mode: str


class Pair(NamedTuple):
    """A region, and the AFU to be programmed into it; ids are canonical."""

    number: int
    region: str
    afu: str


class PortDevice(NamedTuple):
    """The name of an allocated port, and the number of its character device in the container, `major:minor`."""

    name: str
    number: str


class Request(NamedTuple):
    """Pairs by number from 1, and at least that many ports."""

    pairs: tuple[Pair, ...]
    ports: tuple[PortDevice, ...]


def parse_state(data: bytes) -> State:
    """Raises `FpgaError`."""
    state = _document(data, _STATE, STATE_LIMIT)
    bundle = state.get("bundle")
    if not isinstance(bundle, str) or not bundle or "\0" in bundle:
        raise FpgaError(f"{_STATE}: bundle is {quote(str(bundle))}, expected the path of a directory")
    annotations = state.get("annotations")
    mode = annotations.get(MODE_ANNOTATION) if isinstance(annotations, dict) else None
    return State(bundle, mode if isinstance(mode, str) else "")


def parse_config(data: bytes, name: str) -> Request:
    """Parses the configuration called `name`. Raises `FpgaError`."""
    config = _document(data, name, CONFIG_LIMIT)
    pairs = requested_pairs(_strings(_section(config, "process", name).get("env"), f"{name}: process.env"))
    allocated = allocated_ports(config)
    if not allocated:
        raise FpgaError(
            f"no record of allocated ports: found neither -ports in arguments of {HOOK} (from the device plugin's CDI "
            "file) nor annotations of the device plugin (CRI-O)"
        )
    devices = _ports(_section(config, "linux", name).get("devices"), f"{name}: linux.devices")
    ports = tuple(device for device in devices if device.name in allocated or ANY in allocated)
    if len(pairs) > len(ports):
        raise FpgaError(
            f"AFUs requested: {len(pairs)} (up to {REGION_VARIABLE}{len(pairs)}), FPGA ports of the container: "
            f"{len(ports)} ({', '.join(port.name for port in ports) or 'none'}); expected at least as many; allocated: "
            f"{', '.join(sorted(allocated))}"
        )
    return Request(pairs, ports)


def requested_pairs(environment: Sequence[str]) -> tuple[Pair, ...]:
    """Returns the granted pairs in the variables (`NAME=value`), at least one. Raises `FpgaError`."""
    regions = _variables(environment, REGION_VARIABLE)
    afus = _variables(environment, AFU_VARIABLE)
    if not regions:
        raise FpgaError(f"no variable {REGION_VARIABLE}1; check that the FPGA admission webhook runs, and that the "
                           "pod requests the region by the name of a mapping")  # fmt: skip
    for suffix in regions:
        if not _NUMBER.fullmatch(suffix):
            raise FpgaError(f"variable {quote(REGION_VARIABLE + suffix)}: expected a number from 1 at its end")
    numbers = sorted(map(int, regions))
    if numbers != list(range(1, len(numbers) + 1)):
        found = ", ".join(f"{REGION_VARIABLE}{number}" for number in numbers[:20])
        raise FpgaError(f"variables {found}: expected them numbered from 1 without gaps")
    _check_granted(environment, len(numbers))
    pairs: list[Pair] = []
    for number in numbers:
        region, afu = f"{REGION_VARIABLE}{number}", f"{AFU_VARIABLE}{number}"
        if str(number) not in afus:
            raise FpgaError(f"variable {region} without {afu}, expected both")
        pairs.append(Pair(number, requested_id(regions[str(number)], region), requested_id(afus[str(number)], afu)))
    return tuple(pairs)


def _check_granted(environment: Sequence[str], number: int) -> None:
    """Raises `FpgaError` unless the webhook granted that number of pairs."""
    granted = _variables(environment, COUNT_VARIABLE).get("")
    if granted is None:
        raise FpgaError(f"no variable {COUNT_VARIABLE}; the FPGA admission webhook did not grant {REGION_VARIABLE}1")
    if not _COUNT.fullmatch(granted):
        raise FpgaError(f"variable {COUNT_VARIABLE} is {quote(granted)}, expected a number")
    if int(granted) != number:
        raise FpgaError(
            f"AFUs requested: {number} (up to {REGION_VARIABLE}{number}), granted by the FPGA admission webhook: "
            f"{granted} ({COUNT_VARIABLE}); expected the same number; remove such variables from the image and envFrom"
        )


def _variables(environment: Sequence[str], prefix: str) -> dict[str, str]:
    """Returns values by the suffix of their variable."""
    found: dict[str, str] = {}
    for entry in environment:
        name, equals, value = entry.partition("=")
        if not name.startswith(prefix):
            continue
        if not equals:
            raise FpgaError(f"variable {quote(name)} has no value")
        if (other := found.setdefault(name.removeprefix(prefix), value)) != value:
            raise FpgaError(
                f"variable {quote(name)} is set to {quote(other)} and to {quote(value)}; expected one value; remove "
                "such variables from the image"
            )
    return found


def _ports(found: "Json", where: str) -> tuple[PortDevice, ...]:
    """Returns the character devices `/dev/<port>`, also those that were not allocated."""
    if not isinstance(found, list) or not found:
        raise FpgaError(f"{where}: expected a list of devices, found {_word(found)}")
    ports: dict[PortDevice, None] = {}
    for device in found:
        path = device.get("path") if isinstance(device, dict) else None
        if not isinstance(device, dict) or not isinstance(path, str):
            raise FpgaError(f"{where}: a device without a path")
        directory, _, name = path.rpartition("/")
        kind = parse_name(name)
        major, minor = device.get("major"), device.get("minor")
        if kind is None or kind[1] != "port" or directory != "/dev" or device.get("type") != "c":
            continue
        if isinstance(major, int) and isinstance(minor, int):
            ports[PortDevice(name, f"{major}:{minor}")] = None
    return tuple(ports)


def _document(data: bytes, name: str, limit: int) -> Mapping[str, "Json"]:
    if len(data) > limit:
        raise FpgaError(f"{name}: more than {limit} bytes")
    try:
        found: Json = json.loads(data)
    except (ValueError, RecursionError) as error:
        raise FpgaError(f"{name}: not JSON: {error}") from None
    if not isinstance(found, dict):
        raise FpgaError(f"{name}: expected a JSON object, found {_word(found)}")
    return found


def _section(found: Mapping[str, "Json"], key: str, name: str) -> Mapping[str, "Json"]:
    value = found.get(key)
    if not isinstance(value, dict):
        raise FpgaError(f"{name}: {key} is {_word(value)}, expected an object")
    return value


def _strings(found: "Json", where: str) -> list[str]:
    if not isinstance(found, list) or not found:
        raise FpgaError(f"{where}: expected a list of strings, found {_word(found)}")
    strings = [entry for entry in found if isinstance(entry, str)]
    if len(strings) != len(found):
        raise FpgaError(f"{where}: expected only strings")
    return strings


def _word(found: "Json") -> str:
    if found is None:
        return "nothing"
    return "an empty list" if found == [] else quote(str(found))
