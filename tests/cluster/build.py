"""The programs of a cluster: Kubernetes, containerd and kwok from their Go modules, the rest from Debian.

``python -m tests.cluster.build`` (``make kube``) compiles once into directories outside the work tree: one for the
programs of Kubernetes, named after their version, and one for the others. The names have a hash of everything that
decides the result: the modules below ``kube/`` (their go.sum pins every source) and the recipes of this file. A
complete directory is never changed, and is created by one rename, so that an interrupted build leaves no incomplete
directory.

The variable ``ACCELPLANE_KUBERNETES`` (``make … VERSION=``) selects one of the versions of Kubernetes in ``VERSIONS``.

Other programs of the tests are compiled one module at a time, from the modules below ``tools/``: each has a directory
of its own, named after the module and a hash of its files. Its ``go.mod`` names the packages in ``tool`` lines. Its
comments may name build tags (``// tags: NAME…``), a Debian package with a program (``// debian: PROGRAM PACKAGE``),
a directory of C sources of a dependency, which become a program (``// c: PROGRAM MODULE DIRECTORY``), and directories
of a dependency that are copied beside the programs (``// files: MODULE DIRECTORY…``).
``python -m tests.cluster.build`` compiles those of `DEFAULT_TOOLS` too, ``python -m tests.cluster.build NAME…`` only
the named ones.
"""

from __future__ import annotations

import argparse
import fcntl
import hashlib
import os
import platform
import re
import shutil
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field
from functools import cache
from pathlib import Path

KUBE = Path(__file__).parent / "kube"
TOOLS = Path(__file__).parent / "tools"
KUSTOMIZE_VERSIONS = ("5.0.3", "5.4.2", "5.8.2")
VERSIONS = ("1.31", "1.33", "1.34", "1.35", "1.36", "1.37")
DEFAULT_VERSION = VERSIONS[-1]  # the newest stable one
DEFAULT_TOOLS = (*(f"kustomize-{version}" for version in KUSTOMIZE_VERSIONS), "helm")
OLDEST_GO = (1, 26)  # of the newest version of Kubernetes
TOOLCHAIN = "go1.26.8"
BUILD_COMMAND = "python -m tests.cluster.build"


class ClusterError(Exception):
    """A cluster cannot be built or run; the message has the reason and the remedy."""


@dataclass(frozen=True, kw_only=True)
class Recipe:
    """Packages of a module to compile. ``requirements`` names the module whose go.mod is used, if it is another one."""

    module: str
    requirements: str = ""
    packages: tuple[str, ...] = (".",)
    links: tuple[str, ...] = ()
    tags: str = ""
    stamps: dict[str, str] = field(default_factory=dict)


@cache
def _version(module: str, dependency: str) -> str:
    text = (KUBE / module / "go.mod").read_text()
    found = re.search(rf"^\s*{re.escape(dependency)} (v\S+)", text, re.MULTILINE)
    if not found:
        raise ClusterError(f"{KUBE / module / 'go.mod'}: names no version of {dependency}")
    return found[1]


def selected_version() -> str:
    """The selected minor version of Kubernetes. Raises `ClusterError` for one that is not in `VERSIONS`."""
    selected = os.environ.get("ACCELPLANE_KUBERNETES") or DEFAULT_VERSION
    if selected not in VERSIONS:
        raise ClusterError(f"ACCELPLANE_KUBERNETES: found {selected}, expected one of {', '.join(VERSIONS)}")
    return selected


def kubernetes_version(minor: str = "") -> str:
    """The complete version of the selected minor version, or of this one: for example ``v1.34.4`` of ``1.34``."""
    return _version(f"kubernetes-{minor or selected_version()}", "k8s.io/kubernetes")


def kubernetes_minor() -> int:
    return int(selected_version().split(".")[1])


