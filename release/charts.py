"""Helm charts as reproducible archives, and as artefacts of registries."""

import json
import os
from collections.abc import Mapping
from pathlib import Path

from release import oci
from release.errors import ReleaseError
from release.kustomize import load_yaml

CONFIG = "application/vnd.cncf.helm.config.v1+json"
# The template with the digests of a release, without which images are named by version only.
DIGESTS = "templates/_digests.tpl"
CONTENT = "application/vnd.cncf.helm.chart.content.v1.tar+gzip"


def names(charts: Path) -> list[str]:
    """The charts in a directory."""
    return sorted(file.parent.name for file in charts.glob("*/Chart.yaml"))


def package(chart: Path, version: str) -> bytes:
    """The archive of a chart, which `helm install` accepts."""
    found = metadata(chart)
    if found.get("version") != version or str(found.get("appVersion")) != version:
        raise ReleaseError(f"{chart}/Chart.yaml: found another version than {version}; run make version TO={version}")
    files: dict[str, bytes] = {}
    known: set[Path] = set()
    for directory, folders, entries in os.walk(chart, followlinks=True):
        folders.sort()
        _check_link(Path(directory), chart.parent, known)
        for name in entries:
            file = Path(directory, name)
            _check_link(file, chart.parent, known)
            files[f"{chart.name}/{file.relative_to(chart)}"] = file.read_bytes()
    return oci.compressed(oci.archive(files))


def _check_link(path: Path, charts: Path, known: set[Path]) -> None:
    """Raises `ReleaseError` for a link that leaves the directory of all charts, or that leads to the same place."""
    found = path.resolve()
    if found in known or not found.is_relative_to(charts.resolve()):
        raise ReleaseError(f"{path}: found a link to {found}, expected one to another chart, which is followed once")
    known.add(found)


def digests_template(digests: Mapping[str, str]) -> str:
    """The template with the digests of images by name."""
    return (
        f'{{{{- define "accelplane.digests" -}}}}\n{json.dumps(digests, indent=2, sort_keys=True)}\n{{{{- end -}}}}\n'
    )


def metadata(chart: Path) -> dict[str, object]:
    """The content of Chart.yaml."""
    return load_yaml((chart / "Chart.yaml").read_text())


def write_layout(layout: Path, archive: bytes, chart: dict[str, object]) -> oci.Descriptor:
    """Writes a chart as an artefact to an OCI image layout, and returns the descriptor of its manifest."""
    config = oci.put(layout, oci.encoded(chart), CONFIG)
    content = oci.put(layout, archive, CONTENT)
    annotations = {
        "org.opencontainers.image.title": str(chart["name"]),
        "org.opencontainers.image.version": str(chart["version"]),
        "org.opencontainers.image.description": str(chart.get("description", "")),
    }
    manifest = {
        "schemaVersion": 2,
        "mediaType": oci.MANIFEST,
        "config": config.json,
        "layers": [content.json],
        "annotations": annotations,
    }
    return oci.put(layout, oci.encoded(manifest), oci.MANIFEST)
