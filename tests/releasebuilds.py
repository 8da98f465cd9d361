"""A release that is built once for all tests."""

import json
from collections.abc import Callable
from pathlib import Path

import pytest
from manifests import REPOSITORY, kubectl
from releases import VERSION, write_images

from release import build, oci, signing

# No registry listens there.
REGISTRY = "localhost:1/accelplane"
TREES = ("gpu_plugin", "operator/default", "onload/config/default")
NAME = f"accelplane-{VERSION}"


def plan(root: Path, out: Path, **fields: object) -> build.Plan:
    settings = {"version": VERSION, "registry": REGISTRY, "prebuilt": root / "images", "draft": True, "trees": TREES}
    return build.Plan(root=REPOSITORY, out=out, key=root / "key", **{**settings, **fields})  # pyright: ignore


def build_release(root: Path) -> None:
    with pytest.MonkeyPatch.context() as patch:
        patch.setenv("KUBECTL", kubectl())
        patch.setenv("SOURCE_DATE_EPOCH", "1893553445")
        write_images(root / "images")
        signing.generate(root / "key")
        build.make(plan(root, root / "out"), lambda _: None)


def replace(name: str, old: str, new: str) -> Callable[[Path], None]:
    def apply(out: Path) -> None:
        text = (out / name).read_text()
        assert old in text
        (out / name).write_text(text.replace(old, new))

    return apply


def layer(files: dict[str, str]) -> bytes:
    return oci.compressed(oci.archive({name: text.encode() for name, text in files.items()}))


def chart(release_directory: Path) -> str:
    """The digest of the artefact of the chart accelplane."""
    return json.loads((release_directory / "out/release.json").read_text())["charts"]["accelplane"]
