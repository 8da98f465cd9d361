"""Assembles the root file system of the image: a Python from Debian's packages, the wheel, what it needs, no more.

    python3 deploy/images/root.py base DIRECTORY
    python3 deploy/images/root.py product DIRECTORY --base DIRECTORY [--sources DIRECTORY]
    python3 deploy/images/root.py operator DIRECTORY --base DIRECTORY --product DIRECTORY [--sources DIRECTORY]
    python3 deploy/images/root.py shell DIRECTORY
    python3 deploy/images/root.py levelzero DIRECTORY --base DIRECTORY

The Containerfile calls it in a build stage, the tests call it here: the same files either way. `base` picks from
Debian packages, unpacked and not installed, so that there is no package manager, no shell and no tool in the result;
`product`, which goes over it, holds /usr/local: the product's own wheel and its dependencies, by the hashes of
constraints.txt; `operator`, which goes over both, what is asked for by those who make certificates or control custom
resources, which nodes do not; `levelzero`, which goes over both as well, the libraries that read GPUs, with the C
library that they need. All need root (for chroot) and Debian 12 (for its Python), the last two binutils (for
strip) and pip.
What is made is tried out before it is called done.

Modules of others are there compiled only, which halves them. The product's own keep their sources for the lines in
tracebacks, beside code that is never compared with them: a root file system that is read-only could keep no better.
"""

from __future__ import annotations

import argparse
import filecmp
import os
import shutil
import subprocess
import sys
import tempfile
from collections.abc import Iterable, Iterator
from fnmatch import fnmatch
from pathlib import Path

PYTHON = "python3.11"
RELEASE = "bookworm"
STDLIB = f"usr/lib/{PYTHON}"
PACKAGES = f"usr/local/lib/{PYTHON}/dist-packages"

