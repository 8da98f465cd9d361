"""`fpga_tool`, `fpgatool` and `accelplane fpga`: administration of bitstreams and FPGA cards.

    fpga_tool [flags] COMMAND [flags]

Commands write a table or (`-json`) a JSON document to standard output, and errors to standard error. The exit status
is 1 for errors and 2 for invalid flags. Attributes are read from sysfs if possible, because the kernel resets a port
when its last descriptor is closed.
"""

import json
import os
import sys
from collections.abc import Callable, Iterator, Mapping, Sequence
from functools import partial
from typing import Literal, NamedTuple, TypeAlias

from accelplane.cli import signals
from accelplane.cli.goflags import Flag, FlagError, HelpRequested, Value, parse, usage
from accelplane.controls import escape_json
from accelplane.fpga import FpgaError, quote
from accelplane.fpga.bitstream import extra, open_bitstream
from accelplane.fpga.drivers import kind_of
from accelplane.fpga.program import (
    DEFAULT_RETRY,
    TimedOut,
    api_version,
    move,
    port_regions,
    program,
    region_count,
    time_limit,
)
from accelplane.fpga.store import install, install_path
from accelplane.fpga.sysfs import Fme, Pci, Port, afu_id, interface_of, platform_devices, read_fme, read_port
from accelplane.host import Host, HostError

PROGRAM = "fpga_tool"

FLAGS = (
    Flag("b", "", "a bitstream file, GBS or AOCX"),
    Flag("d", "", "the device node of an FME or a port, or its name in /dev"),
    Flag("p", 0, "number of the port to release or assign", unsigned=True),
    Flag("n", 0, "number of virtual functions for sriov", unsigned=True),
    Flag("dry-run", False, "check everything and change nothing"),
    Flag("force", False, "install: overwrite an existing file"),
    Flag("q", False, "print less"),
    Flag("json", False, "print a JSON document"),
    Flag("root", "/", "find sysfs, devfs, locks and the bitstream store under this directory"),
)

Json: TypeAlias = "Mapping[str, Json] | Sequence[Json] | str | float | bool | None"

_DEVICE_WIDTH = 33
_BITSTREAM_WIDTH = 22


class Given(NamedTuple):
    """The command line."""

    host: Host
    flags: Mapping[str, Value]

    def text(self, name: str) -> str:
        """Returns the value of a required flag. Raises `FpgaError`."""
        found = str(self.flags.get(name, ""))
        if not found:
            raise FpgaError(
                f"-{name}: found nothing, expected {next(flag.help for flag in FLAGS if flag.name == name)}"
            )
        return found

    def number(self, name: str) -> int:
        """Returns the value of a flag, 0 by default."""
        return int(self.flags.get(name, 0))

    def has(self, name: str) -> bool:
        """Returns whether a boolean flag is set."""
        return bool(self.flags.get(name))

    def say(self, line: str, *, end: str = "\n") -> None:
        """Prints a line, unless -q or -json is set."""
        if not self.has("q") and not self.has("json"):
            print(line, end=end, flush=True)


class Row(NamedTuple):
    """A line of a device's description: label, key in JSON, value; a `detail` is omitted with -q."""

    label: str
    key: str
    value: Json
    detail: bool = False


