"""Settings of hypothesis, common fixtures, and the report of tests that passed only when they ran again.

Hypothesis generates 25 inputs per test, 50 with `ACCELPLANE_THOROUGH`, or `ACCELPLANE_FUZZ` of them (`make fuzz`),
except for tests that set a number of their own. All of them have the marker `fuzz`. With `ACCELPLANE_FUZZ`, the report
shows the number of inputs.

The directory `tmp_path` of tests with the marker `memory` is in memory if possible (`memorydirectory`).

Coverage is measured in the processes that tests start, too. It is not measured in tests with the marker `untraced`,
which include all hypothesis tests: they execute code that other tests cover, a thousand times, and tracing makes Python
3.11 several times slower. (The marker `no_cover` of pytest-cov has no effect in workers of xdist.)
"""

import functools
import gc
import logging
import os
import re
import shutil
import signal
import sys
import tempfile
import threading
from collections.abc import Generator, Iterator, Mapping
from contextlib import contextmanager
from pathlib import Path
from typing import Any
from unittest.mock import patch

import memorydirectory
import pytest
from hypothesis import HealthCheck, is_hypothesis_test, settings
from thoroughness import FUZZ, examples
from trees import PathInHost

from accelplane.host import Host

_INPUTS = "inputs"
_DATA = os.path.abspath(".coverage")

settings.register_profile(
    "accelplane",
    max_examples=int(FUZZ) if FUZZ else examples(50),
    deadline=None,  # two shared cores: the time of one example says nothing
    database=None,
    # These fixtures are paths and empty directories, which every example fills itself.
    suppress_health_check=[HealthCheck.function_scoped_fixture, HealthCheck.too_slow],
)
settings.load_profile("accelplane")


def pytest_configure(config: pytest.Config) -> None:
    config.add_cleanup(memorydirectory.create())
    config.addinivalue_line("markers", "fuzz: hypothesis generates its inputs")
    config.addinivalue_line("markers", "untraced: coverage is not measured")
    config.addinivalue_line("markers", "memory: `tmp_path` is in memory if possible")
    if signal.getsignal(signal.SIGINT) is signal.SIG_IGN:
        # Shells start background jobs so. Programs that tests start and interrupt would inherit it.
        signal.signal(signal.SIGINT, signal.default_int_handler)


@pytest.hookimpl(wrapper=True)
def pytest_collection() -> Generator[None, Any, Any]:
    """Garbage collection would use a third of the collection time, and traverse all items later."""
    gc.disable()
    try:
        return (yield)
    finally:
        gc.freeze()
        gc.enable()


@pytest.hookimpl(wrapper=True)
def pytest_make_collect_report(collector: pytest.Collector) -> Generator[None, pytest.CollectReport, Any]:
    """Each process starts with another file, so that bytecode compiled by one is loaded by the others."""
    report = yield
    worker: Mapping[str, Any] | None = getattr(collector.config, "workerinput", None)
    if worker and isinstance(collector, pytest.Directory) and report.result:
        first = len(report.result) * int(worker["workerid"].removeprefix("gw")) // worker["workercount"]
        report.result = [*report.result[first:], *report.result[:first]]
    return report


@pytest.hookimpl(tryfirst=True)
def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    items.sort(key=lambda item: item.path)  # the order of all processes has to be the same
    for item in items:
        if is_hypothesis_test(getattr(item, "obj", None)):
            item.add_marker(pytest.mark.fuzz)
            item.add_marker(pytest.mark.untraced)


@pytest.fixture
def tmp_path(request: pytest.FixtureRequest) -> Iterator[Path]:
    """An empty directory, for tests with the marker `memory` in memory. It is kept if the test fails."""
    if not request.node.get_closest_marker("memory") or not memorydirectory.in_memory():
        yield request.getfixturevalue("tmp_path")  # that of pytest
        return
    name = re.sub(r"[^a-z0-9_]", "_", request.node.name)
    path = Path(tempfile.mkdtemp(prefix=f"{name[:30]}-", dir=memorydirectory.path()))
    failures = request.session.testsfailed
    yield path
    if request.session.testsfailed == failures:
        shutil.rmtree(path, ignore_errors=True)


@pytest.fixture(params=["under a root", "at the machine's own"])
def path_in_host(request: pytest.FixtureRequest, tmp_path: Path) -> PathInHost:
    """A host, and a function that returns its paths of files in `tmp_path`."""
    if request.param == "under a root":
        return Host(tmp_path), lambda path: f"/{path}"
    return Host(), lambda path: f"{tmp_path}/{path}"


@pytest.hookimpl(wrapper=True)
def pytest_runtest_protocol(item: pytest.Item) -> Generator[None, Any, Any]:
    with _root_logger_restored():
        return (yield from _trace_if_enabled(item))


@contextmanager
def _root_logger_restored() -> Generator[None]:
    """Commands that run in the process of the tests set up the root logger for themselves."""
    root = logging.getLogger()
    level, handlers = root.level, list(root.handlers)
    try:
        yield
    finally:
        root.setLevel(level)
        root.handlers[:] = handlers


def _trace_if_enabled(item: pytest.Item) -> Generator[None, Any, Any]:
    if not item.config.pluginmanager.hasplugin("_cov"):
        return (yield)
    if item.get_closest_marker("untraced") is None:
        with patch.dict(os.environ, {"COVERAGE_PROCESS_START": str(item.config.inipath), "COVERAGE_FILE": _DATA}):
            return (yield)
    trace, thread_trace = sys.gettrace(), threading.gettrace()
    sys.settrace(None)
    threading.settrace(None)
    try:
        return (yield)
    finally:
        threading.settrace(thread_trace)
        sys.settrace(trace)


@pytest.hookimpl(wrapper=True)
def pytest_runtest_call(item: pytest.Item) -> Generator[None, Any, Any]:
    # Its `inner_test` is called for each input. State machines have none.
    handle = getattr(getattr(item, "obj", None), "hypothesis", None)
    if not FUZZ or handle is None:
        return (yield)
    inner, count = handle.inner_test, 0

    @functools.wraps(inner)
    def counted(*args: Any, **kwargs: Any) -> Any:
        nonlocal count
        count += 1
        return inner(*args, **kwargs)

    handle.inner_test = counted
    try:
        return (yield)
    finally:
        handle.inner_test = inner
        item.user_properties.append((_INPUTS, count))


def pytest_terminal_summary(terminalreporter: Any) -> None:
    # A test that passed only in its second run is defective, too.
    for report in terminalreporter.stats.get("rerun", []):
        terminalreporter.section(f"run again: {report.nodeid} ({report.when})", sep="_")
        terminalreporter.write_line(report.longreprtext)
    if not FUZZ:
        return
    reports = [report for found in terminalreporter.stats.values() for report in found]
    counts = [
        value
        for report in reports
        if getattr(report, "when", "") == "call"
        for name, value in report.user_properties
        if name == _INPUTS
    ]
    terminalreporter.write_line(f"{sum(counts):,} inputs in {len(counts)} tests")