def _kubernetes_recipes() -> list[Recipe]:
    kubernetes = kubernetes_version()
    major, minor, _ = kubernetes.removeprefix("v").split(".", 2)
    return [
        Recipe(
            module="kubernetes",
            requirements=f"kubernetes-{selected_version()}",
            links=("kube-apiserver", "kube-controller-manager", "kube-scheduler", "kube-proxy", "kubelet", "kubectl"),
            stamps={
                "k8s.io/component-base/version.gitVersion": kubernetes,
                "k8s.io/component-base/version.gitMajor": major,
                "k8s.io/component-base/version.gitMinor": minor,
                "k8s.io/client-go/pkg/version.gitVersion": kubernetes,
            },
        )
    ]


def _other_recipes() -> list[Recipe]:
    return [
        Recipe(
            module="containerd",
            packages=tuple(
                f"github.com/containerd/containerd/v2/cmd/{name}"
                for name in ("containerd", "containerd-shim-runc-v2", "ctr")
            ),
            tags="no_btrfs no_zfs no_devmapper",
            stamps={
                "github.com/containerd/containerd/v2/version.Version": _version(
                    "containerd", "github.com/containerd/containerd/v2"
                )
            },
        ),
        Recipe(module="kwok", packages=("sigs.k8s.io/kwok/cmd/kwok",)),
        Recipe(module="pause"),
    ]


# Every program that is not built here, and the Debian package that brings it.
SYSTEM_PROGRAMS = {
    "etcd": "etcd-server",
    "runc": "runc",
    "ptp": "containernetworking-plugins",
    "iptables": "iptables",
    "conntrack": "conntrack",
    "ip": "iproute2",
    "busybox": "busybox-static",
    "unshare": "util-linux",
    "nsenter": "util-linux",
    "mount": "mount",
}
# Installing this package would start a service, so only its files are extracted.
UNPACK_ONLY = "etcd-server"
# Nodes may run it instead of the containerd that is built here. It is optional.
OLD_CONTAINERD = "1.6"
_OLD_CONTAINERD_PACKAGE = f"containerd={OLD_CONTAINERD}.*"
_SYSTEM_DIRECTORIES = ("/usr/sbin", "/usr/bin", "/sbin", "/bin", "/usr/lib/cni", "/opt/cni/bin", "/usr/libexec/cni")


@dataclass(frozen=True)
class Assets:
    """The built programs: Kubernetes in its own directory, the others. ``program`` also finds those of the system."""

    kubernetes: Path
    directory: Path

    @property
    def path(self) -> str:
        """The directories of the programs, as in the variable PATH."""
        return f"{self.kubernetes / 'bin'}:{self.directory / 'bin'}"

    @property
    def old_containerd(self) -> Path:
        """The directory of the programs of Debian's containerd, if available."""
        return self.directory / f"containerd-{OLD_CONTAINERD}/usr/bin"

    def find(self, name: str) -> Path | None:
        places = [*self.path.split(":"), self.directory / "debian/usr/bin", *os.environ.get("PATH", "").split(":")]
        for place in (*places, *_SYSTEM_DIRECTORIES):
            if place and os.access(candidate := Path(place) / name, os.X_OK):
                return candidate
        return None

    def program(self, name: str) -> Path:
        if found := self.find(name):
            return found
        raise ClusterError(f"{name}: not found; {_installation_hint(name)}")

    def missing(self) -> list[str]:
        """The missing programs of a cluster, each with its remedy; empty if complete."""
        for directory in (self.kubernetes, self.directory):
            if not directory.is_dir():
                return [f"no Kubernetes binaries in {directory}; run {BUILD_COMMAND}"]
        return [f"{name} not found; {_installation_hint(name)}" for name in SYSTEM_PROGRAMS if not self.find(name)]


def _installation_hint(name: str) -> str:
    package = SYSTEM_PROGRAMS.get(name)
    return f"install it (Debian: apt-get install {package})" if package else f"run {BUILD_COMMAND}"


def cache_directory() -> Path:
    if chosen := os.environ.get("ACCELPLANE_KUBE_ASSETS"):
        return Path(chosen).absolute()
    return Path(os.environ.get("XDG_CACHE_HOME") or Path.home() / ".cache") / "accelplane/kube"


def assets() -> Assets:
    """The paths of the programs of the current recipes, built or not."""
    return Assets(
        cache_directory() / f"{kubernetes_version()}-{_recipes_digest(_kubernetes_recipes())}",
        cache_directory() / f"programs-{_recipes_digest(_other_recipes())}",
    )


