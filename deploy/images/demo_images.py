"""Builds images of the workloads that the demos name: `make demo-images`.

    python3 deploy/images/demo_images.py build OUT [--images NAME,…] [--source NAME=FILE,sha256:HEX]…
    python3 deploy/images/demo_images.py update          updates the lock files to what the mirrors have now

Writes an OCI image layout for each image, OUT/NAME, for amd64. An image consists of Debian packages, unpacked and
pinned by demo/NAME.lock, of the files below demo/NAME, and of files of vendors, which the caller gives. Images whose
files are not given are skipped. Names and tags are those of the manifests. demo_recipes.py has the recipes, and
docs/demos.md says what the exit status of each demo means.
"""

from __future__ import annotations

import argparse
import os
import shutil
import sys
import tempfile
from collections.abc import Mapping, Sequence
from fnmatch import fnmatch
from pathlib import Path

from buildroot import BuildRoot, unpack_over
from containerfile import Image
from contents import ACCOUNTS
from debian import Package, RecipeError, default_cache, fetch, newest, read_lock, write_lock
from demo_compile import compile_sources, make_directories
from demo_recipes import DEMOS, DIRECTORY, Demo
from demo_sources import (
    GivenSource,
    copy_image,
    describe_missing,
    missing_sources,
    parse_sources,
    unpack_archived,
)
from demo_wheels import install_wheels, update_wheels
from elf import check_libraries
from images import FILE_TIME, creation_time
from layout import LayoutWriter, make_layer
from parts import REPOSITORY, Parts

ARCHITECTURE = "amd64"
ORGANISATION = "docker.io/intel"
_UNWANTED = ("usr/share/man/*", "usr/share/locale/*", "usr/share/info/*", "usr/share/lintian/*", "usr/share/bug/*")


def update(demo: Demo) -> int:
    """Pins the packages and wheels of a demo and everything that they depend on. Returns their number."""
    packages = newest({(demo.release, ARCHITECTURE): demo.packages}, dependencies=True)
    if demo.files:
        packages += newest({(demo.release, ARCHITECTURE): [name for name, _ in demo.files]})
    if demo.newer[0]:
        packages += newest({(demo.newer[0], ARCHITECTURE): demo.newer[1]}, dependencies=True)
    write_lock(packages, DIRECTORY / f"{demo.name}.lock")
    compilers: list[Package] = []
    if demo.compilers:
        compilers = newest({(demo.release, ARCHITECTURE): demo.compilers}, dependencies=True)
        write_lock(compilers, DIRECTORY / f"{demo.name}.build.lock")
    return len(packages) + len(compilers) + (update_wheels(demo) if demo.wheels else 0)


def build_root(demo: Demo, root: Path, cache: Path, given: Mapping[str, GivenSource]) -> None:
    """Makes the file system of a demo."""
    lock = read_lock(DIRECTORY / f"{demo.name}.lock").values()
    archives = fetch((package for package in lock if package.release == demo.release), cache)
    make_directories(root)
    (root / "var/run").symlink_to("../run")
    partial = dict(demo.files)
    for name, archive in archives.items():
        if name not in partial:
            unpack_over(archive, root)
            continue
        with tempfile.TemporaryDirectory() as scratch:
            unpack_over(archive, Path(scratch))
            for file in (*partial[name], f"usr/share/doc/{name}/copyright"):
                (root / file).parent.mkdir(parents=True, exist_ok=True)
                shutil.copy(Path(scratch) / file, root / file)
    for archive in fetch((package for package in lock if package.release != demo.release), cache).values():
        unpack_over(archive, root)
    if not missing_sources(demo, given):
        _add_sources(demo, root, cache, given)
    for file, text in ACCOUNTS.items():
        (root / file).write_text(text)
    _delete_unwanted(root)
    if (DIRECTORY / demo.name).is_dir():
        shutil.copytree(DIRECTORY / demo.name, root, dirs_exist_ok=True)
    for link, target in demo.links:
        (root / link).symlink_to(target)
    check_libraries(root, ARCHITECTURE)


