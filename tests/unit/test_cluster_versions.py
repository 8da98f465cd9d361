"""The table of tested versions of Kubernetes, and what is tested with each."""

import re
from pathlib import Path

import pytest

from tests.cluster import versions
from tests.cluster.build import VERSIONS
from tests.cluster.versions import Result, result_of, updated

REPORT = """<?xml version="1.0" encoding="utf-8"?><testsuites name="pytest tests">
<testsuite name="pytest" errors="1" failures="2" skipped="3" tests="20" time="61.6"></testsuite></testsuites>"""
PAGE = """# Versions

| Kubernetes | Tests | Passed | Failed | Skipped | Time | Selection |
| --- | --- | --- | --- | --- | --- | --- |
| 1.34.4 | 5 | 5 | 0 | 0 | 9 min 0 s | scenarios |
| 1.31.14 | 5 | 5 | 0 | 0 | 9 min 0 s | scenarios |

More text.
"""


def result(version: str = "v1.34.5") -> Result:
    return result_of(REPORT, version, "subset")


def test_errors_count_as_failures() -> None:
    assert result().row() == "| 1.34.5 | 20 | 14 | 3 | 3 | 1 min 2 s | subset |\n"


def test_a_report_without_tests_is_an_error() -> None:
    with pytest.raises(ValueError, match=r"v1\.34\.5 has no test suite"):
        result_of("<testsuites/>", "v1.34.5", "subset")


def test_rows_of_other_versions_stay_and_the_newest_is_first() -> None:
    rows = [line for line in updated(PAGE, [result(), result("v1.37.2")]).splitlines() if line.startswith("| 1.")]
    assert [row.split(" | ")[0] for row in rows] == ["| 1.37.2", "| 1.34.5", "| 1.31.14"]
    assert updated(PAGE, []) == PAGE


def test_a_page_without_the_table_is_an_error() -> None:
    with pytest.raises(ValueError, match="found no table"):
        updated("# Versions\n", [result()])


def test_the_selected_files_exist() -> None:
    directory = Path(versions.__file__).parent
    assert [name for name in versions.SCENARIOS if not (directory / f"test_{name}.py").exists()] == []


def test_the_page_has_rows_of_known_versions_only() -> None:
    rows = re.findall(r"^\| (1\.\d+)\.\d+ \|", versions.PAGE.read_text(), re.MULTILINE)
    assert {*rows} <= {*VERSIONS}