def tool(module: str, program: str | None = None) -> Path:
    """A program of a module below ``tools/``, by default the one with the module's name, whether built yet or not."""
    return _tool_directory(module) / (program or module)


def kustomize(version: str) -> Path:
    """The program of one release, whether built yet or not."""
    return tool(f"kustomize-{version}", "kustomize")


def _tool_directory(module: str) -> Path:
    if not (TOOLS / module / "go.mod").is_file():
        raise ClusterError(f"{module}: no such tool; expected one of {', '.join(sorted(map(_name, TOOLS.iterdir())))}")
    return cache_directory() / f"tools/{module}-{_digest([TOOLS / module], platform.machine())}"


def _name(path: Path) -> str:
    return path.name


def _recipes_digest(recipes: Sequence[Recipe]) -> str:
    modules = [KUBE / name for recipe in recipes for name in (recipe.module, recipe.requirements) if name]
    return _digest(modules, repr((recipes, platform.machine())))


def _digest(modules: Sequence[Path], recipe: str) -> str:
    digest = hashlib.sha256(recipe.encode())
    for file in sorted(path for module in modules for path in module.rglob("*") if path.is_file()):
        digest.update(f"{file.relative_to(file.parents[1])}\0".encode() + file.read_bytes() + b"\0")
    return digest.hexdigest()[:12]


def build(print_status: Callable[[str], None] = print) -> Assets:
    """Build missing programs, and install missing system packages if possible."""
    result = assets()
    cache_directory().mkdir(parents=True, exist_ok=True)
    with _only_builder():
        for directory, recipes in (
            (result.kubernetes, _kubernetes_recipes()),
            (result.directory, _other_recipes()),
        ):
            if not directory.is_dir():
                started = time.monotonic()
                _compile(directory, recipes, print_status)
                print_status(f"built in {time.monotonic() - started:.0f} s: {directory}")
        for module in DEFAULT_TOOLS:
            _compile_tool(module, print_status)
        _get_system_programs(result, print_status)
        _get_old_containerd(result, print_status)
    return result


def build_tools(modules: Sequence[str], print_status: Callable[[str], None] = print) -> list[Path]:
    """Compile missing programs of these modules; returns their directories."""
    cache_directory().mkdir(parents=True, exist_ok=True)
    with _only_builder():
        for module in modules:
            _compile_tool(module, print_status)
    return [_tool_directory(module) for module in modules]


@contextmanager
def _only_builder() -> Iterator[None]:
    with (cache_directory() / ".lock").open("w") as lock:
        fcntl.flock(lock, fcntl.LOCK_EX)
        yield


def _compile(target: Path, recipes: Sequence[Recipe], print_status: Callable[[str], None]) -> None:
    go = _go(print_status)
    with tempfile.TemporaryDirectory(prefix=".building-", dir=target.parent) as scratch:
        programs = Path(scratch) / "assets/bin"
        programs.mkdir(parents=True)
        for recipe in recipes:
            print_status(f"compiling {recipe.requirements or recipe.module}")
            stamps = " ".join(f"-X {name}={value}" for name, value in recipe.stamps.items())
            command = [go, "build", "-trimpath", f"-tags={recipe.tags}", f"-ldflags=-s -w {stamps}", "-o", programs]
            if recipe.requirements:
                command.append(f"-modfile={KUBE / recipe.requirements / 'go.mod'}")
            _run([*command, *recipe.packages], cwd=KUBE / recipe.module, env=_go_environment())
            for link in recipe.links:
                (programs / link).symlink_to(recipe.module)
        (Path(scratch) / "assets").rename(target)