def _add_sources(demo: Demo, root: Path, cache: Path, given: Mapping[str, GivenSource]) -> None:
    """Adds what an image has of files of vendors, and wheels."""
    if demo.archived:
        unpack_archived(demo, given[demo.sources[0].name], root)
    if demo.compilers:
        compile_sources(demo, given, root, cache)
    if demo.wheels:
        install_wheels(demo, root, cache)


def _delete_unwanted(root: Path) -> None:
    """Deletes manual pages, translations, and documentation other than licenses."""
    for file in sorted(root.rglob("*"), reverse=True):
        name = str(file.relative_to(root))
        document = fnmatch(name, "usr/share/doc/*") and file.name != "copyright"
        if file.is_dir() and not file.is_symlink():
            if name.startswith("usr/share/") and not any(file.iterdir()):
                file.rmdir()
        elif document or any(fnmatch(name, pattern) for pattern in _UNWANTED):
            file.unlink()


def build(out: Path, demos: Sequence[Demo], cache: Path, given: Mapping[str, GivenSource]) -> None:
    """Writes the layouts."""
    tools = BuildRoot(cache, read_lock())
    for demo in demos:
        if demo.whole:
            name = f"{ORGANISATION}/{demo.name}"
            digest = copy_image(given[demo.sources[0].name], out / demo.name, name, demo.tag)
            print(f"{demo.name}:{demo.tag} {digest}", file=sys.stderr)
            continue
        labels = {"name": demo.name, "summary": demo.summary, "description": demo.summary, "vendor": "Accelplane"}
        labels |= {"version": demo.tag, "release": "1", "org.opencontainers.image.title": demo.name}
        image = Image(demo.name, demo.entrypoint, labels, parts=(demo.name,))
        with tempfile.TemporaryDirectory(dir=cache) as scratch:
            build_root(demo, root := Path(scratch) / demo.name, cache, given)
            layer = make_layer(root, Path(scratch), FILE_TIME, tools)
            writer = LayoutWriter(out, ORGANISATION, demo.tag, creation_time(REPOSITORY))
            written = writer.write(image, {ARCHITECTURE: [layer]})
        print(f"{demo.name}:{demo.tag} {written.digest} {layer.size / 1e6:.1f} MB", file=sys.stderr)


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("command", choices=("build", "update"))
    parser.add_argument("out", type=Path, nargs="?", default=Path("dist/demo-images"))
    parser.add_argument("--images", default="", help="separated by commas; default: all")
    parser.add_argument("--source", action="append", default=[], help="a file of a vendor: NAME=FILE,sha256:HEX")
    parser.add_argument("--cache", type=Path, default=default_cache(), help="directory of downloads")
    chosen = parser.parse_args()
    names = [each for each in chosen.images.split(",") if each]
    if unknown := sorted(set(names) - {demo.name for demo in DEMOS}):
        expected = ", ".join(demo.name for demo in DEMOS)
        parser.error(f"--images: found {', '.join(unknown)}, expected some of {expected}")
    demos = [demo for demo in DEMOS if not names or demo.name in names]
    os.umask(0o022)
    try:
        if chosen.command == "update":
            for demo in demos:
                if not demo.whole:
                    print(f"{demo.name}: {update(demo)} packages")
            return 0
        given = parse_sources(chosen.source, [source for demo in DEMOS for source in demo.sources])
        demos, skipped = _select(demos, given)
        if demos:
            chosen.cache.mkdir(parents=True, exist_ok=True)
            chosen.out.mkdir(parents=True, exist_ok=True)
            # Two builds at once would make the same build root.
            with Parts(REPOSITORY, chosen.cache.resolve(), read_lock()).locked():
                build(chosen.out, demos, chosen.cache.resolve(), given)
    except (RecipeError, OSError) as error:
        print(error, file=sys.stderr)
        return 1
    for line in skipped:
        print(line, file=sys.stderr)
    return 1 if names and skipped else 0


def _select(demos: Sequence[Demo], given: Mapping[str, GivenSource]) -> tuple[list[Demo], list[str]]:
    """The images that can be built with the given files, and a line for each of the others."""
    missing = {demo.name: [] if demo.optional else missing_sources(demo, given) for demo in demos}
    selected = [demo for demo in demos if not missing[demo.name]]
    return selected, [describe_missing(demo, missing[demo.name]) for demo in demos if missing[demo.name]]


if __name__ == "__main__":
    sys.exit(main())
