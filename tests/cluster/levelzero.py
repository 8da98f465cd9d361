"""The Level-Zero service with the real loader and a driver for tests, whose devices and faults are lines of a file.

The service runs in the file system of its image. The driver is compiled here against the headers of the loader, which
are Debian 13's. ``levelzero_driver.c`` reads the file at each call; its lines are ``KEY VALUE``:

========================  ==============================================================================================
``drivers``, ``devices``  their numbers, by default 1
``FUNCTION``              what it does: a ze_result_t, ``hang``, ``crash``, ``abort``, ``exit``, ``print``
``N.FUNCTION``            the same for device N
``N.bdf``                 its PCI address, by default 0000:03:00.0, 0000:04:00.0 and so on
``N.vendor``              its vendor, by default 0x8086
``N.integrated``          1 for an integrated GPU
``N.quality``             the issues of its link, by default 0
``N.memory``              HEALTH:SIZE of each memory module, by default one of 16 GiB
``N.sensors``             KIND:CELSIUS of each temperature sensor, by default 0:40 1:41 2:42
========================  ==============================================================================================
"""

from __future__ import annotations

import hashlib
import os
import shutil
import subprocess
import tempfile
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import grpc

from accelplane.gpuservices import levelzero_pb2 as pb

from .build import ClusterError, cache_directory
from .machine import wait_until
from .product_image import RECIPES, debian_package

HEADERS = "libze-dev"
PROGRAM = "/usr/local/bin/intel_gpu_levelzero"
_SOURCE = Path(__file__).with_name("levelzero_driver.c")


def headers() -> Path:
    """The directory of the loader's headers, fetched once."""
    digest = hashlib.sha256((RECIPES / "packages.lock").read_bytes()).hexdigest()[:12]
    target = cache_directory() / f"{HEADERS}-{digest}"
    if not target.exists():
        target.parent.mkdir(parents=True, exist_ok=True)
        with tempfile.TemporaryDirectory(prefix=".making-", dir=target.parent) as scratch:
            archive = debian_package(f"trixie/amd64/{HEADERS}")
            subprocess.run(["dpkg-deb", "-x", archive, f"{scratch}/root"], check=True)
            if not target.exists():
                (Path(scratch) / "root").rename(target)
    return target / "usr/include"


def compile_c(source: Path, target: Path, *options: str) -> Path:
    """Compiles a file that includes the loader's headers."""
    if not shutil.which("gcc"):
        raise ClusterError("found no gcc; on Debian run apt-get install gcc libc6-dev")
    command = ["gcc", "-Wall", "-Wextra", "-Werror", "-O1", *options, "-I", headers(), source, "-o", target]
    result = subprocess.run(command, capture_output=True, text=True, check=False)
    if result.returncode:
        raise ClusterError(f"{source}: cannot be compiled\n{result.stderr}")
    return target


def compile_driver(target: Path) -> Path:
    """The driver for tests, a shared library."""
    return compile_c(_SOURCE, target, "-shared", "-fPIC")


@dataclass
class Service:
    """The running service. Its methods call it with the reference implementation of gRPC."""

    process: subprocess.Popen[bytes]
    channel: grpc.Channel
    state: Path
    log: Path

    def set(self, **state: object) -> None:
        """Replaces the content of the driver's file. ``device_0_bdf`` stands for ``0.bdf``."""
        write_state(self.state, state)

    def health(self, bdf: str) -> pb.DeviceHealth:
        return self._call("GetDeviceHealth", pb.DeviceId(bdfAddress=bdf), pb.DeviceHealth)

    def temperature(self, bdf: str) -> pb.DeviceTemperature:
        return self._call("GetDeviceTemperature", pb.DeviceId(bdfAddress=bdf), pb.DeviceTemperature)

    def memory(self, bdf: str) -> pb.DeviceMemoryAmount:
        return self._call("GetDeviceMemoryAmount", pb.DeviceId(bdfAddress=bdf), pb.DeviceMemoryAmount)

    def indices(self) -> pb.DeviceIndices:
        return self._call("GetIntelIndices", pb.GetIntelIndicesMessage(), pb.DeviceIndices)

    def logged(self) -> str:
        return self.log.read_text()

    def processes(self) -> list[int]:
        """The service's child processes."""
        children = Path(f"/proc/{self.process.pid}/task/{self.process.pid}/children").read_text()
        return [int(child) for child in children.split()]

    def wait_for_another_worker(self, old: Sequence[int]) -> None:
        wait_until(lambda: bool(self.processes()) and self.processes() != old, "another worker process")

    def _call(self, method: str, request: Any, response: type[Any]) -> Any:
        call = self.channel.unary_unary(
            f"/Levelzero/{method}", request_serializer=type(request).SerializeToString,
            response_deserializer=response.FromString,
        )  # fmt: skip
        # The socket exists a moment before the service listens on it.
        return call(request, timeout=30, wait_for_ready=True)


def write_state(file: Path, state: Mapping[str, object]) -> None:
    """Replaces the content of the driver's file."""
    lines: list[str] = []
    for key, value in state.items():
        name = key.removeprefix("device_").replace("_", ".", 1) if key.startswith("device_") else key
        lines.append(f"{name} {value}\n")
    (new := file.with_suffix(".new")).write_text("".join(lines))
    new.rename(file)


@dataclass(frozen=True)
class Root:
    """A file system of the image with the driver and its file."""

    directory: Path

    @property
    def state(self) -> Path:
        return self.directory / "tmp/state"

    def command(self, *arguments: str, driver: bool = True) -> tuple[list[str], dict[str, str]]:
        """The service with a socket in this file system, and its environment."""
        environment = {"LEVELZERO_TEST_STATE": "/tmp/state"}
        if driver:
            environment["ZE_ENABLE_ALT_DRIVERS"] = "/tmp/driver.so"
        return ["/usr/sbin/chroot", str(self.directory), PROGRAM, "-socket=/run/server.sock", *arguments], environment

    def run(self, *arguments: str, driver: bool = True) -> subprocess.CompletedProcess[str]:
        """Runs the service to its end."""
        command, environment = self.command(*arguments, driver=driver)
        return subprocess.run(command, env=environment, capture_output=True, text=True, timeout=60, check=False)

    @contextmanager
    def running(self, *arguments: str, **state: object) -> Iterator[Service]:
        """The service with a driver of this state. Its timeouts are long, because the machine may be busy."""
        write_state(self.state, state)
        socket = self.directory / "run/server.sock"
        command, environment = self.command("-v=4", "-call-timeout=20", *arguments)
        log = self.directory / "tmp/log"
        with log.open("wb") as output:
            process = subprocess.Popen(command, env=environment, stderr=output, stdout=output)
        try:
            wait_until(lambda: socket.exists() or process.poll() is not None, "the service's socket")
            with grpc.insecure_channel(f"unix://{socket}", [("grpc.default_authority", "localhost")]) as channel:
                yield Service(process, channel, self.state, log)
        finally:
            process.terminate()
            process.wait(timeout=30)
            for file in (socket, self.state):
                if os.path.lexists(file):
                    file.unlink()
