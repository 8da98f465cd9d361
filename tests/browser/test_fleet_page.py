"""The fleet page as an administrator uses it, in Chromium."""

import csv
import itertools
import re
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path
from typing import Any

import msgspec
import pytest

from accelplane.fleet.model import DevicePlugin, Node, Waiting
from accelplane.report.inventory import Change, ReportedUnit

from .accessibility import CHECKS
from .axe import run_axe
from .conftest import PrefixProxy, SecureServed, Served

pytestmark = pytest.mark.browser

SCREENS = ("", "devices", "nodes", "pods", "waiting", "groups", "search?text=card1", "namespaces")
I915 = "gpu.intel.com/i915"


class Tab:
    """A page of the browser with what it has reported and requested."""

    def __init__(self, context: Any) -> None:
        self.page = context.new_page()
        self.problems: list[str] = []
        self.requests: list[str] = []
        self.page.on("console", lambda message: self.problems.append(message.text))
        self.page.on("pageerror", lambda error: self.problems.append(str(error)))
        self.page.on("request", lambda request: self.requests.append(request.url))


@pytest.fixture
def tab_of(browser: Any) -> Iterator[Callable[..., Tab]]:
    contexts: list[Any] = []

    def make(**options: Any) -> Tab:
        contexts.append(browser.new_context(**({"viewport": {"width": 1280, "height": 800}} | options)))
        return Tab(contexts[-1])

    yield make
    for context in contexts:
        context.close()


def held_node(page_server: Served) -> tuple[Node, ReportedUnit]:
    """A node and a device of it that is healthy and held."""
    for node in page_server.view.cluster().nodes.values():
        for unit in node.units:
            if unit.phase == "healthy" and unit.known and unit.holders and node.name.startswith("gpu"):
                return node, unit
    raise AssertionError("no held device")


def replace_unit(page_server: Served, node: Node, changed: ReportedUnit) -> None:
    current = page_server.view.cluster().nodes[node.name]
    units = tuple(changed if each.unit == changed.unit else each for each in current.units)
    page_server.call(lambda: page_server.view.replace(msgspec.structs.replace(current, units=units)))


def fail(page_server: Served, node: Node, unit: ReportedUnit) -> ReportedUnit:
    change = Change(1764000000, "unhealthy", "wedged", "the driver declared the device wedged")
    failed = msgspec.structs.replace(
        unit, phase="unhealthy", reason="wedged", text=change.text, since=1764000000, history=(change,)
    )
    replace_unit(page_server, node, failed)
    return failed


def screen_link(tab: Tab, name: str) -> Any:
    return tab.page.get_by_role("navigation", name="Screens").get_by_role("link", name=name, exact=True)


def live(tab: Tab) -> None:
    """Waits until the page gets updates."""
    tab.page.locator("#connection", has_text="live").wait_for(timeout=60_000)


def test_an_administrator_finds_the_unhealthy_device_and_its_pod(
    page_server: Served, tab_of: Callable[..., Tab]
) -> None:
    node, unit = held_node(page_server)
    tab = tab_of()
    tab.page.goto(page_server.url)
    live(tab)
    fail(page_server, node, unit)
    problem = tab.page.get_by_role("link", name=re.compile(f"{unit.unit} is unhealthy \\(wedged\\), held by"))
    row = tab.page.get_by_role("row").filter(has_text=node.name).filter(has=problem)
    row.get_by_role("link", name=re.compile("wedged")).click(timeout=60_000)
    assert tab.page.locator("h1").text_content() == f"Device {unit.unit} on {node.name}"
    text = tab.page.locator("main").text_content()
    holder = unit.holders[0]
    assert "the driver declared the device wedged" in text
    assert f"{holder.namespace}/{holder.pod}" in text
    assert f"kubectl -n {holder.namespace} describe pod {holder.pod}" in text
    live(tab)
    replace_unit(page_server, node, unit)
    tab.page.locator(".badge", has_text=re.compile("^H healthy$")).wait_for(timeout=60_000)
    assert tab.problems == []


