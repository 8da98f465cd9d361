"""The record of the units that belong to DRA, and its lock between processes."""

import os
import subprocess
import sys
from pathlib import Path

import pytest

from accelplane.dra.model import Owner
from accelplane.dra.ownership import OwnershipError, OwnershipRecord, owner_of


@pytest.fixture
def record(tmp_path: Path) -> OwnershipRecord:
    return OwnershipRecord(str(tmp_path), "gpu")


def content(record: OwnershipRecord) -> frozenset[str]:
    """What a process that starts later reads."""
    other = OwnershipRecord(os.path.dirname(record.path), "gpu")
    assert other.open()
    other.close()
    return other.units


@pytest.mark.parametrize(
    ("wanted", "recorded", "held", "owner"),
    [
        ("plugin", False, False, "plugin"),
        ("plugin", False, True, "plugin"),
        ("plugin", True, False, "none"),
        ("dra", True, False, "dra"),
        ("dra", True, True, "none"),
        ("dra", False, False, "none"),
        ("none", False, False, "none"),
        ("none", True, False, "none"),
    ],
)
def test_a_unit_is_offered_by_the_api_that_is_wanted_and_recorded(
    wanted: Owner, recorded: bool, held: bool, owner: Owner
) -> None:
    assert owner_of(wanted, recorded=recorded, held=held) == owner


def test_changes_are_on_the_disk_before_the_call_returns(record: OwnershipRecord) -> None:
    assert record.open()
    assert record.change(add=["0000:03:00.0", "0000:04:00.0"])
    assert content(record) == record.units == {"0000:03:00.0", "0000:04:00.0"}
    assert record.change(add=["0000:05:00.0"], remove=["0000:03:00.0"])
    assert content(record) == {"0000:04:00.0", "0000:05:00.0"}


def test_units_that_are_held_when_no_other_process_runs_are_not_removed(record: OwnershipRecord) -> None:
    assert record.open()
    assert record.change(add=["a", "b"])
    other = OwnershipRecord(os.path.dirname(record.path), "gpu")

    def held() -> list[str]:
        assert not other.open()
        return ["a", "c"]

    assert record.change(remove=["a", "b"], held=held)
    assert content(record) == record.units == {"a"}
    other.close()


def test_without_units_there_is_no_file(record: OwnershipRecord) -> None:
    assert record.open()
    assert record.change(add=["a"])
    assert os.path.exists(record.path)
    assert record.change(remove=["a"])
    assert not os.path.exists(record.path)


def test_two_processes_hold_it_and_neither_changes_it(record: OwnershipRecord, tmp_path: Path) -> None:
    assert record.open()
    assert record.change(add=["a"])
    later = OwnershipRecord(str(tmp_path), "gpu")
    assert later.open()
    assert later.units == {"a"}
    assert not later.change(remove=["a"])
    assert not record.change(add=["b"])
    record.close()
    assert later.change(remove=["a"])


def test_the_lock_of_a_killed_process_is_free(record: OwnershipRecord, tmp_path: Path) -> None:
    code = (
        "from accelplane.dra.ownership import OwnershipRecord as R; import sys, time\n"
        f"r = R({str(tmp_path)!r}, 'gpu'); print(r.open(), flush=True); time.sleep(60)"
    )
    with subprocess.Popen([sys.executable, "-c", code], stdout=subprocess.PIPE) as process:
        assert process.stdout is not None
        assert process.stdout.readline() == b"True\n"
        assert record.open()
        assert not record.change(add=["a"])
        process.kill()
    assert record.change(add=["a"])


def test_families_do_not_share_a_lock(record: OwnershipRecord, tmp_path: Path) -> None:
    other = OwnershipRecord(str(tmp_path), "qat")
    assert record.open()
    assert other.open()
    assert record.change(add=["a"])
    assert not other.units


@pytest.mark.parametrize("text", [b"", b"{", b'{"dra": 1}', b"\xff", b"[" * 9999])
def test_an_unreadable_file_is_set_aside(record: OwnershipRecord, text: bytes) -> None:
    Path(record.path).write_bytes(text)
    assert record.open()
    assert record.lost
    assert Path(f"{record.path}.bad").read_bytes() == text
    assert record.change(add=["a"])
    assert not record.lost


def test_the_file_of_a_later_version_is_an_error(record: OwnershipRecord) -> None:
    Path(record.path).write_text('{"apiVersion": "ownership.accelplane/v2", "dra": []}')
    with pytest.raises(OwnershipError, match=r"gpu\.json: found apiVersion 'ownership.accelplane/v2', expected"):
        record.open()


def test_a_failed_write_changes_nothing(record: OwnershipRecord, monkeypatch: pytest.MonkeyPatch) -> None:
    assert record.open()
    assert record.change(add=["a"])

    def fail(*_: object) -> None:
        raise OSError(28, "No space left on device")

    monkeypatch.setattr(os, "fsync", fail)
    with pytest.raises(OwnershipError, match=r"gpu\.json: No space left on device"):
        record.change(add=["b"])
    monkeypatch.undo()
    assert record.units == content(record) == {"a"}


def test_a_directory_that_cannot_be_created_is_an_error(tmp_path: Path) -> None:
    (tmp_path / "plugins").write_text("")
    with pytest.raises(OwnershipError, match="Not a directory"):
        OwnershipRecord(f"{tmp_path}/plugins/accelplane", "gpu").open()
