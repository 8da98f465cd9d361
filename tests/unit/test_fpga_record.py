"""The counters of programming operations that hook and tool record."""

import contextlib
import errno
import json
import os
import signal
import stat
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import pytest
from bitstreams import INTERFACE, NLB0, NLB3, gbs, metadata
from fpgadriver import Driver
from fpgatrees import one_port
from hypothesis import given
from hypothesis import strategies as st
from trees import link, write

from accelplane.fpga import FpgaError
from accelplane.fpga.bitstream import open_bitstream
from accelplane.fpga.program import RetryPolicy, program, time_limit
from accelplane.fpga.record import (
    LIMIT,
    OUTCOMES,
    Last,
    Record,
    RecordError,
    add,
    as_json,
    count_programming,
    parse,
    read,
)
from accelplane.fpga.statedir import STATE_DIRECTORY
from accelplane.fpga.sysfs import read_port
from accelplane.host import Host
from accelplane.plugins.base import Sample
from accelplane.plugins.fpga import FpgaPlugin

pytestmark = pytest.mark.memory

QUICK = RetryPolicy(timeout=30, attempts=2, interval=0.001)
FME = "dfl-fme.0"
LAST = Last(1700000000.5, "dfl-port.0", INTERFACE, NLB3, "failed", "EIO")


def place(root: Path, fme: str = FME) -> Path:
    return root / STATE_DIRECTORY[1:] / f"{fme}.json"


def run(driver: Driver, unless: str = "") -> Host:
    """Programs the card's port once, with or without success."""
    host = Host(driver.card.root)
    path = write(driver.card.root / "nlb3.gbs", gbs(metadata(afu=NLB3)))
    with open_bitstream(str(path)) as bitstream:
        port = read_port(host, driver.card.name("port", 0))
        with contextlib.suppress(FpgaError):
            program(host, port, bitstream, call=driver, unless=unless, retry=QUICK)
    return host


def recorded(root: Path, fme: str = FME) -> Record:
    found = read(Host(root), fme)
    assert found is not None
    return found


# Counters.


@pytest.mark.parametrize("family", ["dfl", "opae"])
def test_programming_is_counted_with_port_and_function(tmp_path: Path, family: str) -> None:
    card = one_port(tmp_path, family)
    driver = Driver(card, NLB3)
    run(driver)
    run(driver)
    found = recorded(tmp_path, card.name("fme", 0))
    assert (found.outcomes, found.errors) == ({"programmed": 2}, {})
    assert found.last is not None
    assert found.last[1:] == (card.name("port", 0), INTERFACE, NLB3, "programmed", "")
    assert found.last.time > LAST.time
    assert found.seconds >= 0


@pytest.mark.parametrize(
    ("driver", "errors"),
    [
        ({"answers": [errno.EIO]}, {"EIO": 1}),
        ({"answers": [errno.EBUSY] * 2}, {"EBUSY": 1}),
        ({"answers": [4321]}, {}),
        ({"afu": NLB0}, {}),
    ],
    ids=["refused", "busy", "no-errno", "another-function"],
)
def test_failures_are_counted_by_errno(tmp_path: Path, driver: Mapping[str, Any], errors: Mapping[str, int]) -> None:
    run(Driver(one_port(tmp_path), **{"afu": NLB3, **driver}))
    found = recorded(tmp_path)
    assert (found.outcomes, found.errors) == ({"failed": 1}, errors)
    assert found.last is not None
    assert (found.last.outcome, found.last.error) == ("failed", "".join(errors))


def test_timeouts_are_counted(tmp_path: Path) -> None:
    class Hanging(Driver):
        def program(self, name: str, argument: bytearray) -> None:
            signal.raise_signal(signal.SIGALRM)

    with time_limit(600, "programming"):
        run(Hanging(one_port(tmp_path), NLB3))
    assert recorded(tmp_path).outcomes == {"timed-out": 1}


def test_errors_before_the_driver_is_called_are_not_counted(tmp_path: Path) -> None:
    run(Driver(one_port(tmp_path), NLB0), unless=NLB0)
    assert not place(tmp_path).exists()


def test_a_record_is_readable_with_any_umask(tmp_path: Path) -> None:
    before = os.umask(0o077)
    try:
        run(Driver(one_port(tmp_path), NLB3))
    finally:
        os.umask(before)
    modes = [stat.S_IMODE(path.stat().st_mode) for path in (place(tmp_path).parent, place(tmp_path))]
    assert modes == [0o700, 0o644]
    assert [path.name for path in place(tmp_path).parent.iterdir() if path.suffix != ".lock"] == [f"{FME}.json"]