def main(arguments: Sequence[str] | None = None, name: str = PROGRAM) -> int:
    signals.end_as_usual()
    try:
        flags, words = _parse(sys.argv[1:] if arguments is None else arguments)
    except HelpRequested:
        print(_usage(name), file=sys.stderr)
        return 0
    except FlagError as error:
        print(f"{error}\n{_usage(name)}", file=sys.stderr)
        return 2
    given = Given(Host(str(flags.get("root", "/"))), flags)
    try:
        if not words:
            raise FpgaError(f"found no command, expected one of {', '.join(COMMANDS)}")
        if words[0] not in COMMANDS:
            raise FpgaError(f"found command {quote(words[0])}, expected one of {', '.join(COMMANDS)}")
        if words[1:]:
            print(f"{name}: ignored: {' '.join(map(quote, words[1:]))}", file=sys.stderr)
        document = COMMANDS[words[0]](given)
        if given.has("json"):
            print(escape_json(json.dumps(document, indent=2)))
        print(end="", flush=True)
    except OSError as error:
        # Of standard output: devices and files raise other errors. Python must not flush it again at exit.
        os.dup2(os.open(os.devnull, os.O_WRONLY), 1)
        if not isinstance(error, BrokenPipeError):
            print(f"{name}: standard output: {error.strerror}", file=sys.stderr)
        return 1
    except (FpgaError, HostError, MemoryError) as error:
        print(f"{name}: {str(error) or 'not enough memory'}", file=sys.stderr)
        return 1
    finally:
        for note in given.host.notes:
            print(f"{name}: {note}", file=sys.stderr)
    return 0


def _parse(arguments: Sequence[str]) -> tuple[dict[str, Value], list[str]]:
    """Parses flags before, between and after words. Raises `FlagError` or `HelpRequested`."""
    flags: dict[str, Value] = {}
    words: list[str] = []
    rest = list(arguments)
    while True:
        found, rest = parse(FLAGS, rest)
        flags |= found
        if not rest:
            return flags, words
        words.append(rest.pop(0))


def _usage(name: str) -> str:
    return f"{usage(name, FLAGS)}\nCommands: {', '.join(COMMANDS)}"


# Bitstreams


def _info(given: Given) -> Json:
    with open_bitstream(given.text("b")) as bitstream:
        rows = (
            Row("Bitstream file", "file", bitstream.path),
            Row("Interface UUID", "interfaceId", bitstream.interface),
            Row("Accelerator Type UUID", "acceleratorTypeId", bitstream.accelerator),
            Row("Unique UUID", "uniqueId", bitstream.unique),
            Row("Installation Path", "installationPath", install_path(bitstream)),
        )
        more = {} if given.has("q") else extra(bitstream)
    if not given.has("json"):
        for row in rows:
            print(f"{row.label:{_BITSTREAM_WIDTH}}: {_json(row.value)}")
        if more:
            print("Extra:")
            for key, text in more.items():
                print(f"\t{key} : {_json(text)}")
    return {**{row.key: row.value for row in rows}, **({"extra": more} if not given.has("q") else {})}


def _install(given: Given) -> Json:
    dry_run = given.has("dry-run")
    with open_bitstream(given.text("b")) as bitstream:
        path = install(given.host, bitstream, force=given.has("force"), dry_run=dry_run)
        given.say(f"{'Would install' if dry_run else 'Installed'} {_json(bitstream.path)} as {_json(path)}")
        return {"file": bitstream.path, "installationPath": path, "installed": not dry_run}


# Devices


def _device_info(given: Given) -> Json:
    text = given.text("d")
    found = kind_of(given.host, text)
    if found is None:
        raise FpgaError(f"-d: found {quote(text)}, expected the name of an FME or a port")
    if found[1] == "fme":
        fme = read_fme(given.host, text)
        return {**_show(given, "FME", _fme_rows(given, fme)), **_programmings(given, fme)}
    return _show(given, "PORT", _port_rows(given, read_port(given.host, text)))


def _programmings(given: Given, fme: Fme) -> dict[str, Json]:
    """In JSON only: scripts depend on the table."""
    if given.has("q") or not given.has("json"):
        return {}
    from accelplane.fpga import record  # noqa: PLC0415 - for this command only

    try:
        found = record.read(given.host, fme.name)
    except record.RecordError as error:
        given.host.note(str(error))
        found = None
    return {"programmings": None if found is None else record.as_json(found)}


