"""`python -m website OUT`: builds the site of this version in OUT/VERSION, beside the versions that are there.

The selector of versions reads OUT/versions.json. OUT/index.html leads to the newest version. Every warning of MkDocs,
and every request of a page to another server, is an error.
"""

import argparse
import logging
import os
import shutil
import sys
from collections.abc import Sequence
from pathlib import Path

from mkdocs.commands.build import build
from mkdocs.config import load_config
from mkdocs.exceptions import Abort

from accelplane import __version__
from website.output import requests_to_other_servers, write_versions

CONFIGURATION = Path(__file__).with_name("mkdocs.yml")


def main(arguments: Sequence[str] | None = None) -> int:
    """Returns the exit code."""
    parser = argparse.ArgumentParser(prog="python -m website", description="Build the documentation site.")
    parser.add_argument("out", type=Path)
    parser.add_argument("--repository", default="", help="address of the source code, for links to files")
    options = parser.parse_args(arguments)
    logging.basicConfig(level=logging.WARNING, format="%(levelname)s: %(message)s")
    site = options.out.resolve() / __version__
    if site.exists():
        shutil.rmtree(site)
    config = load_config(str(CONFIGURATION), site_dir=str(site), strict=True)
    config.extra["repository"] = options.repository.rstrip("/")
    try:
        config.plugins.on_startup(command="build", dirty=False)
        build(config)
    except Abort as error:
        sys.stderr.write(f"{error}\n")
        return 1
    finally:
        config.plugins.on_shutdown()
    outside = sorted(requests_to_other_servers(site))
    for line in outside:
        sys.stderr.write(f"{line}\n")
    if outside:
        return 1
    write_versions(options.out)
    pages = sum(1 for _ in site.rglob("*.html"))
    sys.stdout.write(f"{site}: {pages} pages\n")
    return 0


if __name__ == "__main__":
    # Material for MkDocs prints a notice about MkDocs 2 otherwise.
    os.environ.setdefault("NO_MKDOCS_2_WARNING", "true")
    sys.exit(main())
