"""The directory of the built site: versions, and a check that pages load nothing from other servers."""

import json
import re
from collections.abc import Iterator
from html.parser import HTMLParser
from pathlib import Path

_VERSION = re.compile(r"(\d+)\.(\d+)\.(\d+)")
_REDIRECT = """<!doctype html>
<html lang="en">
<meta charset="utf-8">
<meta http-equiv="refresh" content="0; url={version}/">
<title>Accelplane documentation</title>
<a href="{version}/">Accelplane {version}</a>
</html>
"""
# Elements that a browser loads without a click, and the attribute with the address.
_LOADED = {"script": "src", "link": "href", "img": "src", "iframe": "src", "source": "src", "object": "data"}


def versions(out: Path) -> list[str]:
    """Returns the versions in a directory, newest first."""
    found = [match for entry in out.iterdir() if entry.is_dir() and (match := _VERSION.fullmatch(entry.name))]
    return [match[0] for match in sorted(found, key=lambda match: tuple(map(int, match.groups())), reverse=True)]


def write_versions(out: Path) -> None:
    """Writes the file of the version selector, and the page that leads to the newest version."""
    names = versions(out)
    entries = [{"version": name, "title": name, "aliases": ["latest"] if name == names[0] else []} for name in names]
    (out / "versions.json").write_text(json.dumps(entries, indent=1) + "\n")
    (out / "index.html").write_text(_REDIRECT.format(version=names[0]))
    (out / ".nojekyll").touch()


def requests_to_other_servers(site: Path) -> Iterator[str]:
    """Yields what pages and style sheets load from other servers."""
    for page in site.rglob("*.html"):
        loaded = _Loaded()
        loaded.feed(page.read_text())
        for address in loaded.addresses:
            if re.match(r"(https?:)?//", address):
                yield f"{page.relative_to(site)}: loads {address}, expected a file of the site"
    for sheet in site.rglob("*.css"):
        for address in re.findall(r"""(?:url\(|@import\s*)["']?((?:https?:)?//[^"')\s]+)""", sheet.read_text()):
            yield f"{sheet.relative_to(site)}: loads {address}, expected a file of the site"


class _Loaded(HTMLParser):
    """Collects the addresses that a page loads."""

    def __init__(self) -> None:
        super().__init__()
        self.addresses: list[str] = []

    def handle_starttag(self, tag: str, attrs: list[tuple[str, str | None]]) -> None:
        attributes = dict(attrs)
        if tag == "link" and attributes.get("rel") in ("canonical", "next", "prev", "alternate"):
            return
        address = attributes.get(_LOADED.get(tag, ""))
        if address:
            self.addresses.append(address)
