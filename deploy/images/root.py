"""Assembles the file systems of the images: a Python from Debian's packages, the wheel, what it needs, no more.

    python3 deploy/images/root.py PART DIRECTORY [--architecture amd64|arm64] [--sources DIRECTORY]

The Containerfile calls it in a build stage, images.py and the tests call its functions: the same files either way.

- `base`: files of Debian packages, unpacked and not installed: there is no package manager, no shell and no tool.
- `product`, over the base: /usr/local with the product's wheel and its dependencies, by the hashes of constraints.txt.
- `operator`, over both: what the extra `operator` adds, which nodes do not need.
- `levelzero`, over both: the libraries that read GPUs, with the C library that they need. Only for amd64.
- `shell`, over both: /bin/sh.
- `fpga`, over both: the static programs that are copied to hosts (fpga_host.py).

Debian packages are pinned by packages.lock (debian.py), tools are those of the build root (buildroot.py). Only apt,
dpkg, util-linux and a Python 3.11 or newer with pip are needed. What is made for this machine's architecture is tried
out. For the other one, the libraries that its programs and modules need are verified to exist.

Modules of others are there compiled only, which halves them. The product's own keep their sources for the lines in
tracebacks, beside code that is never compared with them: a root file system that is read-only could keep no better.
"""

from __future__ import annotations

import argparse
import filecmp
import hashlib
import os
import shutil
import sys
import tempfile
import tomllib
from collections.abc import Iterable, Iterator, Mapping
from fnmatch import fnmatch
from pathlib import Path

import fpga_host
from buildroot import PYTHON, TRIPLETS, BuildRoot, build_packages, enter, native
from debian import ARCHITECTURES, RELEASE, Lock, RecipeError, default_cache, fetch, read_lock, run, select, unpack
from elf import check_libraries

STDLIB = f"usr/lib/{PYTHON}"
PACKAGES = f"usr/local/lib/{PYTHON}/dist-packages"

# What is taken of each Debian package. `*` matches across directories.
DEBIAN = {
    "base-files": ("usr/lib/os-release", "usr/share/common-licenses/*"),
    "libc6": ("lib/*/ld-linux*", *(f"lib/*/lib{name}.so.*" for name in
              ("c", "dl", "m", "pthread", "resolv", "rt", "util"))),
    # The licence of the two libraries that follow it.
    "gcc-12-base": (),
    # glibc loads it when a thread is ended from outside, and aborts if it cannot.
    "libgcc-s1": ("lib/*/libgcc_s.so.*",),
    # For protobuf's own library.
    "libstdc++6": ("usr/lib/*/libstdc++.so.*",),
    "libexpat1": ("lib/*/libexpat.so.*",),
    "libffi8": ("usr/lib/*/libffi.so.*",),
    "libssl3": ("usr/lib/*/libssl.so.*", "usr/lib/*/libcrypto.so.*"),
    "zlib1g": ("lib/*/libz.so.*",),
    f"lib{PYTHON}-minimal": (f"{STDLIB}/*",),
    f"lib{PYTHON}-stdlib": (f"{STDLIB}/*",),
    f"{PYTHON}-minimal": (f"usr/bin/{PYTHON}",),
}  # fmt: skip

# The path of the dynamic loader, which every program names.
LOADERS = {"amd64": "lib64/*", "arm64": "lib/ld-linux-aarch64.so.1"}

# The hooks in the DaemonSet of the Go operator for Onload.
SHELL = {"dash": ("bin/dash",)}

# The Level-Zero loader is that of Debian 13, because that of Debian 12 lacks zesInit. It comes with the C library of
# Debian 13, on which programs for Debian 12 run as well. Debian 13 has no Level-Zero driver: it is that of the release
# after it, with the C++ library that it is compiled for. The licence of the libraries of GCC is in the base.
LEVELZERO = {
    "trixie": {
        "libc6": ("usr/lib64/*", "usr/lib/*/ld-linux*", *(f"usr/lib/*/lib{name}.so.*" for name in
                  ("c", "dl", "m", "pthread", "resolv", "rt", "util"))),
        "libze1": ("usr/lib/*/libze_loader.so.*",),
    },
    "forky": {
        "libgcc-s1": ("usr/lib/*/libgcc_s.so.*",),
        "libigdgmm12": ("usr/lib/*/libigdgmm.so.*",),
        "libstdc++6": ("usr/lib/*/libstdc++.so.*",),
        "libze-intel-gpu1": ("usr/lib/*/libze_intel_gpu.so.*",),
    },
}  # fmt: skip
LEVELZERO_ARCHITECTURES = ("amd64",)
ZE_LOADER = "libze_loader.so.1"

