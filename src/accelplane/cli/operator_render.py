"""`accelplane operator render`: prints the DaemonSets that the operator creates for custom resources."""

import argparse
import sys
from collections.abc import Sequence

from accelplane.operator import versions
from accelplane.operator.dryrun import RenderError, render_text
from accelplane.operator.settings import OLDEST, PLACEHOLDER, RELEASE, ImagePolicy, Settings


def main(arguments: Sequence[str]) -> int:
    """Prints the DaemonSets, and warnings to standard error. Returns 1 if a resource cannot be rendered."""
    parser = argparse.ArgumentParser(
        prog="accelplane operator render", description="Print the DaemonSets that the operator creates for resources."
    )
    parser.add_argument("file", help="YAML file of custom resources; - for standard input")
    parser.add_argument("--deviceplugin-namespace", default="kube-system", help="namespace of the DaemonSets")
    parser.add_argument("--image-minimum", default=OLDEST, help="oldest version of images that is accepted")
    parser.add_argument("--image-vendor", default=PLACEHOLDER, help="registry and path of images that are filled in")
    given = parser.parse_args(arguments)
    if versions.parse(given.image_minimum) is None:
        parser.error(f"--image-minimum: {given.image_minimum!a}: expected a version such as {RELEASE}")
    images = ImagePolicy(minimum=given.image_minimum, vendor=given.image_vendor)
    try:
        made = render_text(_read(given.file), Settings(namespace=given.deviceplugin_namespace, images=images))
    except OSError as error:
        sys.stderr.write(f"{given.file}: {error.strerror}\n")
        return 1
    except (RenderError, UnicodeDecodeError) as error:
        sys.stderr.write(f"{given.file}: {error}\n")
        return 1
    for warning in made.warnings:
        sys.stderr.write(f"{given.file}: warning: {warning}\n")
    sys.stdout.write(made.text)
    return 0


def _read(file: str) -> str:
    if file == "-":
        return sys.stdin.read()
    with open(file, encoding="utf-8") as opened:
        return opened.read()
