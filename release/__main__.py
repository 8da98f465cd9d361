"""`python -m release`: bundles and catalogs for OLM, releases and their verification. The Makefile calls it."""

import subprocess
import sys
from pathlib import Path
from typing import Any

import click

from accelplane.manifests.spans import EditError
from release import commands
from release.errors import ReleaseError
from release.registry import RegistryError


class _Named(click.Path):
    """A path. Make passes an empty one if its variable is not set, which must not become the working directory."""

    def convert(self, value: Any, param: click.Parameter | None, ctx: click.Context | None) -> Any:
        if value == "":
            name = param.human_readable_name.upper() if param else "path"
            self.fail(f"found an empty path; set {name}, with make as {name}=…", param, ctx)
        return super().convert(value, param, ctx)


_OUT = click.option("--out", type=click.Path(path_type=Path), default="dist/bundles", show_default=True)
_REGISTRY = click.option("--registry", required=True, help="Registry and path of images.")

_PLAIN = click.option("--plain-http", is_flag=True, help="The registry has no TLS.")
_CA = click.option("--ca-file", default="", help="Authority of the registry's certificate.")


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


@release.command("key")
@click.argument("key", type=_Named(path_type=Path))
def make_key(*, key: Path) -> None:
    """Write a new private key to KEY and its public key to KEY.pub."""
    from release import signing  # noqa: PLC0415

    signing.generate(key)
    click.echo(f"{key}: keep it secret; publish {key}.pub")


@release.command("build")
@click.option("--version", "wanted", required=True)
@click.option("--out", type=_Named(path_type=Path), required=True)
@click.option("--key", type=_Named(path_type=Path), required=True, help="Private key of make release-key.")
@_REGISTRY
@click.option("--push", is_flag=True, help="Push to the registry.")
@_PLAIN
@_CA
@click.option("--prebuilt", type=click.Path(path_type=Path, exists=True), help="OUT of make images.")
@click.option("--platforms", default="", help="Platforms of images, separated by commas.")
@click.option("--draft", is_flag=True, help="Accept changes that are not committed, and a changelog without date.")
def build_release(*, wanted: str, out: Path, push: bool, **options: Any) -> None:
    """Make a release in the new directory OUT."""
    from release.build import Plan, make  # noqa: PLC0415

    plan = Plan(root=Path.cwd(), out=out.absolute(), version=wanted, push=push, **options)
    make(plan, lambda text: click.echo(text, err=True))
    click.echo(out)


@release.command("push")
@click.argument("out", type=_Named(path_type=Path, exists=True, file_okay=False))
@_PLAIN
@_CA
def push_release(*, out: Path, **options: Any) -> None:
    """Push a complete release to its registry, also to continue after an error."""
    from release.push import Push, push  # noqa: PLC0415

    push(Push(out=out, **options), lambda text: click.echo(text, err=True))


@release.command("verify")
@click.argument("out", type=_Named(path_type=Path, exists=True, file_okay=False))
@click.option("--key", type=_Named(path_type=Path), required=True, help="The public key that you trust.")
@click.option("--version", required=True, help="The version that you expect.")
@click.option("--draft", is_flag=True, help="Accept a release of changes that are not committed.")
@click.option("--registry", default="", help="Check this registry too.")
@_PLAIN
@_CA
def verify_release(*, out: Path, **options: Any) -> None:
    """Check a release as its users would."""
    from release.verify import Release, verify  # noqa: PLC0415

    failed = 0
    for each in verify(Release(out=out, **options)):
        click.echo(f"{each.name}: {f'FAILED: {each.problem}' if each.problem else each.text}")
        failed += bool(each.problem)
    if failed:
        raise ReleaseError(f"{failed} checks failed; do not use this release")


def main() -> None:
    """The entry point."""
    try:
        release()
    except (ReleaseError, RegistryError, EditError, OSError, subprocess.SubprocessError) as error:
        click.echo(str(error), err=True)
        sys.exit(1)


if __name__ == "__main__":
    main()
