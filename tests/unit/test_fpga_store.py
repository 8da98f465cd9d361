"""The bitstream store: search paths and installation."""

import os
from pathlib import Path

import pytest
from bitstreams import HASH, INTERFACE, NLB0, NLB3, aocx, gbs, metadata
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st
from trees import link, write

from accelplane.fpga import FpgaError
from accelplane.fpga.bitstream import open_bitstream
from accelplane.fpga.ids import IdError
from accelplane.fpga.store import find, install, install_path, open_installed
from accelplane.host import Host, HostError

pytestmark = pytest.mark.memory

STORE = "srv/intel.com/fpga"


@pytest.fixture
def host(tmp_path: Path) -> Host:
    return Host(tmp_path)


def test_a_bitstream_is_found_by_region_and_afu(tmp_path: Path, host: Host) -> None:
    write(tmp_path / STORE / INTERFACE / f"{NLB0}.gbs", gbs(raw=b"zero"))
    write(tmp_path / STORE / INTERFACE / f"{HASH}.aocx", aocx())
    link(tmp_path / STORE / "arria10-nlb0.gbs", f"{INTERFACE}/{NLB0}.gbs")
    with open_installed(host, INTERFACE.upper(), NLB0) as bitstream:
        assert bitstream.read().tobytes() == b"zero"
        assert bitstream.path == f"/{STORE}/{INTERFACE}/{NLB0}.gbs"
    with open_installed(host, INTERFACE, HASH) as bitstream:
        assert bitstream.unique == HASH


def test_gbs_has_priority_and_its_errors_are_final(tmp_path: Path, host: Host) -> None:
    write(tmp_path / STORE / INTERFACE / f"{NLB0}.aocx", aocx())
    assert find(host, INTERFACE, NLB0).endswith(".aocx")
    write(tmp_path / STORE / INTERFACE / f"{NLB0}.gbs", b"broken")
    with pytest.raises(FpgaError, match=r"\.gbs: 6 bytes"), open_installed(host, INTERFACE, NLB0):
        pass


def test_a_missing_bitstream_is_reported_with_both_paths(host: Host) -> None:
    with pytest.raises(
        FpgaError,
        match=rf"AFU {NLB0} in region {INTERFACE}: found neither /{STORE}/.*\.gbs nor .*\.aocx; use fpga_tool install",
    ):
        find(host, INTERFACE, NLB0)


@pytest.mark.parametrize("afu", ["../../../etc/passwd", "..", "", f"{NLB0}/../x", "a" * 41, "1234567"])
def test_only_ids_are_looked_up(host: Host, afu: str) -> None:
    with pytest.raises(IdError, match=r"AFU .*: expected 8 to 40"):
        find(host, INTERFACE, afu)
    with pytest.raises(IdError, match=r"region .*: expected 8 to 40"):
        find(host, afu, NLB0)


@settings(suppress_health_check=[HealthCheck.function_scoped_fixture])
@given(region=st.text(), afu=st.text())
def test_no_id_resolves_outside_the_store(region: str, afu: str, tmp_path: Path) -> None:
    with pytest.raises(FpgaError):
        find(Host(tmp_path), region, afu)


def test_only_links_within_the_store_are_followed(tmp_path: Path, host: Host) -> None:
    region = tmp_path / STORE / INTERFACE
    write(region / "kept" / "nlb0", gbs())
    link(region / f"{NLB0}.gbs", "kept/nlb0")
    assert find(host, INTERFACE, NLB0).endswith(f"{NLB0}.gbs")
    write(tmp_path / "home/user/nlb3.gbs", gbs())
    link(region / f"{NLB3}.gbs", "/home/user/nlb3.gbs")
    with pytest.raises(FpgaError, match=r"resolves to /home/user/nlb3\.gbs, expected a file within the store"):
        find(host, INTERFACE, NLB3)


def test_the_store_itself_may_be_a_link(tmp_path: Path, host: Host) -> None:
    write(tmp_path / "data/fpga" / INTERFACE / f"{NLB0}.gbs", gbs())
    link(tmp_path / STORE, "/data/fpga")
    assert find(host, INTERFACE, NLB0) == f"/{STORE}/{INTERFACE}/{NLB0}.gbs"


def test_a_link_loop_is_an_error(tmp_path: Path, host: Host) -> None:
    link(tmp_path / STORE / INTERFACE / f"{NLB0}.gbs", f"{NLB0}.gbs")
    with pytest.raises((FpgaError, HostError), match="links"):
        find(host, INTERFACE, NLB0)