# Other files.

JUNK = {
    "no-json": "{",
    "another": "[]",
    "deep": "[" * 10_000,
    "no-count": '{"outcomes": {"failed": true}}',
    "negative": '{"outcomes": {"failed": -1}}',
    "huge": f'{{"errors": {{"EIO": {10**30}}}}}',
    "endless": '{"seconds": Infinity}',
    "nan": '{"seconds": NaN}',
    "last": '{"last": 1}',
    "outcome": '{"last": {"time": 1, "outcome": "perhaps"}}',
    "control": '{"last": {"time": 1, "outcome": "failed", "port": "a\\nb"}}',
    "long": json.dumps({"last": {"time": 1, "outcome": "failed", "afu": "f" * 65}}),
    "large": " " * LIMIT + "{}",
}


@pytest.mark.parametrize("junk", JUNK)
def test_an_invalid_record_is_reset_and_does_not_prevent_programming(tmp_path: Path, junk: str) -> None:
    driver = Driver(one_port(tmp_path), NLB3)
    write(place(tmp_path), JUNK[junk])
    (note,) = run(driver).notes
    assert note.startswith(f"/run/accelplane-fpga/{FME}.json: ")
    assert note.endswith("; the record is reset")
    assert len(note) < 200
    assert note.isprintable()
    assert len(driver.programmed) == 1
    assert recorded(tmp_path).outcomes == {"programmed": 1}


def test_a_link_is_replaced_and_not_followed(tmp_path: Path) -> None:
    precious = write(tmp_path / "precious", "{}")
    link(place(tmp_path), precious)
    link(place(tmp_path).with_name(f".{FME}.json.new"), precious)
    assert run(Driver(one_port(tmp_path), NLB3)).notes
    assert not place(tmp_path).is_symlink()
    assert recorded(tmp_path).outcomes == {"programmed": 1}
    assert precious.read_text() == "{}"


class RacingHost(Host):
    """Replaces the directory of records by a link that leads outside as soon as its local path is known."""

    def local(self, path: str) -> str:
        found = super().local(path)
        directory = Path(self.root, STATE_DIRECTORY[1:])
        directory.rename(directory.with_name("old"))
        directory.symlink_to(Path(self.root).with_name("outside"))
        return found


def test_a_record_outside_the_root_is_never_read(tmp_path: Path) -> None:
    root = tmp_path / "root"
    add(Host(root), FME, LAST, 1.0)
    write(tmp_path / "outside" / f"{FME}.json", json.dumps(as_json(Record({"failed": 7}, {}, 1.0, LAST))))
    record = read(RacingHost(root), FME)
    assert record is not None
    assert record.outcomes == {"failed": 1}


def test_a_record_that_cannot_be_written_does_not_fail_programming(tmp_path: Path) -> None:
    driver = Driver(one_port(tmp_path), NLB3)
    place(tmp_path).mkdir(parents=True)
    assert "the programming is not counted" in run(driver).notes[-1]
    assert len(driver.programmed) == 1


@pytest.mark.parametrize("found", ["a file", "a directory of others"])
def test_an_unusable_directory_is_reported(tmp_path: Path, found: str) -> None:
    host, directory = Host(tmp_path), place(tmp_path).parent
    if found == "a file":
        write(directory, "")
    else:
        directory.mkdir(parents=True)
        directory.chmod(0o777)
    add(host, FME, LAST, 1.5)
    assert "the programming is not counted" in host.notes[-1]


# Output.


def samples(root: Path, fpga: FpgaPlugin | None = None) -> dict[tuple[str, ...], float]:
    found: list[Sample] = list((fpga or FpgaPlugin()).measure(Host(root), ()))
    return {(sample.name, *sample.labels.values()): sample.value for sample in found}


