"""Programs of the demo images that test a device: their exit status shows whether it worked."""

import hashlib
import importlib.machinery
import importlib.util
import os
import struct
import subprocess
import sys
from pathlib import Path
from types import ModuleType

import pytest
from cryptography.hazmat.primitives import hashes
from cryptography.hazmat.primitives.asymmetric import padding, rsa
from demo_recipes import DIRECTORY

NLB = DIRECTORY / "opae-nlb-demo/usr/local/bin"
NPU = DIRECTORY / "intel-npu-demo/usr/local/bin/npu-demo"
SGX = DIRECTORY / "sgx-sdk-demo/opt/intel/sgx-sample-app/sgx-sample-app"
AESMD = DIRECTORY / "sgx-aesmd-demo/usr/local/bin/run-aesmd"
LIBDLB = DIRECTORY / "dlb-libdlb-demo/usr/local/bin"
DPDK = DIRECTORY / "dlb-dpdk-demo/usr/local/bin"
DATA = bytes(range(64))


def load(program: Path) -> ModuleType:
    """The program as a module, without the directory of compiled modules beside it."""
    loader = importlib.machinery.SourceFileLoader(program.name.replace("-", "_"), str(program))
    specification = importlib.util.spec_from_loader(loader.name, loader)
    assert specification
    module = importlib.util.module_from_spec(specification)
    exec(compile(program.read_bytes(), program, "exec"), module.__dict__)  # noqa: S102
    return module


def run(*command: str | Path, **environment: str) -> subprocess.CompletedProcess[str]:
    return subprocess.run(command, env=os.environ | environment, capture_output=True, text=True, check=False)


def script(path: Path, text: str) -> None:
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_text(f"#!/bin/sh\n{text}\n")
    path.chmod(0o755)


@pytest.mark.parametrize(
    ("program", "arguments", "problem"),
    [
        (NLB / "nlb", ("0",), "found 0 FPGA ports, expected one"),
        (NPU, (), "found no accel/accel<n>, expected one"),
        (SGX, (), "sgx_enclave: No such file or directory"),
    ],
)
def test_a_program_without_its_device_prints_one_line_and_fails(
    tmp_path: Path, program: Path, arguments: tuple[str, ...], problem: str
) -> None:
    done = run(sys.executable, program, *arguments, tmp_path)
    assert done.returncode == 1
    assert problem in done.stderr
    assert done.stderr.count("\n") == 1


@pytest.mark.parametrize(
    ("program", "arguments", "node", "problem"),
    [
        (NLB / "nlb", ("0",), "dfl-port.0", "dfl-port.0: [Errno 25]"),
        (NLB / "nlb", ("3",), "intel-fpga-port.1", "intel-fpga-port.1: [Errno 25]"),
        (NPU, (), "accel/accel0", "npu: [Errno 25]"),
        (SGX, (), "sgx_enclave", "ECREATE: Inappropriate ioctl for device"),
    ],
)
def test_a_device_that_answers_with_an_error_is_a_failure(
    tmp_path: Path, program: Path, arguments: tuple[str, ...], node: str, problem: str
) -> None:
    (tmp_path / node).parent.mkdir(exist_ok=True)
    (tmp_path / node).write_bytes(bytes(4096))
    done = run(sys.executable, program, *arguments, tmp_path)
    assert done.returncode == 1
    assert problem in done.stderr
    assert done.stderr.count("\n") == 1


class EmulatedPort:
    """A port with a native loopback function, which works when the program starts it."""

    def __init__(self, function: str, *, copy: bool = True, error: int = 0) -> None:
        self._registers = {0x10: int(function[:16], 16), 0x08: int(function[16:], 16)}
        self._pages: dict[int, bytearray] = {}
        self._copy = copy
        self._error = error
        self.modes: list[int] = []

    def read(self, offset: int) -> int:
        return self._registers.get(offset, 0)

    def write(self, offset: int, value: int) -> None:
        self._registers[offset] = value

    def write_half(self, offset: int, value: int) -> None:
        self._registers[offset] = value
        if offset == 0x138 and value == 3:
            self._start()

    def allocate(self) -> tuple[bytearray, int]:
        address = 0x1000 * (len(self._pages) + 1)
        self._pages[address] = bytearray(4096)
        return self._pages[address], address

    def _start(self) -> None:
        self.modes.append(self._registers[0x140] >> 2 & 7)
        source, target = (self._pages[self._registers[register] * 64] for register in (0x120, 0x128))
        if self._copy:
            target[:] = source[: self._registers[0x130] * 64]
        struct.pack_into("<II", self._pages[self._registers[0x110]], 0x40, 1, self._error)


@pytest.mark.parametrize(("function", "mode"), [("0", 0), ("3", 3)])
def test_nlb_succeeds_if_the_function_does_its_work(function: str, mode: int) -> None:
    program = load(NLB / "nlb")
    port = EmulatedPort(program.FUNCTIONS[function])
    program.test(port, function)
    assert port.modes == [mode]


@pytest.mark.parametrize(
    ("function", "options", "problem"),
    [("0", {"copy": False}, "found other bytes"), ("3", {"error": 4}, "found error register 0x4")],
)
def test_nlb_fails_if_the_function_fails(function: str, options: dict[str, int], problem: str) -> None:
    program = load(NLB / "nlb")
    with pytest.raises(program.TestError, match=problem):
        program.test(EmulatedPort(program.FUNCTIONS[function], **options), function)


