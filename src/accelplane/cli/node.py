"""`accelplane node`, and the flags, signals and exit codes that it shares with the drop-in commands."""

import asyncio
import contextlib
import gc
import os
import sys
from collections.abc import Callable, Mapping, Sequence
from functools import partial
from typing import TYPE_CHECKING, TypeVar

import msgspec

from accelplane import __version__, jsontext
from accelplane.cli import logflags, signals
from accelplane.cli.goflags import Flag, Value, flags_of, go_text, parse_or_exit
from accelplane.devices import Skipped
from accelplane.host import Host
from accelplane.node import config as configuration
from accelplane.node import status_socket
from accelplane.node.agent import Agent, Plugins, Service
from accelplane.node.option_messages import option_message
from accelplane.node.plugins import installed
from accelplane.node.scan_loop import error_text, explanation, try_scan
from accelplane.node.settings import ConfigurationError, Settings
from accelplane.node.status import SkippedPlugin
from accelplane.plugins import Plugin
from accelplane.plugins.base import Config, NodePods
from accelplane.processes import raise_file_limit

FLAGS = (
    *(flag for flag in flags_of(Settings) if flag.help),
    Flag("once", False, "print the devices found as JSON and exit"),
    Flag("dry-run", False, "the same as -once"),
    Flag("check", False, "print each plugin's result as JSON and exit: with 0 if each has healthy devices, else 1"),
    Flag("version", False, "print the version and exit"),
    *logflags.FLAGS,
)

NODE_FLAGS = (
    Flag("plugins", "", "comma-separated plugins to run; all installed ones if empty"),
    Flag("config", "", "YAML file with the plugins' options, read again when it changes"),
    Flag("labels", "off", "labels for the node's hardware: off, nfd (a file in -nfd-dir) or node (on the Node object)"),
)
_LABELS = ("off", "nfd", "node")

if TYPE_CHECKING:
    from accelplane.pages.observer import Observer

PluginT = TypeVar("PluginT", bound=Plugin[Config])


def main(arguments: Sequence[str] | None = None) -> int:
    """`accelplane node`: all installed plugins, or those given by -plugins."""
    flags = (*NODE_FLAGS, *FLAGS)
    given = parse_or_exit("accelplane node", flags, sys.argv[2:] if arguments is None else arguments)
    path = str(given.get("config", ""))
    named = [name.strip() for name in str(given.get("plugins", "")).split(",") if name.strip()]

    chosen = configuration.Chosen({})

    def load() -> tuple[Settings, Plugins]:
        nonlocal chosen
        config = configuration.read(path) if path else configuration.AgentConfig()
        plugin_names = named or config.enabled
        types = installed(plugin_names, "-plugins" if named else f"{path}: enabled")
        if config.plugins or config.dra is not None:
            configuration.check_names(config, (types if plugin_names is None else installed()).types, path)
        settings = settings_of(given, config.settings)
        chosen = configuration.choose(config, types, path, chosen.plugins)
        return settings, chosen.plugins

    labels = str(given.get("labels", "off"))
    return run(
        "accelplane-node",
        given,
        load,
        skipped=lambda: chosen.skipped,
        config_file=path or None,
        labels=labels,
        command="accelplane node",
    )


def dropin(
    program: str,
    plugin_type: type[PluginT],
    name: str,
    arguments: Sequence[str] | None = None,
    *,
    absence: Callable[[PluginT, Host], str] | None = None,
) -> int:
    """A drop-in command: the same agent with one plugin, whose options are flags.

    `absence` may return a reason why the command must not run on this host. Most commands wait for hardware instead.
    """
    options = flags_of(plugin_type.config_type)
    given = parse_or_exit(program, (*options, *FLAGS), arguments, lenient=True)

    def load() -> tuple[Settings, Plugins]:
        own = {option.name for option in options}
        try:
            config = plugin_type.config_type.of({key: value for key, value in given.items() if key in own})
            settings, plugin = settings_of(given, {}), plugin_type(config)
        except ValueError as error:
            message = option_message("-", error, plugin_type.config_type).removeprefix("-: ")
            raise ConfigurationError(f"Argument check failed: {message}") from error
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
    skipped: Callable[[], Sequence[SkippedPlugin]] = tuple,
    config_file: str | None = None,
    labels: str = "off",
    command: str = "",
) -> int:
    """Runs an agent until SIGTERM, SIGINT, SIGHUP or SIGQUIT. Returns the exit code.

    `program` is the name of the agent on its pages and of its log file. `command` is the name in messages, if it
    differs. `labels` is the flag of that name.
    """
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
            return asyncio.run(_print_devices(settings, plugins, skipped()))
        if given.get("check"):
            signals.end_as_usual()
            return asyncio.run(_print_check(settings, plugins, skipped()))
        services = _label_services(labels, settings, given)
        agent = Agent(
            settings,
            plugins,
            config_file=config_file,
            reload=load,
            services=services,
            pods=_pods,
            skipped=skipped,
            program=program,
        )
    except (ConfigurationError, ValueError, OSError) as error:
        print(f"{command or program}: {logflags.message_of(error)}", file=sys.stderr)
        return 1
    try:
        asyncio.run(_serve(agent))
    except ConfigurationError as error:
        print(f"{command or program}: {error}", file=sys.stderr)
        return 1
    return 0


