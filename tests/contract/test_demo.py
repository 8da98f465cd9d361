"""`accelplane demo` passes only if every step has its effect, and fails otherwise."""

import io
import os
import re
import shutil
import signal
import subprocess
import sys
from pathlib import Path

import pytest
from rich.console import Console

from accelplane.cli import demo as command
from accelplane.simulate import demo
from accelplane.simulate.demo import Demo, DemoError

pytestmark = pytest.mark.memory

PROGRAM = os.path.join(os.path.dirname(sys.executable), "accelplane")


def test_demo_without_terminal_prints_plain_text_and_removes_its_files(tmp_path: Path, directory: str) -> None:
    picture = tmp_path / "demo.svg"
    ended = subprocess.run(
        [PROGRAM, "demo", "--svg", str(picture)],
        capture_output=True, text=True, check=False, env={**os.environ, "TMPDIR": directory},
    )  # fmt: skip
    assert ended.returncode == 0, ended.stderr
    steps = [line for line in ended.stdout.splitlines() if line.startswith("ok  ")]
    assert len(steps) == 17
    assert "\x1b" not in ended.stdout
    assert re.search(r"^demo passed in \d+\.\d s$", ended.stdout, re.MULTILINE)
    assert max(map(len, ended.stdout.splitlines())) <= 100
    for resource in ("gpu.intel.com/i915", "npu.intel.com/accel", "qat.intel.com/cy", "sgx.intel.com/enclave"):
        assert len(re.findall(rf"^ +{resource} +\d/\d ", ended.stdout, re.MULTILINE)) == 2, "in both tables"
    assert "all&#160;unhealthy" in picture.read_text()
    assert os.listdir(directory) == []


def test_keep_preserves_the_simulated_node_with_a_long_tmpdir_and_after_an_interrupt(tmp_path: Path) -> None:
    """The path of a Unix socket has at most 107 bytes, so the node is created in /tmp."""
    far = tmp_path / ("x" * 100)
    far.mkdir()
    environment = {**os.environ, "TMPDIR": str(far)}
    with subprocess.Popen([PROGRAM, "demo", "--keep"], stdout=subprocess.PIPE, text=True, env=environment) as process:
        assert process.stdout
        assert any(line.startswith("ok  start the kubelet") for line in process.stdout)
        process.send_signal(signal.SIGINT)
        rest = process.stdout.read()
        (kept,) = re.findall(r"^kept: (.*)$", rest, re.MULTILINE)
    try:
        assert process.returncode == 130
        assert "demo interrupted\n" in rest
        assert Path(kept, "host/sys/class/drm").is_dir()
        assert "registered" in Path(kept, "agent.log").read_text()
    finally:
        shutil.rmtree(kept)


async def test_a_step_without_effect_fails_the_demo(directory: str, capsys: pytest.CaptureFixture[str]) -> None:
    setup = Demo(directory)

    async def nothing() -> str:
        raise DemoError("found 0 cards, expected 4")

    class BrokenDemo(Demo):
        def steps(self) -> tuple[demo.Step, ...]:
            return (demo.Step("cards are found", nothing), *setup.steps())

    assert await command.play(BrokenDemo(directory), "") == 1
    output = capsys.readouterr()
    assert "FAILED  cards are found: found 0 cards, expected 4" in output.err
    assert "demo failed" in output.out


async def test_the_screen_fits_into_small_and_large_terminals(directory: str) -> None:
    setup = Demo(directory)
    screen = command.Screen(setup, setup.steps())
    output: dict[int, str] = {}
    async with setup.running():
        for step in screen.steps[:6]:
            screen.results.append(await step.run())
        for width, height in ((80, 24), (120, 40)):
            console = Console(width=width, height=height, file=io.StringIO(), record=True)
            console.print(screen)
            output[height] = console.export_text()
            lines = output[height].splitlines()
            assert len(lines) < height
            assert max(map(len, lines)) <= width
            assert "QAT0=" in output[height], "the last result"
            assert f"▸ {screen.steps[6].title}" in lines, "the current step"
            assert all(name in output[height] for name in setup.kubelet.resources())
    assert "gateway 0000:61:00." in output[24]
    assert "registered" in output[40], "the log, if there is room"


async def test_a_killed_agent_fails_the_next_step(directory: str) -> None:
    setup = Demo(directory)
    steps = setup.steps()
    async with setup.running():
        for step in steps[:3]:
            await step.run()
        assert setup.agent is not None
        setup.agent.kill()
        await setup.kubelet.until(lambda kubelet: not any(one.allocatable for one in kubelet.resources().values()))
        with pytest.raises(DemoError, match="render"):
            await steps[3].run()