@pytest.mark.parametrize(("name", "content", "unique"), [("a.gbs", gbs(), NLB0), ("a.aocx", aocx(), HASH)])
def test_an_installed_copy_is_readable_by_all_users(
    tmp_path: Path, host: Host, name: str, content: bytes, unique: str
) -> None:
    source = write(tmp_path / name, content)
    umask = os.umask(0o077)
    try:
        with open_bitstream(str(source)) as bitstream:
            path = install(host, bitstream)
            assert path == install_path(bitstream) == f"/{STORE}/{INTERFACE}/{unique}{source.suffix}"
    finally:
        os.umask(umask)
    copy = tmp_path / path[1:]
    assert copy.read_bytes() == content
    assert copy.stat().st_mode & 0o777 == 0o644
    assert {directory.stat().st_mode & 0o777 for directory in (copy.parent, copy.parents[1], copy.parents[2])} == {
        0o755
    }
    assert os.listdir(copy.parent) == [copy.name]
    assert find(host, INTERFACE, unique) == path


def test_files_are_overwritten_only_with_force(tmp_path: Path, host: Host) -> None:
    existing = write(tmp_path / STORE / INTERFACE / f"{NLB0}.gbs", b"older")
    with open_bitstream(str(write(tmp_path / "new.gbs", gbs()))) as bitstream:
        for dry_run in (False, True):
            with pytest.raises(FpgaError, match=r"file exists; use -force to overwrite it"):
                install(host, bitstream, dry_run=dry_run)
        install(host, bitstream, force=True, dry_run=True)
        assert existing.read_bytes() == b"older"
        install(host, bitstream, force=True)
    assert existing.read_bytes() == gbs()
    assert os.listdir(existing.parent) == [existing.name]


def test_a_dry_run_writes_nothing(tmp_path: Path, host: Host) -> None:
    with open_bitstream(str(write(tmp_path / "a.gbs", gbs()))) as bitstream:
        assert install(host, bitstream, dry_run=True) == f"/{STORE}/{INTERFACE}/{NLB0}.gbs"
    assert not (tmp_path / "srv").exists()


@pytest.mark.parametrize("text", [metadata("", NLB0), metadata("../../../etc", NLB0), metadata(afu="x/y")])
def test_a_file_without_ids_is_not_installed(tmp_path: Path, host: Host, text: bytes) -> None:
    with open_bitstream(str(write(tmp_path / "a.gbs", gbs(text)))) as bitstream:
        assert install_path(bitstream) == ""
        with pytest.raises(FpgaError, match="cannot install: interface id is"):
            install(host, bitstream)


@pytest.mark.parametrize("force", [False, True])
def test_temporary_files_of_a_killed_install_are_removed(tmp_path: Path, host: Host, force: bool) -> None:
    half = write(tmp_path / STORE / INTERFACE / f".{NLB0}.gbs.new", gbs()[:20])
    with open_bitstream(str(write(tmp_path / "a.gbs", gbs()))) as bitstream:
        path = install(host, bitstream, force=force)
    assert os.listdir(half.parent) == [f"{NLB0}.gbs"]
    assert (tmp_path / path[1:]).read_bytes() == gbs()


def test_a_damaged_design_is_not_installed(tmp_path: Path, host: Host) -> None:
    content = bytearray(aocx(gbs(raw=os.urandom(1_000_000))))
    content[content.index(b"\x1f\x8b") + 900_000] ^= 0xFF
    for dry_run in (True, False):
        with (
            open_bitstream(str(write(tmp_path / "a.aocx", bytes(content)))) as bitstream,
            pytest.raises(FpgaError, match=r"a\.aocx: its section \.acl\.gbs\.gz cannot be unpacked"),
        ):
            install(host, bitstream, dry_run=dry_run)
    assert not (tmp_path / "srv").exists()


def test_a_link_is_replaced_and_its_target_unchanged(tmp_path: Path, host: Host) -> None:
    precious = write(tmp_path / "precious", "precious")
    existing = tmp_path / STORE / INTERFACE / f"{NLB0}.gbs"
    link(existing, "/precious")
    with open_bitstream(str(write(tmp_path / "a.gbs", gbs()))) as bitstream:
        with pytest.raises(FpgaError):
            install(host, bitstream)
        install(host, bitstream, force=True)
    assert precious.read_text() == "precious"
    assert (existing.is_symlink(), existing.read_bytes()) == (False, gbs())


def test_an_unwritable_store_is_reported(tmp_path: Path, host: Host) -> None:
    write(tmp_path / "srv", "a file where a directory should be")
    with (
        open_bitstream(str(write(tmp_path / "a.gbs", gbs()))) as bitstream,
        pytest.raises(FpgaError, match=r"fpga/.*\.gbs: cannot install: Not a directory"),
    ):
        install(host, bitstream)
