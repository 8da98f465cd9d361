"""Ports, FMEs and regions as read from sysfs, of both drivers."""

import os
import re
import shutil
from collections.abc import Callable
from pathlib import Path

import pytest
from bitstreams import INTERFACE, NLB0
from fpgatrees import PF, VF, Card, class_device, fme, function, one_port, port, with_vf
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st
from thoroughness import examples
from trees import link, write

from accelplane.fpga import FpgaError
from accelplane.fpga.drivers import DFL, OPAE, Driver, detect
from accelplane.fpga.ids import CRASHED, IdError
from accelplane.fpga.sysfs import (
    Scan,
    afu_id,
    interface_of,
    platform_devices,
    port_number,
    read_fme,
    read_port,
    scan,
)
from accelplane.host import Host, HostError

pytestmark = pytest.mark.memory

OTHER = "ce48969398f05f33946d560708be108a"
families = pytest.mark.parametrize("family", ["dfl", "opae"])


def driver_of(host: Host) -> Driver:
    driver = detect(host)
    assert driver is not None
    return driver


def scanned(root: Path) -> Scan:
    host = Host(root)
    return scan(host, driver_of(host))


def interface(card: Card) -> Path:
    """The file of the card's interface id."""
    return card.device(0) / "dfl-fme.0/dfl-fme-region.9/fpga_region/region9/compat_id"


def unreadable(path: Path) -> None:
    """Replaces a file by a directory."""
    path.unlink()
    path.mkdir()


def regions(found: Scan) -> list[tuple[str, str, list[str]]]:
    names: dict[tuple[str, str], list[str]] = {}
    for each, interface in found.ports:
        names.setdefault((interface, each.fme.name), []).append(each.name)
    return [(interface, fme_name, ports) for (interface, fme_name), ports in names.items()]