def _show(given: Given, kind: str, rows: Sequence[Row]) -> dict[str, Json]:
    rows = [row for row in rows if not (row.detail and given.has("q"))]
    if not given.has("json"):
        print(f"//****** {kind} ******//")
        for row in rows:
            for value in row.value if isinstance(row.value, list) else [row.value]:
                print(f"{row.label:{_DEVICE_WIDTH}}: {_shown_value(value)}")
    return {"kind": kind.lower(), **{row.key: row.value for row in rows}}


def _json(value: Json) -> str:
    return escape_json(json.dumps(value))


def _shown_value(value: Json) -> str:
    if isinstance(value, dict):
        return " / ".join(str(part) for part in value.values())
    text = "" if value is None else str(value)
    return text if text.isprintable() else quote(text)


def _fme_rows(given: Given, fme: Fme) -> list[Row]:
    rows = [*_device_rows(fme.name, fme.node, fme.path, fme.pci)]
    rows.append(Row("Interface UUID", "interfaceId", ", ".join(dict.fromkeys(fme.interfaces))))
    if not given.has("q"):
        rows += [
            Row("Kernet API Version", "apiVersion", api_version(given.host, fme)),
            Row("Ports Num", "portsNum", fme.ports_num),
            Row("Socket Id", "socketId", fme.socket_id),
            Row("Bitstream Id", "bitstreamId", fme.bitstream_id),
            Row("Bitstream Metadata", "bitstreamMetadata", fme.bitstream_metadata),
        ]
    return rows


def _port_rows(given: Given, port: Port) -> list[Row]:
    rows = [*_device_rows(port.name, port.node, port.path, port.pci)]
    rows += [
        Row("FME Name", "fme", port.fme.name),
        Row("Port Id", "portId", port.number),
        Row("Interface UUID", "interfaceId", interface_of(port)),
        Row("Accelerator UUID", "acceleratorId", afu_id(given.host, port)),
    ]
    if not given.has("q"):
        version = api_version(given.host, port)
        count = region_count(given.host, port)
        regions = [
            {"index": region.number, "size": region.size, "offset": region.offset}
            for region in port_regions(given.host, port, count)
        ]
        rows += [
            Row("Kernet API Version", "apiVersion", version),
            Row("Port Regions", "portRegions", count),
            Row("Port Region (Index/Size/Offset)", "regions", regions),
        ]
    return rows


def _device_rows(name: str, node: str, path: str, pci: Pci) -> Iterator[Row]:
    yield Row("Name", "name", name)
    yield Row("Device Node", "node", node)
    yield Row("SysFS Path", "sysfsPath", path)
    yield Row("PCIe s:b:d:f", "pciAddress", pci.address)
    if pci.physical is not None:
        yield Row("Physical Function PCIe s:b:d:f", "physicalFunction", pci.physical.address, detail=True)
    yield Row("Device Id", "deviceId", f"{pci.vendor}:{pci.device}")
    yield Row("Device Class", "class", pci.cls, detail=True)
    yield Row("Local CPUs", "localCpus", pci.cpus, detail=True)
    yield Row("NUMA", "numaNode", pci.numa, detail=True)
    if pci.vfs:
        yield Row("SR-IOV Virtual Functions", "virtualFunctions", pci.vfs, detail=True)
    if pci.vfs_limit:
        yield Row("SR-IOV maximum Virtual Functions", "maximumVirtualFunctions", pci.vfs_limit, detail=True)


def _list(given: Given, kinds: Sequence[Literal["FME", "Port"]]) -> Json:
    """Lists the devices of these kinds."""
    fmes, ports = platform_devices(given.host)
    found = {f"{kind.lower()}s": fmes if kind == "FME" else ports for kind in kinds}
    for kind, names in zip(kinds, found.values(), strict=True):
        given.say(f"Detected FPGA {kind}s: {len(names)}")
        if not given.has("json"):
            print(*names, sep="\n", end="\n" if names else "")
    return found


# Commands that change hardware


