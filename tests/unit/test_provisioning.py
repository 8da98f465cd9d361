"""Output of provisioning, and signals."""

import fcntl
import os
import signal
import threading
from collections.abc import Callable, Iterator
from contextlib import contextmanager, redirect_stderr
from pathlib import Path
from typing import TextIO

import pytest
from trees import write

from accelplane.cli.provisioning import FAILED, OK, Part, run
from accelplane.host import Host, Unreadable
from accelplane.provision.steps import Plan, Planner, Step


def attribute(name: str, *, then: Callable[[], None] = lambda: None) -> Planner:
    """A device whose file must have the text 1; with `then` it is written twice."""

    def planner(host: Host) -> Plan:
        path = f"/sys/{name}"
        found = host.text(path)
        if found == "0":
            then()
        missing = {"0": "half", "half": "1"}.get(found)
        return Plan(device=name, steps=[Step(what=f"{name} {missing}", path=path, text=missing)] if missing else [])

    return planner


@pytest.mark.parametrize("number", [signal.SIGTERM, signal.SIGINT])
def test_a_signal_ends_after_the_current_device(
    number: signal.Signals, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    for name in "abc":
        write(tmp_path / "sys" / name, "0")
    before = signal.getsignal(number)
    devices = [attribute("a"), attribute("b", then=lambda: os.kill(os.getpid(), number)), attribute("c")]
    parts = [Part("x", "wanted", lambda _host: devices), Part("y", "wanted", lambda _host: [attribute("c")])]
    assert run("apply", parts, str(tmp_path), "table") == FAILED
    assert [(tmp_path / "sys" / name).read_text() for name in "abc"] == ["1", "1", "0"]
    assert f"failed: stopped by {number.name} after b" in capsys.readouterr().out
    assert signal.getsignal(number) is before


@contextmanager
def concurrent_apply(root: Path) -> Iterator[None]:
    (root / "sys/devices").mkdir(parents=True)
    descriptor = os.open(root / "sys/devices", os.O_RDONLY)
    try:
        fcntl.flock(descriptor, fcntl.LOCK_EX)
        yield
    finally:
        os.close(descriptor)


def test_concurrent_applies_wait_and_concurrent_plans_do_not(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    write(tmp_path / "sys/a", "0")
    parts = [Part("x", "wanted", lambda _host: [attribute("a")])]
    readable, writable = os.pipe()
    lines: list[str] = []

    def end_it(stdout: TextIO) -> None:
        lines.append(stdout.readline())
        os.kill(os.getpid(), signal.SIGTERM)

    with concurrent_apply(tmp_path), open(readable) as stdout, open(writable, "w", buffering=1) as stderr:
        assert run("plan", parts, str(tmp_path), "table") == OK
        assert capsys.readouterr().err == ""
        impatient = threading.Thread(target=end_it, args=(stdout,))
        impatient.start()
        with redirect_stderr(stderr):
            assert run("apply", parts, str(tmp_path), "table") == FAILED
        impatient.join()
    assert lines == ["waiting for another process that provisions this node\n"]
    assert "failed: stopped by SIGTERM, nothing was written" in capsys.readouterr().out
    assert (tmp_path / "sys/a").read_text() == "0"
    assert run("apply", parts, str(tmp_path), "table") == OK
    assert (tmp_path / "sys/a").read_text() == "1"


def test_a_family_that_cannot_be_scanned_fails_and_the_next_is_scanned(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    def unreadable(_host: Host) -> Iterator[Planner]:
        yield attribute("a")
        raise Unreadable("/sys/bus/x", "Input/output error")

    for name in "ab":
        write(tmp_path / "sys" / name, "1")
    parts = [Part("x", "desired: a", unreadable), Part("y", "desired: b", lambda _host: [attribute("b")])]
    assert run("plan", parts, str(tmp_path), "table") == FAILED
    assert capsys.readouterr().out == (
        "x: desired: a\n  a  unchanged\ny: desired: b\n  b  unchanged\n"
        "      failed: x: /sys/bus/x: Input/output error\n2 devices: 2 unchanged\n"
    )


def test_texts_of_devices_are_escaped_for_terminals(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    evil = Plan(device="d", now={"name": "\x1b[2J\u202e" + "x" * 300}, notes=["two\nlines"])
    assert run("plan", [Part("x", "wanted", lambda _host: [lambda _: evil])], str(tmp_path), "table") == OK
    output = capsys.readouterr().out
    assert "\x1b" not in output
    assert "\u202e" not in output
    assert "note: two lines" in output
