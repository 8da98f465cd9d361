"""Debian packages pinned by hash: reads, updates and downloads what packages.lock names.

    python3 deploy/images/debian.py update             updates the lock file to what the mirrors have now
    python3 deploy/images/debian.py fetch PACKAGE…     downloads packages of the lock file and prints the files

A line of the lock file has eight fields: release, architecture, package, version, size, SHA-256, mirror (`debian` or
`debian-security`) and the path below the mirror. The mirrors are those of this machine's apt, or DEBIAN_MIRROR and
DEBIAN_SECURITY_MIRROR. apt downloads; every file is verified by its hash and kept in the cache, so the next build needs
no network. The exit status is 3 if the mirror lacks a locked package. Packages are unpacked, not installed: no
maintainer script runs, and any architecture is possible.
"""

from __future__ import annotations

import argparse
import hashlib
import os
import re
import subprocess
import sys
import tempfile
from collections.abc import Iterable, Mapping
from pathlib import Path
from typing import NamedTuple
from urllib.parse import unquote

LOCK = Path(__file__).with_name("packages.lock")
ARCHITECTURES = ("amd64", "arm64")
RELEASE = "bookworm"
KEYS = "/usr/share/keyrings/debian-archive-keyring.gpg"
UPDATE = "make images-lock"
EXIT_PACKAGE_GONE = 3

_MIRRORS = {"debian": "DEBIAN_MIRROR", "debian-security": "DEBIAN_SECURITY_MIRROR"}
# Suites of each release, and the mirror that has them.
_SUITES = (("{}", "debian"), ("{}-updates", "debian"), ("{}-security", "debian-security"))
_LINE = re.compile(
    rf"[a-z]+ (?:{'|'.join(ARCHITECTURES)}) [a-z0-9][a-z0-9.+-]* [\w.+:~-]+ [0-9]{{1,12}} [0-9a-f]{{64}} "
    rf"(?:{'|'.join(_MIRRORS)}) (?!.*\.\.)[\w./+~%-]+",
    re.ASCII,
)
_APT_HELPER = "/usr/lib/apt/apt-helper"
_HEADER = f"# Debian packages of the images. {UPDATE} updates this file; debian.py describes it.\n"


class RecipeError(Exception):
    """An image cannot be built; the message says why and what to do."""


class PackageGoneError(RecipeError):
    """The mirror no longer has a locked package."""


class Package(NamedTuple):
    """One file of a Debian mirror."""

    release: str
    architecture: str
    name: str
    version: str
    size: int
    sha256: str
    mirror: str
    path: str


Lock = Mapping[tuple[str, str, str], Package]


def default_cache() -> Path:
    """Directory of downloads and of what is made of them."""
    return Path(os.environ.get("XDG_CACHE_HOME") or Path.home() / ".cache") / "accelplane/images"


def read_lock(file: Path = LOCK) -> Lock:
    """The pinned packages, by release, architecture and name."""
    found: dict[tuple[str, str, str], Package] = {}
    for number, line in enumerate(file.read_text().splitlines(), 1):
        if not line or line.startswith("#"):
            continue
        fields = line.split()
        if len(fields) != 8 or not _LINE.fullmatch(" ".join(fields)):
            raise RecipeError(f"{file}:{number}: found {line[:200]!a}, expected eight fields; run {UPDATE}")
        package = Package(*fields[:4], int(fields[4]), *fields[5:])
        found[package[:3]] = package
    return found


def write_lock(packages: Iterable[Package], file: Path = LOCK) -> None:
    """Writes the lock file, sorted."""
    lines = [" ".join(map(str, package)) + "\n" for package in sorted(packages)]
    file.write_text(_HEADER + "".join(lines))


def select(lock: Lock, release: str, architecture: str, names: Iterable[str]) -> list[Package]:
    """The pins of packages. Raises `RecipeError` if one is missing."""
    wanted = sorted(names)
    if missing := [name for name in wanted if (release, architecture, name) not in lock]:
        raise RecipeError(f"{LOCK.name}: found no {release} {architecture} {' '.join(missing)}; run {UPDATE}")
    return [lock[release, architecture, name] for name in wanted]


