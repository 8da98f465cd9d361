"""The OCI hook with requests of containers."""

import errno
import fcntl
import json
import os
import signal
import subprocess
import sys
from pathlib import Path

import pytest
from bitstreams import HASH, INTERFACE, NLB0, NLB3, aocx, gbs, metadata
from fpgadriver import Driver
from fpgatrees import Card, fme, one_port, port, with_vf
from trees import write

from accelplane.fpga import FpgaError
from accelplane.fpga.allocation import HOOK, hook_arguments
from accelplane.fpga.hook import assign_ports, read_request, run
from accelplane.fpga.ids import CRASHED
from accelplane.fpga.program import RetryPolicy, TimedOut
from accelplane.fpga.request import Pair, PortDevice, Request
from accelplane.fpga.statedir import STATE_DIRECTORY
from accelplane.host import Host

pytestmark = pytest.mark.memory

OTHER = "ce48969398f05f33946d560708be108a"
QUICK = RetryPolicy(timeout=30, attempts=4, interval=0.001)


def oci_state(*afus: str, ports: int = 1, region: str = INTERFACE, family: str = "dfl") -> Request:
    pairs = tuple(Pair(number, region, afu) for number, afu in enumerate(afus, 1))
    card = Card(Path(), family)
    return Request(pairs, tuple(PortDevice(card.name("port", number), f"244:{number}") for number in range(ports)))


def stored(root: Path, afu: str, content: bytes | None = None, extension: str = ".gbs", raw: bytes = b"") -> None:
    content = content or gbs(metadata(afu=afu), raw or afu.encode())
    write(root / "srv/intel.com/fpga" / INTERFACE / f"{afu}{extension}", content)