class TestScan:
    @families
    def test_a_port_and_its_fme_make_a_region(self, tmp_path: Path, family: str) -> None:
        card = one_port(tmp_path, family)
        found = scanned(tmp_path)
        assert found.faults == ()
        assert regions(found) == [(INTERFACE, card.name("fme", 0), [card.name("port", 0)])]
        ((port, _interface),) = found.ports
        assert port.fme.node == f"/dev/{card.name('fme', 0)}"
        assert port.node == f"/dev/{card.name('port', 0)}"
        assert port.pci.address == PF
        assert afu_id(Host(tmp_path), port) == NLB0

    @families
    def test_ports_of_one_fme_are_one_region_across_functions(self, tmp_path: Path, family: str) -> None:
        card = with_vf(tmp_path, family)
        found = scanned(tmp_path)
        assert found.faults == ()
        assert regions(found) == [(INTERFACE, card.name("fme", 0), [card.name("port", 0), card.name("port", 1)])]
        ports = [port for port, _interface in found.ports]
        assert [port.pci.address for port in ports] == [PF, VF]
        assert [port_number(port) for port in ports] == [0, 1]
        assert ports[1].pci.physical is not None
        assert ports[1].pci.physical.address == ports[1].fme.pci.address == PF

    @families
    def test_all_ports_of_a_class_device_are_found(self, tmp_path: Path, family: str) -> None:
        card = one_port(tmp_path, family)
        port(card, number=3, inside=1)
        assert regions(scanned(tmp_path)) == [
            (INTERFACE, card.name("fme", 0), [card.name("port", 0), card.name("port", 3)])
        ]

    def test_two_cards_are_two_regions(self, tmp_path: Path) -> None:
        one_port(tmp_path)
        second = Card(tmp_path, address="0000:82:00.0")
        function(second)
        class_device(second, 1)
        fme(second, 1, [OTHER], number=1)
        port(second, 1, number=1)
        assert regions(scanned(tmp_path)) == [
            (INTERFACE, "dfl-fme.0", ["dfl-port.0"]),
            (OTHER, "dfl-fme.1", ["dfl-port.1"]),
        ]

    def test_a_driver_without_devices_has_no_regions(self, tmp_path: Path) -> None:
        (tmp_path / "sys/class/fpga_region").mkdir(parents=True)
        write(tmp_path / "sys/class/fpga_region/other/dfl-port.0/id", "0")
        assert scanned(tmp_path) == Scan((), ())

    def test_an_unreadable_class_directory_fails_the_scan(self, tmp_path: Path) -> None:
        with pytest.raises(HostError, match="/sys/class/fpga: "):
            scan(Host(tmp_path), OPAE)

    def test_an_fme_with_only_released_ports_is_not_a_region(self, tmp_path: Path) -> None:
        card = one_port(tmp_path)
        shutil.rmtree(card.device(0) / "dfl-port.0")
        assert scanned(tmp_path) == Scan((), ())

    def test_a_pci_domain_may_have_five_digits(self, tmp_path: Path) -> None:
        card = Card(tmp_path, address="10000:81:00.0")
        function(card)
        class_device(card, 0)
        fme(card)
        port(card)
        assert scanned(tmp_path).ports[0][0].fme.pci.address == "10000:81:00.0"

    def test_a_crashed_card_has_the_id_of_crashed_ones(self, tmp_path: Path) -> None:
        card = one_port(tmp_path)
        fme(card, interfaces=[CRASHED])
        port(card, afu=CRASHED)
        ((found, interface),) = scanned(tmp_path).ports
        assert interface == CRASHED
        assert afu_id(Host(tmp_path), found) == CRASHED

    @pytest.mark.parametrize(
        ("break_", "problem"),
        [
            (lambda card: write(card.pci / "class", "0x0200\n"), "class: '0x0200', expected 0x120000"),
            (lambda card: write(card.pci / "vendor", ""), "vendor or device id is missing"),
            (lambda card: (card.root / "dev/dfl-port.0").unlink(), "/dev/dfl-port.0: no such device node"),
            (lambda card: (card.root / "dev/dfl-fme.0").unlink(), "/dev/dfl-fme.0: found neither this device node"),
            (lambda card: shutil.rmtree(card.device(0) / "dfl-fme.0"), "FMEs below .*: none; expected exactly one"),
            (lambda card: fme(card, number=1), "FMEs below .*: dfl-fme.0, dfl-fme.1; expected exactly one"),
            (lambda card: fme(card, interfaces=["12345"]), "interface id '12345': expected 32 hexadecimal"),
            (lambda card: fme(card, interfaces=[""]), "interface id '': expected 32 hexadecimal"),
            (lambda card: write(interface(card), b"\xff"), "not text"),
            (lambda card: interface(card).unlink(), "no interface id, expected one in dfl-fme-region"),
            (lambda card: write(card.device(0) / "dfl-port.0/id", "one"), "dfl-port.0/id: 'one', expected a number"),
            (lambda card: unreadable(card.device(0) / "dfl-port.0/id"), "dfl-port.0/id: Is a directory"),
        ],
        ids=[
            *("class", "vendor", "port's node", "FME's node", "no FME", "two FMEs", "short id", "empty id", "no text"),
            *("no id", "port number", "unreadable"),
        ],
    )
    def test_a_device_that_cannot_be_read_does_not_hide_the_others(
        self, tmp_path: Path, break_: Callable[[Card], object], problem: str
    ) -> None:
        card = one_port(tmp_path)
        second = Card(tmp_path, address="0000:82:00.0")
        function(second)
        class_device(second, 5)
        fme(second, 5, number=5)
        port(second, 5, number=5)
        break_(card)
        found = scanned(tmp_path)
        assert regions(found) == [(INTERFACE, "dfl-fme.5", ["dfl-port.5"])]
        (fault,) = found.faults
        assert fault.name == "dfl-port.0"
        assert re.search(problem, fault.problem)

    def test_a_class_device_that_cannot_be_listed_is_reported(self, tmp_path: Path) -> None:
        one_port(tmp_path)
        link(tmp_path / "sys/class/fpga_region/region7", "region7")
        found = scanned(tmp_path)
        assert len(found.ports) == 1
        assert [fault.name for fault in found.faults] == ["region7"]

    def test_a_link_of_udev_to_an_fme_is_resolved(self, tmp_path: Path) -> None:
        one_port(tmp_path)
        (tmp_path / "dev/dfl-fme.0").rename(tmp_path / "dev/fme-of-card-a")
        link(tmp_path / "dev/char/243:0", "../fme-of-card-a")
        assert scanned(tmp_path).ports[0][0].fme.node == "/dev/fme-of-card-a"


