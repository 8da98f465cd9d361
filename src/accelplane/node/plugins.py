"""The installed plugins: those of the package entry point group `accelplane.plugins`."""

import logging
from collections.abc import Collection, Iterable, Mapping
from typing import TYPE_CHECKING

from accelplane.node.settings import ConfigurationError
from accelplane.plugins import Config, Plugin

if TYPE_CHECKING:
    from importlib.metadata import EntryPoint

log = logging.getLogger(__name__)

GROUP = "accelplane.plugins"

PluginType = type[Plugin[Config]]


def installed(only: Collection[str] | None = None, source: str = "-plugins") -> Mapping[str, PluginType]:
    """Plugin classes by name in alphabetical order: all installed ones, or those in `only`.

    `source` is the flag, or the file and key, that `only` comes from.

    Of several plugins with one name, that of this project is used, otherwise the first one by its package's name.

    Raises `ConfigurationError` for a name in `only` that is not installed or cannot be loaded. Without `only`, a plugin
    that cannot be loaded is logged and skipped.
    """
    from importlib.metadata import entry_points  # noqa: PLC0415 - 1.3 MB that the drop-in commands do without

    points = _by_name(entry_points(group=GROUP))
    unknown = sorted(set(only or ()) - points.keys())
    if unknown:
        raise ConfigurationError(
            f"{source}: found {', '.join(map(ascii, unknown))}, expected installed plugins: {', '.join(sorted(points))}"
        )
    found: dict[str, PluginType] = {}
    for name in sorted(points if only is None else only):
        try:
            loaded: object = points[name].load()
            if not (isinstance(loaded, type) and issubclass(loaded, Plugin)):
                raise TypeError(f"{points[name].value} is not a subclass of accelplane.plugins.Plugin")
        except (Exception, SystemExit) as error:
            if only is not None:
                raise ConfigurationError(f"{source}: plugin {name} cannot be loaded: {error}") from error
            log.exception("plugin %s cannot be loaded and is skipped", name)
            continue
        found[name] = loaded
    return found


def _by_name(points: "Iterable[EntryPoint]") -> "dict[str, EntryPoint]":
    """One entry point for each name. Others of the same name are logged."""
    found: dict[str, EntryPoint] = {}
    for point in sorted(points, key=_precedence):
        first = found.setdefault(point.name, point)
        if first.value != point.value:
            log.error(
                "plugin %s: found %s of the package %s, which is skipped: %s of the package %s has the same name; "
                "expected distinct names of entry points",
                point.name, point.value, _package(point), first.value, _package(first),
            )  # fmt: skip
    return found


def _precedence(point: "EntryPoint") -> tuple[bool, str, str]:
    return not point.module.startswith("accelplane."), _package(point), point.value


def _package(point: "EntryPoint") -> str:
    return point.dist.name if point.dist is not None else ""
