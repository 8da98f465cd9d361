"""Files by patterns: device nodes, directories with device nodes, and files that are mounted.

A device has one match of each path of its group. The first device has the first matches in byte-wise order, and so on.
"""

import stat
from collections.abc import Iterator, Mapping, Sequence

from accelplane.devices import Attribute, DeviceNode, Mount, Skipped
from accelplane.host import Host, HostError
from accelplane.host.devicenodes import nodes_behind
from accelplane.plugins.generic.config import Group, Path
from accelplane.plugins.generic.match import Found, Match, joined
from accelplane.plugins.generic.usb import usb_device_of

DEFAULT_PERMISSIONS = "mrw"


def find(host: Host, name: str, group: Group) -> Found:
    """The matches of a group of paths."""
    skipped: list[Skipped] = []
    columns = [_files(host, path, skipped) for path in group.paths]
    matches = [_match(host, row) for row in _rows(group.paths, columns)]
    if not matches:
        missing = [path.path for path, files in zip(group.paths, columns, strict=True) if not (files or path.optional)]
        skipped.append(Skipped(f"{name}: {group.paths[0].path}", f"no file matches {', '.join(missing)}"))
    return Found(matches, skipped)


def directory_of(path: str) -> str:
    """The directory to watch for a path without a pattern."""
    return path.rstrip("/").rpartition("/")[0] or "/"


def pattern_of(path: str) -> str:
    """The pattern of Go's path/filepath in the syntax of Python's fnmatch: `[^a]` is `[!a]`, and `\\*` is `[*]`."""
    text, out, position = path.strip(), "", 0
    while position < len(text):
        character = text[position]
        if character == "\\" and position + 1 < len(text):
            position += 1
            out += f"[{text[position]}]" if text[position] in "*?[" else text[position]
        elif character == "[" and text[position + 1 : position + 2] == "^":
            position += 1
            out += "[!"
        else:
            out += character
        position += 1
    return out


def _rows(paths: Sequence[Path], columns: Sequence[Sequence[str]]) -> Iterator[list[tuple[Path, str]]]:
    """The files of each device, with their paths.

    The number of devices is that of the path with most matches, as far as the limits of the other paths allow.
    """
    required = [(path, files) for path, files in zip(paths, columns, strict=True) if not path.optional]
    most = max(len(files) for _path, files in required)
    count = min(most, *(len(files) * (path.limit or 1) for path, files in required))
    for number in range(count):
        row: list[tuple[Path, str]] = []
        for path, files in zip(paths, columns, strict=True):
            if number < len(files) * (path.limit or 1):
                row.append((path, files[number % len(files)]))
        yield row


def _files(host: Host, path: Path, skipped: list[Skipped]) -> list[str]:
    found: list[str] = []
    for file in host.glob(pattern_of(path.path)):
        if problem := _problem(host, path, file):
            skipped.append(Skipped(ascii(file)[1:-1], problem, warning=True))
        else:
            found.append(file)
    return found


def _problem(host: Host, path: Path, file: str) -> str:
    """Why a file is not published, empty if it is."""
    if not file.isprintable():
        return "found a name with characters that are not printable, expected printable UTF-8 text"
    status = host.status(file)
    if status is None:
        return "does not exist any more"
    mode = status.st_mode
    if path.type == "Mount" or stat.S_ISCHR(mode) or stat.S_ISBLK(mode) or stat.S_ISDIR(mode):
        return ""
    if host.is_plain_stand_in(status):
        return ""
    return "found no device node and no directory, expected one of them; set type to Mount to mount a file"


def _match(host: Host, row: Sequence[tuple[Path, str]]) -> Match:
    nodes: list[DeviceNode] = []
    mounts: list[Mount] = []
    links: dict[DeviceNode, Sequence[DeviceNode]] = {}
    for path, file in row:
        place = path.mount_path.strip() or file
        if path.type == "Mount":
            mounts.append(Mount(file, place, path.read_only))
            continue
        node = DeviceNode(file, place, path.permissions or DEFAULT_PERMISSIONS)
        nodes.append(node)
        behind = _behind(host, node)
        if behind != [node]:
            links[node] = behind
    files = [file for _path, file in row]
    first, shown = nodes[0] if nodes else None, row[0][1]
    device = _device(host, first.host_path) if first else ""
    usb = usb_device_of(host, device) if device else None
    attributes: Mapping[str, Attribute] = usb.attributes if usb else {}
    return Match(
        unit=joined(files),
        hashed="".join(files),
        nodes=nodes,
        mounts=mounts,
        links=links,
        path=device,
        # Without a part, the name of a unit depends on what else its PCI function has.
        part=usb.part if usb and len(nodes) == 1 else joined(files),
        attributes=attributes,
        values={
            "path": shown,
            "containerPath": first.container_path if first else mounts[0].container_path,
            "name": shown.rpartition("/")[2],
            "serial": usb.serial if usb else "",
            "address": _address(host, device),
        },
    )


def _device(host: Host, node: str) -> str:
    """The sysfs directory of a node, empty if it is unknown."""
    try:
        return host.device_of_node(node)
    except HostError:
        return ""


def _address(host: Host, device: str) -> str:
    try:
        return host.function_of(device).rpartition("/")[2] if device else ""
    except HostError:
        return ""


def _behind(host: Host, node: DeviceNode) -> list[DeviceNode]:
    """The device nodes of a link or directory: CDI has neither."""
    try:
        found = nodes_behind(host, node.host_path)
    except HostError:
        return [node]
    return [DeviceNode(real, node.container_path + below, node.permissions) for below, real in found.items()]