def test_the_plugin_shows_the_counts(tmp_path: Path) -> None:
    assert samples(tmp_path) == {}
    host = Host(tmp_path)
    (tmp_path / "run").mkdir()
    add(host, FME, LAST, 1.5)
    add(host, FME, LAST._replace(outcome="programmed", error="", time=1700000001.0), 2.0)
    add(host, "intel-fpga-fme.1", LAST._replace(outcome="timed-out", error=""), 60.0)
    name = "intel-fpga-fme.1"
    assert samples(tmp_path) == {
        ("fpga_programmings_total", FME, "programmed"): 1,
        ("fpga_programmings_total", FME, "failed"): 1,
        ("fpga_programmings_total", FME, "timed-out"): 0,
        ("fpga_programming_errors_total", FME, "EIO"): 1,
        ("fpga_programming_seconds_total", FME): 3.5,
        ("fpga_last_programming_timestamp_seconds", FME): 1700000001.0,
        ("fpga_programmings_total", name, "programmed"): 0,
        ("fpga_programmings_total", name, "failed"): 0,
        ("fpga_programmings_total", name, "timed-out"): 1,
        ("fpga_programming_seconds_total", name): 60.0,
        ("fpga_last_programming_timestamp_seconds", name): LAST.time,
    }


def test_other_files_are_ignored_and_errors_are_logged_once(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    for name in ("README", "dfl-fme.x.json", ".dfl-fme.0.json.new", "dfl-port.0.json", "..json"):
        write(tmp_path / STATE_DIRECTORY[1:] / name, "{}")
    write(place(tmp_path), "junk")
    fpga = FpgaPlugin()
    assert samples(tmp_path, fpga) == samples(tmp_path, fpga) == {}
    (message,) = caplog.messages
    assert (
        message == f"{STATE_DIRECTORY}/{FME}.json: not JSON, expected a record of programmings; its metrics are missing"
    )


# Any content.

COUNTS = st.dictionaries(st.sampled_from(["EIO", "EBUSY"]), st.integers(0, 1 << 53))
LASTS = st.builds(
    Last,
    st.floats(0, 1 << 40),
    st.text("abc.-0", max_size=64),
    st.text("0123456789abcdef", max_size=64),
    st.text("0123456789abcdef", max_size=64),
    st.sampled_from(OUTCOMES),
    st.sampled_from(["", "EIO", "EBUSY"]),
)
RECORDED_LAST = st.builds(
    Record, st.dictionaries(st.sampled_from(OUTCOMES), st.integers(0, 1 << 53)), COUNTS, st.floats(0, 1 << 40), LASTS
)
RECORDED = RECORDED_LAST | RECORDED_LAST.map(lambda record: record._replace(last=None))


def junk_in(record: Record, path: list[str], junk: object) -> bytes:
    """The record's file with another value at the path."""
    document = json.loads(json.dumps(as_json(record)))
    inner = document
    for step in path[:-1]:
        inner = inner[step]
    inner[path[-1]] = junk
    return json.dumps(document).encode()


@given(RECORDED)
def test_a_written_record_is_read_unchanged(record: Record) -> None:
    found = parse(json.dumps(as_json(record)).encode(), "a")
    assert found._replace(seconds=record.seconds) == record
    assert found.seconds == pytest.approx(record.seconds, abs=0.001)


@given(RECORDED, LASTS)
def test_counting_adds_one(record: Record, last: Last) -> None:
    found = count_programming(record, last, 1.0)
    assert sum(found.outcomes.values()) in (sum(record.outcomes.values()), sum(record.outcomes.values()) + 1)
    assert parse(json.dumps(as_json(found)).encode(), "a").last == last


JSON = st.recursive(
    st.none() | st.booleans() | st.integers() | st.floats() | st.text(max_size=80),
    lambda inner: st.lists(inner, max_size=3) | st.dictionaries(st.text(max_size=6), inner, max_size=3),
    max_leaves=5,
)
PLACES = st.sampled_from(
    [
        ["outcomes"], ["outcomes", "failed"], ["outcomes", "?"], ["errors"], ["errors", "EIO"], ["errors", "E"],
        ["seconds"], ["last"], ["last", "time"], ["last", "port"], ["last", "outcome"], ["last", "error"],
    ]
)  # fmt: skip


@given(
    st.binary(max_size=100)
    | JSON.map(lambda junk: json.dumps(junk).encode())
    | st.builds(junk_in, RECORDED_LAST, PLACES, JSON)
)
def test_any_record_is_parsed_or_rejected_in_one_line(data: bytes) -> None:
    refusal, found = "", Record()
    try:
        found = parse(data, "a")
    except RecordError as error:
        refusal = str(error)
    assert len(refusal) < 300
    assert refusal.isprintable()
    assert {*found.outcomes} <= {*OUTCOMES}
    assert {*found.errors} <= {*errno.errorcode.values()}
    again = parse(json.dumps(as_json(count_programming(found, LAST, 1.0))).encode(), "a")
    assert again.outcomes["failed"] >= found.outcomes.get("failed", 0)
    assert len(json.dumps(as_json(again))) < LIMIT
