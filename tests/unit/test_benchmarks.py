"""The benchmarks run, and their statistics are correct. No test checks the measured figures."""

import json
import subprocess
import sys
from pathlib import Path

import pytest

from benchmarks.figures import Figure, median, percentile, quantile

ROOT = Path(__file__).parents[2]


def run(*arguments: str) -> subprocess.CompletedProcess[str]:
    command = [sys.executable, "-m", "benchmarks", *arguments]
    return subprocess.run(command, cwd=ROOT, capture_output=True, text=True, check=False)


@pytest.mark.untraced
def test_a_run_prints_a_table_and_writes_the_same_figures_as_json(tmp_path: Path) -> None:
    result = run("--quick", "--only", "scan,start", "--json", str(tmp_path / "new" / "results.json"))
    assert result.returncode == 0, result.stderr
    written = json.loads((tmp_path / "new" / "results.json").read_text())
    names = [figure["name"] for result in written["results"].values() for figure in result["figures"]]
    assert list(written["results"]) == ["scan", "start"]
    assert len(names) == 13
    assert all(name in result.stdout for name in names)
    assert written["quick"]
    assert written["machine"]["cores"] >= 1


@pytest.mark.untraced
def test_all_benchmarks_can_be_imported_outside_of_pytest() -> None:
    program = "from benchmarks import __main__, run_one\nfor name in __main__.NAMES: run_one.load(name)"
    result = subprocess.run([sys.executable, "-c", program], cwd=ROOT, capture_output=True, text=True, check=False)
    assert result.returncode == 0, result.stderr


def test_an_unknown_benchmark_is_rejected_with_the_list_of_benchmarks() -> None:
    result = run("--only", "scan,speed")
    assert result.returncode == 2
    assert "unknown benchmark speed; expected memory, confined, start" in result.stderr


@pytest.mark.parametrize(
    ("share", "expected"), [(0.0, 1), (0.25, 1), (0.26, 2), (0.5, 2), (0.75, 3), (0.99, 4), (1.0, 4)]
)
def test_a_quantile_is_one_of_the_samples(share: float, expected: float) -> None:
    assert quantile([3, 1, 4, 2], share) == expected


def test_a_percentile_covers_all_samples_and_its_spread_the_rounds() -> None:
    figure = percentile("p50", [[1, 2, 3], [4, 5, 6], [7, 8, 9]], 0.5, "us")
    assert (figure.value, figure.low, figure.high, figure.samples) == (5, 2, 8, 9)


def test_a_median_includes_minimum_and_maximum() -> None:
    assert median("m", [5, 1, 2], "ms") == Figure(name="m", value=2, unit="ms", low=1, high=5, samples=3)


@pytest.mark.parametrize(("budget", "over"), [(None, False), (10, False), (9.9, True)])
def test_a_figure_equal_to_its_budget_is_within_budget(budget: float | None, over: bool) -> None:
    assert Figure(name="f", value=10, unit="", budget=budget).over_budget is over