# An emulator of the other architecture, and the headers of the Level-Zero loader.
FOR_TESTS = {"bookworm": ("qemu-user-static",), "trixie": ("libze-dev",)}

# What is not taken of Python's library: other front ends, compilers, tests, databases, East Asian codecs.
UNWANTED = tuple(
    f"{STDLIB}/{pattern}"
    for pattern in (
        "__phello__*", "_sysconfigdata*", "antigravity.py", "config-*", "curses/*", "dbm/*", "distutils/*",
        "doctest.py", "ensurepip/*", "idlelib/*", "lib2to3/*", "pydoc.py", "pydoc_data/*", "sitecustomize.py",
        "sqlite3/*", "test/*", "this.py", "tkinter/*", "turtle.py", "turtledemo/*", "unittest/*", "venv/*",
        *(f"encodings/{name}*.py" for name in
          ("big5", "cp932", "cp949", "cp950", "euc_", "gb", "hz", "iso2022", "johab", "shift_jis")),
        *(f"lib-dynload/{name}.*" for name in
          ("_bz2", "_codecs_*", "_crypt", "_ctypes_test", "_curses*", "_dbm", "_lzma", "_multibytecodec",
           "_sqlite3", "_test*", "_uuid", "_xx*", "audioop", "nis", "ossaudiodev", "readline", "xx*")),
    )
)  # fmt: skip

ACCOUNTS = {
    "etc/passwd": "root:x:0:0:root:/:/sbin/nologin\nnonroot:x:65532:65532:nonroot:/:/sbin/nologin\n",
    "etc/group": "root:x:0:\nnonroot:x:65532:\n",
    "etc/nsswitch.conf": "passwd: files\ngroup: files\nhosts: files dns\n",
}

# Where users' manifests and scripts look for a command besides /usr/local/bin.
ALSO_IN = {
    "intel-gpu-nfdhook": "usr/local/bin/gpu-sw",
    "intel-sgx-epchook": "usr/local/bin/sgx-sw",
    "onload-device-plugin": "usr/bin",
    "onload-worker": "usr/bin",
}

# What init containers find around them: the working directories, into which manifests mount `conf` and `scratch`, with
# the profiles that are taken where there is no configuration.
INIT_DIRECTORIES = ("qat-init/conf", "idxd-init/conf", "idxd-init/scratch")
PROFILES = {"idxd-init": ("dsa.conf", "iaa.conf")}

# Loads every library and imports every module of ours, in the image's own root.
TRIAL = """
import ctypes, importlib, os, pkgutil, sys
for place, _, names in os.walk("/usr"):
    for name in names:
        if ".so" in name:
            ctypes.CDLL(os.path.join(place, name))
missing, *names = sys.argv[1:]
for name in names:
    package = importlib.import_module(name)
    for module in pkgutil.walk_packages(package.__path__, name + "."):
        if module.name.endswith(".__main__"):
            continue
        try:
            importlib.import_module(module.name)
        except ModuleNotFoundError as error:
            if error.name not in missing.split(","):
                raise
"""

# Not in any image: the emulated kernel, and the extra `simulate`.
EMULATED_KERNEL = "accelplane/simulate/kernel"
SIMULATE = ("grpc", "rich", EMULATED_KERNEL.replace("/", "."))
OPERATOR = ("cryptography", "prometheus_client")

# pip's options that allow no network; the directory follows.
_FROM_CACHE = ("--no-index", "--find-links")


