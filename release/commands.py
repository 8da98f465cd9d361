"""The commands of `python -m release` for bundles and catalogs of OLM."""

import os
import re
import time
from pathlib import Path

import msgspec

from release import changelog, images, version
from release.errors import ReleaseError
from release.images import References
from release.olm import bundle, catalog, checks
from release.olm.products import PRODUCTS, read


class Choices(msgspec.Struct, frozen=True, kw_only=True):
    """What the command line chooses for bundles."""

    root: Path
    out: Path
    registry: str
    list_of_images: Path | None = None
    channels: tuple[str, ...] = ()
    default_channel: str = ""
    repository: str = ""
    older_catalog: Path | None = None


def created(root: Path) -> str:
    """The time of a release in RFC 3339: $SOURCE_DATE_EPOCH, or that of the last commit."""
    return time.strftime("%Y-%m-%dT%H:%M:%SZ", time.gmtime(epoch(root)))


def epoch(root: Path) -> int:
    """The time of a release in seconds: $SOURCE_DATE_EPOCH, or that of the last commit."""
    from release.git import commit_time  # noqa: PLC0415

    text = os.environ.get("SOURCE_DATE_EPOCH", "")
    if text and not re.fullmatch("[0-9]{1,10}", text):
        raise ReleaseError(f"SOURCE_DATE_EPOCH: found {text!a}, expected seconds since 1970, at most ten digits")
    return int(text) if text else commit_time(root)


def make_bundles(choices: Choices) -> dict[str, dict[str, str]]:
    """Writes the bundles of all products to `out/<package>`, and returns their files by package."""
    current = version.current(choices.root)
    digests = {}
    if choices.list_of_images:
        found = images.load(choices.list_of_images)
        if found.version != current:
            raise ReleaseError(f"{choices.list_of_images}: found version {found.version}, expected {current}")
        digests = found.digests
    options = bundle.Options(
        references=References(choices.registry, current, digests),
        created=created(choices.root),
        channels=choices.channels,
        default_channel=choices.default_channel,
        replaces=changelog.previous((choices.root / "CHANGELOG.md").read_text(), current),
        repository=choices.repository,
    )
    written: dict[str, dict[str, str]] = {}
    for package, product in PRODUCTS.items():
        content = bundle.files(product, read(product, choices.root / "deploy"), options)
        if problems := checks.bundle_problems(content, pinned=bool(digests)):
            raise ReleaseError(f"bundle {package}:\n" + "\n".join(problems))
        bundle.write(choices.out / package, content)
        written[package] = content
    return written


def build_bundles(out: Path) -> dict[str, str]:
    """Writes the images of bundles in `out` as OCI image layouts to `<package>-bundle`, and returns their digests."""
    digests: dict[str, str] = {}
    for package in PRODUCTS:
        if not (out / package / "metadata/annotations.yaml").is_file():
            raise ReleaseError(f"{out / package}: found no bundle; run make bundle")
        content = bundle.read(out / package)
        digests[package] = bundle.layout(content, bundle.labels(content), out / f"{package}-bundle")
    return digests


def make_catalog(choices: Choices) -> Path:
    """Writes the catalog of the bundles in `out` to `out/catalog`, its image to `out/catalog-image`."""
    older = catalog.read(choices.older_catalog) if choices.older_catalog else []
    digests = build_bundles(choices.out)
    packages = [
        catalog.blobs(
            catalog.Entry(bundle.read(choices.out / package), f"{choices.registry}/{package}-bundle@{digest}"), older
        )
        for package, digest in digests.items()
    ]
    if problems := checks.catalog_problems([blob for each in packages for blob in each]):
        raise ReleaseError("catalog:\n" + "\n".join(problems))
    target = choices.out / "catalog"
    catalog.layout(catalog.write(target, packages), choices.out / "catalog-image")
    return target
