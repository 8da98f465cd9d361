"""The demo is a test: it passes only if every step had its effect, and it must be able to fail."""

import io
import os
import re
import shutil
import subprocess
import sys
from pathlib import Path

import pytest
from rich.console import Console

from accelplane.cli import demo as command
from accelplane.simulate import demo
from accelplane.simulate.demo import Demo, DemoError


def run(*arguments: str, **environment: str) -> subprocess.CompletedProcess[str]:
    program = os.path.join(os.path.dirname(sys.executable), "accelplane")
    return subprocess.run(
        [program, "demo", *arguments], capture_output=True, text=True, check=False, env={**os.environ, **environment}
    )


def test_without_a_terminal_it_runs_once_as_plain_text_and_leaves_nothing(tmp_path: Path, directory: str) -> None:
    picture = tmp_path / "demo.svg"
    ended = run("--svg", str(picture), TMPDIR=directory)
    assert ended.returncode == 0, ended.stderr
    steps = [line for line in ended.stdout.splitlines() if line.startswith("ok  ")]
    assert len(steps) == 16
    assert "\x1b" not in ended.stdout
    assert re.search(r"^demo passed in \d+\.\d s$", ended.stdout, re.MULTILINE)
    assert max(map(len, ended.stdout.splitlines())) <= 100
    for resource in ("gpu.intel.com/i915", "npu.intel.com/accel", "qat.intel.com/cy", "sgx.intel.com/enclave"):
        assert len(re.findall(rf"^ +{resource} +\d/\d ", ended.stdout, re.MULTILINE)) == 2, "in both tables"
    assert "all&#160;sick" in picture.read_text()
    assert os.listdir(directory) == []


def test_it_keeps_its_node_and_runs_with_a_path_to_temporary_files_that_is_too_long_for_sockets(tmp_path: Path) -> None:
    """Socket paths have at most 107 bytes, so the node is made in /tmp."""
    far = tmp_path / ("x" * 100)
    far.mkdir()
    ended = run("--keep", TMPDIR=str(far))
    assert ended.returncode == 0, ended.stderr
    (kept,) = re.findall(r"^kept: (.*)$", ended.stdout, re.MULTILINE)
    try:
        assert Path(kept, "host/sys/class/drm").is_dir()
        assert "registered" in Path(kept, "agent.log").read_text()
    finally:
        shutil.rmtree(kept)


async def test_a_step_without_its_effect_fails_the_demo(directory: str, capsys: pytest.CaptureFixture[str]) -> None:
    world = Demo(directory)

    async def nothing() -> str:
        raise DemoError("saw 0 cards, expected 4")

    class Broken(Demo):
        def steps(self) -> tuple[demo.Step, ...]:
            return (demo.Step("cards are found", nothing), *world.steps())

    assert await command.play(Broken(directory), "") == 1
    shown = capsys.readouterr()
    assert "FAILED  cards are found: saw 0 cards, expected 4" in shown.err
    assert "demo failed" in shown.out


async def test_it_all_fits_on_a_small_screen_and_on_a_large_one(directory: str) -> None:
    world = Demo(directory)
    stage = command.Stage(world, world.steps())
    shown: dict[int, str] = {}
    async with world.running():
        for step in stage.steps[:6]:
            stage.seen.append(await step.work())
        for width, height in ((80, 24), (120, 40)):
            console = Console(width=width, height=height, file=io.StringIO(), record=True)
            console.print(stage)
            shown[height] = console.export_text()
            lines = shown[height].splitlines()
            assert len(lines) < height
            assert max(map(len, lines)) <= width
            assert "QAT0=" in shown[height], "what was seen last"
            assert f"▸ {stage.steps[6].title}" in lines, "what comes next"
            assert all(name in shown[height] for name in world.kubelet.resources())
    assert "gateway 0000:61:00." in shown[24]
    assert "registered" in shown[40], "the log, where there is room for it"


async def test_an_agent_that_is_killed_is_missed(directory: str) -> None:
    world = Demo(directory)
    steps = world.steps()
    async with world.running():
        for step in steps[:3]:
            await step.work()
        assert world.agent is not None
        world.agent.kill()
        await world.kubelet.until(lambda kubelet: not any(one.allocatable for one in kubelet.resources().values()))
        with pytest.raises(DemoError, match="render"):
            await steps[3].work()