class Recipe:
    """Makes the parts of the images of one architecture."""

    def __init__(self, architecture: str, sources: Path, cache: Path, lock: Lock) -> None:
        self.architecture = architecture
        self.sources = sources
        self.cache = cache
        self.lock = lock
        self.build_root = BuildRoot(cache, lock)

    def base(self, root: Path) -> None:
        """The parts from Debian."""
        with self.build_root.scratch() as scratch:
            made = scratch / "base"
            made.mkdir()
            for link in ("bin", "lib", "lib64", "sbin"):
                (made / "usr" / link).mkdir(parents=True, exist_ok=True)
                (made / link).symlink_to(f"usr/{link}")
            for directory in ("dev", "etc", "licenses/debian", "proc", "run", "sys", "tmp", "var/lib/dpkg/status.d"):
                (made / directory).mkdir(parents=True)
            (made / "var/run").symlink_to("../run")
            wanted = dict(DEBIAN)
            wanted["libc6"] = (LOADERS[self.architecture], *wanted["libc6"])
            self._add_packages(made, RELEASE, wanted)
            for file in list(_files(made / STDLIB)):
                if _matches(file.relative_to(made), UNWANTED):
                    file.unlink()
            _drop_empty(made / STDLIB)
            (made / "etc/os-release").symlink_to("../usr/lib/os-release")
            for name, text in ACCOUNTS.items():
                (made / name).write_text(text)
            self._compile(made, STDLIB)
            self._try_out(made)
            shutil.copytree(made, root, symlinks=True)
        (root / "tmp").chmod(0o1777)

    def shell(self, root: Path) -> None:
        """What goes over both for the one image whose users' manifests have hooks that are shell scripts."""
        for directory in ("licenses/debian", "var/lib/dpkg/status.d", "usr/bin"):
            (root / directory).mkdir(parents=True)
        self._add_packages(root, RELEASE, SHELL)
        # /bin is a link in the base.
        (root / "bin/dash").rename(root / "usr/bin/sh")
        (root / "bin").rmdir()

    def product(self, root: Path, base: Path, extra: str = "") -> None:
        """What goes over the base: our wheel and its dependencies."""
        with self.build_root.scratch() as scratch:
            made = scratch / "product"
            packages = made / PACKAGES
            self._install(packages, extra)
            shutil.rmtree(packages / "bin", ignore_errors=True)
            shutil.rmtree(packages / EMULATED_KERNEL)
            self._strip(packages)
            _move_licences(packages, made)
            for command, function in _commands(packages):
                _write_command(made / "usr/local/bin" / command, function)
            _add_places(made, packages)
            self._compile(made, PACKAGES, keep_sources_of="accelplane")
            whole = _united(scratch / "whole", base, made)
            self._try_out(whole, "accelplane", without=SIMULATE if extra == "operator" else (*SIMULATE, *OPERATOR))
            shutil.copytree(made, root, symlinks=True)

    def operator(self, root: Path, base: Path, product: Path) -> None:
        """What goes over the product: what its extra of that name adds to it."""
        with tempfile.TemporaryDirectory() as scratch:
            self.product(whole := Path(scratch) / "whole", base, "operator")
            for file in list(_files(whole)):
                there = product / file.relative_to(whole)
                if file.is_symlink() or (there.is_file() and filecmp.cmp(file, there, shallow=False)):
                    file.unlink()
            _drop_empty(whole)
            shutil.copytree(whole, root)
        # The command of the manifest of the Onload operator.
        (root / "manager").symlink_to("/usr/local/bin/onload-operator")

    def levelzero(self, root: Path, base: Path) -> None:
        """What goes over base and product: the libraries that read GPUs."""
        if self.architecture not in LEVELZERO_ARCHITECTURES:
            raise RecipeError(
                f"levelzero: found {self.architecture}, expected amd64: Debian has the driver for it only"
            )
        for directory in ("usr/lib", "licenses/debian", "var/lib/dpkg/status.d"):
            (root / directory).mkdir(parents=True)
        for release, packages in LEVELZERO.items():
            self._add_packages(root, release, packages)
        with tempfile.TemporaryDirectory() as scratch:
            whole = _united(Path(scratch) / "root", base, root)
            self._try_out(whole)
            if self.architecture == native():
                _inside(whole, "-c", f"import ctypes; ctypes.CDLL('{ZE_LOADER}').zesInit")

    def fpga(self, root: Path) -> None:
        """What goes over both for the image that installs programs on hosts."""
        fpga_host.build(root / "usr/local/fpga-sw", self.sources, self.architecture, self.cache, self.lock)

    def _add_packages(self, root: Path, release: str, wanted: Mapping[str, tuple[str, ...]]) -> None:
        """What is wanted of each Debian package, its licence and its description."""
        archives = fetch(select(self.lock, release, self.architecture, wanted), self.cache)
        with tempfile.TemporaryDirectory() as scratch:
            for name, archive in archives.items():
                unpack(archive, unpacked := Path(scratch) / name)
                _pick(unpacked, root, wanted[name])
                _keep_licence(unpacked, root / "licenses/debian", name)
                # Where tools that look for known flaws find what is in an image without a package manager.
                (root / "var/lib/dpkg/status.d" / name).write_text(run("dpkg-deb", "-f", archive))
                shutil.rmtree(unpacked)

    def _install(self, packages: Path, extra: str) -> None:
        """Our wheel and its dependencies, whose wheels are kept in the cache."""
        with tempfile.TemporaryDirectory() as scratch:
            constraints = self.sources / "constraints.txt"
            tools = self._tools(constraints, Path(scratch) / "tools")
            wheel = _wheel(self.sources, Path(scratch), tools)
            wanted = Path(scratch) / "wanted.txt"
            wanted.write_text(
                f"accelplane{f'[{extra}]' if extra else ''} @ {wheel.as_uri()} --hash=sha256:{_sha256(wheel)}\n"
            )
            locked = ("--constraint", constraints, "--requirement", wanted)
            project = tomllib.loads((self.sources / "pyproject.toml").read_text())["project"]
            dependencies = repr((self._platform(), project["dependencies"], project["optional-dependencies"]))
            metadata = constraints.read_bytes() + dependencies.encode()
            kept = self._wheels(
                f"{extra or 'product'}-{self.architecture}", metadata, (*self._platform(), *locked), tools
            )
            _pip(
                "install",
                *_FROM_CACHE,
                kept,
                "--no-compile",
                *self._platform(),
                "--target",
                packages,
                *locked,
                env=tools,
            )

    def _platform(self) -> tuple[str, ...]:
        """pip's options for wheels of the image's Python and C library, whatever runs pip."""
        machine = TRIPLETS[self.architecture].partition("-")[0]
        glibc = (f"manylinux_2_{minor}_{machine}" for minor in range(36, 16, -1))
        platforms = (*glibc, f"manylinux2014_{machine}")
        version = ("--implementation", "cp", "--python-version", PYTHON.removeprefix("python"))
        return (*(f"--platform={platform}" for platform in platforms), *version)

    def _tools(self, constraints: Path, directory: Path) -> dict[str, str]:
        """The environment with pinned setuptools and pip. That of Debian takes no hashes from constraints."""
        wanted = directory.with_suffix(".txt")
        pins = "".join(_pinned(constraints, ("pip", "setuptools")))
        wanted.write_text(pins)
        environment = dict(os.environ)
        kept = self._wheels("tools", pins.encode(), ("--requirement", wanted), environment)
        _pip("install", *_FROM_CACHE, kept, "--target", directory, "--requirement", wanted, env=environment)
        return environment | {"PYTHONPATH": str(directory), "SOURCE_DATE_EPOCH": "315532800"}

    def _wheels(self, name: str, metadata: bytes, arguments: tuple[str | Path, ...], env: dict[str, str]) -> Path:
        """The directory of the cache with the wheels that the arguments name. Downloads them unless it exists."""
        digest = hashlib.sha256(metadata).hexdigest()[:16]
        directory = self.cache / "wheels" / f"{name}-{digest}"
        if not directory.exists():
            directory.parent.mkdir(parents=True, exist_ok=True)
            with tempfile.TemporaryDirectory(dir=self.cache) as scratch:
                made = Path(scratch) / "wheels"
                _pip("download", "--dest", made, *arguments, env=env)
                for own in made.glob("accelplane-*.whl"):
                    own.unlink()
                made.rename(directory)
        return directory

    def _strip(self, packages: Path) -> None:
        for library in sorted(packages.rglob("*.so")):
            if library.name.startswith("_testcapi"):
                library.unlink()
            else:
                strip = f"/usr/bin/{TRIPLETS[self.architecture]}-strip"
                self.build_root.run(strip, "--strip-unneeded", library.name, directory=library.parent)

    def _compile(self, root: Path, where: str, keep_sources_of: str = "") -> None:
        """Compiles all modules in a root inside the build root, and deletes the sources of others."""
        inside = f"/{root.relative_to(self.build_root.root)}"
        # Without -I, which would ignore the seed: the order of sets of texts in the files depends on it.
        compiler = [f"/usr/bin/{PYTHON}", "-BSs", "-m", "compileall", "-q", "--invalidation-mode", "unchecked-hash"]
        place = ["-s", inside, "-p", "/"]
        skip = ["-x", f"/{where}/{keep_sources_of}/"] if keep_sources_of else []
        seed = {"PYTHONHASHSEED": "0"}
        self.build_root.run(*compiler, *place, *skip, "-b", f"{inside}/{where}", directory=root, env=seed)
        for file in list(_files(root / where)):
            relative = file.relative_to(root / where)
            if relative.parts[0] == keep_sources_of:
                continue
            if file.suffix in {".py", ".pyi", ".pyx", ".pxd", ".c", ".h"} or file.name == "py.typed":
                file.unlink()
        if keep_sources_of:
            own = f"{inside}/{where}/{keep_sources_of}"
            self.build_root.run(*compiler, *place, own, directory=root, env=seed)

    def _try_out(self, root: Path, *packages: str, without: Iterable[str] = ()) -> None:
        check_libraries(root, self.architecture)
        if self.architecture == native():
            _inside(root, "-W", "ignore", "-c", TRIAL, ",".join(without), *packages)


