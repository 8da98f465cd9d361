"""`accelplane node`, and what it shares with the drop-in commands: flags, signals, exit codes."""

import asyncio
import gc
import os
import sys
from collections.abc import Callable, Mapping, Sequence
from typing import TypeVar

import msgspec

from accelplane import __version__
from accelplane.cli import logflags, signals
from accelplane.cli.goflags import Flag, Value, flags_of, parse_or_exit
from accelplane.devices import Inventory, Skipped
from accelplane.host import Host, HostError
from accelplane.node import config as configuration
from accelplane.node.agent import Agent, Companion, Plugins, with_overrides
from accelplane.node.plugins import installed
from accelplane.node.runner import explained, scanned
from accelplane.node.settings import ConfigurationError, Settings
from accelplane.plugins import Plugin, ScanError
from accelplane.plugins.base import Config

FLAGS = (
    Flag("root", "/", "read sysfs and devfs under this directory; what the kubelet is told stays without it"),
    Flag("kubelet-dir", "/var/lib/kubelet", "the kubelet's directory; sockets are in device-plugins/ below it"),
    Flag("cdi-dir", "/var/run/cdi", "directory for CDI files, made when missing"),
    Flag("keep-cdi", True, "leave CDI files where they are at the end, for containers that restart meanwhile"),
    Flag("nfd-dir", "", "write node labels as files for node-feature-discovery into this directory"),
    Flag("http-address", "", "serve /metrics, /healthz, /readyz and /status at this host:port"),
    Flag("health-interval", 30.0, "seconds between looks at the devices' health"),
    Flag("scan-grace", 30.0, "seconds after which devices that cannot be seen any more become unhealthy"),
    Flag("once", False, "print the devices found as JSON and exit"),
    Flag("dry-run", False, "the same as -once"),
    Flag("check", False, "print as JSON what each plugin found and needs, and exit: 0 if each has devices, else 1"),
    Flag("version", False, "print the version and exit"),
    *logflags.FLAGS,
)

_NODE_FLAGS = (
    Flag("plugins", "", "comma-separated plugins to run; all that are installed when empty"),
    Flag("config", "", "YAML file with the plugins' options, read again when it changes"),
    Flag("labels", "off", "node labels of what the node has: off, nfd (a file in -nfd-dir) or node (on the Node)"),
)
_LABELS = ("off", "nfd", "node")

PluginT = TypeVar("PluginT", bound=Plugin[Config])


def main(arguments: Sequence[str] | None = None) -> int:
    """`accelplane node`: all plugins whose hardware is present, or those asked for."""
    flags = (*_NODE_FLAGS, *FLAGS)
    given = parse_or_exit("accelplane node", flags, sys.argv[2:] if arguments is None else arguments)
    path = str(given.get("config", ""))
    named = [name.strip() for name in str(given.get("plugins", "")).split(",") if name.strip()]

    def load() -> tuple[Settings, Plugins]:
        config = configuration.read(path) if path else configuration.AgentConfig()
        return _configured(given, config, path, named)

    return run("accelplane-node", given, load, config_file=path or None, labels=str(given.get("labels", "off")))


def dropin(
    program: str,
    plugin_type: type[PluginT],
    name: str,
    arguments: Sequence[str] | None = None,
    *,
    absence: Callable[[PluginT, Host], str] | None = None,
) -> int:
    """A drop-in command: the same agent with one plugin, whose options are flags.

    `absence` may tell why the command is not to serve this host, for which most wait to get their hardware.
    """
    options = flags_of(plugin_type.config_type)
    words = sys.argv[1:] if arguments is None else arguments
    given = parse_or_exit(program, (*options, *FLAGS), words, lenient=True)

    def load() -> tuple[Settings, Plugins]:
        own = {option.name for option in options}
        try:
            config = plugin_type.config_type.of({key: value for key, value in given.items() if key in own})
            settings, plugin = _settings(given), plugin_type(config)
        except (msgspec.ValidationError, ValueError) as error:
            raise ConfigurationError(f"Argument check failed: {error}") from error
        serves = not any(given.get(flag) for flag in ("once", "dry-run", "check"))
        if absence is not None and serves and os.path.isdir(settings.root):
            problem = absence(plugin, Host(settings.root))
            if problem:
                raise ConfigurationError(problem)
        return settings, {name: plugin}

    return run(program, given, load)