def test_nlb_reports_another_function() -> None:
    program = load(NLB / "nlb")
    with pytest.raises(program.OtherFunctionError, match="expected NLB0"):
        program.test(EmulatedPort(program.FUNCTIONS["3"]), "0")


@pytest.mark.parametrize(("nlb3", "nlb0", "status"), [(0, 3, 0), (0, 0, 1), (0, 1, 1), (1, 3, 1), (3, 3, 3)])
def test_the_fpga_demo_succeeds_only_if_nlb3_works_and_nlb0_is_absent(
    tmp_path: Path, nlb3: int, nlb0: int, status: int
) -> None:
    script(tmp_path / "nlb3", f"exit {nlb3}")
    script(tmp_path / "nlb0", f"exit {nlb0}")
    assert run(NLB / "test_fpga.sh", PATH=f"{tmp_path}:{os.environ['PATH']}").returncode == status


def test_the_signature_of_the_enclave_is_valid() -> None:
    program = load(SGX)
    # A prime factor of 1536 bits takes seconds.
    key = rsa.generate_private_key(public_exponent=3, key_size=3072).private_numbers()
    modulus = key.public_numbers.n
    measurement = program.measure(program.make_pages(DATA))
    signature = program.make_signature(measurement, (modulus, key.d))
    assert len(signature) == 1808
    assert signature[960:992] == measurement
    number, q1, q2 = (int.from_bytes(signature[at : at + 384], "little") for at in (516, 1040, 1424))
    public = rsa.RSAPublicNumbers(3, modulus).public_key()
    body = signature[:128] + signature[900:1028]
    public.verify(number.to_bytes(384, "big"), body, padding.PKCS1v15(), hashes.SHA256())
    # What EINIT computes with them instead of divisions.
    assert (number**2 - q1 * modulus) * number - q2 * modulus == pow(number, 3, modulus)


def test_generated_keys_sign_with_exponent_three() -> None:
    program = load(SGX)
    program.KEY_BITS = 512
    modulus, private = program.make_key()
    assert modulus.bit_length() == 512
    assert pow(pow(12345, private, modulus), 3, modulus) == 12345


def test_the_measurement_depends_on_each_page_of_the_enclave() -> None:
    program = load(SGX)
    pages = program.make_pages(DATA)
    measurements = {program.measure(pages), program.measure(program.make_pages(DATA[::-1]))}
    for number, (offset, content, flags) in enumerate(pages):
        changed = (offset, content, flags ^ 2)
        measurements.add(program.measure([*pages[:number], changed, *pages[number + 1 :]]))
    assert len(measurements) == len(pages) + 2


def test_the_report_must_have_the_measurement_the_signer_and_the_data() -> None:
    program = load(SGX)
    measurement, signer = hashlib.sha256(b"measurement").digest(), hashlib.sha256(b"signer").digest()
    report = bytearray(program.REPORT_SIZE)
    report[64:96], report[128:160], report[320:384] = measurement, signer, DATA
    program.check_report(bytes(report), measurement, signer, DATA)
    for offset, name in ((64, "measurement"), (128, "signer"), (320, "data")):
        changed = bytearray(report)
        changed[offset] ^= 1
        with pytest.raises(program.TestError, match=f"{name} in the report"):
            program.check_report(bytes(changed), measurement, signer, DATA)


def test_aesmd_needs_both_device_nodes(tmp_path: Path) -> None:
    script(tmp_path / "aesm_service", 'echo "$LD_LIBRARY_PATH $*"; exit 4')
    done = run(AESMD, DEVICES=str(tmp_path), AESM_DIRECTORY=str(tmp_path))
    assert (done.returncode, done.stdout) == (1, "")
    assert "found no" in done.stderr
    for node in ("sgx_enclave", "sgx_provision"):
        (tmp_path / node).symlink_to("/dev/null")
    done = run(AESMD, DEVICES=str(tmp_path), AESM_DIRECTORY=str(tmp_path))
    assert (done.returncode, done.stdout) == (4, f"{tmp_path} --no-daemon\n")


@pytest.mark.parametrize(
    ("folder", "programs", "expected"),
    [
        (LIBDLB, ("dir_traffic", "ldb_traffic"), ["-n 8 -d 12 -w epoll"] * 2),
        (
            DPDK,
            ("dpdk-test-eventdev",),
            [
                f"--no-huge --vdev=dlb2_event,hwdev_id=12 -- --test={test}"
                for test in ("order_queue", "perf_queue", "order_atq", "perf_atq")
            ],
        ),
    ],
)
def test_dlb_tests_get_the_number_of_the_device(
    tmp_path: Path, folder: Path, programs: tuple[str, ...], expected: list[str]
) -> None:
    for name in programs:
        script(tmp_path / "bin" / name, 'echo "$*"; exit "${STATUS:-0}"')
    environment = {"DEVICES": str(tmp_path), "PATH": f"{folder}:{tmp_path}/bin:{os.environ['PATH']}"}
    done = run(folder / "test.sh", **environment)
    assert (done.returncode, done.stdout) == (1, "")
    assert "found 0 devices" in done.stderr
    (tmp_path / "dlb12").touch()
    done = run(folder / "test.sh", **environment)
    assert (done.returncode, done.stdout.splitlines()) == (0, expected)
    assert run(folder / "test.sh", **environment, STATUS="6").returncode == 6