def wanted_packages(*architectures: str) -> dict[tuple[str, str], set[str]]:
    """All packages that images, build roots and tests of these architectures need, by release and architecture."""
    found: dict[tuple[str, str], set[str]] = {}
    for architecture in architectures:
        names = {*DEBIAN, *SHELL, *fpga_host.DEBIAN, *build_packages(architecture)}
        found[RELEASE, architecture] = names | set(FOR_TESTS[RELEASE])
        if architecture in LEVELZERO_ARCHITECTURES:
            for release, packages in LEVELZERO.items():
                found[release, architecture] = {*packages, *FOR_TESTS.get(release, ())}
    return found


def _add_places(root: Path, packages: Path) -> None:
    """Paths that manifests know."""
    for command, directory in ALSO_IN.items():
        (root / directory).mkdir(parents=True, exist_ok=True)
        (root / directory / command).symlink_to(f"/usr/local/bin/{command}")
    for directory in INIT_DIRECTORIES:
        (root / directory).mkdir(parents=True)
    for directory, names in PROFILES.items():
        for name in names:
            profile = packages / "accelplane/provision/profiles" / name
            if not profile.exists():
                raise RecipeError(f"the wheel lacks {profile.relative_to(packages)}; is it package-data in pyproject?")
            shutil.copy(profile, root / directory)