def test_a_user_signs_in_with_a_token_gets_updates_and_signs_out(
    secure_page: SecureServed, tab_of: Callable[..., Tab]
) -> None:
    secure_page.reviews.users["token-of-ann"] = "ann"
    secure_page.reviews.allow("ann", "get /fleet", "list pods")
    tab = tab_of(ignore_https_errors=True)
    tab.page.goto(f"{secure_page.url}nodes?state=held")
    tab.page.get_by_label("Token").fill("token-of-ann")
    tab.page.get_by_role("button", name="Sign in").click()
    tab.page.wait_for_url(f"{secure_page.url}nodes?state=held", timeout=60_000)
    live(tab)
    tab.page.get_by_role("button", name="Sign out").click()
    tab.page.get_by_label("Token").wait_for(timeout=60_000)


def test_an_administrator_reads_why_a_pod_is_pending(page_server: Served, tab_of: Callable[..., Tab]) -> None:
    tab = tab_of()
    tab.page.goto(f"{page_server.url}waiting?text=train-large")
    row = tab.page.get_by_role("row").filter(has_text="vision/train-large-0")
    text = row.text_content()
    assert f"Requests 40 of {I915}." in text
    assert "at most" in text
    assert "The quota of the namespace leaves 13 for other pods." in text
    assert f"Insufficient {I915}" in text
    live(tab)
    pod = Waiting("vision", "train-large-1", 1764000000, {I915: 1}, "no message")
    before = page_server.view.cluster().waiting
    page_server.call(lambda: page_server.view.replace(waiting=(*before, pod)))
    tab.page.get_by_role("row").filter(has_text="train-large-1").wait_for(timeout=60_000)
    page_server.call(lambda: page_server.view.replace(waiting=before))
    tab.page.get_by_role("row").filter(has_text="train-large-1").wait_for(state="detached", timeout=60_000)
    assert tab.problems == []


def test_device_plugins_of_the_operator_appear_change_and_vanish_without_a_reload(
    page_server: Served, tab_of: Callable[..., Tab]
) -> None:
    initial = page_server.view.cluster().device_plugins

    def show(*plugins: DevicePlugin) -> None:
        page_server.call(lambda: page_server.view.replace(device_plugins=plugins))

    show()
    tab = tab_of()
    tab.page.goto(page_server.url)
    live(tab)
    heading = tab.page.get_by_role("heading", name="Device plugins of the operator")
    assert not heading.is_visible()
    gpu = DevicePlugin("GpuDevicePlugin", "gpu", 3, 3, 3)
    show(gpu)
    row = tab.page.get_by_role("row").filter(has_text="GpuDevicePlugin")
    row.filter(has_text="no problem").wait_for(timeout=60_000)
    assert heading.is_visible()
    problem = "Degraded: <img src=x onerror=alert(1)>"
    show(DevicePlugin("SgxDevicePlugin", "sgx", 2, 1, 2, problem), gpu)
    tab.page.get_by_text(problem).wait_for(timeout=60_000)
    kinds = tab.page.locator("[data-live=plugins] tr").all_text_contents()
    assert [each[:15] for each in kinds] == ["SgxDevicePlugin", "GpuDevicePlugin"]
    show()
    heading.wait_for(state="hidden", timeout=60_000)
    show(*initial)
    heading.wait_for(timeout=60_000)
    assert tab.problems == []


def test_one_long_name_or_message_does_not_move_other_columns_out_of_sight(
    page_server: Served, tab_of: Callable[..., Tab]
) -> None:
    before = page_server.view.cluster()
    pod = Waiting("team", "x" * 253, 1764000000, {I915: 1}, "y" * 1000)
    page_server.call(lambda: page_server.view.replace(waiting=(pod,), problem="z" * 1000))
    tab = tab_of()
    tab.page.goto(f"{page_server.url}waiting")
    box = tab.page.get_by_role("columnheader", name="Waits since").bounding_box()
    assert box["x"] + box["width"] <= 1280
    assert tab.page.evaluate("document.documentElement.scrollWidth") == 1280
    page_server.call(lambda: page_server.view.replace(waiting=before.waiting, problem=before.problem))


