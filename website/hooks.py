"""Hooks of MkDocs: adds the pages from outside docs/ and the references, and adapts links of pages."""

from typing import Any

from mkdocs.config.defaults import MkDocsConfig
from mkdocs.structure.files import File, Files
from mkdocs.structure.pages import Page

from website import reference
from website.links import PAGES, ROOT, adapt_page

# Flags and names of metrics in the first column of a table are not broken.
STYLE = ".md-typeset table:not([class]) td:first-child code { white-space: nowrap; word-break: normal; }\n"


def on_files(files: Files, config: MkDocsConfig) -> Files:
    """Adds the pages that are not in docs/."""
    for source, site in PAGES.items():
        text = (ROOT / source).read_text()
        content = f"# License\n\n```text\n{text}```\n" if source == "LICENSE" else text
        files.append(File.generated(config, site, content=content))
    files.append(File.generated(config, "assets/site.css", content=STYLE))
    for path, content in reference.pages(ROOT).items():
        files.append(File.generated(config, path, content=content))
    return files


def on_page_markdown(markdown: str, *, page: Page, config: MkDocsConfig, **_others: Any) -> str:
    """Adapts a page. References are made for the site and remain unchanged."""
    path = page.file.src_uri
    return markdown if path.startswith("reference/") else adapt_page(markdown, path, config.extra.get("repository", ""))