def _compile_tool(module: str, print_status: Callable[[str], None]) -> None:
    target = _tool_directory(module)
    if target.is_dir():
        return
    text = (TOOLS / module / "go.mod").read_text()
    packages = re.findall(r"^tool (\S+)$", text, re.MULTILINE)
    version = re.search(r"^go (\d+)\.(\d+)", text, re.MULTILINE)
    tags = " ".join(re.findall(r"^// tags: (.+)$", text, re.MULTILINE))
    _get_debian_programs(re.findall(r"^// debian: (\S+) (\S+)$", text, re.MULTILINE), print_status)
    assert packages, module
    assert version, module
    go = _go(print_status, (int(version[1]), int(version[2])))
    target.parent.mkdir(exist_ok=True)
    with tempfile.TemporaryDirectory(prefix=".building-", dir=target.parent) as scratch:
        print_status(f"compiling {module}")
        programs = Path(scratch) / "programs"
        programs.mkdir()
        command = [go, "build", "-trimpath", f"-tags={tags}", "-ldflags=-s -w", "-o", programs, *packages]
        _run(command, cwd=TOOLS / module, env=_go_environment())
        for program, source, directory in re.findall(r"^// c: (\S+) (\S+) (\S+)$", text, re.MULTILINE):
            sources = _module_directory(go, TOOLS / module, source) / directory
            _run(["cc", "-std=c99", "-O2", "-static", "-o", programs / program, *sorted(sources.glob("*.c"))])
        for dependency, directories in re.findall(r"^// files: (\S+) (.+)$", text, re.MULTILINE):
            _copy_files(_module_directory(go, TOOLS / module, dependency), directories.split(), programs)
        programs.rename(target)


def _copy_files(source: Path, directories: Sequence[str], target: Path) -> None:
    for directory in directories:
        copy = shutil.copytree(source / directory, target / directory, copy_function=shutil.copyfile)
        # Directories of the module cache are read-only.
        for each in (copy, *(path for path in copy.rglob("*") if path.is_dir())):
            each.chmod(0o755)


def _module_directory(go: Path, module: Path, dependency: str) -> Path:
    """The directory of a dependency, of the version that the module names."""
    command = [go, "list", "-m", "-f", "{{.Dir}}", dependency]
    result = subprocess.run(command, cwd=module, env=_go_environment(), capture_output=True, text=True, check=False)
    if result.returncode:
        raise ClusterError(f"{dependency}: no directory of the module\n{result.stderr}")
    return Path(result.stdout.strip())


def _get_debian_programs(programs: Sequence[tuple[str, str]], print_status: Callable[[str], None]) -> None:
    packages = [package for program, package in programs if not shutil.which(program)]
    if not packages:
        return
    if not _can_install():
        raise ClusterError(f"programs not found; install them (Debian: apt-get install {' '.join(packages)})")
    print_status(f"getting Debian packages: {' '.join(packages)}")
    _apt_install(packages)


def _go_environment() -> dict[str, str]:
    chosen = {"CGO_ENABLED": "0", "GOFLAGS": "-mod=readonly -buildvcs=false", "GOWORK": "off", "GOTOOLCHAIN": "local"}
    # Garbage collection uses a fifth of the processor time of compiler and linker. The limit is a soft one.
    memory = {"GOGC": "400", "GOMEMLIMIT": "3GiB"}
    return os.environ | chosen | memory


def _go(print_status: Callable[[str], None], oldest: tuple[int, int] = OLDEST_GO) -> Path:
    found = _installed_go()
    if found is None and _can_install():
        print_status("no Go here: installing one from the Debian packages")
        _apt_install(["golang-go"])
        found = _installed_go()
    if found is None:
        required = ".".join(map(str, oldest))
        raise ClusterError(
            f"no Go toolchain found; install Go {required} or newer, or any Go at all "
            "(Debian: apt-get install golang-go): it is used to fetch a newer one"
        )
    if _go_version(found) >= oldest:
        return found
    return _newer_go(found, print_status)


def _installed_go() -> Path | None:
    in_path = shutil.which("go")
    places = [*([Path(in_path)] if in_path else []), Path("/usr/local/go/bin/go")]
    places += sorted(Path("/usr/lib").glob("go-*/bin/go"))
    usable = [place for place in places if os.access(place, os.X_OK)]
    return max(usable, key=_go_version, default=None)


def _go_version(go: Path) -> tuple[int, int]:
    answer = subprocess.run([go, "version"], capture_output=True, text=True, check=True).stdout
    found = re.search(r"go(\d+)\.(\d+)", answer)
    return (int(found[1]), int(found[2])) if found else (0, 0)