def test_rows_are_stacked_on_a_phone_without_broken_words_below_folded_filters(
    page_server: Served, tab_of: Callable[..., Tab]
) -> None:
    node, unit = held_node(page_server)
    fail(page_server, node, unit)
    tab = tab_of(viewport={"width": 380, "height": 800})
    tab.page.goto(f"{page_server.url}devices")
    live(tab)
    assert not tab.page.get_by_label("Node labels").is_visible()
    tab.page.get_by_text("Filters").click()
    assert tab.page.get_by_label("Node labels").is_visible()
    for path in ("devices", "pods", "waiting", f"device?node={node.name}&plugin={unit.plugin}&unit={unit.unit}"):
        tab.page.goto(page_server.url + path)
        live(tab)
        assert tab.page.evaluate(BROKEN_WORDS) == [], path
        cells = tab.page.locator("tbody tr").first.locator("td")
        boxes = [cells.nth(index).bounding_box() for index in range(cells.count())]
        assert [box["x"] for box in boxes] == [boxes[0]["x"]] * len(boxes)
        assert all(one["y"] + one["height"] <= other["y"] + 1 for one, other in itertools.pairwise(boxes))
    replace_unit(page_server, node, unit)


# The short words that are shown in two lines: names longer than a line have to be broken.
BROKEN_WORDS = """
() => {
  const found = [];
  const texts = document.createTreeWalker(document.querySelector("main"), NodeFilter.SHOW_TEXT);
  for (let text = texts.nextNode(); text; text = texts.nextNode()) {
    if (!text.parentElement.checkVisibility()) continue;
    for (const word of text.data.matchAll(/\\b[A-Za-z]{2,20}\\b/g)) {
      const range = document.createRange();
      range.setStart(text, word.index);
      range.setEnd(text, word.index + word[0].length);
      if (new Set(Array.from(range.getClientRects(), (box) => Math.round(box.top))).size > 1) found.push(word[0]);
    }
  }
  return found;
}
"""


def test_times_are_those_of_the_viewers_zone_and_utc_is_their_title(
    page_server: Served, tab_of: Callable[..., Tab]
) -> None:
    node, unit = held_node(page_server)
    fail(page_server, node, unit)
    tab = tab_of(timezone_id="Asia/Kolkata")
    tab.page.goto(f"{page_server.url}device?node={node.name}&plugin={unit.plugin}&unit={unit.unit}")
    live(tab)
    time = tab.page.locator("[data-live=history] time").first
    assert time.get_attribute("title") == "2025-11-24 16:00:00 UTC"
    assert time.text_content().startswith("2025-11-24 21:30:00 (")
    assert "Asia/Calcutta" in tab.page.locator("#zone").text_content()
    replace_unit(page_server, node, unit)


def test_an_administrator_finds_idle_and_failing_devices_of_a_team_and_downloads_them(
    page_server: Served, tab_of: Callable[..., Tab]
) -> None:
    node, unit = held_node(page_server)
    team = unit.holders[0].namespace
    tab = tab_of()
    tab.page.goto(page_server.url)
    screen_link(tab, "Devices").click()
    tab.page.get_by_label("Holder").fill(f"{team}/")
    tab.page.get_by_label("State").select_option(label="idle or not healthy")
    tab.page.get_by_role("button", name="Apply").click()
    live(tab)
    row = tab.page.locator(f'tr[data-key="{node.name} {unit.plugin} {unit.unit}"]')
    assert row.count() == 0
    fail(page_server, node, unit)
    row.wait_for(timeout=60_000)
    assert "unhealthy (wedged)" in row.text_content()
    with tab.page.expect_download() as started:
        tab.page.get_by_role("link", name="CSV").click()
    table = csv.DictReader(Path(started.value.path()).read_text().splitlines())
    shown = tab.page.locator("tbody tr").count()
    rows = list(table)
    assert len(rows) == shown
    assert (node.name, "unhealthy") in [(each["node"], each["state"]) for each in rows]
    replace_unit(page_server, node, unit)
    row.wait_for(state="detached", timeout=60_000)
    assert tab.problems == []


