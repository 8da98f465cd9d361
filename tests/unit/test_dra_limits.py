"""Claims at the same time, and limits: of calls, claims, files and objects."""

import asyncio
import errno
import os
import stat
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import msgspec
import pytest
from draclaims import UnitOffers, World, devices_of, error_of, ref
from trees import gpu_card, write

from accelplane.descriptors import read_limited
from accelplane.devices import Unit, UnitNode
from accelplane.dra import claims, durable, journal
from accelplane.dra.journal import Entry, Holding, Journal, JournalError
from accelplane.dra.model import ClaimError
from accelplane.plugins.gpu import GpuPlugin

pytestmark = pytest.mark.memory


@pytest.fixture
def world(tmp_path: Path) -> World:
    for index in (0, 1):
        gpu_card(tmp_path, index)
    return World(tmp_path, GpuPlugin())


@pytest.fixture
def book(tmp_path: Path) -> Journal:
    found = Journal(str(tmp_path / "driver"))
    found.open()
    return found


def entry(uid: str, **fields: Any) -> Entry:
    holding = Holding(request="r", pool="p", device="d", unit="0000:03:00.0")
    return Entry(**{"uid": uid, "state": "prepared", "boot": "b", "devices": [holding], **fields})


def raising(error: Exception) -> Any:
    def fail(*_arguments: Any, **_options: Any) -> bytes:
        raise error

    return fail


def save(book: Journal, *entries: Entry) -> Mapping[str, Entry]:
    with book.lock():
        book.entries()
        for each in entries:
            book.save(each)
        return book.entries()


async def test_one_of_two_claims_gets_a_unit_at_the_same_time(world: World) -> None:
    preparer = await world.start()
    names = [world.claim(uid, world.device()) for uid in ("a1", "b1", "c1")]

    answers = await preparer.prepare(names)

    refused = [uid for uid, answer in answers.items() if isinstance(answer, ClaimError)]
    assert len(refused) == 2
    (holder,) = answers.keys() - set(refused)
    assert all(f"held by claim shop/claim-{holder}" in error_of(answers[uid]) for uid in refused)
    assert list(world.journal()) == [holder]


async def test_unit_passes_from_one_claim_to_the_next_at_the_same_time(world: World) -> None:
    preparer = await world.start()
    one, two = (world.claim(uid, world.device()) for uid in ("a1", "b1"))
    await preparer.prepare([one])

    ended, answer, again = await asyncio.gather(
        preparer.unprepare([one]), preparer.prepare([two]), preparer.prepare([one])
    )

    assert ended == {"a1": None}
    held = [uid for uid, found in ({**answer, **again}).items() if not isinstance(found, ClaimError)]
    assert list(world.journal()) == held
    assert len(held) <= 1


async def test_instances_never_prepare_one_unit_twice(world: World) -> None:
    preparers = [await world.start() for _number in range(3)]
    names = [world.claim(f"a{number}", world.device()) for number in range(3)]

    answers = await asyncio.gather(
        *(preparer.prepare([claim]) for preparer, claim in zip(preparers, names, strict=True))
    )

    prepared = [uid for answer in answers for uid, found in answer.items() if not isinstance(found, ClaimError)]
    assert len(prepared) == 1
    assert list(world.journal()) == prepared