class TestRun:
    @pytest.mark.parametrize("family", ["dfl", "opae"])
    def test_a_region_gets_the_afu(self, tmp_path: Path, family: str) -> None:
        card = one_port(tmp_path, family)
        stored(tmp_path, NLB3)
        driver = Driver(card, NLB3)
        request = oci_state(NLB3, family=family)
        run(Host(tmp_path), request, call=driver, retry=QUICK)
        assert driver.programmed == [(card.name("fme", 0), 0, NLB3.encode())]
        # The runtime runs the hook once for each region device: the second time there is nothing to do.
        run(Host(tmp_path), request, call=driver, retry=QUICK)
        assert len(driver.programmed) == 1

    def test_a_programmed_function_needs_no_bitstream(self, tmp_path: Path) -> None:
        driver = Driver(one_port(tmp_path), NLB3)
        run(Host(tmp_path), oci_state(NLB0), call=driver)
        assert driver.calls == []

    def test_pairs_after_a_programmed_one_are_programmed(self, tmp_path: Path) -> None:
        card = with_vf(tmp_path)
        stored(tmp_path, NLB0)
        driver = Driver(card, NLB0)
        run(Host(tmp_path), oci_state(NLB0, NLB0, ports=2), call=driver, retry=QUICK)
        assert driver.programmed == [("dfl-fme.0", 1, NLB0.encode())]

    def test_two_functions_of_one_region_get_one_port_each(self, tmp_path: Path) -> None:
        card = with_vf(tmp_path)
        stored(tmp_path, NLB0)
        stored(tmp_path, NLB3)
        driver = Driver(card, NLB3)
        swapped = oci_state(NLB3, NLB3, ports=2)
        run(Host(tmp_path), swapped, call=driver, retry=QUICK)
        assert [(pair.number, port.name) for pair, port in assign_ports(Host(tmp_path), swapped)] == [
            (1, "dfl-port.0"),
            (2, "dfl-port.1"),
        ]
        assert [number for _name, number, _data in driver.programmed] == [0]

    def test_an_opencl_design_is_programmed_by_its_hash(self, tmp_path: Path) -> None:
        card = one_port(tmp_path)
        stored(tmp_path, HASH, aocx(gbs(metadata(afu=NLB3), b"opencl")), ".aocx")
        driver = Driver(card, NLB3)
        run(Host(tmp_path), oci_state(HASH), call=driver, retry=QUICK)
        assert driver.programmed == [("dfl-fme.0", 0, b"opencl")]

    @pytest.mark.parametrize(
        ("afu", "answers", "problem"),
        [
            (
                NLB3,
                [],
                rf"^FPGA_AFU_1 in dfl-port\.0: no bitstream for AFU {NLB3} in region {INTERFACE}: found neither /srv",
            ),
            ("a" * 32, [], r"aaa\.gbs: 6 bytes, expected a GBS header of 20"),
            ("b" * 32, [], rf"found id {NLB0} in the file, expected b{{32}}; the file was renamed"),
            ("c" * 32, [], rf"made for regions with interface id {OTHER}, that of dfl-port\.0 is {INTERFACE}"),
            ("d" * 32, [errno.EIO], r"dfl-fme\.0: programming failed: .*\(EIO\)"),
            ("d" * 32, [], r"AFU id is e{32} after programming .*, expected d{32}"),
            (HASH, [], r"found id b{40} in the file, expected 40007c"),
        ],
        ids=["missing", "broken", "renamed", "other card", "refused", "something else came out", "other design"],
    )
    def test_errors_have_one_line(self, tmp_path: Path, afu: str, answers: list[int], problem: str) -> None:
        card = one_port(tmp_path)
        stored(tmp_path, "a" * 32, b"broken")
        stored(tmp_path, "b" * 32, gbs())
        stored(tmp_path, "c" * 32, gbs(metadata(OTHER, "c" * 32)))
        stored(tmp_path, "d" * 32)
        stored(tmp_path, HASH, aocx(rand_hash="b" * 40), ".aocx")
        with pytest.raises(FpgaError, match=problem) as caught:
            run(Host(tmp_path), oci_state(afu), call=Driver(card, "e" * 32, answers), retry=QUICK)
        assert str(caught.value).isprintable()

    def test_nothing_is_programmed_before_every_pair_has_a_port(self, tmp_path: Path) -> None:
        card = with_vf(tmp_path)
        stored(tmp_path, NLB3)
        driver = Driver(card, NLB3)
        request = Request((Pair(1, INTERFACE, NLB3), Pair(2, OTHER, NLB3)), oci_state(ports=2).ports)
        with pytest.raises(
            FpgaError,
            match=rf"^FPGA_REGION_2: found no port of region {OTHER} in the container: dfl-port\.0 has region "
            rf"{INTERFACE}; dfl-port\.1 has region {INTERFACE}; dfl-port\.0 is assigned to FPGA_REGION_1$",
        ):
            run(Host(tmp_path), request, call=driver)
        assert driver.calls == []

    def test_an_unreadable_port_is_not_used_and_reported(self, tmp_path: Path) -> None:
        one_port(tmp_path)
        request = Request((Pair(1, OTHER, NLB3),), (PortDevice("dfl-port.7", "244:7"), *oci_state().ports))
        with pytest.raises(
            FpgaError, match=r"in the container: /dev/dfl-port\.7: no such device node.*; dfl-port\.0 has reg"
        ):
            run(Host(tmp_path), request)

    @pytest.mark.parametrize("family", ["dfl", "opae"])
    def test_a_device_with_another_number_than_the_port_on_the_host_is_not_used(
        self, tmp_path: Path, family: str
    ) -> None:
        card = with_vf(tmp_path, family)
        stored(tmp_path, NLB3)
        driver = Driver(card, NLB3)
        name = card.name("port", 0)
        for number in ("244:1", "7:0", ":"):
            request = Request((Pair(1, INTERFACE, NLB3),), (PortDevice(name, number),))
            with pytest.raises(
                FpgaError, match=rf"/dev/{name}: found device number {number} in the container, on the "
            ):
                run(Host(tmp_path), request, call=driver, retry=QUICK)
        assert driver.calls == []
        right = oci_state(NLB3, family=family)
        run(Host(tmp_path), right._replace(ports=(PortDevice(name, "7:0"), *right.ports)), call=driver, retry=QUICK)
        assert [number for _name, number, _data in driver.programmed] == [0]

    def test_a_port_without_a_device_number_in_sysfs_is_not_used(self, tmp_path: Path) -> None:
        (port(one_port(tmp_path)) / "dev").unlink()
        with pytest.raises(FpgaError, match=r"device number 244:0 in the container, on the host '' of dfl-port\.0"):
            assign_ports(Host(tmp_path), oci_state(NLB0))

    def test_a_crashed_card_is_reported_as_crashed(self, tmp_path: Path) -> None:
        fme(one_port(tmp_path), interfaces=[CRASHED])
        with pytest.raises(FpgaError, match=r"dfl-port\.0 has region f{32} \(the card has crashed\)$"):
            assign_ports(Host(tmp_path), oci_state(NLB0))

    def test_ports_of_different_regions_are_distinguished(self, tmp_path: Path) -> None:
        card = one_port(tmp_path)
        fme(card, interfaces=[OTHER, INTERFACE], ports=2)
        port(card, number=1, inside=1)
        (claim,) = assign_ports(Host(tmp_path), oci_state(NLB0, ports=2))
        assert claim[1].name == "dfl-port.1"

    def test_a_hanging_driver_ends_with_a_timeout(self, tmp_path: Path) -> None:
        one_port(tmp_path)
        stored(tmp_path, NLB3)
        read_end, write_end = os.pipe()
        try:
            with pytest.raises(FpgaError, match=r"^FPGA_AFU_1 in dfl-port\.0: programming .* took more than 0\.2 s"):
                run(
                    Host(tmp_path),
                    oci_state(NLB3),
                    call=lambda _node, _request, _argument: len(os.read(read_end, 1)),
                    retry=RetryPolicy(0.2, 1, 0.001),
                )
        finally:
            os.close(read_end)
            os.close(write_end)

    def test_a_timeout_while_waiting_for_another_process_is_reported(self, tmp_path: Path) -> None:
        one_port(tmp_path)
        stored(tmp_path, NLB3)
        lock = write(tmp_path / STATE_DIRECTORY[1:] / "dfl-fme.0.lock", "")
        with lock.open("rb") as file:
            fcntl.flock(file, fcntl.LOCK_EX)
            with pytest.raises(FpgaError, match=r"0: dfl-fme\.0: locked by another process for \S+ s \(/run"):
                run(Host(tmp_path), oci_state(NLB3), retry=RetryPolicy(2, 1, 60))

    def test_a_driver_that_stays_busy_is_reported(self, tmp_path: Path) -> None:
        driver = Driver(one_port(tmp_path), NLB3, [errno.EBUSY] * 9)
        stored(tmp_path, NLB3)
        with pytest.raises(
            FpgaError, match=r"^FPGA_AFU_1 in dfl-port\.0: .*dfl-fme\.0: programming failed: .*\(EBUSY\)"
        ):
            run(Host(tmp_path), oci_state(NLB3), call=driver, retry=RetryPolicy(60, 9, 0))

    def test_a_hanging_port_is_not_skipped(self, tmp_path: Path) -> None:
        one_port(tmp_path)
        host = Host(tmp_path)
        calls: list[str] = []

        class Hanging(Host):
            def status(self, path: str) -> os.stat_result | None:
                calls.append(path)
                signal.pause()
                return host.status(path)

        with pytest.raises(TimedOut, match=r"^programming for this container took more than 0\.2 s"):
            run(Hanging(tmp_path), oci_state(NLB3, ports=2), retry=RetryPolicy(0.2, 1, 0.001))
        assert calls == ["/dev/dfl-port.0"]