def test_a_search_from_any_screen_leads_to_the_device(page_server: Served, tab_of: Callable[..., Tab]) -> None:
    _, unit = held_node(page_server)
    tab = tab_of()
    tab.page.goto(f"{page_server.url}waiting")
    tab.page.get_by_label("Search nodes, devices and pods").fill(unit.holders[0].pod)
    tab.page.keyboard.press("Enter")
    tab.page.get_by_role("link", name=unit.unit, exact=True).first.click()
    tab.page.wait_for_url("**/device?**")
    assert unit.holders[0].pod in tab.page.locator("main").text_content()
    assert tab.problems == []


def test_filters_are_in_the_address_and_narrow_the_list(page_server: Served, tab_of: Callable[..., Tab]) -> None:
    tab = tab_of()
    tab.page.goto(f"{page_server.url}nodes")
    tab.page.get_by_label("Family").select_option("qat")
    tab.page.get_by_role("button", name="Apply").click()
    tab.page.get_by_role("columnheader", name="Node").get_by_role("link").click()
    tab.page.wait_for_url("**/nodes?family=qat&sort=name")
    heads = tab.page.locator("tbody th").all_text_contents()
    assert heads == sorted(heads)
    tab.page.get_by_role("columnheader", name="Node").get_by_role("link").click()
    tab.page.wait_for_url("**/nodes?family=qat&sort=-name")
    assert tab.page.locator("tbody th").all_text_contents() == heads[::-1]
    assert heads
    assert all(each.startswith("crypto") for each in heads)
    assert tab.page.get_by_label("Family").input_value() == "qat"
    assert tab.page.locator("th[aria-sort=descending]").text_content() == "Node"


def test_all_controls_are_reachable_with_the_keyboard(page_server: Served, tab_of: Callable[..., Tab]) -> None:
    node, unit = held_node(page_server)
    fail(page_server, node, unit)
    tab = tab_of()
    tab.page.goto(page_server.url)
    tab.page.keyboard.press("Tab")
    assert tab.page.evaluate("document.activeElement.textContent") == "Skip to the content"
    tab.page.keyboard.press("Enter")
    assert tab.page.evaluate("document.activeElement.id") == "title"
    for _ in range(60):
        tab.page.keyboard.press("Tab")
        focused = tab.page.evaluate(
            """() => {
              const style = getComputedStyle(document.activeElement);
              return [document.activeElement.textContent, style.outlineStyle, parseFloat(style.outlineWidth)];
            }"""
        )
        assert focused[1] == "solid"
        assert focused[2] >= 2, f"the focus of {focused[0]!r} is visible"
        if focused[0].startswith(f"gpu {unit.unit} is unhealthy (wedged)"):
            break
    tab.page.keyboard.press("Enter")
    tab.page.wait_for_url("**/device?**")
    replace_unit(page_server, node, unit)


def test_the_keyboard_reaches_the_next_nodes_without_passing_all_devices(
    page_server: Served, tab_of: Callable[..., Tab]
) -> None:
    tab = tab_of()
    tab.page.goto(f"{page_server.url}nodes?start=20")
    tab.page.get_by_role("link", name="Clear").focus()
    tab.page.keyboard.press("Tab")
    assert tab.page.evaluate("document.activeElement.textContent") == "Skip the list"
    assert tab.page.get_by_role("link", name="Skip the list").bounding_box()["height"] >= 10
    tab.page.keyboard.press("Enter")
    tab.page.keyboard.press("Tab")
    assert tab.page.evaluate("document.activeElement.textContent") == "First"


def check_accessibility(tab: Tab, schemes: Sequence[str]) -> None:
    """Fails for each rule of axe-core, or of our own, that the page violates in one of the colour schemes."""
    for scheme in schemes:
        tab.page.emulate_media(color_scheme=scheme)
        colour = tab.page.evaluate("getComputedStyle(document.body).backgroundColor")
        assert (sum(int(part) for part in re.findall(r"\d+", colour)[:3]) > 384) is (scheme == "light")
        check_rules(tab)


