"""`accelplane operator render`: the DaemonSets that the operator would make of custom resources, without a cluster."""

import argparse
import sys
from collections.abc import Sequence

from accelplane.operator.dryrun import NotRendered, rendered
from accelplane.operator.images import version
from accelplane.operator.settings import OLDEST, ImagePolicy, Settings


def main(arguments: Sequence[str]) -> int:
    """Write the DaemonSets of a file's resources to standard output; say what is wrong with them and return 1."""
    parser = argparse.ArgumentParser(
        prog="accelplane operator render", description="Show the DaemonSets that the operator makes of resources."
    )
    parser.add_argument("file", help="YAML of custom resources; - for standard input")
    parser.add_argument("--deviceplugin-namespace", default="kube-system", help="namespace of the DaemonSets")
    parser.add_argument("--image-minimum", default=OLDEST, help="oldest release of images that is taken")
    parser.add_argument("--image-vendor", default="intel", help="what stands before the names of images")
    given = parser.parse_args(arguments)
    if version(given.image_minimum) is None:
        parser.error(f"--image-minimum: {given.image_minimum!a}: expected a version like {OLDEST}")
    images = ImagePolicy(minimum=given.image_minimum, vendor=given.image_vendor)
    try:
        text = rendered(_read(given.file), Settings(namespace=given.deviceplugin_namespace, images=images))
    except OSError as error:
        sys.stderr.write(f"{given.file}: {error.strerror}\n")
        return 1
    except (NotRendered, UnicodeDecodeError) as error:
        sys.stderr.write(f"{given.file}: {error}\n")
        return 1
    sys.stdout.write(text)
    return 0


def _read(file: str) -> str:
    if file == "-":
        return sys.stdin.read()
    with open(file, encoding="utf-8") as opened:
        return opened.read()
