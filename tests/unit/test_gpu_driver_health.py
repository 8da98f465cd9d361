"""The health that the driver of a GPU reports in `gpu_health`."""

from collections.abc import Mapping
from pathlib import Path

import pytest

from accelplane.devices import Device, Skipped, Verdict
from accelplane.host import Host
from accelplane.plugins.gpu import GpuPlugin
from accelplane.simulate.specs import GpuSpec, NodeSpec
from accelplane.simulate.tree import SimulatedNode

pytestmark = pytest.mark.memory

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
    [("ok", "good", "other"), ("warning", "good", "driver"), ("critical", "bad", "driver"), ("junk", None, None)],
)
async def test_only_a_critical_card_is_unhealthy(
    tmp_path: Path, word: str, answer: str | None, cause: str | None
) -> None:
    reports, found = await health(tmp_path, card0=word)
    assert reports
    assert {card: (verdict.answer, verdict.cause) for card, verdict in found.items()} == (
        {"card0": (answer, cause)} if answer else {}
    )


async def test_a_warning_has_a_reason_and_a_good_card_has_none(tmp_path: Path) -> None:
    _, found = await health(tmp_path, card0="warning", card1="ok")
    assert found["card0"].reason == "the driver reports gpu_health warning; see the kernel log"
    assert found["card1"] == Verdict("good")


@pytest.mark.parametrize("mode", ["Boot", "Runtime Survivability\nCapability Info: 0x1"])
async def test_a_card_in_survivability_mode_is_unhealthy_until_its_firmware_is_flashed(
    tmp_path: Path, mode: str
) -> None:
    SimulatedNode(tmp_path).build(NodeSpec(gpus=[GpuSpec(driver="xe", bdf=address) for address in ADDRESSES]))
    (tmp_path / "sys/class/drm/card0/device/survivability_mode").write_text(f"{mode}\n")
    plugin = GpuPlugin()
    devices = [device for device in plugin.scan(Host(tmp_path)) if isinstance(device, Device)]
    assert plugin.overrides("health")
    (found,) = (await plugin.health(Host(tmp_path), devices)).items()
    reason = f"survivability mode '{mode.splitlines()[0]}': flash the firmware of the GPU"
    assert found == ("card0", Verdict("bad", reason, "firmware"))


@pytest.mark.parametrize(("mode", "found"), [("Boot", True), ("", False), (None, False)])
def test_a_gpu_without_card_is_skipped_with_the_reason(tmp_path: Path, mode: str | None, found: bool) -> None:
    SimulatedNode(tmp_path).build(NodeSpec(gpus=[GpuSpec(driver="xe", bdf=ADDRESSES[0])]))
    device = tmp_path / "sys/bus/pci/drivers/xe" / ADDRESSES[1]
    device.mkdir(parents=True)
    if mode is not None:
        (device / "survivability_mode").write_text(mode)
    skipped = [item for item in GpuPlugin().scan(Host(tmp_path)) if isinstance(item, Skipped)]
    reason = "survivability mode 'Boot': flash the firmware of the GPU"
    assert skipped == ([Skipped(ADDRESSES[1], reason, warning=True)] if found else [])


async def test_without_the_file_there_is_no_source_of_health(tmp_path: Path) -> None:
    assert await health(tmp_path) == (False, {})