async def test_claim_over_the_number_of_prepared_claims_is_refused(
    world: World, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(journal, "MAX_CLAIMS", 1)
    preparer = await world.start()
    await preparer.prepare([world.claim("a1", world.device(0))])

    answer = await preparer.prepare([world.claim("b1", world.device(1))])

    assert "found 1 prepared claims, expected less" in error_of(answer["b1"])
    await preparer.unprepare([ref("a1")])
    devices_of((await preparer.prepare([ref("b1")]))["b1"])


async def test_claim_with_too_many_devices_is_refused(world: World, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(claims, "MAX_RESULTS", 1)
    preparer = await world.start()

    answer = await preparer.prepare([world.claim("a1", world.device(0), world.device(1))])

    assert "has 2 devices, expected at most 1" in error_of(answer["a1"])


async def test_object_that_is_no_claim_is_an_error(world: World) -> None:
    preparer = await world.start()
    claim = world.claim("a1", world.device())
    world.api.objects[world.api.path(claim)]["status"] = {"allocation": {"devices": {"results": [{"request": 3}]}}}

    assert "cannot be read" in error_of((await preparer.prepare([claim]))["a1"])
    world.api.objects[world.api.path(claim)]["status"] = {}
    assert "is not allocated" in error_of((await preparer.prepare([claim]))["a1"])


@pytest.mark.parametrize("uid", ["", ".", "..", "a/b", "-a", "a" * 65, "a\n"])
def test_uid_that_cannot_be_a_file_name_is_invalid(uid: str) -> None:
    assert not journal.valid_uid(uid)


def test_entry_that_is_too_large_is_not_written(book: Journal) -> None:
    with pytest.raises(JournalError, match="expected at most 1048576"):
        save(book, entry("a1", error="x" * journal.MAX_FILE))
    assert save(book) == {}


def test_file_that_is_too_large_is_damaged(book: Journal, tmp_path: Path) -> None:
    save(book, entry("a1"))
    path = tmp_path / "driver/claims/a1.json"
    durable.write(str(path), path.read_bytes() + b" " * journal.MAX_FILE, 0o600)

    assert save(book) == {}
    assert list(book.damaged()) == ["a1"]


@pytest.mark.parametrize(
    "content",
    [
        b"", b"[]", b"{}", b"\xff", b"[" * 100_000, b'{"apiVersion": "journal.accelplane/v2", "uid": "a1"}',
        b'{"apiVersion": "journal.accelplane/v1", "uid": "b1", "state": "prepared", "boot": ""}',
        b'{"apiVersion": "journal.accelplane/v1", "uid": "a1", "state": "done", "boot": ""}',
        b'{"apiVersion": "journal.accelplane/v1", "uid": "a1", "state": "prepared", "boot": "", "undo": [{}]}',
    ],
)  # fmt: skip
def test_content_that_is_no_entry_is_set_aside(book: Journal, tmp_path: Path, content: bytes) -> None:
    write(tmp_path / "driver/claims/a1.json", content)

    assert list(save(book, entry("c1"))) == ["c1"]
    assert list(book.damaged()) == ["a1"]
    assert (tmp_path / "driver/claims/a1.bad").read_bytes() == content


def test_links_and_other_files_are_no_entries(book: Journal, tmp_path: Path) -> None:
    directory = tmp_path / "driver/claims"
    secret = write(tmp_path / "secret.json", "{}")
    (directory / "a1.json").symlink_to(secret)
    os.mkfifo(directory / "b1.json")
    write(directory / "README", "")

    assert save(book) == {}
    assert sorted(book.damaged()) == ["a1", "b1"]
    assert secret.read_text() == "{}"


def test_error_of_this_process_does_not_set_files_aside(book: Journal, monkeypatch: pytest.MonkeyPatch) -> None:
    write(Path(book._claims) / "a1.json", msgspec.json.encode(entry("a1")))

    with monkeypatch.context() as patched:
        patched.setattr(journal, "read_limited", raising(OSError(errno.EMFILE, os.strerror(errno.EMFILE))))
        with pytest.raises(JournalError, match="Too many open files"):
            save(book)
    assert list(save(book)) == ["a1"]


def test_changes_of_another_instance_are_seen_although_the_directory_has_the_same_time(
    book: Journal, tmp_path: Path
) -> None:
    """The time of a directory has the resolution of the kernel's tick before Linux 6.13."""
    other = Journal(book._directory)
    path = tmp_path / "driver/claims"

    def at_the_same_time(journal: Journal, *entries: Entry) -> list[str]:
        with journal.lock():
            for each in entries:
                journal.save(each)
            os.utime(path, ns=(1, 1))
        return list(save(journal))

    assert at_the_same_time(book, entry("a1")) == ["a1"]
    assert at_the_same_time(other, entry("b1")) == ["a1", "b1"]
    assert list(save(book)) == ["a1", "b1"]
    with other.lock():
        other.remove("a1")
        os.utime(path, ns=(1, 1))
    assert list(save(book)) == ["b1"]
    assert at_the_same_time(other, entry("b1", error="e")) == ["b1"]
    assert save(book)["b1"].error == "e"


def test_files_are_read_only_after_changes_of_others(book: Journal, monkeypatch: pytest.MonkeyPatch) -> None:
    save(book, entry("a1"), entry("b1"))
    other = Journal(book._directory)
    save(other)
    save(other, entry("c1"))
    read = list[str]()

    def record(path: str, *arguments: Any, **options: Any) -> bytes:
        read.append(os.path.basename(path))
        return read_limited(path, *arguments, **options)

    monkeypatch.setattr(journal, "read_limited", record)
    listdir = os.listdir
    monkeypatch.setattr(os, "listdir", lambda path: (read.append("directory"), listdir(path))[1])
    assert list(save(book)) == ["a1", "b1", "c1"]
    assert read == ["directory", "c1.json"]
    assert save(book, entry("a1", error="e")) is save(book)
    assert read == ["directory", "c1.json"]


def test_change_that_fails_is_read_again(book: Journal, monkeypatch: pytest.MonkeyPatch) -> None:
    save(book, entry("a1"))
    with monkeypatch.context() as patched:
        # The file is replaced, and the directory cannot be flushed.
        patched.setattr(durable, "_flush", raising(OSError(errno.EIO, os.strerror(errno.EIO))))
        with pytest.raises(JournalError, match="error"):
            save(book, entry("a1", error="e"))
    assert save(book)["a1"].error == "e"


def test_lock_of_another_process_is_waited_for_and_then_named(book: Journal, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(journal, "_LOCK_TIMEOUT", 0.02)

    with book.lock(), pytest.raises(JournalError, match=r"journal.lock: locked by another process for 0.02 s"):
        save(Journal(book._directory))


def test_journal_is_private_and_cdi_files_are_readable(book: Journal, tmp_path: Path) -> None:
    save(book, entry("a1"))
    durable.write(str(tmp_path / "driver/public"), b"", 0o644)

    modes = [
        stat.S_IMODE((tmp_path / "driver" / name).stat().st_mode) for name in ("claims", "claims/a1.json", "public")
    ]
    assert modes == [0o700, 0o600, 0o644]


async def test_directory_that_cannot_be_used_is_an_error_at_the_start(world: World) -> None:
    write(world.directory / "claims", "")

    with pytest.raises(JournalError, match="File exists"):
        await world.start()


async def test_many_claims_at_the_same_time(tmp_path: Path) -> None:
    units: list[Unit] = []
    for number in range(64):
        write(tmp_path / f"dev/accel{number}", "")
        unit = f"0000:{number:02x}:00.0"
        units.append(Unit(id=unit, health=unit, nodes=[UnitNode(f"/dev/accel{number}")]))
    world = World(tmp_path, UnitOffers(*units))
    preparer = await world.start()
    names = [world.claim(f"a{number}", world.device(number)) for number in range(64)]

    answers = await preparer.prepare(names)

    assert len([devices_of(answer) for answer in answers.values()]) == 64
    assert set((await preparer.unprepare(names)).values()) == {None}
    assert world.leftovers() == []
