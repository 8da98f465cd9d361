"""`accelplane manifests list|set`: images of manifests, kustomizations and Helm charts.

Exit codes: 0 for success, 1 if something cannot be edited or would change with --check, 2 for an invalid command
line.
"""

import sys
from pathlib import Path
from typing import TYPE_CHECKING, Literal

import click

from accelplane.cli.flagspelling import Group

if TYPE_CHECKING:
    from accelplane.manifests.files import FileEdit, Remaining

_PATHS = click.argument("paths", nargs=-1, required=True, metavar="PATH...", type=click.Path(path_type=Path))
_SELECTED = click.option(
    "--selected",
    default="accelplane",
    show_default=True,
    metavar="REGISTRY",
    help="Registry and path of the images. The default includes all hosts.",
)


@click.group(
    cls=Group,
    context_settings={"help_option_names": ["-h", "--help"]},
    short_help="List or change images of manifests and charts.",
)
def manifests() -> None:
    """List or change the images of manifests, kustomizations and charts."""


@manifests.command("list")
@_SELECTED
@_PATHS
def list_images(selected: str, paths: tuple[Path, ...]) -> None:
    """Print file, line and reference of each image below PATH."""
    from accelplane.manifests.edits import Settings  # noqa: PLC0415
    from accelplane.manifests.files import images  # noqa: PLC0415
    from accelplane.manifests.spans import EditError  # noqa: PLC0415

    try:
        for path, line, reference in images(paths, Settings(selected=selected)):
            click.echo(f"{path}:{line}: {reference}")
    except (EditError, OSError) as error:
        raise click.ClickException(str(error)) from error


@manifests.command("set")
@click.option("--version", default="", metavar="VERSION", help="New version, without v. Charts get it too.")
@click.option("--registry", default="", metavar="REGISTRY", help="New registry and path, as in mirror.example/tools.")
@click.option(
    "--pull-policy",
    default=None,
    type=click.Choice(["Always", "IfNotPresent", "Never"]),
    metavar="POLICY",
    help="New pull policy: Always, IfNotPresent or Never. Containers with Never keep it.",
)
@click.option(
    "--digests",
    default=None,
    metavar="FILE",
    type=click.Path(path_type=Path, exists=True, dir_okay=False),
    help="images.json of a release: add its digests.",
)
@click.option("--check", is_flag=True, help="Change nothing. Exit code 1 if something would change.")
@_SELECTED
@_PATHS
def set_images(
    *,
    version: str,
    registry: str,
    pull_policy: Literal["Always", "IfNotPresent", "Never"] | None,
    digests: Path | None,
    check: bool,
    selected: str,
    paths: tuple[Path, ...],
) -> None:
    """Change version, registry, digest or pull policy of the images below PATH.

    Comments, order and quotes stay. Nothing is written if a reference with an old value would be left behind.
    """
    from accelplane.manifests import files  # noqa: PLC0415
    from accelplane.manifests.edits import Settings  # noqa: PLC0415
    from accelplane.manifests.spans import EditError  # noqa: PLC0415

    if not (version or registry or pull_policy or digests):
        raise click.UsageError("expected --version, --registry, --pull-policy or --digests")
    try:
        settings = Settings(
            version=version,
            registry=registry,
            pull_policy=pull_policy or "",
            digests=_digests(digests, version) if digests else {},
            selected=selected,
        )
        changed, remaining = files.edits(paths, settings)
        _report(changed, remaining)
        if check:
            sys.exit(1 if changed else 0)
        for each in changed:
            files.write(each.path, each.text)
    except (EditError, OSError) as error:
        raise click.ClickException(str(error)) from error


def _digests(file: Path, version: str) -> dict[str, str]:
    """The digests in the list of images of a release."""
    import msgspec  # noqa: PLC0415

    from accelplane.manifests.spans import MAX_TEXT, EditError  # noqa: PLC0415

    class Image(msgspec.Struct):
        name: str
        digest: str

    class Images(msgspec.Struct):
        version: str
        images: list[Image]

    with file.open("rb") as stream:
        content = stream.read(MAX_TEXT)
    try:
        found = msgspec.json.decode(content, type=Images)
    except msgspec.DecodeError as error:
        raise EditError(f"{file}: found {error}, expected the images.json of a release") from error
    if version and version != found.version:
        raise EditError(f"{file}: found digests of version {found.version}, expected {version}")
    return {image.name: image.digest for image in found.images}


def _report(changed: "list[FileEdit]", remaining: "list[Remaining]") -> None:
    for each in remaining:
        click.echo(f"{each.path}:{each.line}: {each.reference}: expected {each.expected}; edit it by hand", err=True)
    if remaining:
        raise click.ClickException(f"{len(remaining)} references cannot be edited; nothing was changed")
    for file in changed:
        for change in file.changes:
            found = change.found or "(none)"
            click.echo(f"{file.path}:{change.line}: {change.field}: {found} -> {change.used or '(none)'}")