class TestSeveralInterfaces:
    """A DFL card has a child region, and with it a `compat_id`, for each port."""

    def cards(self, root: Path, interfaces: list[str], ports_num: int = 2) -> Scan:
        card = one_port(root)
        shutil.rmtree(card.device(0) / "dfl-fme.0")
        for place in (root / "sys/class/fpga_region").glob("region9*"):
            place.unlink()
        fme(card, interfaces=interfaces, ports=ports_num)
        port(card, number=1, inside=1)
        return scanned(root)

    def test_equal_interface_ids_are_one_region(self, tmp_path: Path) -> None:
        found = self.cards(tmp_path, [INTERFACE, INTERFACE])
        assert regions(found) == [(INTERFACE, "dfl-fme.0", ["dfl-port.0", "dfl-port.1"])]

    def test_ports_with_different_interface_ids_have_different_regions(self, tmp_path: Path) -> None:
        # dfl-fme-region.9 and .10: numeric, not alphabetic order.
        found = self.cards(tmp_path, [OTHER, INTERFACE])
        assert regions(found) == [(OTHER, "dfl-fme.0", ["dfl-port.0"]), (INTERFACE, "dfl-fme.0", ["dfl-port.1"])]

    @pytest.mark.parametrize("ports_num", [1, 3])
    def test_the_region_is_unknown_without_one_interface_id_per_port(self, tmp_path: Path, ports_num: int) -> None:
        found = self.cards(tmp_path, [OTHER, INTERFACE], ports_num)
        assert found.ports == ()
        assert [fault.name for fault in found.faults] == ["dfl-port.0", "dfl-port.1"]
        assert f"ambiguous interface id, dfl-fme.0 has {OTHER}, {INTERFACE}: found" in found.faults[0].problem

    def test_the_region_is_unknown_without_a_port_number(self, tmp_path: Path) -> None:
        self.cards(tmp_path, [OTHER, INTERFACE])
        (Card(tmp_path).device(0) / "dfl-port.1/id").unlink()
        found = scanned(tmp_path)
        assert regions(found) == [(OTHER, "dfl-fme.0", ["dfl-port.0"])]
        with pytest.raises(FpgaError, match="no such file, expected the port's number"):
            port_number(read_port(Host(tmp_path), "dfl-port.1"))