def fetch(packages: Iterable[Package], cache: Path) -> dict[str, Path]:
    """Downloads what the cache lacks. Returns the files by package name."""
    files = {package: cache / "packages" / f"{package.name}-{package.sha256}.deb" for package in packages}
    missing = [package for package, file in files.items() if not file.exists()]
    if missing:
        known = mirrors()
        (cache / "packages").mkdir(parents=True, exist_ok=True)
        with tempfile.TemporaryDirectory(dir=cache) as scratch:
            for package in missing:
                _download(package, known, made := Path(scratch) / package.sha256)
                made.rename(files[package])
    return {package.name: file for package, file in files.items()}


def _download(package: Package, known: Mapping[str, str], target: Path) -> None:
    uri = f"{known[package.mirror]}/{package.path}"
    command = (_APT_HELPER, "-oAPT::Sandbox::User=root", "download-file", uri, target, f"SHA256:{package.sha256}")
    done = _execute(*command)
    described = f"{package.name} {package.version} ({package.release}, {package.architecture})"
    if done.returncode:
        gone = re.search(r"\b404\b|Not Found", done.stdout)
        remedy = f"run {UPDATE}, which locks the present version" if gone else "is the mirror reachable?"
        problem = "the mirror no longer has it" if gone else f"cannot be downloaded: {done.stdout.strip()[-400:]}"
        raise (PackageGoneError if gone else RecipeError)(f"{described}: {problem}; {remedy}")
    digest = hashlib.sha256(target.read_bytes()).hexdigest()
    if digest != package.sha256:
        raise RecipeError(f"{described}: found SHA-256 {digest}, expected {package.sha256}; is the mirror altered?")


def unpack(archive: Path, directory: Path) -> None:
    """Unpacks the files of a package."""
    run("dpkg-deb", "-x", archive, directory)


def mirrors() -> dict[str, str]:
    """Address of each mirror, without a slash at the end."""
    found = {mirror: os.environ[name].rstrip("/") for mirror, name in _MIRRORS.items() if os.environ.get(name)}
    if len(found) < len(_MIRRORS):
        command = ("apt-get", "indextargets", "--format", "$(ORIGIN) $(REPO_URI) $(CODENAME)")
        listed = _execute(*command).stdout.splitlines()
        if not any(line.startswith("Debian ") for line in listed) and os.geteuid() == 0:
            run("apt-get", "-q", "update")
            listed = _execute(*command).stdout.splitlines()
        for line in listed:
            origin, _, rest = line.partition(" ")
            uri, _, codename = rest.partition(" ")
            if origin == "Debian" and codename.startswith(RELEASE):
                found.setdefault("debian-security" if codename.endswith("-security") else "debian", uri.rstrip("/"))
    if missing := [variable for mirror, variable in _MIRRORS.items() if mirror not in found]:
        raise RecipeError(f"apt has no list of Debian {RELEASE}; run apt-get update, or set {' and '.join(missing)}")
    return found


def newest(wanted: Mapping[tuple[str, str], Iterable[str]], *, dependencies: bool = False) -> list[Package]:
    """What the mirrors have now of the packages, given by release and architecture, and of what they depend on."""
    known = mirrors()
    found: list[Package] = []
    for (release, architecture), given in sorted(wanted.items()):
        names = sorted(set(given))
        with tempfile.TemporaryDirectory() as scratch:
            apt = ("apt-get", "-q", *_apt_options(Path(scratch), release, architecture, known))
            run(*apt, "update")
            if dependencies:
                # It prints no SHA-256.
                listed = run(*apt, "install", "--yes", "--no-install-recommends", "--print-uris", *names)
                names = [line.split()[1].partition("_")[0] for line in listed.splitlines() if line.startswith("'")]
            listed = run(*apt, "download", "--print-uris", *names)
        lines = (line for line in listed.splitlines() if line.startswith("'"))
        found += [_parsed(line, release, architecture, known) for line in lines]
    return found


