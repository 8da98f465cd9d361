"""The installed plugins: those of the package entry point group `accelplane.plugins`."""

import logging
from collections.abc import Collection, Iterable, Mapping, Sequence
from typing import TYPE_CHECKING, NamedTuple

from accelplane.node.loop_watchdog import watching
from accelplane.node.settings import ConfigurationError
from accelplane.node.status import SkippedPlugin
from accelplane.plugins import Config, Plugin

if TYPE_CHECKING:
    from importlib.metadata import EntryPoint

log = logging.getLogger(__name__)

GROUP = "accelplane.plugins"

PluginType = type[Plugin[Config]]


class Installed(NamedTuple):
    """Plugin classes by name in alphabetical order, and the plugins that cannot be loaded or have the name of one."""

    types: Mapping[str, PluginType]
    skipped: Sequence[SkippedPlugin] = ()


def installed(only: Collection[str] | None = None, source: str = "-plugins") -> Installed:
    """All installed plugins, or those in `only`. A plugin that cannot be loaded is logged and skipped.

    `source` is the flag, or the file and key, that `only` comes from.

    Of several plugins with one name, that of this project is used, otherwise the first one by its package's name.

    Raises `ConfigurationError` for a name in `only` that is not installed.
    """
    from importlib.metadata import entry_points  # noqa: PLC0415 - 1.3 MB that the drop-in commands do without

    points, skipped = _by_name(entry_points(group=GROUP), only)
    unknown = sorted(set(only or ()) - points.keys())
    if unknown:
        raise ConfigurationError(
            f"{source}: found {', '.join(map(ascii, unknown))}, expected installed plugins: {', '.join(sorted(points))}"
        )
    found: dict[str, PluginType] = {}
    for name in sorted(points if only is None else only):
        try:
            with watching(name, "import"):
                loaded: object = points[name].load()
            if not (isinstance(loaded, type) and issubclass(loaded, Plugin)):
                raise TypeError(f"{points[name].value} is not a subclass of accelplane.plugins.Plugin")
        except (Exception, SystemExit) as error:
            log.exception("plugin %s cannot be loaded and is skipped", name)
            skipped.append(
                SkippedPlugin(name, f"{points[name].value} cannot be loaded: {type(error).__name__}: {error}")
            )
            continue
        found[name] = loaded
    return Installed(found, skipped)


def _by_name(
    points: "Iterable[EntryPoint]", only: Collection[str] | None
) -> "tuple[dict[str, EntryPoint], list[SkippedPlugin]]":
    """One entry point for each name, and the others of the names in `only`, which are logged."""
    found: dict[str, EntryPoint] = {}
    skipped: list[SkippedPlugin] = []
    for point in sorted(points, key=_precedence):
        first = found.setdefault(point.name, point)
        if first.value != point.value and (only is None or point.name in only):
            reason = (
                f"found {point.value} of the package {_package(point)}, but {first.value} of the package "
                f"{_package(first)} has the same name; expected distinct names of entry points"
            )
            log.error("plugin %s is skipped: %s", point.name, reason)
            skipped.append(SkippedPlugin(point.name, reason))
    return found, skipped


def _precedence(point: "EntryPoint") -> tuple[bool, str, str]:
    return not point.module.startswith("accelplane."), _package(point), point.value


def _package(point: "EntryPoint") -> str:
    return point.dist.name if point.dist is not None else ""
