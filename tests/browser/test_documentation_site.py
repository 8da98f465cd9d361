"""The documentation site in Chromium at the width of a phone: search, colors, and no requests to other servers."""

import functools
import http.server
import subprocess
import sys
import threading
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

pytestmark = pytest.mark.browser

ROOT = Path(__file__).parents[2]
PAGES = ("reference/custom-resources/", "reference/flags/", "tutorial/", "users-guide/")


class Files(http.server.SimpleHTTPRequestHandler):
    """Serves files without a log."""

    def log_message(self, format: str, *args: object) -> None:  # noqa: A002 - the name in the base class
        pass


@pytest.fixture(scope="module")
def site(tmp_path_factory: pytest.TempPathFactory) -> Iterator[str]:
    """The address of the built site."""
    out = tmp_path_factory.mktemp("site")
    subprocess.run([sys.executable, "-m", "website", out], cwd=ROOT, check=True)
    with http.server.ThreadingHTTPServer(("127.0.0.1", 0), functools.partial(Files, directory=str(out))) as server:
        thread = threading.Thread(target=server.serve_forever)
        thread.start()
        yield f"http://127.0.0.1:{server.server_port}/"
        server.shutdown()
        thread.join()


@pytest.mark.parametrize("scheme", ["light", "dark"])
def test_search_works_and_pages_fit_a_phone_without_other_servers(browser: Any, site: str, scheme: str) -> None:
    context = browser.new_context(color_scheme=scheme, viewport={"width": 390, "height": 800})
    page = context.new_page()
    requests: list[str] = []
    errors: list[str] = []
    page.on("request", lambda request: requests.append(request.url))
    page.on("pageerror", lambda error: errors.append(str(error)))
    page.goto(site)
    page.wait_for_url("**/1.*/")
    page.wait_for_selector(".md-version__current")
    red = page.evaluate("getComputedStyle(document.body).backgroundColor.match(/[0-9]+/)[0]")
    assert (int(red) < 64) == (scheme == "dark")
    page.click("label[for=__search]:visible >> nth=0")
    page.focus("input.md-search__input")
    page.keyboard.type("kubelet restart", delay=20)
    page.wait_for_selector(".md-search-result__item", timeout=60_000)
    base = page.url.partition("?")[0]
    for path in PAGES:
        page.goto(base + path)
        assert page.evaluate("document.documentElement.scrollWidth") == 390, path
    assert errors == []
    assert [url for url in requests if not url.startswith((site, "data:", "blob:"))] == []
    context.close()
