"""Node labels through node-feature-discovery's local source: a text file of `key=value` lines."""

import logging
import os
from collections.abc import Mapping

from accelplane.devices import Inventory
from accelplane.node import atomic_file
from accelplane.node.context import PluginContext

log = logging.getLogger(__name__)


class LabelFile:
    """One label file. It is replaced atomically, and only if the labels differ from its content."""

    def __init__(self, path: str) -> None:
        self.path = path

    def write(self, labels: Mapping[str, str]) -> bool:
        """Writes `labels`, or removes the file if there are none; returns whether anything changed.

        Raises `OSError`.
        """
        if not labels:
            return self.remove()
        text = "".join(f"{key}={value}\n" for key, value in sorted(labels.items())).encode()
        if atomic_file.content(self.path, len(text)) == text:
            return False
        # NFD ignores names that start with a dot, so it never reads a half-written file.
        atomic_file.replace(self.path, text, prefix=".labels")
        return True

    def remove(self) -> bool:
        """Removes the file; returns whether it existed."""
        try:
            os.unlink(self.path)
        except FileNotFoundError:
            return False
        return True


class LabelPublisher:
    """Writes the plugin's labels into a file of node-feature-discovery's directory, if there is one."""

    def __init__(self, context: PluginContext) -> None:
        self._context = context
        directory = context.settings.nfd_dir
        wanted = directory and context.plugin.overrides("labels")
        self._file = LabelFile(os.path.join(directory, f"accelplane-{context.name}.txt")) if wanted else None

    def publish(self, inventory: Inventory) -> None:
        """Writes the labels of the listed devices. Errors are logged."""
        if self._file is None:
            return
        try:
            self._file.write(self._context.plugin.labels(inventory))
        except Exception as error:  # noqa: BLE001 - a plugin's own hook may raise anything
            log.warning("%s: labels not written: %s", self._context.name, str(error) or type(error).__name__)

    def close(self) -> None:
        """Removes the file. Errors are logged."""
        try:
            if self._file is not None:
                self._file.remove()
        except OSError as error:
            log.warning("%s: labels not removed: %s", self._context.name, error)
