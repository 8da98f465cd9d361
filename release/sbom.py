"""Bills of materials in the formats SPDX 2.3 and CycloneDX 1.6.

Those of images list the Debian packages of dpkg's files and the Python packages of the metadata in their layers. The
one of the wheel lists the pinned dependencies of constraints.txt.
"""

import re
import tarfile
import uuid
from collections.abc import Iterable, Iterator, Mapping
from email.parser import HeaderParser
from pathlib import Path

import msgspec

from release import oci
from release.errors import ReleaseError

_SPACE = uuid.UUID("5f9c6c0e-62c5-5d0e-9a4e-0d6f7f3f5b11")
_METADATA = re.compile(r"(?:^|/)[^/]+\.dist-info/METADATA$")
_STATUS = re.compile(r"^(?:\./)?var/lib/dpkg/status(?:\.d/[^/]+)?$")
_PIN = re.compile(r"^([a-z0-9.-]+)==([^\s;\\]+)", re.MULTILINE)
_MAX_METADATA = 4 * 1024 * 1024


class Package(msgspec.Struct, frozen=True, order=True):
    """A package: its purl is unique."""

    name: str
    version: str
    purl: str
    license: str = ""


class Subject(msgspec.Struct, frozen=True):
    """What a bill of materials is about: its name, version, purl and SHA-256 digest, and the time of the release."""

    name: str
    version: str
    purl: str
    digest: str
    created: str


def of_lock(text: str, wanted: Iterable[str]) -> list[Package]:
    """The pinned packages of constraints.txt that are wanted. Raises `ReleaseError` if one is missing."""
    pinned = {name: Package(name, version, f"pkg:pypi/{name}@{version}") for name, version in _PIN.findall(text)}
    names = set(wanted)
    if missing := names - pinned.keys():
        raise ReleaseError(f"constraints.txt: found no pin of {', '.join(sorted(missing))}; run make lock")
    return sorted(pinned[name] for name in names)


def of_image(layout: Path, descriptor: oci.Descriptor, known: dict[str, list[Package]]) -> list[Package]:
    """The packages in all layers of an image. `known` keeps those of layers that other images have too."""
    found: set[Package] = set()
    for each, content in oci.walk(layout, descriptor):
        if content is None and each.media_type == oci.LAYER:
            if each.digest not in known:
                known[each.digest] = list(_of_layer(oci.blob(layout, each.digest)))
            found |= set(known[each.digest])
    # Formats do not allow a package twice, for example with and without a license.
    return sorted({package.purl: package for package in sorted(found)}.values())


def _of_layer(file: Path) -> Iterator[Package]:
    try:
        with tarfile.open(file, "r:gz") as tar:
            for member in tar:
                kind = _METADATA.search(member.name) or _STATUS.match(member.name)
                if kind is None or not member.isfile():
                    continue
                if member.size > _MAX_METADATA:
                    raise ReleaseError(f"{file}: {member.name}: found {member.size} bytes, too many for metadata")
                stream = tar.extractfile(member)
                text = stream.read().decode(errors="replace") if stream else ""
                yield from _debian(text) if _STATUS.match(member.name) else _python(text)
    except (tarfile.TarError, EOFError, OSError) as error:
        raise ReleaseError(f"{file}: {error}; expected a layer as a compressed tar archive") from error


def _debian(text: str) -> Iterator[Package]:
    for paragraph in re.split(r"\n\s*\n", text.strip()):
        fields = dict(re.findall(r"^(\S+): *(.*)$", paragraph, re.MULTILINE))
        if "Package" in fields and "Version" in fields and not fields.get("Status", "").startswith("deinstall"):
            name, version = fields["Package"], fields["Version"]
            architecture = fields.get("Architecture", "all")
            quoted = version.replace("+", "%2B").replace(":", "%3A").replace("~", "~")
            yield Package(name, version, f"pkg:deb/debian/{name}@{quoted}?arch={architecture}")


def _python(text: str) -> Iterator[Package]:
    fields = HeaderParser().parsestr(text)
    name, version = fields.get("Name"), fields.get("Version")
    if name and version:
        normalized = re.sub(r"[-_.]+", "-", name).lower()
        yield Package(normalized, version, f"pkg:pypi/{normalized}@{version}", fields.get("License-Expression") or "")