def run(
    program: str,
    given: Mapping[str, Value],
    load: Callable[[], tuple[Settings, Plugins]],
    *,
    config_file: str | None = None,
    labels: str = "off",
) -> int:
    """Runs an agent until SIGTERM or SIGINT; the process's exit code. `labels` is the flag of that name."""
    if given.get("version"):
        print(f"accelplane {__version__}")
        return 0
    try:
        logflags.start(given, program)
        settings, plugins = load()
        if not os.path.isdir(settings.root):
            raise ConfigurationError(f"-root: {settings.root}: not a directory, expected one with sys/ and dev/ in it")
        if given.get("once") or given.get("dry-run"):
            signals.end_as_usual()
            return asyncio.run(_print_devices(settings, plugins))
        if given.get("check"):
            signals.end_as_usual()
            return asyncio.run(_print_check(settings, plugins))
        companions = _labelling(labels, settings, given)
        agent = Agent(settings, plugins, config_file=config_file, reload=load, companions=companions)
    except (ConfigurationError, ValueError) as error:
        print(f"{program}: {error}", file=sys.stderr)
        return 1
    except OSError as error:
        where = f"{error.filename}: " if error.filename else ""
        print(f"{program}: {where}{error.strerror or error}", file=sys.stderr)
        return 1
    try:
        asyncio.run(_serve(agent))
    except ConfigurationError as error:
        print(f"{program}: {error}", file=sys.stderr)
        return 1
    return 0


async def _serve(agent: Agent) -> None:
    loop = asyncio.get_running_loop()
    for number in signals.ENDING:
        loop.add_signal_handler(number, agent.stop)
    # What was imported lives for ever; the collector need not look at it again and again.
    gc.collect()
    gc.freeze()
    # An answer to the kubelet waits for at most this long while a scan runs beside it.
    sys.setswitchinterval(0.001)
    await agent.run()


def _labelling(labels: str, settings: Settings, given: Mapping[str, Value]) -> Mapping[str, Companion]:
    """What runs beside the plugins to label the node. Raises `ConfigurationError`."""
    if labels not in _LABELS:
        raise ConfigurationError(f"-labels: {labels!a}: expected one of {', '.join(_LABELS)}")
    if labels == "off":
        return {}
    if labels == "nfd" and not settings.nfd_dir:
        raise ConfigurationError("-labels=nfd: -nfd-dir is not given, expected node-feature-discovery's features.d")
    if labels == "nfd":
        from accelplane.cli.labels import into_file  # noqa: PLC0415 - memory of agents that label nothing

        return {"labels": lambda watcher: into_file(settings.root, settings.nfd_dir, watcher)}
    from accelplane.node.companion import accompanied  # noqa: PLC0415 - as above

    isolation = "-I" if sys.flags.isolated else "-P"
    # A file of its own by -log_dir, but two who rotate one file would lose what the other wrote.
    names = [flag.name for flag in logflags.FLAGS if flag.name in given and flag.name != "log_file"]
    log_flags = [f"-{name}={_go_text(given[name])}" for name in names]
    command = (
        sys.executable, isolation, "-m", "accelplane.cli.labels", "-output=node", "-daemon", "-epc",
        "-until-stdin-ends", f"-root={settings.root}", *log_flags,
    )  # fmt: skip
    return {"labels": lambda _watcher: accompanied("labels", command)}


def _go_text(value: Value) -> str:
    return str(value).lower() if isinstance(value, bool) else str(value)


def _configured(
    given: Mapping[str, Value], config: configuration.AgentConfig, path: str, named: Sequence[str]
) -> tuple[Settings, Plugins]:
    wanted = named or config.enabled
    types = installed(wanted)
    if config.plugins:
        configuration.check_names(config, types if wanted is None else installed(), path)
    settings = with_overrides(
        _settings(given),
        None if "health-interval" in given else config.health_interval,
        None if "scan-grace" in given else config.scan_grace,
    )
    return settings, configuration.plugins(config, types, path)