def check_rules(tab: Tab) -> None:
    found = run_axe(tab.page)
    assert found.violations == []
    # Contrast is incomplete on cells with a background image and below the edge of a table that scrolls. `CHECKS`
    # computes it for all elements.
    assert [each for each in found.incomplete if each.rule != "color-contrast"] == []
    assert found.passes > 5, "the rules have found elements"
    assert tab.page.evaluate(CHECKS) == []


@pytest.mark.parametrize(("schemes", "width"), [(("light",), 1280), (("dark",), 1280), (("light", "dark"), 380)])
def test_every_screen_follows_the_rules_of_accessibility(
    page_server: Served, tab_of: Callable[..., Tab], schemes: Sequence[str], width: int
) -> None:
    node, unit = held_node(page_server)
    fail(page_server, node, unit)
    tab = tab_of(viewport={"width": width, "height": 800})
    place = f"node={node.name}"
    paths = (*SCREENS, "nodes?labels=zone+in", f"node?{place}", f"device?{place}&plugin=gpu&unit={unit.unit}")
    for path in paths:
        tab.page.goto(page_server.url + path)
        live(tab)
        check_accessibility(tab, schemes)
    assert tab.problems == []
    replace_unit(page_server, node, unit)


@pytest.mark.parametrize(("schemes", "width"), [(("light",), 1280), (("dark",), 1280), (("light", "dark"), 380)])
def test_the_sign_in_page_and_error_pages_follow_the_rules_of_accessibility(
    secure_page: SecureServed, tab_of: Callable[..., Tab], schemes: Sequence[str], width: int
) -> None:
    secure_page.reviews.users["token-of-eve"] = "eve"
    secure_page.reviews.users["token-of-ann"] = "ann"
    secure_page.reviews.allow("ann", "get /fleet")
    tab = tab_of(ignore_https_errors=True, viewport={"width": width, "height": 800})

    def sign_in(token: str, title: str) -> None:
        tab.page.get_by_label("Token").fill(token)
        tab.page.get_by_role("button", name="Sign in").click()
        tab.page.get_by_role("heading", name=title).wait_for(timeout=60_000)
        check_accessibility(tab, schemes)

    tab.page.goto(f"{secure_page.url}waiting")
    check_accessibility(tab, schemes)
    sign_in("unknown", "Sign in")
    assert "This token is not valid here" in tab.page.get_by_role("alert").text_content()
    sign_in("token-of-eve", "Forbidden")
    tab.page.goto(f"{secure_page.url}waiting")
    sign_in("token-of-ann", "Waiting pods")
    assert tab.page.locator(".hidden-name").count()
    tab.page.goto(f"{secure_page.url}node?node=missing")
    check_accessibility(tab, schemes)


def test_axe_finds_the_violations_of_a_page(page_server: Served, tab_of: Callable[..., Tab]) -> None:
    tab = tab_of()
    tab.page.goto(page_server.url)
    tab.page.evaluate("document.querySelector('html').removeAttribute('lang')")
    tab.page.evaluate("document.querySelector('main').insertAdjacentHTML('beforeend', '<img src=\"data:,\">')")
    assert {each.rule for each in run_axe(tab.page).violations} == {"html-has-lang", "image-alt"}


@pytest.mark.parametrize("width", [320, 380])
def test_every_page_fits_a_phone_without_horizontal_scrolling(
    page_server: Served, tab_of: Callable[..., Tab], width: int
) -> None:
    node, unit = held_node(page_server)
    tab = tab_of(viewport={"width": width, "height": 700}, has_touch=True)
    for path in (*SCREENS, f"node?node={node.name}", f"device?node={node.name}&plugin=gpu&unit={unit.unit}"):
        tab.page.goto(page_server.url + path)
        assert tab.page.evaluate("document.documentElement.scrollWidth") <= width, path
        box = tab.page.locator("h1").bounding_box()
        assert box["x"] >= 0
        assert box["x"] + box["width"] <= width
    tab.page.goto(f"{page_server.url}nodes")
    tab.page.locator("a.cell").first.tap()
    tab.page.wait_for_url("**/device?**")