# What is taken of each Debian package. `*` matches across directories.
DEBIAN = {
    "base-files": ("usr/lib/os-release", "usr/share/common-licenses/*"),
    "libc6": ("lib/*/ld-linux*", "lib64/*", *(f"lib/*/lib{name}.so.*" for name in
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
LOADER = "libze_loader.so.1"
KEYS = "/usr/share/keyrings/debian-archive-keyring.gpg"

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


class RecipeError(Exception):
    """The root cannot be made; the message says why and what to do."""


def base(root: Path) -> None:
    """The parts from Debian."""
    root.mkdir(parents=True)
    for link in ("bin", "lib", "lib64", "sbin"):
        (root / "usr" / link).mkdir(parents=True, exist_ok=True)
        (root / link).symlink_to(f"usr/{link}")
    for directory in ("dev", "etc", "licenses/debian", "proc", "run", "sys", "tmp", "var/lib/dpkg/status.d"):
        (root / directory).mkdir(parents=True)
    (root / "tmp").chmod(0o1777)
    (root / "var/run").symlink_to("../run")
    add_packages(root, DEBIAN)
    for file in list(_files(root / STDLIB)):
        if _matches(file.relative_to(root), UNWANTED):
            file.unlink()
    _drop_empty(root / STDLIB)
    (root / "etc/os-release").symlink_to("../usr/lib/os-release")
    for file, text in ACCOUNTS.items():
        (root / file).write_text(text)
    _compile(root, STDLIB)
    _try_out(root)


def shell(root: Path) -> None:
    """What goes over both for the one image whose users' manifests have hooks that are shell scripts."""
    for directory in ("licenses/debian", "var/lib/dpkg/status.d", "usr/bin"):
        (root / directory).mkdir(parents=True)
    add_packages(root, SHELL)
    # /bin is a link in the base.
    (root / "bin/dash").rename(root / "usr/bin/sh")
    (root / "bin").rmdir()


def product(root: Path, base: Path, sources: Path, extra: str = "") -> None:
    """What goes over the base: our wheel and its dependencies."""
    if f"python{sys.version_info[0]}.{sys.version_info[1]}" != PYTHON:
        raise RecipeError(f"this is Python {sys.version.split()[0]}; the image's packages are chosen by {PYTHON}")
    root.mkdir(parents=True)
    packages = root / PACKAGES
    with tempfile.TemporaryDirectory() as scratch:
        tools = _tools(sources / "constraints.txt", Path(scratch) / "tools")
        wheel = _wheel(sources, Path(scratch), tools)
        digest = _output("sha256sum", wheel).split()[0]
        wanted = Path(scratch) / "wanted.txt"
        wanted.write_text(f"accelplane{f'[{extra}]' if extra else ''} @ {wheel.as_uri()} --hash=sha256:{digest}\n")
        locked = ("--constraint", sources / "constraints.txt", "--requirement", wanted)
        _pip("--target", packages, *locked, env=tools)
    shutil.rmtree(packages / "bin", ignore_errors=True)
    shutil.rmtree(packages / EMULATED_KERNEL)
    for library in packages.rglob("*.so"):
        if library.name.startswith("_testcapi"):
            library.unlink()
        else:
            _run("strip", "--strip-unneeded", library)
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
    for command, function in _commands(packages):
        _write_command(root / "usr/local/bin" / command, function)
    _add_places(root, packages)
    # Over the base, as it will be, so that what is compiled knows its place.
    with tempfile.TemporaryDirectory() as scratch:
        whole = Path(scratch) / "root"
        shutil.copytree(base, whole, symlinks=True)
        shutil.copytree(root, whole, symlinks=True, dirs_exist_ok=True)
        _compile(whole, PACKAGES, keep_sources_of="accelplane")
        _try_out(whole, "accelplane", without=SIMULATE if extra == "operator" else (*SIMULATE, *OPERATOR))
        shutil.rmtree(packages)
        shutil.copytree(whole / PACKAGES, packages, symlinks=True)


def operator(root: Path, base: Path, product_made: Path, sources: Path) -> None:
    """What goes over the product: what its extra of that name adds to it."""
    with tempfile.TemporaryDirectory() as scratch:
        product(whole := Path(scratch) / "whole", base, sources, "operator")
        for file in list(_files(whole)):
            there = product_made / file.relative_to(whole)
            if file.is_symlink() or (there.is_file() and filecmp.cmp(file, there, shallow=False)):
                file.unlink()
        _drop_empty(whole)
        shutil.copytree(whole, root)
    # The command of the manifest of the Onload operator.
    (root / "manager").symlink_to("/usr/local/bin/onload-operator")


def levelzero(root: Path, base: Path) -> None:
    """What goes over base and product: the libraries that read GPUs."""
    for directory in ("usr/lib", "licenses/debian", "var/lib/dpkg/status.d"):
        (root / directory).mkdir(parents=True)
    with tempfile.TemporaryDirectory() as scratch:
        for release, packages in LEVELZERO.items():
            add_packages(root, packages, apt_options(release, Path(scratch) / release))
        (whole := Path(scratch) / "root").mkdir()
        for part in (base, root):
            # Unlike copytree, cp replaces links.
            _run("cp", "-a", "--remove-destination", f"{part}/.", whole)
        _try_out(whole)
        _inside(whole, "-c", f"import ctypes; ctypes.CDLL('{LOADER}').zesInit")


def apt_options(release: str, directory: Path) -> tuple[str, ...]:
    """apt's options for the packages of another Debian release, from the mirror of this one. Gets their list."""
    lines = _output("apt-get", "indextargets", "--format", "$(ORIGIN) $(SITE) $(REPO_URI) $(CODENAME)").splitlines()
    mirrors = [line.split()[2] for line in lines if line.startswith("Debian ") and line.split()[-1] == RELEASE]
    if not mirrors:
        raise RecipeError(f"apt has no list of Debian {RELEASE}, expected its mirror; run apt-get update")
    for name in ("state/lists/partial", "cache/archives/partial"):
        (directory / name).mkdir(parents=True)
    (sources := directory / "sources.list").write_text(f"deb [signed-by={KEYS}] {mirrors[0]} {release} main\n")
    settings = {
        "APT::Sandbox::User": "root",
        "Acquire::IndexTargets::deb::DEP-11::DefaultEnabled": "false",
        "Dir::Cache": directory / "cache",
        "Dir::Etc::sourcelist": sources,
        "Dir::Etc::sourceparts": "-",
        "Dir::State": directory / "state",
        "Dir::State::status": "/dev/null",
    }
    options = tuple(f"-o{name}={value}" for name, value in settings.items())
    _run("apt-get", "-q", *options, "update")
    return options


def add_packages(root: Path, wanted: dict[str, tuple[str, ...]], options: tuple[str, ...] = ()) -> None:
    """What is wanted of each Debian package, its licence and its description."""
    with tempfile.TemporaryDirectory() as scratch:
        _run("apt-get", "-q", "-oAPT::Sandbox::User=root", *options, "download", *wanted, cwd=Path(scratch))
        for archive in sorted(Path(scratch).glob("*.deb")):
            name = archive.name.partition("_")[0]
            _run("dpkg-deb", "-x", archive, unpacked := Path(scratch) / name)
            _pick(unpacked, root, wanted[name])
            _keep_licence(unpacked, root / "licenses/debian", name)
            # Where tools that look for known flaws find what is in an image without a package manager.
            (root / "var/lib/dpkg/status.d" / name).write_text(_output("dpkg-deb", "-f", archive))


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


def _tools(constraints: Path, directory: Path) -> dict[str, str]:
    """The pinned setuptools and pip (that of Debian takes no hashes from constraints), as an environment to run in."""
    wanted = directory.with_suffix(".txt")
    wanted.write_text("".join(_pinned(constraints, ("pip", "setuptools"))))
    _pip("--target", directory, "--requirement", wanted, env=dict(os.environ))
    return os.environ | {"PYTHONPATH": str(directory), "SOURCE_DATE_EPOCH": "315532800"}


def _wheel(sources: Path, scratch: Path, tools: dict[str, str]) -> Path:
    """Our wheel, built from a copy: setuptools leaves things lying about."""
    copy = scratch / "sources"
    copy.mkdir()
    for name in ("pyproject.toml", "README.md", "LICENSE"):
        shutil.copy(sources / name, copy)
    shutil.copytree(sources / "src", copy / "src", ignore=shutil.ignore_patterns("__pycache__", "*.egg-info"))
    build = "from setuptools import build_meta; print(build_meta.build_wheel('..'))"
    _run(sys.executable, "-c", build, cwd=copy, env=tools)
    return next(scratch.glob("*.whl"))


def _pinned(constraints: Path, names: Iterable[str]) -> Iterator[str]:
    """The lines of a constraints file that pin these packages."""
    wanted = False
    for line in constraints.read_text().splitlines(keepends=True):
        if not line.startswith((" ", "#")):
            wanted = line.partition("==")[0].strip() in names
        if wanted and not line.lstrip().startswith("#"):
            yield line


def _pip(*arguments: str | Path, env: dict[str, str]) -> None:
    _run(
        sys.executable, "-m", "pip", "install", "--quiet", "--disable-pip-version-check", "--no-compile",
        "--no-warn-conflicts", "--root-user-action=ignore", "--require-hashes", "--only-binary=:all:", *arguments,
        env=env,
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


def _compile(root: Path, where: str, keep_sources_of: str = "") -> None:
    compiler = ["-m", "compileall", "-q", "--invalidation-mode", "unchecked-hash"]
    skip = ["-x", f"/{where}/{keep_sources_of}/"] if keep_sources_of else []
    _inside(root, *compiler, *skip, "-b", f"/{where}")
    for file in list(_files(root / where)):
        relative = file.relative_to(root / where)
        if relative.parts[0] == keep_sources_of:
            continue
        if file.suffix in {".py", ".pyi", ".pyx", ".pxd", ".c", ".h"} or file.name == "py.typed":
            file.unlink()
    if keep_sources_of:
        _inside(root, *compiler, f"/{where}/{keep_sources_of}")


def _try_out(root: Path, *packages: str, without: Iterable[str] = ()) -> None:
    _inside(root, "-W", "ignore", "-c", TRIAL, ",".join(without), *packages)


def _inside(root: Path, *arguments: str) -> None:
    _run("chroot", root, f"/usr/bin/{PYTHON}", "-IB", *arguments)


def _files(directory: Path) -> Iterator[Path]:
    return (path for path in sorted(directory.rglob("*")) if path.is_symlink() or path.is_file())


def _matches(path: Path, patterns: Iterable[str]) -> bool:
    return any(fnmatch(str(path), pattern) for pattern in patterns)


def _drop_empty(directory: Path) -> None:
    for path in sorted(directory.rglob("*"), reverse=True):
        if path.is_dir() and not any(path.iterdir()):
            path.rmdir()


def _run(*command: str | Path, cwd: Path | None = None, env: dict[str, str] | None = None) -> None:
    try:
        done = subprocess.run(
            command, cwd=cwd, env=env, stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True, check=False
        )
    except FileNotFoundError:
        raise RecipeError(f"{command[0]}: not found; on Debian: apt-get install binutils coreutils dpkg apt") from None
    if done.returncode:
        raise RecipeError(f"{' '.join(map(str, command[:6]))}: failed with {done.returncode}\n{done.stdout[-4000:]}")


def _output(*command: str | Path) -> str:
    return subprocess.run(command, capture_output=True, text=True, check=True).stdout


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("part", choices=("base", "product", "operator", "shell", "levelzero"))
    parser.add_argument("directory", type=Path)
    parser.add_argument("--base", type=Path, help="for the others: what base has made")
    parser.add_argument("--product", type=Path, help="for operator: what product has made")
    parser.add_argument("--sources", type=Path, default=Path(__file__).parents[2], help="the repository")
    chosen = parser.parse_args()
    if chosen.part in ("product", "operator") and not chosen.base:
        parser.error(f"{chosen.part} needs --base")
    if chosen.part == "operator" and not chosen.product:
        parser.error("operator needs --product")
    try:
        if os.geteuid() != 0:
            raise RecipeError("needs root, to try the result out in itself")
        if chosen.part == "base":
            base(chosen.directory)
        elif chosen.part == "shell":
            shell(chosen.directory)
        elif chosen.part == "product":
            product(chosen.directory, chosen.base, chosen.sources)
        elif chosen.part == "levelzero":
            levelzero(chosen.directory, chosen.base)
        else:
            operator(chosen.directory, chosen.base, chosen.product, chosen.sources)
    except RecipeError as error:
        print(error, file=sys.stderr)
        return 1
    return 0


if __name__ == "__main__":
    sys.exit(main())
