"""Scans outside an agent that fail."""

from collections.abc import Iterator

import pytest

from accelplane.devices import Device
from accelplane.host import Host
from accelplane.node.scan_loop import try_scan
from accelplane.plugins import Plugin, ScanError
from accelplane.plugins.base import Config


class FailingPlugin(Plugin[Config]):
    namespace = "example.com"
    error: Exception = ScanError()

    def scan(self, host: Host) -> Iterator[Device]:
        raise self.error


@pytest.mark.parametrize(
    ("error", "text"),
    [
        (ScanError("no answer"), "no answer"),
        (ScanError(), "ScanError"),
        (OSError(), "OSError"),
        (ValueError("x"), "ValueError: x"),
    ],
)
async def test_a_failed_scan_always_has_a_reason(error: Exception, text: str) -> None:
    plugin = FailingPlugin(Config())
    plugin.error = error
    inventory, problem = await try_scan(plugin, "/")
    assert len(inventory) == 0
    assert problem == text
