"""The health that the driver of a GPU reports in `gpu_health`."""

from collections.abc import Mapping
from pathlib import Path

import pytest

from accelplane.devices import Device, Verdict
from accelplane.host import Host
from accelplane.plugins.gpu import GpuPlugin
from accelplane.simulate.specs import GpuSpec, NodeSpec
from accelplane.simulate.tree import SimulatedNode

ADDRESSES = ("0000:03:00.0", "0000:04:00.0")


async def health(root: Path, **words: str) -> tuple[bool, Mapping[str, Verdict]]:
    """Whether the plugin has a source of health, and its verdicts. `words` are those of cards."""
    SimulatedNode(root).build(NodeSpec(gpus=[GpuSpec(driver="xe", bdf=address) for address in ADDRESSES]))
    for card, word in words.items():
        (root / f"sys/class/drm/{card}/device/gpu_health").write_text(f"{word}\n")
    plugin = GpuPlugin()
    devices = [device for device in plugin.scan(Host(root)) if isinstance(device, Device)]
    return plugin.overrides("health"), await plugin.health(Host(root), devices)


@pytest.mark.parametrize(
    ("word", "answer", "cause"),
    [("ok", "good", "other"), ("warning", "good", "other"), ("critical", "bad", "driver"), ("junk", None, None)],
)
async def test_only_a_critical_card_is_unhealthy(
    tmp_path: Path, word: str, answer: str | None, cause: str | None
) -> None:
    reports, found = await health(tmp_path, card0=word)
    assert reports
    assert {card: (verdict.answer, verdict.cause) for card, verdict in found.items()} == (
        {"card0": (answer, cause)} if answer else {}
    )


async def test_without_the_file_there_is_no_source_of_health(tmp_path: Path) -> None:
    assert await health(tmp_path) == (False, {})
