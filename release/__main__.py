"""`python -m release`: bundles and catalogs for OLM, releases and their verification. The Makefile calls it."""

import sys
from pathlib import Path

import click

from release import commands
from release.errors import ReleaseError
from release.images import DEFAULT_REGISTRY

_OUT = click.option("--out", type=click.Path(path_type=Path), default="dist/bundles", show_default=True)
_REGISTRY = click.option("--registry", default=DEFAULT_REGISTRY, show_default=True, help="Registry and path of images.")


@click.group(context_settings={"help_option_names": ["-h", "--help"]})
def release() -> None:
    """Make and verify releases."""


@release.command("bundle")
@_OUT
@_REGISTRY
@click.option("--images", "list_of_images", type=click.Path(path_type=Path, exists=True), help="images.json.")
@click.option("--channels", default="", help="Channels, separated by commas. The default depends on the product.")
@click.option("--default-channel", default="", help="The first channel by default.")
@click.option("--repository", default="", help="Address of the source code.")
def make_bundle(
    *, out: Path, registry: str, list_of_images: Path | None, channels: str, default_channel: str, repository: str
) -> None:
    """Write the bundles of both operators to OUT/PACKAGE."""
    if not list_of_images:
        click.echo("images.json is not given: images are not pinned by digest", err=True)
    choices = commands.Choices(
        root=Path.cwd(), out=out, registry=registry, list_of_images=list_of_images, repository=repository,
        channels=tuple(filter(None, channels.split(","))), default_channel=default_channel,
    )  # fmt: skip
    for package, content in commands.make_bundles(choices).items():
        click.echo(f"{out / package}: {len(content)} files")


@release.command("bundle-build")
@_OUT
def build_bundles(*, out: Path) -> None:
    """Write the images of the bundles in OUT as OCI image layouts."""
    for package, digest in commands.build_bundles(out).items():
        click.echo(f"{out / package}-bundle: {digest}")


@release.command("catalog")
@_OUT
@_REGISTRY
@click.option("--older", type=click.Path(path_type=Path, exists=True), help="Directory of the catalog to add to.")
def make_catalog(*, out: Path, registry: str, older: Path | None) -> None:
    """Write a file-based catalog of the bundles in OUT."""
    choices = commands.Choices(root=Path.cwd(), out=out, registry=registry, older_catalog=older)
    click.echo(commands.make_catalog(choices))


def main() -> None:
    """The entry point."""
    try:
        release()
    except ReleaseError as error:
        click.echo(str(error), err=True)
        sys.exit(1)


if __name__ == "__main__":
    main()
