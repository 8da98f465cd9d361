"""The build root: Python, compilers and binutils from locked Debian packages, in a directory of the cache.

Everything whose output gets into an image and depends on the version of a tool runs in it: the compilation of Python
modules, strip, the C compiler and gzip. So the build gives the same files on every machine, and cross-compiles for the
other architecture. It needs no privilege: `chroot`, or a user namespace if the caller is not root, enters it.
"""

from __future__ import annotations

import hashlib
import os
import platform
import shutil
import subprocess
import tempfile
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

from debian import RELEASE, Lock, Package, RecipeError, fetch, run, select

PYTHON = "python3.11"
TRIPLETS = {"amd64": "x86_64-linux-gnu", "arm64": "aarch64-linux-gnu"}
GCC = "gcc-12"
_MACHINES = {"x86_64": "amd64", "aarch64": "arm64"}

_INTERPRETER = (
    "gcc-12-base", "libc6", "libexpat1", "libffi8", "libgcc-s1", f"lib{PYTHON}-minimal", f"lib{PYTHON}-stdlib",
    "libssl3", f"{PYTHON}-minimal", "zlib1g",
)  # fmt: skip
_COMPILER = (
    "binutils", "binutils-common", "cpp-12", "gcc-12", "libbinutils", "libc6-dev", "libctf-nobfd0", "libctf0",
    "libgcc-12-dev", "libgmp10", "libisl23", "libjansson4", "libmpc3", "libmpfr6", "libstdc++6", "libzstd1",
    "linux-libc-dev",
)  # fmt: skip
# Of each architecture's own and of the other one's, where there is a compiler.
_NATIVE = {"amd64": "binutils-x86-64-linux-gnu", "arm64": "binutils-aarch64-linux-gnu"}
_OTHER = {"amd64": "arm64", "arm64": "amd64"}


def native() -> str:
    """Debian's name of this machine's architecture."""
    machine = platform.machine()
    if machine not in _MACHINES:
        raise RecipeError(f"machine: found {machine}, expected {' or '.join(_MACHINES)}; build on one of them")
    return _MACHINES[machine]


def build_packages(architecture: str) -> tuple[str, ...]:
    """What a build root on this architecture consists of."""
    other = _OTHER[architecture]
    triplet = TRIPLETS[other].replace("_", "-")
    cross = (
        f"binutils-{triplet}", f"cpp-12-{triplet}", f"gcc-12-{triplet}", f"libc6-{other}-cross",
        f"libc6-dev-{other}-cross", f"libgcc-12-dev-{other}-cross", f"libgcc-s1-{other}-cross",
        f"linux-libc-dev-{other}-cross",
    )  # fmt: skip
    return (*_INTERPRETER, *_COMPILER, _NATIVE[architecture], *cross)


_GZIP = """import gzip, shutil, sys
with gzip.GzipFile("", "wb", 6, sys.stdout.buffer, 0) as file:
    shutil.copyfileobj(sys.stdin.buffer, file)"""

_CHANGE_DIRECTORY = "import os, sys; os.chdir(sys.argv[1]); os.execv(sys.argv[2], sys.argv[2:])"


class BuildRoot:
    """A directory in which programs of the locked packages run."""

    def __init__(self, cache: Path, lock: Lock) -> None:
        packages = select(lock, RELEASE, native(), build_packages(native()))
        self.root = cache / f"build-root-{_digest(packages)}"
        if not self.root.exists():
            self._make(packages, cache)

    def _make(self, packages: list[Package], cache: Path) -> None:
        archives = fetch(packages, cache)
        with tempfile.TemporaryDirectory(dir=cache) as scratch:
            made = Path(scratch) / "root"
            for link in ("bin", "lib", "lib64", "sbin"):
                (made / "usr" / link).mkdir(parents=True)
                (made / link).symlink_to(f"usr/{link}")
            for directory in ("etc", "tmp", "work"):
                (made / directory).mkdir()
            for archive in archives.values():
                unpack_over(archive, made)
            made.rename(self.root)

    @contextmanager
    def scratch(self) -> Iterator[Path]:
        """A new directory in the build root, which is deleted in the end."""
        with tempfile.TemporaryDirectory(dir=self.root / "work") as directory:
            yield Path(directory)

    def run(self, *command: str, directory: Path, env: dict[str, str] | None = None) -> str:
        """Runs a program of the build root in a directory of it, with no other environment than the given one."""
        inside = f"/{directory.relative_to(self.root)}"
        settings = {"PATH": "/usr/bin", "LC_ALL": "C.UTF-8", "TZ": "UTC", "TMPDIR": "/tmp", **(env or {})}  # noqa: S108
        variables = [f"{name}={value}" for name, value in settings.items()]
        return run("env", "-i", *variables, *enter(self.root, inside), *command)

    def gzip(self, source: Path, target: Path) -> None:
        """Compresses a file; the result depends on its content only."""
        with source.open("rb") as stream, target.open("wb") as compressed:
            command = [*enter(self.root, "/"), f"/usr/bin/{PYTHON}", "-ISc", _GZIP]
            done = subprocess.run(command, stdin=stream, stdout=compressed, stderr=subprocess.PIPE, check=False)
        if done.returncode:
            raise RecipeError(f"{source.name}: cannot be compressed: {done.stderr.decode()[-1000:]}")


def unpack_over(archive: Path, root: Path) -> None:
    """Unpacks a package over others. dpkg-deb would replace the links of the root by directories of the package."""
    with subprocess.Popen(("dpkg-deb", "--fsys-tarfile", archive), stdout=subprocess.PIPE) as package:
        command = ("tar", "-x", "--keep-directory-symlink", "--no-same-owner", "-C", root)
        done = subprocess.run(command, stdin=package.stdout, stderr=subprocess.PIPE, text=True, check=False)
    if done.returncode or package.returncode:
        raise RecipeError(f"{archive.name}: cannot be unpacked: {done.stderr.strip()[-1000:]}")


def enter(root: Path, directory: str) -> list[str]:
    """The begin of a command whose rest runs in a directory of another root, which has Python."""
    if os.geteuid() != 0:
        # An absolute path: programs are started with an empty environment.
        return ["/usr/bin/unshare", "--user", "--map-root-user", f"--root={root}", f"--wd={directory}"]
    # Without unshare, whose system call container engines do not allow in builds.
    chroot = [shutil.which("chroot", path="/usr/sbin:/usr/bin:/sbin:/bin") or "chroot", str(root)]
    return chroot if directory == "/" else [*chroot, f"/usr/bin/{PYTHON}", "-ISc", _CHANGE_DIRECTORY, directory]


def _digest(packages: list[Package]) -> str:
    hashes = "".join(package.sha256 for package in packages)
    return hashlib.sha256(f"{Path(__file__).read_text()}{hashes}".encode()).hexdigest()[:16]
