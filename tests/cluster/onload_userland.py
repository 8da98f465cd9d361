"""A small Onload for tests: libraries and control plane server compiled here, in an image with the original's layout.

The server keeps its pid in the name of the file that it writes.
"""

from __future__ import annotations

import shutil
import subprocess
import tempfile
from pathlib import Path

from .build import ClusterError
from .cluster import Cluster
from .images import ImageConfig, images_from_directory

SOURCES = Path(__file__).with_name("onload")
_LAUNCHER = '#!/bin/sh\nLD_PRELOAD=libonload.so exec "$@"\n'


def user_image(version: str) -> str:
    """The name of the image with this version of the userland."""
    return f"docker.io/onload/onload-user:{version}"


def import_user_image(cluster: Cluster, version: str) -> None:
    """Compiles the userland and imports its image on all nodes. Its shell is that of busybox."""
    busybox = cluster.assets.program("busybox")
    with tempfile.TemporaryDirectory() as scratch:
        root = Path(scratch) / "root"
        make_userland(root / "opt/onload", version)
        programs = root / "bin"
        programs.mkdir()
        shutil.copy(busybox, programs / "busybox")
        for tool in subprocess.run([busybox, "--list"], capture_output=True, text=True, check=True).stdout.split():
            if tool != "busybox":
                (programs / tool).symlink_to("busybox")
        config = ImageConfig(command=["/bin/sh"])
        cluster.import_image(images_from_directory(Path(scratch) / "image.tar", {user_image(version): config}, root))


def make_userland(directory: Path, version: str) -> None:
    """The files of `/opt/onload` in the image."""
    libraries, programs, server = directory / "usr/lib64", directory / "usr/bin", directory / "sbin"
    for each in (libraries, programs, server):
        each.mkdir(parents=True)
    for name in ("libonload", "libonload_ext"):
        _compile(SOURCES / f"{name}.c", libraries / f"{name}.so.1", "-shared", "-fPIC", f'-DVERSION="{version}"')
        (libraries / f"{name}.so").symlink_to(f"{name}.so.1")
    (programs / "onload").write_text(_LAUNCHER)
    (programs / "onload").chmod(0o755)
    _compile(SOURCES / "onload_cp_server.c", server / "onload_cp_server", "-static")


def _compile(source: Path, target: Path, *options: str) -> None:
    command = ["gcc", "-Wall", "-Wextra", "-Werror", "-O2", "-o", target, *options, source]
    try:
        result = subprocess.run(command, capture_output=True, text=True, check=False)
    except FileNotFoundError:
        raise ClusterError("gcc: not found, expected a C compiler; install it (Debian: apt-get install gcc)") from None
    if result.returncode:
        raise ClusterError(f"{source}: does not compile\n{result.stderr}")
