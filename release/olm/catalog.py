"""A file-based catalog of OLM: packages, channels with their upgrade graph, and bundles.

A catalog starts with the blobs of the catalog before it, so that older versions stay available.
"""

import base64
import json
from collections.abc import Iterable, Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any

import msgspec
import yaml

from release import oci
from release.errors import ReleaseError
from release.kustomize import Object, load_yaml, write_yaml
from release.olm import bundle

CONFIGS_LABEL = "operators.operatorframework.io.index.configs.v1"


class Entry(msgspec.Struct, frozen=True):
    """A bundle for a catalog: its files, and the reference of its image."""

    content: Mapping[str, str]
    image: str

    @property
    def version(self) -> Object:
        """The ClusterServiceVersion."""
        return load_yaml(self.content[bundle.parts(self.content)[0]])

    @property
    def annotations(self) -> Mapping[str, str]:
        """The annotations of the bundle, without their prefix."""
        found = bundle.labels(self.content)
        return {name.removeprefix("operators.operatorframework.io.bundle."): text for name, text in found.items()}


def blobs(entry: Entry, older: Sequence[Object] = ()) -> list[Object]:
    """The blobs of a package with a new bundle. `older` are those of the catalog before it."""
    package = entry.annotations["package.v1"]
    name = entry.version["metadata"]["name"]
    mine = [each for each in older if package in (each.get("package"), each.get("name"))]
    if any(each["schema"] == "olm.bundle" and each["name"] == name for each in mine):
        raise ReleaseError(f"{name}: the catalog has this bundle already; release a new version")
    bundles = [each for each in mine if each["schema"] == "olm.bundle"]
    channels = {each["name"]: each for each in mine if each["schema"] == "olm.channel"}
    for channel in entry.annotations["channels.v1"].split(","):
        entries = [*channels.get(channel, {}).get("entries", []), _edge(entry)]
        channels[channel] = {"schema": "olm.channel", "package": package, "name": channel, "entries": entries}
    default = entry.annotations["channel.default.v1"]
    description = entry.version["spec"]["description"]
    root = {"schema": "olm.package", "name": package, "defaultChannel": default, "description": description}
    return [root, *channels.values(), *bundles, _bundle(entry, package, name)]


def write(directory: Path, packages: Iterable[Sequence[Object]]) -> dict[str, bytes]:
    """Writes the blobs of packages as `<package>/catalog.yaml`, and returns the files."""
    found: dict[str, bytes] = {}
    for each in packages:
        name = f"{each[0]['name']}/catalog.yaml"
        text = "".join(f"---\n{write_yaml(blob)}" for blob in each)
        (directory / name).parent.mkdir(parents=True, exist_ok=True)
        (directory / name).write_text(text)
        found[name] = text.encode()
    return found


def read(directory: Path) -> list[Object]:
    """The blobs of a catalog. Raises `ReleaseError` if a file is not valid."""
    found: list[Object] = []
    for file in sorted(directory.rglob("*.yaml")):
        try:
            documents = list(yaml.load_all(file.read_text(), yaml.CSafeLoader))
        except yaml.YAMLError as error:
            raise ReleaseError(f"{file}: found invalid YAML: {error}") from error
        if any(not isinstance(each, dict) or "schema" not in each for each in documents):
            raise ReleaseError(f"{file}: found a document without schema, expected blobs of a catalog")
        found += documents
    return found


def layout(content: Mapping[str, bytes], target: Path) -> str:
    """Writes the image of a catalog as an OCI image layout, and returns the digest of its index.

    It has no server: a CatalogSource needs `grpcPodConfig.extractContent`, and catalogd of OLM 1 reads it as it is.
    """
    files = {f"configs/{name}": text for name, text in content.items()}
    return oci.write_data_image(target, files, labels={CONFIGS_LABEL: "/configs"})


def _edge(entry: Entry) -> Object:
    version = entry.version
    edge: dict[str, Any] = {"name": version["metadata"]["name"]}
    for key in ("replaces", "skips"):
        if key in version["spec"]:
            edge[key] = version["spec"][key]
    if skipped := version["metadata"]["annotations"].get("olm.skipRange"):
        edge["skipRange"] = skipped
    return edge


def _bundle(entry: Entry, package: str, name: str) -> Object:
    version = entry.version
    related = [{"name": "", "image": entry.image}, *version["spec"]["relatedImages"]]
    return {
        "schema": "olm.bundle",
        "package": package,
        "name": name,
        "image": entry.image,
        "properties": list(_properties(entry, package)),
        "relatedImages": related,
    }


def _properties(entry: Entry, package: str) -> Iterator[Object]:
    version = entry.version
    yield {"type": "olm.package", "value": {"packageName": package, "version": version["spec"]["version"]}}
    for each in version["spec"]["customresourcedefinitions"]["owned"]:
        group = each["name"].partition(".")[2]
        yield {"type": "olm.gvk", "value": {"group": group, "kind": each["kind"], "version": each["version"]}}
    for each in load_yaml(entry.content.get("metadata/dependencies.yaml", "dependencies: []"))["dependencies"]:
        value = {"packageName": each["value"]["packageName"], "versionRange": each["value"]["version"]}
        yield {"type": "olm.package.required", "value": value}
    for name in bundle.parts(entry.content):
        data = json.dumps(load_yaml(entry.content[name]), separators=(",", ":"))
        yield {"type": "olm.bundle.object", "value": {"data": base64.b64encode(data.encode()).decode()}}