def test_pages_are_complete_without_script(page_server: Served, tab_of: Callable[..., Tab]) -> None:
    with_script, without = tab_of(), tab_of(java_script_enabled=False)
    for path in SCREENS:
        for tab in (with_script, without):
            tab.page.goto(page_server.url + path)
        live(with_script)
        rows = [tab.page.locator("tbody th").all_text_contents() for tab in (with_script, without)]
        assert rows[0] == rows[1] != []
    without.page.get_by_role("link", name="Refresh").click()
    assert without.page.locator("h1").text_content() == "Namespaces"
    assert without.page.get_by_role("button", name="Pause updates").count() == 0


def test_nothing_is_loaded_from_elsewhere_and_the_policy_is_never_violated(
    page_server: Served, tab_of: Callable[..., Tab]
) -> None:
    tab = tab_of()
    tab.page.add_init_script(
        "addEventListener('securitypolicyviolation', (event) => console.error('violation', event.violatedDirective))"
    )
    for path in SCREENS:
        tab.page.goto(page_server.url + path)
        live(tab)
    assert tab.problems == []
    assert all(each.startswith(page_server.url) for each in tab.requests if not each.startswith("data:"))
    first = [each for each in tab.requests if "assets/" in each]
    assert len({each.rpartition("/")[2] for each in first}) == 2
    tab.page.evaluate("document.body.append(Object.assign(document.createElement('script'), {textContent: 'x'}))")
    assert any("violation" in each or "Content Security Policy" in each for each in tab.problems)


def test_a_row_that_is_read_does_not_change_and_focus_stays(page_server: Served, tab_of: Callable[..., Tab]) -> None:
    node, unit = held_node(page_server)
    tab = tab_of()
    tab.page.goto(f"{page_server.url}nodes?sort=name&text={node.name}")
    live(tab)
    cell = tab.page.get_by_role("link", name=re.compile(f"^gpu {unit.unit}: healthy"))
    cell.focus()
    failed = fail(page_server, node, unit)
    tab.page.locator(".numbers .alert", has_text="unhealthy").wait_for(timeout=60_000)
    assert cell.evaluate("(element) => element === document.activeElement")
    assert failed.phase == "unhealthy"
    cell.evaluate("(element) => element.blur()")
    tab.page.get_by_role("link", name=re.compile(f"^gpu {unit.unit}: unhealthy")).wait_for(timeout=60_000)
    replace_unit(page_server, node, unit)


def test_updates_can_be_paused_and_begin_paused_with_reduced_motion(
    page_server: Served, tab_of: Callable[..., Tab]
) -> None:
    node, unit = held_node(page_server)
    tab = tab_of(reduced_motion="reduce")
    tab.page.goto(f"{page_server.url}nodes?text={node.name}")
    assert tab.page.locator("#connection").text_content() == "Updates are paused."
    tab.page.get_by_role("button", name="Resume updates").click()
    live(tab)
    tab.page.get_by_role("button", name="Pause updates").click()
    fail(page_server, node, unit)
    healthy = tab.page.get_by_role("link", name=re.compile(f"^gpu {unit.unit}: healthy"))
    assert healthy.count() == 1
    tab.page.get_by_role("button", name="Resume updates").click()
    tab.page.get_by_role("link", name=re.compile(f"^gpu {unit.unit}: unhealthy")).wait_for(timeout=60_000)
    replace_unit(page_server, node, unit)


def test_links_and_updates_work_below_a_path_prefix(
    page_server: Served, prefixed: tuple[str, PrefixProxy], tab_of: Callable[..., Tab]
) -> None:
    url, proxy = prefixed
    tab = tab_of()
    tab.page.goto(url)
    live(tab)
    screen_link(tab, "Nodes").click()
    live(tab)
    tab.page.locator("a.cell").first.click()
    live(tab)
    screen_link(tab, "Overview").click()
    live(tab)
    assert tab.page.url == url
    assert all(path.startswith("/tools/fleet/") for path in proxy.paths)
    assert any(path.endswith("/api/v1/events") for path in proxy.paths)
    assert tab.problems == []
