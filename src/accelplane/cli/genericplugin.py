"""`generic-device-plugin`, with the flags, variables and file of squat's program of that name.

As there, a flag has precedence over its variable, and that over the file. Facts: config.go and main.go of
github.com/squat/generic-device-plugin, version 0.2.
"""

import logging
import os
import sys
import zlib
from collections.abc import Mapping, Sequence
from typing import Any, TypeAlias

import msgspec

from accelplane.cli.goflags import Flag, Value, flags_of, parse_or_exit
from accelplane.cli.node import FLAGS, run, settings_of
from accelplane.host import Host, HostError
from accelplane.node.agent import Plugins
from accelplane.node.option_messages import option_message
from accelplane.node.settings import ConfigurationError, Settings
from accelplane.plugins.generic import GenericConfig, GenericPlugin
from accelplane.plugins.generic.config import (
    DEFAULT_DOMAIN,
    MAX_DEVICE_TEXT,
    DeviceSpec,
    Group,
    HealthCommand,
    Path,
    Pci,
    Rdma,
    Usb,
)

log = logging.getLogger(__name__)

PROGRAM = "generic-device-plugin"
SOCKETS = "device-plugins"

_SEPARATOR = "\x00"  # which no argument has
_LEVELS: Mapping[str, tuple[int, int]] = {
    # The verbosity, and the lowest level that is logged.
    "all": (10, 0), "debug": (4, 0), "info": (0, 0), "warn": (0, logging.WARNING), "error": (0, logging.ERROR),
    "none": (0, logging.CRITICAL + 1),
}  # fmt: skip

OWN_FLAGS = (
    Flag("config", "", "YAML file with these options by name, and `devices` as a list; read again when it changes"),
    Flag("device", "", "a resource with its devices, in YAML or JSON; repeat the flag for several", repeated=True,
         separator=_SEPARATOR),
    Flag("domain", DEFAULT_DOMAIN, "part of the resource names before the slash", environment="DOMAIN"),
    Flag("listen", ":8080", "address of the pages for health and metrics; none if empty", environment="LISTEN"),
    Flag("log-level", "info", f"one of {', '.join(_LEVELS)}", environment="LOG_LEVEL"),
    Flag("plugin-directory", f"/var/lib/kubelet/{SOCKETS}/", f"directory of the sockets, named {SOCKETS}",
         environment="PLUGIN_DIRECTORY"),
)  # fmt: skip
PLUGIN_FLAGS = (*OWN_FLAGS, *(flag for flag in flags_of(GenericConfig) if flag.name != "domain"))
ALL_FLAGS = (*PLUGIN_FLAGS, *FLAGS)

_FILES = ("/etc/generic-device-plugin/config.yaml", "config.yaml")
_SIZE_LIMIT = 1024 * 1024
_TEXTS = ("domain", "listen", "log-level", "plugin-directory")

_Structs: TypeAlias = Mapping[str, type[msgspec.Struct]]
_NESTED: _Structs = {
    "groups": Group, "paths": Path, "usb": Usb, "pci": Pci, "rdma": Rdma, "health": HealthCommand,
}  # fmt: skip
_ALIASES = {"usbs": "usb"}
_HEX = ("vendor", "product", "device")


def main(arguments: Sequence[str] | None = None) -> int:
    """Runs the plugin until a signal ends it. Returns the exit code."""
    given = parse_or_exit(PROGRAM, ALL_FLAGS, arguments)
    path = str(given.get("config", "")) or next(filter(os.path.isfile, _FILES), "")

    def load() -> tuple[Settings, Plugins]:
        content = _read(path)
        return settings_of(_node_flags(given, content), {}), {"generic": _plugin(given, content)}

    try:
        content = _read(path)
        level = str(_value("log-level", given, content))
        if level not in _LEVELS:
            raise ConfigurationError(f"-log-level: found {level!a}, expected one of {', '.join(_LEVELS)}")
    except ConfigurationError as error:
        print(f"{PROGRAM}: {error}", file=sys.stderr)
        return 1
    verbosity, lowest = _LEVELS[level]
    logging.disable(max(lowest - 1, 0))
    # A node may run several, for different resources: the status of each has a socket of its own.
    configured = repr((given.get("domain"), given.get("device"), sorted(content.items())))
    program = f"{PROGRAM}-{zlib.crc32(configured.encode()):08x}"
    node_flags = {"v": verbosity, "log-format": "json", **given}
    return run(program, node_flags, load, config_file=path or None, command=PROGRAM)


def _read(path: str) -> Mapping[str, Any]:
    """The options of a file by their names in lower case, none without a file. Raises `ConfigurationError`."""
    if not path:
        return {}
    from accelplane.node import foreign_yaml  # noqa: PLC0415 - memory of plugins that have no such file

    try:
        content: object = foreign_yaml.load(Host().read_bytes(os.path.abspath(path), _SIZE_LIMIT))
        options = msgspec.convert({} if content is None else content, dict[str, Any])
    except HostError as error:
        raise ConfigurationError(f"{error}, expected the YAML file of --config") from error
    except foreign_yaml.YamlError as error:
        raise ConfigurationError(f"{path}: not YAML: {error}") from error
    except msgspec.ValidationError as error:
        raise ConfigurationError(option_message(f"{path}: ", error)) from error
    options = {name.lower(): value for name, value in options.items()}
    for name in _TEXTS:
        if not isinstance(options.get(name, ""), str):
            raise ConfigurationError(f"{path}: {name}: found {options[name]!a}, expected a string")
    return options


