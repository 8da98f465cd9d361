"""Cluster tests with several versions of Kubernetes: ``python -m tests.cluster.versions`` (``make test-versions``).

The newest version runs all cluster tests, the versions of `COMPLETE` the files of `SCENARIOS`, both with the contract
tests of the real kubelet. The other versions run the files of `SUBSET`. The results replace the rows of these versions
in the table of ``docs/versions.md``; rows of other versions stay. The exit code is 1 if a test failed.
"""

from __future__ import annotations

import argparse
import re
import subprocess
import sys
import tempfile
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from xml.etree import ElementTree

from .build import DEFAULT_VERSION, VERSIONS, kubernetes_version

ROOT = Path(__file__).parents[2]
PAGE = ROOT / "docs/versions.md"
COMPLETE = (VERSIONS[0], "1.34")
SUBSET = ("framework_scenarios", "gpu_base", "families_agent", "vanished_devices", "kubelet_defects", "webhook_bursts")
SCENARIOS = (
    *SUBSET,
    "dra_agent",
    *("gpu_labels", "gpu_levelzero", "gpu_fractional", "families", "admission", "webhook_trees"),
    *("operator", "operator_crds", "operator_daemonsets", "operator_life", "operator_edits"),
    *("onload_crds", "onload_node", "onload_upgrade", "helm", "helm_accelplane"),
)
SELECTIONS: Mapping[str, Sequence[str]] = {
    "all": (),
    "scenarios": (*(f"tests/cluster/test_{name}.py" for name in SCENARIOS), "tests/contract"),
    "subset": tuple(f"tests/cluster/test_{name}.py" for name in SUBSET),
}
_HEADER = ("Kubernetes", "Tests", "Passed", "Failed", "Skipped", "Time", "Selection")
_ROW = re.compile(r"^\| (1\.\d+)\.\d+ \|.*\n", re.MULTILINE)


@dataclass(frozen=True, kw_only=True)
class Result:
    """The counts of one version, such as ``v1.34.4``; `seconds` includes clusters, not the compilation."""

    version: str
    tests: int
    failed: int
    skipped: int
    seconds: float
    selection: str

    @property
    def passed(self) -> int:
        return self.tests - self.failed - self.skipped

    def row(self) -> str:
        minutes, seconds = divmod(round(self.seconds), 60)
        counts = (self.tests, self.passed, self.failed, self.skipped)
        return _line(self.version.removeprefix("v"), *counts, f"{minutes} min {seconds} s", self.selection)


def _line(*cells: object) -> str:
    return f"| {' | '.join(map(str, cells))} |\n"


def result_of(report: str, version: str, selection: str) -> Result:
    """The counts of a JUnit report of pytest. Raises `ValueError` if it has none."""
    suite = ElementTree.fromstring(report).find("testsuite")  # noqa: S314 - written by pytest
    if suite is None:
        raise ValueError(f"the report of Kubernetes {version} has no test suite")
    counts = {name: int(suite.get(name, "0")) for name in ("tests", "failures", "errors", "skipped")}
    return Result(
        version=version,
        tests=counts["tests"],
        failed=counts["failures"] + counts["errors"],
        skipped=counts["skipped"],
        seconds=float(suite.get("time", "0")),
        selection=selection,
    )


def updated(page: str, results: Sequence[Result]) -> str:
    """The page with the rows of these results in its table, newest first. Raises `ValueError` without a table."""
    header = _line(*_HEADER)
    start = page.find(header)
    if start < 0:
        raise ValueError(f"{PAGE.name}: found no table with the header {header.strip()}")
    start += len(header)
    start = page.index("\n", start) + 1  # after the line of dashes
    end = start
    rows: dict[str, str] = {}
    while found := _ROW.match(page, end):
        rows[found[1]] = found[0]
        end = found.end()
    rows |= {_minor(result.version): result.row() for result in results}
    ordered = sorted(rows, key=lambda minor: int(minor.split(".")[1]), reverse=True)
    return page[:start] + "".join(rows[minor] for minor in ordered) + page[end:]


def _minor(version: str) -> str:
    return ".".join(version.removeprefix("v").split(".")[:2])


def _test(version: str, selection: str, arguments: Sequence[str]) -> Result:
    with tempfile.TemporaryDirectory() as scratch:
        report = Path(scratch) / "report.xml"
        words = ["--reruns", "1", f"--junitxml={report}", *arguments, *SELECTIONS[selection]]
        command = ["make", "test-cluster", f"VERSION={version}", f"ARGS={' '.join(words)}"]
        code = subprocess.run(command, cwd=ROOT, check=False).returncode
        if not report.exists():
            raise ValueError(f"Kubernetes {version}: the command ended with {code}, without a report")
        return result_of(report.read_text(), kubernetes_version(version), selection)


def main() -> int:
    parser = argparse.ArgumentParser(
        prog="python -m tests.cluster.versions", description=(__doc__ or "").split("\n")[0]
    )
    parser.add_argument("versions", nargs="*", metavar="VERSION", help=f"of {', '.join(VERSIONS)}; default: all")
    parser.add_argument("--subset", action="store_true", help=f"run {', '.join(SUBSET)} only")
    parser.add_argument("--no-page", action="store_true", help=f"do not write {PAGE.relative_to(ROOT)}")
    parser.add_argument("--pytest", default="", metavar="ARGUMENTS", help="passed to pytest")
    chosen = parser.parse_args()
    if unknown := set(chosen.versions) - set(VERSIONS):
        parser.error(f"found {', '.join(sorted(unknown))}, expected versions of {', '.join(VERSIONS)}")
    results: list[Result] = []
    problems: list[str] = []
    for version in chosen.versions or VERSIONS:
        selection = "all" if version == DEFAULT_VERSION else "scenarios" if version in COMPLETE else "subset"
        try:
            results.append(_test(version, "subset" if chosen.subset else selection, chosen.pytest.split()))
        except ValueError as error:
            problems.append(str(error))
    print(_line(*_HEADER), *(result.row() for result in results), sep="", end="", flush=True)
    for problem in problems:
        print(problem, file=sys.stderr)
    if not chosen.no_page:
        PAGE.write_text(updated(PAGE.read_text(), results))
    return 1 if problems or any(result.failed for result in results) else 0


if __name__ == "__main__":
    sys.exit(main())
