"""Makes the parts of the images: file trees from Debian packages (contents.py) and wheels (wheels.py).

    python3 deploy/images/root.py PART DIRECTORY [--architecture amd64|arm64] [--sources DIRECTORY]

The Containerfile calls it in a build stage; images.py and the tests call its functions. Both result in the same files.

- `base`: files of Debian packages, unpacked and not installed: no package manager, no shell and no tool.
- `product`, over the base: /usr/local with the product's wheel and its dependencies, by the hashes of constraints.txt.
- `operator`, over both: the dependencies of the extra `operator`, which nodes do not need.
- `levelzero`, over both: the libraries that read GPUs, with the C library that they need. Only for amd64.
- `shell`, over both: /bin/sh.
- `fpga`, over both: the static programs that are copied to hosts (fpga_host.py).

Debian packages are pinned by packages.lock (debian.py). Tools are those of the build root (buildroot.py). The machine
needs apt, dpkg, util-linux and a Python 3.11 or newer with pip. The build loads every library and imports every module
of parts for this machine's architecture. For the other one, it verifies that every needed library exists.

Modules of other projects are compiled only, which halves their size. The product keeps its sources for tracebacks. The
compiled files are not compared with the sources, because the root file system of a container can be read-only.
"""

from __future__ import annotations

import argparse
import filecmp
import os
import shutil
import sys
import tempfile
from collections.abc import Iterable, Iterator, Mapping
from fnmatch import fnmatch
from pathlib import Path

import fpga_host
from buildroot import PYTHON, TRIPLETS, BuildRoot, enter, native
from contents import (
    ACCOUNTS,
    ALSO_IN,
    DEBIAN,
    INIT_DIRECTORIES,
    LEFT_OUT,
    LEVELZERO,
    LEVELZERO_ARCHITECTURES,
    LOADERS,
    OPERATOR,
    PACKAGES,
    PROFILES,
    SHELL,
    SIMULATE,
    STDLIB,
    UNWANTED,
    ZE_LOADER,
)  # fmt: skip
from debian import ARCHITECTURES, RELEASE, Lock, RecipeError, default_cache, fetch, read_lock, run, select, unpack
from elf import check_libraries
from wheels import Wheels

# Runs in the root of an image: loads every library and imports every module of the product.
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


class Recipe:
    """Makes the parts of the images of one architecture."""

    def __init__(self, architecture: str, sources: Path, cache: Path, lock: Lock) -> None:
        self.architecture = architecture
        self.sources = sources
        self.cache = cache
        self.lock = lock
        self.build_root = BuildRoot(cache, lock)
        self.wheels = Wheels(architecture, sources, cache)

    def base(self, root: Path) -> None:
        """The files of Debian packages."""
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
            self._check(made)
            shutil.copytree(made, root, symlinks=True)
        (root / "tmp").chmod(0o1777)

    def shell(self, root: Path) -> None:
        """/bin/sh, for the image whose manifests of the Go project have hooks that are shell scripts."""
        for directory in ("licenses/debian", "var/lib/dpkg/status.d", "usr/bin"):
            (root / directory).mkdir(parents=True)
        self._add_packages(root, RELEASE, SHELL)
        # /bin is a link in the base.
        (root / "bin/dash").rename(root / "usr/bin/sh")
        (root / "bin").rmdir()

    def product(self, root: Path, base: Path, extra: str = "") -> None:
        """The wheel of the product and its dependencies."""
        with self.build_root.scratch() as scratch:
            made = scratch / "product"
            packages = made / PACKAGES
            self.wheels.install(packages, extra)
            shutil.rmtree(packages / "bin", ignore_errors=True)
            for directory in LEFT_OUT:
                shutil.rmtree(packages / directory)
            self._strip(packages)
            _move_licenses(packages, made)
            for command, function in _commands(packages):
                _write_command(made / "usr/local/bin" / command, function)
            _add_places(made, packages)
            self._compile(made, PACKAGES, keep_sources_of="accelplane")
            whole = _united(scratch / "whole", base, made)
            self._check(whole, "accelplane", without=SIMULATE if extra == "operator" else (*SIMULATE, *OPERATOR))
            shutil.copytree(made, root, symlinks=True)

    def operator(self, root: Path, base: Path, product: Path) -> None:
        """The files that the extra `operator` adds to the product."""
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
        """The libraries that read GPUs."""
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
            self._check(whole)
            if self.architecture == native():
                _inside(whole, "-c", f"import ctypes; ctypes.CDLL('{ZE_LOADER}').zesInit")

    def fpga(self, root: Path) -> None:
        """The programs for hosts."""
        fpga_host.build(root / "usr/local/fpga-sw", self.sources, self.architecture, self.cache, self.lock)

    def _add_packages(self, root: Path, release: str, wanted: Mapping[str, tuple[str, ...]]) -> None:
        """The wanted files of each Debian package, its license and its description."""
        archives = fetch(select(self.lock, release, self.architecture, wanted), self.cache)
        with tempfile.TemporaryDirectory() as scratch:
            for name, archive in archives.items():
                unpack(archive, unpacked := Path(scratch) / name)
                _pick(unpacked, root, wanted[name])
                _keep_license(unpacked, root / "licenses/debian", name)
                # Scanners for vulnerabilities read this directory in images without a package manager.
                (root / "var/lib/dpkg/status.d" / name).write_text(run("dpkg-deb", "-f", archive))
                shutil.rmtree(unpacked)

    def _strip(self, packages: Path) -> None:
        for library in sorted(packages.rglob("*.so")):
            if library.name.startswith("_testcapi"):
                library.unlink()
            else:
                strip = f"/usr/bin/{TRIPLETS[self.architecture]}-strip"
                self.build_root.run(strip, "--strip-unneeded", library.name, directory=library.parent)

    def _compile(self, root: Path, where: str, keep_sources_of: str = "") -> None:
        """Compiles all modules in a root inside the build root, and deletes the sources of other projects."""
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

    def _check(self, root: Path, *packages: str, without: Iterable[str] = ()) -> None:
        check_libraries(root, self.architecture)
        if self.architecture == native():
            _inside(root, "-W", "ignore", "-c", TRIAL, ",".join(without), *packages)