def _value(name: str, given: Mapping[str, Value], content: Mapping[str, Any]) -> Value:
    """The value of an own flag: as given, of its variable, of the file, or the default."""
    flag = next(flag for flag in OWN_FLAGS if flag.name == name)
    return given.get(name, os.environ.get(flag.environment) or content.get(name, flag.default))


def _node_flags(given: Mapping[str, Value], content: Mapping[str, Any]) -> dict[str, Value]:
    """The given flags of the agent, and those that the own flags stand for. Raises `ConfigurationError`."""
    directory = os.path.normpath(str(_value("plugin-directory", given, content)))
    if os.path.basename(directory) != SOCKETS or not directory.startswith("/"):
        raise ConfigurationError(
            f"-plugin-directory: found {directory!a}, expected an absolute path that ends with /{SOCKETS}, as the "
            "kubelet's directory of sockets is called"
        )
    own = {"kubelet-dir": os.path.dirname(directory), "http-address": _value("listen", given, content)}
    return {**own, **given}


def _plugin(given: Mapping[str, Value], content: Mapping[str, Any]) -> GenericPlugin:
    """Raises `ConfigurationError` with the flag or the option."""
    texts = str(given["device"]).split(_SEPARATOR) if "device" in given else ()
    listed: object = content.get("devices", content.get("device"))
    specs = [_spec(f"-device[{number}]", text) for number, text in enumerate(texts)]
    if not texts and listed is not None:
        if not isinstance(listed, list):
            raise ConfigurationError(f"devices: found {ascii(listed)[:80]}, expected a list")
        entries = msgspec.convert(listed, list[Any])
        specs = [compatible(entry, DeviceSpec, f"devices[{number}]") for number, entry in enumerate(entries)]
    if not specs:
        raise ConfigurationError("at least one device must be specified, by -device or in the file of -config")
    extra = {flag.name: given[flag.name] for flag in flags_of(GenericConfig) if flag.name in given}
    options = {**extra, "domain": _value("domain", given, content), "devices": specs}
    try:
        return GenericPlugin(GenericConfig.of(options))
    except ValueError as error:
        message = option_message("", error, GenericConfig)
        named = f"-device{message.removeprefix('devices')}" if texts and message.startswith("devices[") else message
        raise ConfigurationError(named) from error


def _spec(where: str, text: str) -> object:
    from accelplane.node import foreign_yaml  # noqa: PLC0415 - parsed once, at the start

    if len(text) > MAX_DEVICE_TEXT:
        raise ConfigurationError(f"{where}: found {len(text)} characters, expected at most {MAX_DEVICE_TEXT}")
    try:
        return compatible(foreign_yaml.load(os.fsencode(text)), DeviceSpec, where)
    except foreign_yaml.YamlError as error:
        raise ConfigurationError(f"{where}: not YAML: {error}") from error


def compatible(value: object, kind: type[msgspec.Struct], where: str) -> object:
    """A value that Go's decoder would accept, as the types of this project have it.

    Names of fields may have any case, fields without a value are absent, and unknown ones are logged and left out.
    A `count` of a resource, which the original's help shows, is that of its groups.
    """
    if not isinstance(value, dict):
        return value
    known = {field.encode_name.lower(): field.encode_name for field in msgspec.structs.fields(kind)}
    found: dict[str, object] = {}
    entries = msgspec.convert(value, dict[Any, Any])
    count: object = None
    for key, entry in entries.items():
        lower = str(key).lower()
        name = known.get(_ALIASES.get(lower, lower))
        if entry is None:
            continue
        if name is None:
            if kind is DeviceSpec and lower == "count":
                count = entry
            else:
                log.warning(
                    "%s: ignored the unknown field %a, expected one of %s", where, key, ", ".join(known.values())
                )
            continue
        found[name] = _field(name, entry, f"{where}.{name}")
    groups = found.get("groups")
    if count is not None and isinstance(groups, list):
        members = msgspec.convert(groups, list[Any])
        found["groups"] = [{"count": count, **group} if isinstance(group, dict) else group for group in members]
    return found


def _field(name: str, entry: object, where: str) -> object:
    nested = _NESTED.get(name)
    if nested is not None and isinstance(entry, list):
        entries = msgspec.convert(entry, list[Any])
        return [compatible(each, nested, f"{where}[{number}]") for number, each in enumerate(entries)]
    if nested is not None:
        return compatible(entry, nested, where)
    if name in _HEX and type(entry) is int and 1000 <= entry <= 9999:
        return str(entry)  # `vendor: 1209` without quotes: the digits are hexadecimal
    return entry.strip() if name == "name" and isinstance(entry, str) else entry
