"""The files of a release that are made from the source tree: manifests, charts, lists of images, the merged images."""

import json
import os
import re
import shutil
from collections.abc import Iterator, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

from accelplane.manifests import files
from accelplane.manifests.edits import Settings
from release import charts, oci
from release.errors import ReleaseError
from release.images import Images, load
from release.kustomize import load_yaml, render_text

CONTAINERD_NAME = "io.containerd.image.name"

# The trees that users apply. Others are parts of these.
_TREES = (
    *("accelplane_node", "accelplane_node/overlays/*", "labels", "labels/overlays/*", "fleet", "fleet/overlays/*"),
    *("*_plugin", "sgx_plugin/base", "*_plugin/overlays/*"),
    *("dra", "dra/extended-resources"),
    *("operator/default", "operator/device/*", "operator/overlays/*"),
    *("*_admissionwebhook/default", "*_admissionwebhook/overlays/*", "onload/config/default*"),
)


def pinned_tree(deploy: Path, target: Path, images: Images, registry: str) -> None:
    """Copies the kustomizations and charts, and gives their images the registry and digests of a release."""
    shutil.copytree(deploy, target, symlinks=True, ignore=shutil.ignore_patterns("__pycache__"))
    settings = Settings(version=images.version, registry=registry, digests=images.digests)
    changed, remaining = files.edits([target], settings)
    if remaining:
        places = "\n".join(f"{each.path}:{each.line}: {each.reference}" for each in remaining)
        raise ReleaseError(f"found references that are no fields of manifests; edit them by hand:\n{places}")
    for each in changed:
        files.write(each.path, each.text)
    for name in charts.names(target / "charts"):
        (target / "charts" / name / charts.DIGESTS).write_text(charts.digests_template(images.digests))


def trees(deploy: Path) -> list[str]:
    """The paths of all trees that users apply."""
    found = {path for pattern in _TREES for path in deploy.glob(pattern) if (path / "kustomization.yaml").is_file()}
    wanted = [path for path in found if load_yaml((path / "kustomization.yaml").read_text())["kind"] == "Kustomization"]
    return sorted(str(path.relative_to(deploy)) for path in wanted)


def write_manifests(deploy: Path, target: Path, wanted: Sequence[str]) -> None:
    """Renders trees to `<path of the tree>.yaml`."""
    with ThreadPoolExecutor(max_workers=os.cpu_count()) as pool:
        for tree, text in zip(wanted, pool.map(lambda tree: render_text(deploy / tree), wanted), strict=True):
            file = target / f"{tree}.yaml"
            file.parent.mkdir(parents=True, exist_ok=True)
            file.write_text(text)


def write_charts(deploy: Path, target: Path, version: str) -> dict[str, str]:
    """Writes all charts as archives, and as one OCI image layout. Returns the digests of the artefacts by name."""
    target.mkdir(parents=True)
    digests: dict[str, str] = {}
    entries: list[oci.Json] = []
    layout = target / "oci"
    for name in charts.names(deploy / "charts"):
        archive = charts.package(deploy / "charts" / name, version)
        (target / f"{name}-{version}.tgz").write_bytes(archive)
        descriptor = charts.write_layout(layout, archive, charts.metadata(deploy / "charts" / name))
        entries.append(descriptor.json | {"annotations": {oci.REF_NAME: f"{name}:{version}"}})
        digests[name] = descriptor.digest
    oci.write_index(layout, entries)
    return digests


def merge_images(source: Path, target: Path, images: Images, registry: str) -> None:
    """Copies the layouts of all images into one. Its entries have the names that containerd imports: tag and digest."""
    entries: list[oci.Json] = []
    (target / "blobs/sha256").mkdir(parents=True)
    for image in images.images:
        layout = source / image.name
        descriptor = oci.root(layout)
        if descriptor.digest != image.digest:
            raise ReleaseError(f"{layout}: found digest {descriptor.digest}, expected {image.digest} of images.json")
        for digest in sorted(oci.verify(layout)):
            if not oci.blob(target, digest).exists():
                shutil.copyfile(oci.blob(layout, digest), oci.blob(target, digest))
        for reference in (f"{registry}/{image.name}:{images.version}", f"{registry}/{image.name}@{image.digest}"):
            annotations = {CONTAINERD_NAME: reference}
            if "@" not in reference:
                annotations[oci.REF_NAME] = f"{image.name}:{images.version}"
            entries.append(descriptor.json | {"annotations": annotations})
    oci.write_index(target, entries)


def registry_artefacts(out: Path) -> Iterator[tuple[str, Path, str]]:
    """Name, layout and digest of all artefacts of a release in a registry."""
    facts = json.loads((out / "release.json").read_text())
    for name, digest in load(out / "images.json").digests.items():
        yield name, out / "images", digest
    for name, digest in facts["charts"].items():
        yield f"charts/{name}", out / "charts/oci", digest
    for name, digest in facts["olm"].items():
        yield name, olm_layout(out, name), digest


def olm_layout(out: Path, name: str) -> Path:
    """The layout of the image of a bundle or the catalog."""
    return out / "olm" / ("catalog-image" if name == "accelplane-catalog" else name)


def image_references(images: Images, registry: str) -> list[str]:
    """All references of images, for mirrors."""
    return [f"{registry}/{name}:{images.version}@{digest}" for name, digest in sorted(images.digests.items())]


def references_of(text: str, registry: str) -> list[str]:
    """The references of a registry in a manifest, complete or not."""
    return re.findall(rf"(?<![\w./-]){re.escape(registry)}/[^\s\"']+", text)


def checksums(directory: Path) -> str:
    """SHA-256 digests of all files below a directory, in the format of sha256sum."""
    return checksum_lines(
        {
            str(file.relative_to(directory)): oci.file_digest(file)
            for file in directory.rglob("*")
            if file.is_file() and not file.is_symlink()
        }
    )


def checksum_lines(digests: Mapping[str, str]) -> str:
    """Digests of files by name, in the format and order of `checksums`."""
    return "".join(f"{digests[name].removeprefix('sha256:')}  {name}\n" for name in sorted(digests, key=path_order))


def path_order(name: str) -> list[str]:
    """The sort key of the path of a file: directories sort like files."""
    return name.split("/")


def write_json(file: Path, value: object) -> None:
    """Writes JSON with a fixed form."""
    file.write_text(json.dumps(value, indent=2) + "\n")


def images_json(images: Images) -> Mapping[str, object]:
    """The list of images as `make images` writes it."""
    return {
        "version": images.version,
        "images": [
            {
                "name": each.name,
                "digest": each.digest,
                "platforms": list(each.platforms),
                "bytes": each.bytes,
                "aliases": list(each.aliases),
            }
            for each in images.images
        ],
    }