def _pick(unpacked: Path, root: Path, patterns: tuple[str, ...]) -> None:
    for pattern in patterns:
        found = [file for file in _files(unpacked) if fnmatch(str(file.relative_to(unpacked)), pattern)]
        if not found:
            raise RecipeError(f"{unpacked.name}: has no {pattern}; is this Debian 12?")
        for file in found:
            target = root / file.relative_to(unpacked)
            target.parent.mkdir(parents=True, exist_ok=True)
            shutil.copy2(file, target, follow_symlinks=False)


def _keep_licence(unpacked: Path, licences: Path, name: str) -> None:
    document = unpacked / "usr/share/doc" / name / "copyright"
    if document.is_symlink() or not document.exists():
        return
    (licences / name).mkdir(parents=True, exist_ok=True)
    shutil.copy(document, licences / name)


def _wheel(sources: Path, scratch: Path, tools: dict[str, str]) -> Path:
    """Our wheel, built from a copy: setuptools leaves things lying about."""
    copy = scratch / "sources"
    copy.mkdir()
    for name in ("pyproject.toml", "README.md", "LICENSE"):
        shutil.copy(sources / name, copy)
    shutil.copytree(sources / "src", copy / "src", ignore=shutil.ignore_patterns("__pycache__", "*.egg-info"))
    build = "from setuptools import build_meta; print(build_meta.build_wheel('..'))"
    run(sys.executable, "-c", build, cwd=copy, env=tools)
    return next(scratch.glob("*.whl"))


def _pinned(constraints: Path, names: Iterable[str]) -> Iterator[str]:
    """The lines of a constraints file that pin these packages."""
    wanted = False
    for line in constraints.read_text().splitlines(keepends=True):
        if not line.startswith((" ", "#")):
            wanted = line.partition("==")[0].strip() in names
        if wanted and not line.lstrip().startswith("#"):
            yield line