def _program(given: Given) -> Json:
    host, path, dry_run = given.host, given.text("b"), given.has("dry-run")
    port = read_port(host, given.text("d"))
    with time_limit(DEFAULT_RETRY.timeout, "programming"), open_bitstream(path) as bitstream:
        if not dry_run:
            # Of the FME: the port is not opened.
            api_version(host, port.fme)
        before = _ids(host, port)
        given.say(f"Before: {_format_ids(before)}")
        given.say(f'Programming {_json(bitstream.path)} to port "{port.name}": ', end="")
        try:
            done = program(host, port, bitstream, dry_run=dry_run)
        except (FpgaError, HostError) as error:
            given.say("FAILED")
            if not isinstance(error, TimedOut):  # the alarm has fired: a blocked call would not end
                given.say(f"After : {_format_ids(_ids(host, port))}")
            raise
        given.say("OK" if done else "OK (dry run, nothing was programmed)")
        after = _ids(host, port)
        given.say(f"After : {_format_ids(after)}")
        return {"port": port.name, "file": bitstream.path, "programmed": done, "before": before, "after": after}


def _ids(host: Host, port: Port) -> dict[str, str]:
    """Returns empty ids if they cannot be read, so that the tool also reports on a failed card."""
    try:
        return {"interfaceId": interface_of(port), "acceleratorId": afu_id(host, port) or ""}
    except TimedOut:
        raise
    except (FpgaError, HostError):
        return {"interfaceId": "", "acceleratorId": ""}


def _format_ids(ids: Mapping[str, str]) -> str:
    return f'Interface ID: "{ids["interfaceId"]}" AFU ID: "{ids["acceleratorId"]}"'


def _move(given: Given, operation: Literal["release", "assign"]) -> Json:
    host, number, dry_run = given.host, given.number("p"), given.has("dry-run")
    fme = read_fme(host, given.text("d"))
    if fme.ports_num.isdecimal() and number >= int(fme.ports_num):
        raise FpgaError(f"-p {number}: {fme.name} has {fme.ports_num} ports, numbered from 0")
    if dry_run:
        given.say(f"Would {operation} port {number} of {fme.name}")
    else:
        with time_limit(DEFAULT_RETRY.timeout, f"to {operation} the port"):
            move(host, fme, operation, number)
    return {"fme": fme.name, "portId": number, "done": not dry_run}


def _sriov(given: Given) -> Json:
    from accelplane.fpga import sriov  # noqa: PLC0415 - for this command only

    host, dry_run = given.host, given.has("dry-run")
    fme = read_fme(host, given.text("d"))
    if "n" not in given.flags:
        raise FpgaError("-n: found nothing, expected the number of virtual functions")
    vfs = given.number("n")
    steps = sriov.plan(sriov.read_state(host, fme), vfs)
    if not steps:
        given.say(f"{fme.name}: {vfs} virtual functions already")
    # All lines before the first step: a closed pipe must not interrupt the steps.
    for step in steps:
        given.say(f"Would {step}" if dry_run else str(step).capitalize())
    if steps and not dry_run:
        sriov.apply(host, fme, steps)
    return {
        "fme": fme.name,
        "virtualFunctions": vfs,
        "steps": [str(step) for step in steps],
        "done": bool(steps) and not dry_run,
    }


COMMANDS: Mapping[str, Callable[[Given], Json]] = {
    "info": _info,
    "install": _install,
    "fpgainfo": _device_info,
    "fmeinfo": _device_info,
    "portinfo": _device_info,
    "list": partial(_list, kinds=("FME", "Port")),
    "list-fme": partial(_list, kinds=("FME",)),
    "list-port": partial(_list, kinds=("Port",)),
    "pr": _program,
    "release": partial(_move, operation="release"),
    "assign": partial(_move, operation="assign"),
    "sriov": _sriov,
}


if __name__ == "__main__":
    sys.exit(main())
