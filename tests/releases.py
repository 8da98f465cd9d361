"""Small images and lists of images for the tests of releases."""

import json
from functools import cache
from pathlib import Path

import memorydirectory
from manifests import DEPLOY, REPOSITORY

from accelplane.manifests import files
from accelplane.manifests.edits import Settings
from accelplane.operator.images import parse
from release import oci
from release.images import Image, Images
from release.olm.products import PRODUCTS
from release.version import current

VERSION = current(REPOSITORY)
STATUS = "Package: libc6\nStatus: install ok installed\nVersion: 2.36-9\nArchitecture: amd64\nSource: glibc\n"
METADATA = "Metadata-Version: 2.4\nName: msgspec\nVersion: 0.20.0\nLicense-Expression: BSD-3-Clause\n\n"


@cache
def names() -> tuple[str, ...]:
    """The images that bundles and manifests refer to. All manifests are read once for all processes."""
    return tuple((memorydirectory.build_once("image-names", _write_names) / "names").read_text().split())


def _write_names(directory: Path) -> None:
    expected = {name for product in PRODUCTS.values() for name in (product.image, *product.operands.values())}
    expected |= {parse(each).image for _, _, each in files.images([DEPLOY], Settings())}
    (directory / "names").write_text("\n".join(sorted(expected)))


def digest_of(name: str) -> str:
    return oci.digest_of(name.encode())


def image_list(version: str = VERSION) -> Images:
    """A list with digests that belong to no image."""
    return Images(version, tuple(Image(name, digest_of(name), ("linux/amd64",), 1000) for name in names()))


def write_images(directory: Path, selected_names: tuple[str, ...] = ()) -> Images:
    """Writes layouts of images with a package of Debian and one of Python, and `images.json`."""
    files = {
        "var/lib/dpkg/status.d/libc6": STATUS.encode(),
        "usr/local/lib/python3.11/dist-packages/msgspec-0.20.0.dist-info/METADATA": METADATA.encode(),
        "usr/local/bin/accelplane": b"#!/usr/bin/python3\n",
    }
    images: list[Image] = []
    for name in selected_names or names():
        digest = oci.write_data_image(directory / name, {**files, "name": name.encode()}, labels={"name": name})
        images.append(Image(name, digest, ("linux/amd64",), 1000))
    listed = Images(VERSION, tuple(images))
    as_json = [{"name": each.name, "digest": each.digest, "platforms": list(each.platforms), "bytes": each.bytes}
               for each in listed.images]  # fmt: skip
    (directory / "images.json").write_text(json.dumps({"version": VERSION, "images": as_json}))
    return listed