def _settings(given: Mapping[str, Value]) -> Settings:
    values = {flag.name: flag.default for flag in FLAGS} | dict(given)
    for name in ("root", "kubelet-dir", "cdi-dir"):
        if not values[name]:
            raise ConfigurationError(f"-{name}: empty, expected a directory")
    interval, grace = float(values["health-interval"]), float(values["scan-grace"])
    if not 1 <= interval <= 3600:
        raise ConfigurationError(f"-health-interval: {interval:g}: expected 1 to 3600 seconds")
    if not 0 <= grace <= 3600:
        raise ConfigurationError(f"-scan-grace: {grace:g}: expected 0 to 3600 seconds")
    return Settings(
        root=os.path.abspath(str(values["root"])),
        kubelet_dir=os.path.abspath(str(values["kubelet-dir"])),
        cdi_dir=os.path.abspath(str(values["cdi-dir"])),
        keep_cdi=bool(values["keep-cdi"]),
        nfd_dir=os.path.abspath(str(values["nfd-dir"])) if values["nfd-dir"] else "",
        http_address=str(values["http-address"]),
        health_interval=interval,
        scan_grace=grace,
    )


async def _print_devices(settings: Settings, plugins: Plugins) -> int:
    failed = False
    report: dict[str, object] = {}
    for name, plugin in plugins.items():
        try:
            inventory = await look_once(settings, plugin)
        except Exception as error:  # noqa: BLE001 - a plugin's own scan may raise anything; the others are shown
            failed = True
            report[name] = {"error": _shown(error)}
            continue
        report[name] = {
            "resources": {
                f"{plugin.namespace}/{resource}": devices for resource, devices in inventory.resources.items()
            },
            "skipped": inventory.skipped,
        }
    _print_json(report)
    return 1 if failed else 0


class _Checked(msgspec.Struct, frozen=True, kw_only=True, omit_defaults=True):
    """What `-check` says of one plugin; `devices` counts the healthy ones by resource."""

    ok: bool
    devices: Mapping[str, int]
    skipped: Sequence[Skipped] = ()
    explanation: msgspec.Raw | None = None
    errors: Sequence[str] = ()


async def _print_check(settings: Settings, plugins: Plugins) -> int:
    report = {name: await _checked(settings, plugin) for name, plugin in plugins.items()}
    _print_json(report)
    return 0 if all(checked.ok for checked in report.values()) else 1


async def _checked(settings: Settings, plugin: Plugin[Config]) -> _Checked:
    errors: list[str] = []
    inventory = Inventory()
    explanation = None
    try:
        inventory = await look_once(settings, plugin)
    except Exception as error:  # noqa: BLE001 - a plugin's own scan may raise anything
        errors.append(_shown(error))
    try:
        if plugin.overrides("explain"):
            explanation = msgspec.Raw(explained(plugin, Host(settings.root)))
    except Exception as error:  # noqa: BLE001 - a plugin's own hook may raise anything
        errors.append(_shown(error))
    devices = {
        f"{plugin.namespace}/{resource}": sum(device.healthy for device in devices.values())
        for resource, devices in inventory.resources.items()
    }
    return _Checked(
        ok=not errors and any(devices.values()),
        devices=devices,
        skipped=inventory.skipped,
        explanation=explanation,
        errors=tuple(errors),
    )


def _shown(error: Exception) -> str:
    expected = isinstance(error, (HostError, ScanError, OSError))
    return str(error) if expected else f"{type(error).__name__}: {error}"


def _print_json(report: Mapping[str, object]) -> None:
    print(msgspec.json.format(msgspec.json.encode(report), indent=2).decode())


async def look_once(settings: Settings, plugin: Plugin[Config]) -> Inventory:
    """One scan of the host. Raises what the plugin's scan raises."""
    host = Host(settings.root)
    if plugin.overrides("refresh"):
        await plugin.refresh(host)
    return scanned(plugin, host)