def _pip(command: str, *arguments: str | Path, env: dict[str, str]) -> None:
    run(
        sys.executable, "-m", "pip", command, "--quiet", "--disable-pip-version-check", "--require-hashes",
        "--only-binary=:all:", *(("--no-warn-conflicts", "--root-user-action=ignore") if command == "install" else ()),
        *arguments, env=env,
    )  # fmt: skip


def _commands(packages: Path) -> Iterator[tuple[str, str]]:
    """Command and `module:function` of our entry points."""
    text = next(packages.glob("accelplane-*.dist-info/entry_points.txt")).read_text()
    section = text.partition("[console_scripts]")[2].partition("[")[0]
    for line in section.strip().splitlines():
        command, _, function = line.partition("=")
        yield command.strip(), function.strip()


def _write_command(path: Path, function: str) -> None:
    module, _, name = function.partition(":")
    path.parent.mkdir(parents=True, exist_ok=True)
    # -I: nothing of the environment, the user's home or the working directory decides what is imported.
    path.write_text(f"#!/usr/bin/{PYTHON} -I\nimport sys\n\nfrom {module} import {name}\n\nsys.exit({name}())\n")
    path.chmod(0o755)


def _move_licences(packages: Path, root: Path) -> None:
    for metadata in packages.glob("*.dist-info"):
        name = metadata.name.partition("-")[0]
        for licence in (*metadata.glob("LICEN[CS]E*"), *metadata.glob("licenses/**/*"), *metadata.glob("NOTICE*")):
            if licence.is_file():
                (kept := root / "licenses" / name).mkdir(parents=True, exist_ok=True)
                shutil.move(licence, kept / licence.name)
        # They list files that were moved, and paths of this machine.
        for file in ("RECORD", "INSTALLER", "REQUESTED", "direct_url.json"):
            (metadata / file).unlink(missing_ok=True)
        _drop_empty(metadata)


def _united(root: Path, *parts: Path) -> Path:
    """The parts over each other, as in an image."""
    root.mkdir()
    for part in parts:
        # Unlike copytree, cp replaces links.
        run("cp", "-a", "--remove-destination", f"{part}/.", root)
    return root


def _inside(root: Path, *arguments: str) -> None:
    run("env", "-i", *enter(root, "/"), f"/usr/bin/{PYTHON}", "-IB", *arguments)


def _sha256(file: Path) -> str:
    return hashlib.sha256(file.read_bytes()).hexdigest()


def _files(directory: Path) -> Iterator[Path]:
    return (path for path in sorted(directory.rglob("*")) if path.is_symlink() or path.is_file())


def _matches(path: Path, patterns: Iterable[str]) -> bool:
    return any(fnmatch(str(path), pattern) for pattern in patterns)


def _drop_empty(directory: Path) -> None:
    for path in sorted(directory.rglob("*"), reverse=True):
        if path.is_dir() and not any(path.iterdir()):
            path.rmdir()


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("part", choices=("base", "product", "operator", "shell", "fpga", "levelzero"))
    parser.add_argument("directory", type=Path)
    parser.add_argument("--architecture", choices=ARCHITECTURES, help="of the image; default: of this machine")
    parser.add_argument("--base", type=Path, help="for product, operator and levelzero: what base has made")
    parser.add_argument("--product", type=Path, help="for operator: what product has made")
    parser.add_argument("--sources", type=Path, default=Path(__file__).parents[2], help="the repository")
    parser.add_argument("--cache", type=Path, default=default_cache(), help="directory of downloads")
    chosen = parser.parse_args()
    others = {"product": ("base",), "operator": ("base", "product"), "levelzero": ("base",)}.get(chosen.part, ())
    if missing := [f"--{name}" for name in others if not getattr(chosen, name)]:
        parser.error(f"{chosen.part} needs {' and '.join(missing)}")
    os.umask(0o022)
    chosen.cache.mkdir(parents=True, exist_ok=True)
    try:
        recipe = Recipe(chosen.architecture or native(), chosen.sources.resolve(), chosen.cache.resolve(), read_lock())
        getattr(recipe, chosen.part)(chosen.directory, *(getattr(chosen, name) for name in others))
    except RecipeError as error:
        print(error, file=sys.stderr)
        return 1
    return 0


if __name__ == "__main__":
    sys.exit(main())
