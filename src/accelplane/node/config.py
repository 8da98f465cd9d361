"""The agent's YAML file: the plugins to run and their options.

enabled: [gpu, npu]        # all installed plugins if omitted
plugins:
  gpu:
    shared-dev-num: 4      # the keys are the drop-in command's flags
health-interval: 30        # as the flags of these names, which take precedence
scan-grace: 30
dra:                       # as the flags -dra-*, which take precedence
  api: {gpu: dra}
  devices: {"0000:03:00.0": plugin}
"""

import logging
from collections.abc import Collection, Mapping, Sequence
from typing import Any, NamedTuple

import msgspec

from accelplane.host import Host, HostError
from accelplane.node.device_api import Api
from accelplane.node.hook_results import check_plugin
from accelplane.node.loop_watchdog import watching
from accelplane.node.option_messages import option_message
from accelplane.node.plugins import Installed, PluginType
from accelplane.node.settings import ConfigurationError, Settings
from accelplane.node.status import SkippedPlugin
from accelplane.plugins import Config, Plugin

log = logging.getLogger(__name__)

_SIZE_LIMIT = 1024 * 1024


class DraConfig(msgspec.Struct, frozen=True, kw_only=True, rename="kebab", forbid_unknown_fields=True):
    """`api` is one API for all plugins, or by plugin; `devices` is by PCI address."""

    api: Api | dict[str, Api] | None = None
    devices: dict[str, Api] = {}
    evict: str | None = None
    manage_binding: bool | None = None
    device_status: bool | None = None
    take_over: bool | None = None

    @property
    def settings(self) -> dict[str, str | bool]:
        entries = [f"{name}={api}" for name, api in self.devices.items()]
        if isinstance(self.api, str):
            entries.insert(0, self.api)
        elif self.api is not None:
            entries[:0] = [f"{name}={api}" for name, api in self.api.items()]
        given = {
            "dra-api": ",".join(entries) or None,
            "dra-evict": self.evict,
            "dra-manage-binding": self.manage_binding,
            "dra-device-status": self.device_status,
            "dra-take-over": self.take_over,
        }
        return {name: value for name, value in given.items() if value is not None}


class AgentConfig(msgspec.Struct, frozen=True, kw_only=True, rename="kebab", forbid_unknown_fields=True):
    """The file's content; the plugins' options are not decoded yet."""

    enabled: list[str] | None = None
    plugins: dict[str, dict[str, Any] | None] = {}
    health_interval: float | None = None
    scan_grace: float | None = None
    dra: DraConfig | None = None

    @property
    def settings(self) -> dict[str, float | str]:
        """The options that are settings of the agent, by name."""
        given = {"health-interval": self.health_interval, "scan-grace": self.scan_grace}
        dra = self.dra.settings if self.dra is not None else {}
        return {**{name: value for name, value in given.items() if value is not None}, **dra}


def read(path: str) -> AgentConfig:
    """The configuration file's content. Raises `ConfigurationError` naming the file, the key and the error."""
    from accelplane.node import foreign_yaml  # noqa: PLC0415 - memory of agents that have no such file

    try:
        content: Any = foreign_yaml.load(Host().read_bytes(path, _SIZE_LIMIT))
    except HostError as error:
        raise ConfigurationError(f"{error}, expected the YAML file of --config") from error
    except foreign_yaml.YamlError as error:
        raise ConfigurationError(f"{path}: not YAML: {error}") from error
    try:
        config = msgspec.convert({} if content is None else content, AgentConfig)
    except msgspec.ValidationError as error:
        raise ConfigurationError(option_message(f"{path}: ", error, AgentConfig)) from error
    Settings.of(config.settings, f"{path}: ")
    return config


class Chosen(NamedTuple):
    """The plugins to run by name, and those that are skipped."""

    plugins: Mapping[str, Plugin[Config]]
    skipped: Sequence[SkippedPlugin] = ()


def choose(config: AgentConfig, installed: Installed, source: str, running: Collection[str] = ()) -> Chosen:
    """A plugin for each of the `installed` types with its options. One that cannot be created is logged and skipped.

    Raises `ConfigurationError` naming `source`, plugin and option for a plugin that is `running`, which then continues
    with the options before, and if no plugin is left.
    """
    made: dict[str, Plugin[Config]] = {}
    skipped = list(installed.skipped)
    errors: list[tuple[str, str, BaseException | None]] = []
    for name, plugin_type in installed.types.items():
        where = f"{source}: plugins.{name}" if source else f"plugins.{name}"
        try:
            with watching(name, "__init__"):
                made[name] = _created(plugin_type, config.plugins.get(name) or {})
        except (Exception, SystemExit) as error:  # a plugin's own constructor and checks may raise anything
            problem = (
                option_message(where, error, plugin_type.config_type)
                if isinstance(error, ValueError)
                else f"{where}: {type(error).__name__}: {error}"
            )
            if name in running:
                raise ConfigurationError(problem) from error
            skipped.append(SkippedPlugin(name, problem))
            errors.append((name, problem, None if isinstance(error, ValueError) else error))
    if skipped and not made:
        raise ConfigurationError("; ".join(each.reason for each in skipped))
    for name, problem, unexpected in errors:
        log.error("plugin %s cannot be created and is skipped: %s", name, problem, exc_info=unexpected)
    return Chosen(made, skipped)


def _created(plugin_type: PluginType, options: Mapping[str, Any]) -> Plugin[Config]:
    """The plugin of a type. Raises the exceptions of its constructor, and `TypeError` if the agent cannot run it."""
    plugin = plugin_type(plugin_type.config_type.of(options))
    check_plugin(plugin)
    return plugin


def check_names(config: AgentConfig, installed: Mapping[str, PluginType], source: str) -> None:
    """Raises `ConfigurationError` for options of plugins that are not installed."""
    api = config.dra.api if config.dra is not None else None
    families = api if isinstance(api, dict) else {}
    for key, name in (*(("plugins", name) for name in config.plugins), *(("dra.api", name) for name in families)):
        if name not in installed:
            known = ", ".join(installed)
            raise ConfigurationError(f"{source}: {key}.{name}: no such plugin is installed, expected one of {known}")