def spdx(subject: Subject, packages: Iterable[Package]) -> bytes:
    """An SPDX 2.3 document."""
    packages = list(packages)
    root = {
        **_spdx_package("SPDXRef-subject", subject.name, subject.version, subject.purl),
        "checksums": [{"algorithm": "SHA256", "checksumValue": subject.digest.removeprefix("sha256:")}],
    }
    found = []
    for position, each in enumerate(packages):
        entry = _spdx_package(f"SPDXRef-package-{position}", each.name, each.version, each.purl)
        entry["licenseDeclared"] = each.license or "NOASSERTION"
        found.append(entry)
    relationships = [
        {"spdxElementId": "SPDXRef-DOCUMENT", "relationshipType": "DESCRIBES", "relatedSpdxElement": "SPDXRef-subject"},
        *(
            {"spdxElementId": "SPDXRef-subject", "relationshipType": "CONTAINS", "relatedSpdxElement": entry["SPDXID"]}
            for entry in found
        ),
    ]
    return oci.encoded(
        {
            "spdxVersion": "SPDX-2.3",
            "dataLicense": "CC0-1.0",
            "SPDXID": "SPDXRef-DOCUMENT",
            "name": f"{subject.name}-{subject.version}",
            "documentNamespace": f"urn:uuid:{_identity(subject)}",
            "creationInfo": {"created": subject.created, "creators": ["Tool: accelplane-release"]},
            "packages": [root, *found],
            "relationships": relationships,
        }
    )


def _spdx_package(identity: str, name: str, version: str, purl: str) -> dict[str, object]:
    reference = {"referenceCategory": "PACKAGE-MANAGER", "referenceType": "purl", "referenceLocator": purl}
    return {
        "SPDXID": identity,
        "name": name,
        "versionInfo": version,
        "downloadLocation": "NOASSERTION",
        "filesAnalyzed": False,
        "licenseConcluded": "NOASSERTION",
        "licenseDeclared": "NOASSERTION",
        "copyrightText": "NOASSERTION",
        "externalRefs": [reference],
    }


def cyclonedx(subject: Subject, packages: Iterable[Package]) -> bytes:
    """A CycloneDX 1.6 document."""
    packages = list(packages)
    kind = "container" if subject.purl.startswith("pkg:oci/") else "library"
    root = {
        "type": kind,
        "bom-ref": subject.purl,
        "name": subject.name,
        "version": subject.version,
        "purl": subject.purl,
        "hashes": [{"alg": "SHA-256", "content": subject.digest.removeprefix("sha256:")}],
    }
    components = []
    for each in packages:
        entry = {"type": "library", "bom-ref": each.purl, "name": each.name, "version": each.version, "purl": each.purl}
        if each.license:
            entry["licenses"] = [{"expression": each.license}]
        components.append(entry)
    dependencies = [{"ref": subject.purl, "dependsOn": [each.purl for each in packages]}]
    return oci.encoded(
        {
            "bomFormat": "CycloneDX",
            "specVersion": "1.6",
            "serialNumber": f"urn:uuid:{_identity(subject)}",
            "version": 1,
            "metadata": {"timestamp": subject.created, "component": root},
            "components": components,
            "dependencies": dependencies,
        }
    )


def write(directory: Path, subject: Subject, packages: Iterable[Package]) -> None:
    """Writes both documents of a subject."""
    packages = list(packages)
    directory.mkdir(parents=True, exist_ok=True)
    (directory / f"{subject.name}.spdx.json").write_bytes(spdx(subject, packages))
    (directory / f"{subject.name}.cdx.json").write_bytes(cyclonedx(subject, packages))


def closure(wanted: Iterable[str], requirements: Mapping[str, Iterable[str]]) -> set[str]:
    """The packages that are wanted, and all that they require."""
    found: set[str] = set()
    pending = list(wanted)
    while pending:
        name = pending.pop()
        if name not in found:
            found.add(name)
            pending.extend(requirements.get(name, ()))
    return found


def _identity(subject: Subject) -> uuid.UUID:
    return uuid.uuid5(_SPACE, f"{subject.purl} {subject.digest}")