async def _serve(agent: Agent) -> None:
    loop = asyncio.get_running_loop()
    for number in signals.NODE_ENDING:
        loop.add_signal_handler(number, agent.stop)
    # Imported objects are permanent: the garbage collector can skip them.
    gc.collect()
    gc.freeze()
    # Limits how long an answer to the kubelet waits while a scan runs in a thread.
    sys.setswitchinterval(0.001)
    async with contextlib.AsyncExitStack() as stack:
        readers: Observer | None = None

        def open_readers() -> "Observer":
            """The readers of pages and of the status socket, which are created when something is requested."""
            nonlocal readers
            if readers is None:
                from accelplane.pages.observer import Observer  # noqa: PLC0415 - memory of agents that nobody asks

                raise_file_limit()  # directories of devices stay open
                readers = Observer(agent)
                stack.push_async_callback(readers.close)
            return readers

        if agent.settings.http_address:
            from accelplane.pages import observer, server  # noqa: PLC0415 - memory of agents without pages

            access = server.OPEN
            if agent.settings.http_tls_dir or agent.settings.http_authorized:
                from accelplane.pages.access import page_access  # noqa: PLC0415 - memory of plain pages

                access = page_access(agent.settings)
            address = agent.settings.http_address
            options = observer.page_options(agent.settings)
            await stack.enter_async_context(server.serving(address, agent.status, open_readers(), access, options))

        async def status() -> bytes:
            from accelplane.pages.local_status import local_status  # noqa: PLC0415 - as above

            return await local_status(agent.status, open_readers())

        if agent.settings.status_socket != status_socket.OFF:
            agent.services["status socket"] = partial(status_socket.serve, agent.settings, agent.program, status)
        await agent.run()


def _pods(settings: Settings) -> NodePods:
    """Raises `ConfigurationError`."""
    from accelplane.node.pods import in_cluster  # noqa: PLC0415 - TLS and HTTP, which most agents do without

    return in_cluster(settings, os.environ)


def _label_services(labels: str, settings: Settings, given: Mapping[str, Value]) -> Mapping[str, Service]:
    """The service that labels the node, if any. Raises `ConfigurationError`."""
    if labels not in _LABELS:
        raise ConfigurationError(f"-labels: found {labels!a}, expected one of {', '.join(_LABELS)}")
    if labels == "off":
        return {}
    if labels == "nfd" and not settings.nfd_dir:
        raise ConfigurationError(
            "-labels=nfd: found without -nfd-dir, expected both; set it to features.d of node-feature-discovery"
        )
    if labels == "nfd":
        from accelplane.cli.labels import into_file  # noqa: PLC0415 - memory of agents without labels

        return {"labels": lambda watcher: into_file(settings.root, settings.nfd_dir, watcher)}
    from accelplane.node.subprocess_supervisor import supervise  # noqa: PLC0415 - as above

    isolation = "-I" if sys.flags.isolated else "-P"
    # -log_dir gives each process its own file. Two processes that rotate one -log_file would lose lines.
    names = [flag.name for flag in logflags.FLAGS if flag.name in given and flag.name != "log_file"]
    log_flags = [f"-{name}={go_text(given[name])}" for name in names]
    command = (
        sys.executable, isolation, "-m", "accelplane.cli.labels", "-output=node", "-daemon", "-epc",
        "-until-stdin-ends", f"-root={settings.root}", *log_flags,
    )  # fmt: skip
    return {"labels": lambda _watcher: supervise("labels", command)}


def settings_of(given: Mapping[str, Value], configured: Mapping[str, float | str]) -> Settings:
    """From flags, and from the configuration file where there is no such flag. Raises `ConfigurationError`."""
    names = {flag.name for flag in flags_of(Settings) if flag.help}
    return Settings.of({**configured, **{name: value for name, value in given.items() if name in names}}, "-")


async def _print_devices(settings: Settings, plugins: Plugins, skipped: Sequence[SkippedPlugin]) -> int:
    report: dict[str, object] = {each.name: {"error": each.reason} for each in skipped if each.name not in plugins}
    failed = bool(report)
    for name, plugin in plugins.items():
        inventory, problem = await try_scan(plugin, settings.root)
        failed = failed or bool(problem)
        resources = {f"{plugin.namespace}/{resource}": devices for resource, devices in inventory.resources.items()}
        report[name] = {"error": problem} if problem else {"resources": resources, "skipped": inventory.skipped}
    _print_json(report)
    return 1 if failed else 0


class _Checked(msgspec.Struct, frozen=True, kw_only=True, omit_defaults=True):
    """The result of `-check` for one plugin; `devices` counts the healthy ones by resource."""

    ok: bool
    devices: Mapping[str, int]
    skipped: Sequence[Skipped] = ()
    explanation: msgspec.Raw | None = None
    errors: Sequence[str] = ()


async def _print_check(settings: Settings, plugins: Plugins, skipped: Sequence[SkippedPlugin]) -> int:
    report = {name: await _check_plugin(settings, plugin) for name, plugin in plugins.items()}
    report |= {
        each.name: _Checked(ok=False, devices={}, errors=[each.reason]) for each in skipped if each.name not in plugins
    }
    _print_json(report)
    return 0 if all(checked.ok for checked in report.values()) else 1


async def _check_plugin(settings: Settings, plugin: Plugin[Config]) -> _Checked:
    inventory, problem = await try_scan(plugin, settings.root)
    errors = [problem] if problem else []
    explained = None
    try:
        if plugin.overrides("explain"):
            explained = msgspec.Raw(explanation(plugin, Host(settings.root)))
    except Exception as error:  # noqa: BLE001 - a plugin's own hook may raise anything
        errors.append(error_text(error))
    devices = {
        f"{plugin.namespace}/{resource}": sum(device.healthy for device in devices.values())
        for resource, devices in inventory.resources.items()
    }
    return _Checked(
        ok=not errors and any(devices.values()),
        devices=devices,
        skipped=inventory.skipped,
        explanation=explained,
        errors=tuple(errors),
    )


def _print_json(report: Mapping[str, object]) -> None:
    print(jsontext.indented(report))
