"""Builds the images without a container engine: `make images`.

    python3 deploy/images/images.py OUT [--platforms linux/amd64,linux/arm64] [--images NAME,…]

Writes an OCI image layout for each image, OUT/NAME, and OUT/images.json, a list of the images with their digests. All
images are those of the Containerfile, and so are their files. Two builds of the same sources have the same digests:
nothing depends on path, user, umask, locale, time zone, time or the versions of this machine's tools.
SOURCE_DATE_EPOCH is the time of creation in the images; the default is that of the last commit, or 1980.
"""

from __future__ import annotations

import argparse
import json
import os
import re
import subprocess
import sys
from collections.abc import Sequence
from pathlib import Path

from containerfile import Image, read_images
from contents import LEVELZERO_ARCHITECTURES
from debian import ARCHITECTURES, LOCK, RecipeError, default_cache, read_lock
from layout import Layer, LayoutWriter, make_layer
from parts import REPOSITORY, Parts

# The registry of the manifests. Registries name the images themselves.
ORGANISATION = "set-your-registry.invalid/accelplane"
PLATFORMS = tuple(f"linux/{architecture}" for architecture in ARCHITECTURES)
# Of all files in layers. The time of the commit would change the digest of layers whose content is the same.
FILE_TIME = 315532800


def version_of(sources: Path) -> str:
    """The version of the package, which is the tag of the images."""
    found = re.search(r'^__version__ = "(.*)"$', (sources / "src/accelplane/__init__.py").read_text(), re.MULTILINE)
    if not found:
        raise RecipeError("src/accelplane/__init__.py: found no __version__, expected the version of the images")
    return found[1]


def build(
    out: Path, sources: Path, platforms: Sequence[str], names: Sequence[str], parts: Parts
) -> list[dict[str, object]]:
    """Writes the layouts and returns what images.json lists."""
    version = version_of(sources)
    images = read_images(version)
    if unknown := sorted(set(names) - images.keys()):
        raise RecipeError(f"images: found {', '.join(unknown)}, expected some of {', '.join(sorted(images))}")
    # A list of other images than those in the directory would be worse than none.
    (out / "images.json").unlink(missing_ok=True)
    writer = LayoutWriter(out, ORGANISATION, version, creation_time(sources))
    listed: list[dict[str, object]] = []
    for name in names or sorted(images):
        image = images[name]
        architectures = _architectures(image, platforms)
        if not architectures:
            print(f"{name}: skipped, it does not exist for {' and '.join(platforms)}", file=sys.stderr)
            continue
        layers = {architecture: _layers(image, architecture, parts) for architecture in architectures}
        written = writer.write(image, layers)
        size = written.sizes.get("linux/amd64", next(iter(written.sizes.values())))
        entry = {"name": name, "digest": written.digest, "platforms": [*written.sizes], "bytes": size}
        listed.append({**entry, "aliases": image.aliases})
        print(f"{name} {written.digest} {' '.join(written.sizes)} {size / 1e6:.1f} MB", file=sys.stderr)
    return listed


def _architectures(image: Image, platforms: Sequence[str]) -> list[str]:
    wanted = [platform.removeprefix("linux/") for platform in PLATFORMS if platform in platforms]
    return [each for each in wanted if "levelzero" not in image.parts or each in LEVELZERO_ARCHITECTURES]


def _layers(image: Image, architecture: str, parts: Parts) -> list[Layer]:
    build_root = parts.recipe(architecture).build_root
    directories = [parts.part(name, architecture) for name in image.parts]
    return [make_layer(directory, parts.directory, FILE_TIME, build_root) for directory in directories]


def creation_time(sources: Path) -> int:
    """Seconds since 1970."""
    if given := os.environ.get("SOURCE_DATE_EPOCH"):
        if not re.fullmatch("[0-9]{1,10}", given):
            raise RecipeError(f"SOURCE_DATE_EPOCH: found {given!a}, expected seconds since 1970, at most ten digits")
        return int(given)
    command = ("git", "-C", sources, "log", "-1", "--format=%ct")
    try:
        committed = subprocess.run(command, capture_output=True, text=True, check=False).stdout.strip()
    except FileNotFoundError:
        committed = ""
    return int(committed) if committed.isdigit() else FILE_TIME


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("out", type=Path)
    parser.add_argument("--platforms", default=",".join(PLATFORMS), help="separated by commas; default: %(default)s")
    parser.add_argument("--images", default="", help="separated by commas; default: all")
    parser.add_argument("--sources", type=Path, default=REPOSITORY, help="the repository")
    parser.add_argument("--cache", type=Path, default=default_cache(), help="directory of downloads")
    parser.add_argument("--lock", type=Path, default=LOCK, help="the lock file of Debian packages")
    chosen = parser.parse_args()
    platforms = [each for each in chosen.platforms.split(",") if each]
    names = [each for each in chosen.images.split(",") if each]
    if unknown := sorted(set(platforms) - set(PLATFORMS)):
        parser.error(f"--platforms: found {', '.join(unknown)}, expected {' or '.join(PLATFORMS)}")
    # Every program that is started here creates files with modes for everyone.
    os.umask(0o022)
    try:
        chosen.out.mkdir(parents=True, exist_ok=True)
        parts = Parts(chosen.sources.resolve(), chosen.cache.resolve(), read_lock(chosen.lock))
        with parts.locked():
            images = build(chosen.out, chosen.sources.resolve(), platforms, names, parts)
        text = json.dumps({"version": version_of(chosen.sources), "images": images}, indent=2)
        (chosen.out / "images.json").write_text(f"{text}\n")
    except (RecipeError, OSError) as error:
        print(error, file=sys.stderr)
        return 1
    return 0


if __name__ == "__main__":
    sys.exit(main())