class TestOneDevice:
    @families
    @pytest.mark.parametrize("where", ["", "/dev/", "/dev/by-name/"])
    def test_a_port_is_read_by_name_path_or_link(self, tmp_path: Path, family: str, where: str) -> None:
        card = one_port(tmp_path, family)
        name = card.name("port", 0)
        link(tmp_path / "dev/by-name" / name, f"../{name}")
        host = Host(tmp_path)
        found = read_port(host, f"{where}{name}")
        assert found.driver is (DFL if family == "dfl" else OPAE)
        assert (found.name, found.node) == (name, f"{where or '/dev/'}{name}")
        assert found.path == f"/{card.device(0).relative_to(tmp_path)}/{name}"
        assert (found.dev, found.number) == ("244:0", "0")
        assert interface_of(found) == INTERFACE
        assert found.fme == read_fme(host, card.name("fme", 0))

    def test_all_properties_of_sysfs_are_read(self, tmp_path: Path) -> None:
        with_vf(tmp_path)
        vf = read_port(Host(tmp_path), "dfl-port.1").pci
        assert (vf.address, vf.vendor, vf.device, vf.cls, vf.cpus, vf.numa, vf.driver, vf.vfs) == (
            *(VF, "0x8086", "0x09c4", "0x120000", "0-7", "1", "dfl-pci", ""),
        )
        assert vf.physical is not None
        assert (vf.physical.address, vf.physical.vfs, vf.physical.vfs_limit) == (PF, "0", "1")
        found = read_fme(Host(tmp_path), "dfl-fme.0")
        assert (found.bitstream_id, found.bitstream_metadata, found.ports_num, found.socket_id) == (
            *("0x123000200000185", "0x19011011", "2", "0"),
        )

    @pytest.mark.parametrize(
        ("text", "problem"),
        [
            ("null", r"/dev/null': not an FPGA port, expected a device node called intel-fpga-port\.N or dfl-port\.N"),
            ("/dev/dfl-fme.0", "not an FPGA port"),
            ("dfl-port.7", "/dev/dfl-port.7: no such device node; load the FPGA driver"),
            ("dfl-port.8", "/dev/dfl-port.8: no FPGA port dfl-port.8"),
            ("dfl-port.9", "/dev/dfl-port.9: not a character device"),
            ("", "not an FPGA port"),
        ],
    )
    def test_other_devices_are_rejected_as_ports(self, tmp_path: Path, text: str, problem: str) -> None:
        one_port(tmp_path)
        write(tmp_path / "dev/dfl-port.8", "")
        os.mkfifo(tmp_path / "dev/dfl-port.9")
        with pytest.raises(FpgaError, match=problem):
            read_port(Host(tmp_path), text)

    def test_a_directory_replaces_a_device_node_below_a_root(self, tmp_path: Path) -> None:
        one_port(tmp_path)
        expected = read_port(Host(tmp_path), "dfl-port.0")
        for name in ("dfl-port.0", "dfl-fme.0"):
            (tmp_path / "dev" / name).unlink()
            (tmp_path / "dev" / name).mkdir()
        assert read_port(Host(tmp_path), "dfl-port.0") == expected

    @pytest.mark.skipif(os.geteuid() != 0, reason="only root makes device nodes")
    def test_a_device_node_is_found_by_its_number(self, tmp_path: Path) -> None:
        card = one_port(tmp_path)
        for name, minor in (("dfl-port.0", 0), ("dfl-port.4", 4)):
            (tmp_path / "dev" / name).unlink(missing_ok=True)
            os.mknod(tmp_path / "dev" / name, 0o020600, os.makedev(244, minor))
        link(tmp_path / "sys/dev/char/244:4", card.device(0) / "dfl-port.0")
        host = Host(tmp_path)
        assert read_port(host, "dfl-port.4").name == "dfl-port.0"
        assert read_port(host, "dfl-port.0").name == "dfl-port.0"  # by its name: the tree has no number for it
        write(card.device(0) / "dfl-port.0/dev", "244:9")
        with pytest.raises(FpgaError, match="with device number 244:0"):
            read_port(host, "dfl-port.0")

    @pytest.mark.parametrize("text", ["", "0" * 31, "zz" * 16, "0x" + NLB0])
    def test_an_invalid_afu_id_is_an_error_of_its_port(self, tmp_path: Path, text: str) -> None:
        write(one_port(tmp_path).device(0) / "dfl-port.0/afu_id", text)
        host = Host(tmp_path)
        with pytest.raises(IdError, match=r"dfl-port\.0/afu_id: AFU id .*: expected 32"):
            afu_id(host, read_port(host, "dfl-port.0"))

    def test_platform_devices_are_found_by_name(self, tmp_path: Path) -> None:
        assert platform_devices(Host(tmp_path)) == ([], [])
        for name in ("dfl-port.1", "dfl-port.0", "dfl-fme.0", "intel-fpga-port.2", "dfl-fme-region.1", "serial8250"):
            (tmp_path / "sys/bus/platform/devices" / name).mkdir(parents=True)
        assert platform_devices(Host(tmp_path)) == (["dfl-fme.0"], ["dfl-port.0", "dfl-port.1", "intel-fpga-port.2"])


@settings(suppress_health_check=[HealthCheck.function_scoped_fixture], deadline=None, max_examples=examples(50))
@given(data=st.data())
def test_no_file_content_stops_a_scan(data: st.DataObject, tmp_path: Path) -> None:
    root = tmp_path / "tree"
    shutil.rmtree(root, ignore_errors=True)
    with_vf(root)
    files = sorted(path for path in root.rglob("*") if path.is_file() and not path.is_symlink())
    for path in data.draw(st.lists(st.sampled_from(files), max_size=4, unique=True)):
        content = data.draw(st.one_of(st.none(), st.binary(max_size=40), st.text("0123456789abcdef-", max_size=40)))
        if content is None:
            path.unlink()
        else:
            write(path, content)
    found = scanned(root)
    names = {each.name for each, _interface in found.ports} | {fault.name for fault in found.faults}
    assert names == {"dfl-port.0", "dfl-port.1"}
    for each, _interface in found.ports:
        try:
            afu_id(Host(root), each)
        except (FpgaError, HostError) as error:
            problem = str(error)
            assert problem.isprintable()