def _parsed(line: str, release: str, architecture: str, known: Mapping[str, str]) -> Package:
    """One line of `--print-uris`: the quoted URI, name_version_architecture.deb, size and hash."""
    quoted, file, size, digest = line.split()
    uri = quoted.strip("'")
    # The longest address first: one may begin with the other.
    mirror = next(name for name in sorted(known, key=lambda each: -len(known[each])) if uri.startswith(known[name]))
    name, version, _ = file.split("_")
    path = uri.removeprefix(known[mirror]).lstrip("/")
    return Package(
        release, architecture, name, unquote(version), int(size), digest.removeprefix("SHA256:"), mirror, path
    )


def _apt_options(directory: Path, release: str, architecture: str, known: Mapping[str, str]) -> list[str]:
    """Settings with which apt knows the packages of one release and architecture only, and no installed ones."""
    for name in ("state/lists/partial", "cache/archives/partial"):
        (directory / name).mkdir(parents=True)
    lines = (
        f"deb [signed-by={KEYS}] {known[mirror]} {suite.format(release)} main\n"
        for suite, mirror in (_SUITES if release == RELEASE else _SUITES[:1])
    )
    (sources := directory / "sources.list").write_text("".join(lines))
    settings = {
        "APT::Architecture": architecture,
        "APT::Architectures": architecture,
        "APT::Sandbox::User": "root",
        "Acquire::IndexTargets::deb::DEP-11::DefaultEnabled": "false",
        "Acquire::Languages": "none",
        "Dir::Cache": directory / "cache",
        "Dir::Etc::sourcelist": sources,
        "Dir::Etc::sourceparts": "-",
        "Dir::State": directory / "state",
        "Dir::State::status": "/dev/null",
    }
    return [f"-o{name}={value}" for name, value in settings.items()]


def run(*command: str | Path, env: Mapping[str, str] | None = None, cwd: Path | None = None) -> str:
    """Runs a program and returns what it prints. Raises `RecipeError` if it fails."""
    done = _execute(*command, env=env, cwd=cwd)
    if done.returncode:
        shown = " ".join(map(str, command[:6]))
        raise RecipeError(f"{shown}: found exit status {done.returncode}, expected 0\n{done.stdout[-4000:]}")
    return done.stdout


def _execute(
    *command: str | Path, env: Mapping[str, str] | None = None, cwd: Path | None = None
) -> subprocess.CompletedProcess[str]:
    # The output is parsed, so it must not be translated.
    environment = {**os.environ, "LC_ALL": "C.UTF-8", "TZ": "UTC", **(env or {})}
    try:
        return subprocess.run(
            command, cwd=cwd, env=environment, stdin=subprocess.DEVNULL, stdout=subprocess.PIPE,
            stderr=subprocess.STDOUT, text=True, check=False,
        )  # fmt: skip
    except FileNotFoundError:
        raise RecipeError(f"{command[0]}: not found; on Debian run apt-get install apt dpkg util-linux") from None


def update(file: Path) -> None:
    """Updates a lock file, and prints what changed."""
    # Only this function needs the lists of packages, which are where the packages are used.
    from contents import wanted_packages  # noqa: PLC0415

    before = read_lock(file) if file.exists() else {}
    packages = newest(wanted_packages(*ARCHITECTURES))
    write_lock(packages, file)
    for package in packages:
        old = before.get(package[:3])
        if not old or old.sha256 != package.sha256:
            names = f"{package.release} {package.architecture} {package.name}"
            print(f"{names}: {old.version if old else 'new'} -> {package.version}")


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("command", choices=("update", "fetch"))
    parser.add_argument("packages", nargs="*", help="for fetch: RELEASE/ARCHITECTURE/NAME")
    parser.add_argument("--lock", type=Path, default=LOCK, help="the lock file")
    chosen = parser.parse_args()
    try:
        if chosen.command == "update":
            update(chosen.lock)
            return 0
        lock, cache = read_lock(chosen.lock), default_cache()
        cache.mkdir(parents=True, exist_ok=True)
        for release, architecture, name in (package.split("/") for package in chosen.packages):
            print(*fetch(select(lock, release, architecture, [name]), cache).values())
    except RecipeError as error:
        print(error, file=sys.stderr)
        return EXIT_PACKAGE_GONE if isinstance(error, PackageGoneError) else 1
    return 0


if __name__ == "__main__":
    sys.exit(main())