def _newer_go(go: Path, print_status: Callable[[str], None]) -> Path:
    """An old Go cannot build Kubernetes, but it can fetch a newer one: toolchains are modules like any other."""
    machine = {"x86_64": "amd64", "aarch64": "arm64"}.get(platform.machine(), platform.machine())
    toolchain = f"golang.org/toolchain@v0.0.1-{TOOLCHAIN}.linux-{machine}"
    print_status(f"{go} is too old: fetching {TOOLCHAIN}")
    with tempfile.TemporaryDirectory() as outside_any_module:
        _run([go, "mod", "download", toolchain], cwd=Path(outside_any_module), env=_go_environment())
    store = subprocess.run([go, "env", "GOMODCACHE"], capture_output=True, text=True, check=True).stdout.strip()
    root = Path(store) / toolchain
    # Module archives carry no executable bits.
    for program in (*root.glob("bin/*"), *root.glob("pkg/tool/*/*")):
        program.chmod(0o755)
    return root / "bin/go"


def _get_system_programs(result: Assets, print_status: Callable[[str], None]) -> None:
    packages = sorted({package for name, package in SYSTEM_PROGRAMS.items() if not result.find(name)})
    if not packages:
        return
    if not _can_install():
        raise ClusterError("\n".join(result.missing()))
    print_status(f"getting Debian packages: {' '.join(packages)}")
    installed = [package for package in packages if package != UNPACK_ONLY]
    if installed:
        _apt_install(installed)
    if UNPACK_ONLY in packages:
        _unpack(UNPACK_ONLY, result.directory / "debian")
    if missing := result.missing():
        raise ClusterError("\n".join(missing))


def _get_old_containerd(result: Assets, print_status: Callable[[str], None]) -> None:
    if result.old_containerd.is_dir():
        return
    try:
        if not _can_install():
            raise ClusterError("that takes root and apt-get")
        print_status(f"getting Debian's containerd {OLD_CONTAINERD}")
        _unpack(_OLD_CONTAINERD_PACKAGE, result.old_containerd.parents[1])
    except ClusterError as error:
        print_status(f"no containerd {OLD_CONTAINERD}, the tests that need it will not run: {error}")


def _can_install() -> bool:
    return os.geteuid() == 0 and shutil.which("apt-get") is not None


def _apt_install(packages: list[str]) -> None:
    environment = os.environ | {"DEBIAN_FRONTEND": "noninteractive"}
    _run(["apt-get", "-q", "update"], env=environment)
    _run(["apt-get", "-q", "install", "-y", "--no-install-recommends", *packages], env=environment)


def _unpack(package: str, target: Path) -> None:
    with tempfile.TemporaryDirectory(prefix=".unpacking-", dir=target.parent) as scratch:
        _run(["apt-get", "-q", "update"])
        _run(["apt-get", "-q", "-o", "APT::Sandbox::User=root", "download", package], cwd=Path(scratch))
        archive = next(Path(scratch).glob("*.deb"))
        _run(["dpkg-deb", "-x", archive, Path(scratch) / "root"])
        (Path(scratch) / "root").rename(target)


def _run(command: list[str | Path], cwd: Path | None = None, env: dict[str, str] | None = None) -> None:
    result = subprocess.run(
        command, cwd=cwd, env=env, stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True, check=False
    )
    if result.returncode:
        words = " ".join(map(str, command))
        raise ClusterError(f"{words}: failed with {result.returncode}\n{result.stdout[-4000:]}")


def main() -> int:
    parser = argparse.ArgumentParser(prog=BUILD_COMMAND, description="build the programs of the test cluster")
    parser.add_argument("tools", nargs="*", metavar="TOOL", help="build only these modules of tests/cluster/tools")
    modules = parser.parse_args().tools

    def print_status(text: str) -> None:
        print(text, flush=True)

    try:
        for directory in build_tools(modules, print_status) if modules else [build(print_status).directory]:
            print(directory)
    except ClusterError as error:
        print(error, file=sys.stderr)
        return 1
    except KeyboardInterrupt:
        return 130
    return 0


if __name__ == "__main__":
    sys.exit(main())
