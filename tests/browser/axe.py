"""axe-core in a page of the browser: the rules of WCAG 2.0, 2.1 and 2.2, levels A and AA.

The script is the only part of the package `axe-playwright-python` that is used. `violations` are certain. `incomplete`
are results that axe-core leaves to a person, such as contrast on a background with an image.
"""

from importlib.resources import files
from typing import Any, NamedTuple

TAGS = ("wcag2a", "wcag2aa", "wcag21a", "wcag21aa", "wcag22a", "wcag22aa")

# The rule of WCAG 2.2 for the size of targets is off by default.
_RUN = """
async ([tags]) => {
  const rules = {"target-size": {enabled: true}};
  const found = await axe.run(document, {runOnly: {type: "tag", values: tags}, rules, resultTypes: ["violations"]});
  const list = (results) => results.flatMap((rule) =>
    rule.nodes.map((node) => [rule.id, node.target.join(" "), node.html.slice(0, 160), node.failureSummary || ""]));
  return {violations: list(found.violations), incomplete: list(found.incomplete), passes: found.passes.length};
}
"""


class Finding(NamedTuple):
    """A rule, an element, and what has to change."""

    rule: str
    selector: str
    html: str
    summary: str


class AxeResults(NamedTuple):
    """`passes` is the number of rules that found elements and no violation."""

    violations: list[Finding]
    incomplete: list[Finding]
    passes: int


def run_axe(page: Any) -> AxeResults:
    """The results of the rules for the page that is shown."""
    if not page.evaluate("'axe' in window"):
        page.evaluate(files("axe_playwright_python").joinpath("axe.min.js").read_text(encoding="utf-8"))
    found = page.evaluate(_RUN, [list(TAGS)])
    violations, incomplete = ([Finding(*each) for each in found[kind]] for kind in ("violations", "incomplete"))
    return AxeResults(violations, incomplete, found["passes"])
