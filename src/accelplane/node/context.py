"""What the tasks of one plugin share."""

from accelplane.node.settings import Settings
from accelplane.plugins import Plugin
from accelplane.plugins.base import Config


class PluginContext:
    """The plugin that runs under `name` and its settings. Both are replaced when the configuration changes."""

    def __init__(self, name: str, plugin: Plugin[Config], settings: Settings) -> None:
        self.name = name
        self.plugin = plugin
        self.settings = settings
