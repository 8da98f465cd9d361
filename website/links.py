"""Links and fences of pages, adapted from forges to the site.

Pages are written for forges, where links lead to files of the repository. A link to a page of the site becomes a link
to that page. A link to another file leads to the forge if the address of the repository is known; otherwise the text
remains. A link to a file that does not exist is a warning, and therefore an error of the build.
"""

import logging
import posixpath
import re
from pathlib import Path

from accelplane import __version__

log = logging.getLogger("mkdocs.website")

ROOT = Path(__file__).parents[1]

# Pages outside docs/ by their path in the repository, and their path in the site.
PAGES = {
    "CONTRIBUTING.md": "develop/contributing.md",
    "SECURITY.md": "project/security.md",
    "CHANGELOG.md": "project/changelog.md",
    "LICENSE": "project/license.md",
    "deploy/README.md": "project/which-tree.md",
    "examples/generic-devices/README.md": "develop/generic-devices.md",
    "examples/node-maintenance/README.md": "develop/node-maintenance.md",
}
_SOURCES = {site: source for source, site in PAGES.items()}

_FENCED = re.compile(r"^( *)```.*?^ *```$", re.MULTILINE | re.DOTALL)
_LINK = re.compile(r"(!?)\[((?:[^\[\]]|\[[^\]]*\])*)\]\(([^)\s]+)\)")


def adapt_page(markdown: str, path: str, repository: str) -> str:
    """Returns the text of the page at `path` in the site, with adapted links and fences."""
    parts: list[str] = []
    end = 0
    for fenced in _FENCED.finditer(markdown):
        parts += (rewrite_links(markdown[end : fenced.start()], path, repository), adapt_fence(fenced[0], fenced[1]))
        end = fenced.end()
    return "".join((*parts, rewrite_links(markdown[end:], path, repository)))


def adapt_fence(block: str, indent: str) -> str:
    """Makes the file name after the language a title, and indents the fence of a list item by four spaces.

    Forges show no title, and accept three spaces.
    """
    block = re.sub(r"\A( *```\w+) ([\w./-]+)$", r'\1 title="\2"', block, flags=re.MULTILINE)
    return re.sub(r"^ {2,3}(?=\S| )", "    ", block, flags=re.MULTILINE) if len(indent) in (2, 3) else block


def rewrite_links(text: str, path: str, repository: str) -> str:
    """Rewrites the links of a page at `path` in the site."""
    source = _SOURCES.get(path, f"docs/{path}")

    def rewritten(match: re.Match[str]) -> str:
        image, label, target = match.groups()
        file, hash_, anchor = target.partition("#")
        if not file or re.match(r"[a-z][a-z+.-]*:", file):
            return match[0]
        found = posixpath.normpath(posixpath.join(posixpath.dirname(source), file))
        if not (ROOT / found).exists():
            log.warning("%s: found a link to %s, which does not exist", source, found)
            return match[0]
        page = _page_of(found)
        if page:
            return f"{image}[{label}]({posixpath.relpath(page, posixpath.dirname(path) or '.')}{hash_}{anchor})"
        if image:
            log.warning("%s: found an image %s outside docs/", source, found)
        kind = "tree" if (ROOT / found).is_dir() else "blob"
        return f"[{label}]({repository}/{kind}/v{__version__}/{found}{hash_}{anchor})" if repository else label

    return _LINK.sub(rewritten, text)


def _page_of(found: str) -> str:
    """Returns the path in the site of a file of the repository, or an empty string."""
    if found in PAGES or f"{found}/README.md" in PAGES:
        return PAGES.get(found) or PAGES[f"{found}/README.md"]
    if found == "README.md":
        return "index.md"
    return found.removeprefix("docs/") if found.startswith("docs/") and (ROOT / found).is_file() else ""