def _add_places(root: Path, packages: Path) -> None:
    """Paths that manifests name."""
    for command, directory in ALSO_IN.items():
        (root / directory).mkdir(parents=True, exist_ok=True)
        (root / directory / command).symlink_to(f"/usr/local/bin/{command}")
    for directory in INIT_DIRECTORIES:
        (root / directory).mkdir(parents=True)
    for directory, names in PROFILES.items():
        for name in names:
            profile = packages / "accelplane/provision/profiles" / name
            if not profile.exists():
                raise RecipeError(
                    f"wheel: found no {profile.relative_to(packages)}; add it to package-data in pyproject.toml"
                )
            shutil.copy(profile, root / directory)


def _pick(unpacked: Path, root: Path, patterns: tuple[str, ...]) -> None:
    for pattern in patterns:
        found = [file for file in _files(unpacked) if fnmatch(str(file.relative_to(unpacked)), pattern)]
        if not found:
            raise RecipeError(f"{unpacked.name}: found no file {pattern}; update the patterns in contents.py")
        for file in found:
            target = root / file.relative_to(unpacked)
            target.parent.mkdir(parents=True, exist_ok=True)
            shutil.copy2(file, target, follow_symlinks=False)


def _keep_license(unpacked: Path, licenses: Path, name: str) -> None:
    document = unpacked / "usr/share/doc" / name / "copyright"
    if document.is_symlink() or not document.exists():
        return
    (licenses / name).mkdir(parents=True, exist_ok=True)
    shutil.copy(document, licenses / name)


def _commands(packages: Path) -> Iterator[tuple[str, str]]:
    """Command and `module:function` of the entry points of the product."""
    text = next(packages.glob("accelplane-*.dist-info/entry_points.txt")).read_text()
    section = text.partition("[console_scripts]")[2].partition("[")[0]
    for line in section.strip().splitlines():
        command, _, function = line.partition("=")
        yield command.strip(), function.strip()


def _write_command(path: Path, function: str) -> None:
    module, _, name = function.partition(":")
    path.parent.mkdir(parents=True, exist_ok=True)
    # -I: the environment, the home and the working directory have no influence on imports.
    path.write_text(f"#!/usr/bin/{PYTHON} -I\nimport sys\n\nfrom {module} import {name}\n\nsys.exit({name}())\n")
    path.chmod(0o755)


def _move_licenses(packages: Path, root: Path) -> None:
    for metadata in packages.glob("*.dist-info"):
        name = metadata.name.partition("-")[0]
        for license_file in (*metadata.glob("LICEN[CS]E*"), *metadata.glob("licenses/**/*"), *metadata.glob("NOTICE*")):
            if license_file.is_file():
                (kept := root / "licenses" / name).mkdir(parents=True, exist_ok=True)
                shutil.move(license_file, kept / license_file.name)
        # They name moved files and paths of this machine.
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
