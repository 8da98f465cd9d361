"""Node labels through node-feature-discovery's local source: a text file of `key=value` lines."""

import asyncio
import contextlib
import logging
import os
import time
from collections.abc import Mapping

from accelplane.devices import Inventory
from accelplane.host.blocking import SerialThread
from accelplane.node import atomic_file
from accelplane.node.atomic_file import stamp_of
from accelplane.node.context import PluginContext
from accelplane.node.hook_results import checked_labels

log = logging.getLogger(__name__)

_TIMEOUT = 1.0  # the list of the kubelet is not delayed, but the plugin's next publication is


class LabelFile:
    """One label file. It is replaced atomically, and only if the labels differ from its content.

    During an update two processes may write the same file. Then it belongs to the one that began last.
    """

    def __init__(self, path: str) -> None:
        self.path = path
        self._stamp = stamp_of(path)  # of the file as this process has found or written it
        self._owned = False

    def write(self, labels: Mapping[str, str]) -> bool:
        """Writes `labels`, or removes the file if there are none. Returns whether it changed. Raises `OSError`."""
        if not labels:
            return self.remove()
        text = "".join(f"{key}={value}\n" for key, value in sorted(labels.items())).encode()
        known = atomic_file.content(self.path, len(text)) == text
        if known and self._owned:
            return False
        if known:
            os.utime(self.path)  # so that a process that ends does not remove it
        else:
            # NFD ignores names that start with a dot, so it never reads a half-written file.
            atomic_file.replace(self.path, text, prefix=".labels")
        self._stamp, self._owned = stamp_of(self.path), True
        return not known

    def remove_of_earlier_boot(self) -> None:
        """Removes a file that was written before the node has started. Raises `OSError`."""
        booted = time.time() - time.clock_gettime(time.CLOCK_BOOTTIME)
        with contextlib.suppress(FileNotFoundError):
            if os.stat(self.path).st_mtime < booted:
                self.remove()

    def remove(self) -> bool:
        """Removes the file; returns whether it existed."""
        try:
            os.unlink(self.path)
        except FileNotFoundError:
            return False
        return True

    def withdraw(self) -> None:
        """Removes the file at the end of this process, unless another one has written it since. Raises `OSError`."""
        if stamp_of(self.path) == self._stamp:
            self.remove()


def dra_label_path(directory: str, driver: str) -> str:
    """The file with the label of a DRA driver whose slices are published."""
    return os.path.join(directory, f"accelplane-dra-{driver}.txt")


class LabelPublisher:
    """Writes the plugin's labels into a file of node-feature-discovery's directory, if there is one."""

    def __init__(self, context: PluginContext) -> None:
        # The owner waits for the thread at its end.
        self.thread = SerialThread()
        self._context = context
        self._file: LabelFile | None = None

    async def publish(self, inventory: Inventory) -> None:
        """Writes the labels of the listed devices. Problems are those of the hook `labels`.

        While the hook of an earlier call has not returned, nothing is written.
        """
        path = self._path()
        if self._file is not None and self._file.path != path:
            self.close()
        if not path:
            return
        file = self._file = self._file or LabelFile(path)
        if self.thread.busy:
            return
        plugin, problems = self._context.plugin, list[str]()
        try:
            async with asyncio.timeout(_TIMEOUT):
                labels, problems = checked_labels(await self.thread.run(lambda: plugin.labels(inventory)))
            file.write(labels)
        except TimeoutError:
            problems = [f"not written: no result within {_TIMEOUT:g} s"]
        except Exception as error:  # noqa: BLE001 - a plugin's own hook may raise anything
            problems = [f"not written: {str(error) or type(error).__name__}"]
        self._context.problems.update("labels", problems)

    def close(self) -> None:
        """Removes the file unless another process has written it. Errors are logged."""
        try:
            if self._file is not None:
                self._file.withdraw()
        except OSError as error:
            log.warning("%s: labels not removed: %s", self._context.name, error)
        self._file = None

    def _path(self) -> str:
        """The file of the plugin with its present options, empty for none."""
        plugin, settings = self._context.plugin, self._context.settings
        if not plugin.overrides("labels"):
            return ""
        directory, name = os.path.split(plugin.label_file)
        directory = settings.nfd_dir or directory
        return os.path.join(directory, name or f"accelplane-{self._context.name}.txt") if directory else ""
