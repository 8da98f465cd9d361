"""The installed plugins: those of the package entry point group `accelplane.plugins`."""

import logging
from collections.abc import Collection, Mapping

from accelplane.node.settings import ConfigurationError
from accelplane.plugins import Config, Plugin

log = logging.getLogger(__name__)

GROUP = "accelplane.plugins"

PluginType = type[Plugin[Config]]


def installed(only: Collection[str] | None = None, source: str = "-plugins") -> Mapping[str, PluginType]:
    """Plugin classes by name in alphabetical order: all installed ones, or those in `only`.

    `source` is the flag, or the file and key, that `only` comes from.

    Raises `ConfigurationError` for a name in `only` that is not installed or cannot be loaded. Without `only`, a plugin
    that cannot be loaded is logged and skipped.
    """
    from importlib.metadata import entry_points  # noqa: PLC0415 - 1.3 MB that the drop-in commands do without

    points = {point.name: point for point in entry_points(group=GROUP)}
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
        except Exception as error:
            if only is not None:
                raise ConfigurationError(f"{source}: plugin {name} cannot be loaded: {error}") from error
            log.exception("plugin %s cannot be loaded and is skipped", name)
            continue
        found[name] = loaded
    return found