class TestReadRequest:
    def state(self, bundle: Path, **more: object) -> bytes:
        return json.dumps({"ociVersion": "1.0.2", "bundle": str(bundle), **more}).encode()

    def bundle(self, root: Path) -> Path:
        environment = ["FPGA_REGIONS=1", f"FPGA_REGION_1={INTERFACE}", f"FPGA_AFU_1={NLB3}"]
        devices = [{"path": "/dev/dfl-port.0", "type": "c", "major": 244, "minor": 0}]
        hooks = {"createRuntime": [{"path": HOOK, "args": hook_arguments(["dfl-port.0"])}]}
        config = {"process": {"env": environment}, "linux": {"devices": devices}, "hooks": hooks}
        write(root / "bundle/config.json", json.dumps(config))
        return root / "bundle"

    def test_the_request_is_read_from_the_bundle(self, tmp_path: Path) -> None:
        assert read_request(self.state(self.bundle(tmp_path))) == oci_state(NLB3)

    def test_the_annotation_is_required_only_on_request(self, tmp_path: Path) -> None:
        bundle = self.bundle(tmp_path)
        annotations = {"com.intel.fpga.mode": "fpga.intel.com/region"}
        assert read_request(self.state(bundle, annotations=annotations), require_mode=True) == oci_state(NLB3)
        with pytest.raises(FpgaError, match=r"annotation com\.intel\.fpga\.mode is '', expected fpga\.intel\.com/reg"):
            read_request(self.state(bundle), require_mode=True)

    def test_an_invalid_bundle_is_reported(self, tmp_path: Path) -> None:
        tmp_path /= "as-long-as-the-runtime-has-it" * 4
        tmp_path.mkdir()
        with pytest.raises(FpgaError, match=r"bundle .*: no such directory"):
            read_request(self.state(tmp_path / "none"))
        with pytest.raises(FpgaError, match=r"config\.json': No such file"):
            read_request(self.state(tmp_path))
        os.mkfifo(tmp_path / "config.json")
        writer = os.open(tmp_path / "config.json", os.O_RDWR)  # a writer that writes nothing
        with pytest.raises(FpgaError, match=r"config\.json': not a regular file"):
            read_request(self.state(tmp_path))
        os.close(writer)


def test_a_hook_without_memory_reports_it(tmp_path: Path) -> None:
    with open(tmp_path / "config.json", "wb") as file:
        file.truncate(16 << 20)
    code = (
        "import resource, sys; from accelplane.cli.fpgahook import main\n"
        "used = int(open('/proc/self/statm').read().split()[0]) * resource.getpagesize()\n"
        "resource.setrlimit(resource.RLIMIT_AS, (used + (8 << 20),) * 2); sys.exit(main())"
    )
    state = json.dumps({"bundle": str(tmp_path)})
    result = subprocess.run([sys.executable, "-c", code], input=state, capture_output=True, text=True, check=False)
    assert (result.returncode, result.stderr) == (1, "intel-fpga-crihook: not enough memory\n")


def test_a_hook_without_a_request_imports_few_modules() -> None:
    unmeasured = {name: value for name, value in os.environ.items() if not name.startswith("COVERAGE_")}
    command = [sys.executable, "-c", "import sys, accelplane.fpga.hook; print(*sys.modules)"]
    loaded = subprocess.run(command, env=unmeasured, check=True, capture_output=True, text=True).stdout.split()
    heavy = {"msgspec", "yaml", "click", "rich", "asyncio", "logging", "tempfile", "zlib", "accelplane.fpga.aocx"}
    assert heavy & set(loaded) == set()
