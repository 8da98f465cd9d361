"""The code rules of CONTRIBUTING.md that no linter checks."""

import ast
import os
import re
import runpy
import subprocess
import sys
import tempfile
import tomllib
from collections.abc import Iterator
from functools import cache
from importlib.metadata import packages_distributions
from pathlib import Path
from pkgutil import resolve_name

import pytest

import accelplane

ROOT = Path(__file__).parents[2]
SOURCES = sorted(file for file in (ROOT / "src").rglob("*.py") if not file.name.endswith("_pb2.py"))
PAGES = sorted(page for folder in (".", "docs", "examples") for page in ROOT.joinpath(folder).glob("*.md"))
DECISIONS = sorted((ROOT / "docs" / "decisions").glob("[0-9]*.md"))
WRITTEN = ("src", "tests", "examples", "benchmarks", "proto", "docs")
PROJECT = tomllib.loads((ROOT / "pyproject.toml").read_text())["project"]

# Modules that node processes must not load at start: imported at the place of use or not at all.
NOT_ON_NODES = {
    *("lightkube", "httpx2", "cryptography", "accelplane.kube", "starlette", "uvicorn", "prometheus_client"),
    *("grpc", "structlog", "rich", "click", "yaml", "argparse"),
}

# Modules of several megabytes that operator and webhooks must load only when they are needed.
LOADED_ON_DEMAND = {
    *(
        "cryptography",
        "lightkube",
        "httpx2",
        "yaml",
        "h2",
        "grpc",
        "rich",
        "click",
        "cProfile",
        "accelplane.kube.crds",
        "accelplane.operator.crds",
    ),
}


def name_of(requirement: str) -> str:
    """The normalized distribution name of a requirement."""
    found = re.match(r"[\w.-]+", requirement)
    assert found, requirement
    return re.sub(r"[-_.]+", "-", found[0]).lower()


@cache
def syntax_tree(source: Path) -> ast.Module:
    return ast.parse(source.read_text())


def statements(node: ast.AST) -> Iterator[ast.AST]:
    """All statements below a node, without their expressions, which are ten times as many."""
    for name in ("body", "orelse", "finalbody", "handlers", "cases"):
        for child in getattr(node, name, ()):
            yield child
            yield from statements(child)


def imports(source: Path) -> Iterator[str]:
    """The top-level names of all imports in a module."""
    for node in statements(syntax_tree(source)):
        if isinstance(node, ast.Import):
            yield from (alias.name.partition(".")[0] for alias in node.names)
        elif isinstance(node, ast.ImportFrom) and node.module and not node.level:
            yield node.module.partition(".")[0]


def loaded_by(code: str) -> set[str]:
    """The modules that a Python process has loaded after running `code`."""
    command = [sys.executable, "-c", f"{code}\nimport sys; print(*sys.modules)"]
    # without coverage measurement and proxy settings
    excluded = re.compile("COVERAGE_|.*_proxy$", re.IGNORECASE)
    others = {name: value for name, value in os.environ.items() if not excluded.match(name)}
    return set(subprocess.run(command, env=others, check=True, capture_output=True, text=True).stdout.split())


@pytest.mark.parametrize(
    "module",
    [
        f"accelplane.cli.{name}"
        for name in ("main", "node", "clients", "inspect", "top", "dropin", "levelzero", "onloadworker", "xpumanager")
    ],
)
def test_node_commands_do_not_load_unneeded_modules(module: str) -> None:
    loaded = loaded_by(f"import {module}")
    assert module in loaded
    assert NOT_ON_NODES & loaded == set()


RUNNING_AGENT = """
import asyncio, os
from accelplane.cli import node
from accelplane.node.agent import Agent
from accelplane.node.settings import Settings
from accelplane.plugins.gpu import GpuPlugin
from accelplane.simulate.specs import GpuSpec, NodeSpec
from accelplane.simulate.tree import SimulatedNode

os.makedirs("{directory}/device-plugins")
SimulatedNode("{directory}/root").build(NodeSpec(gpus=[GpuSpec()]))
settings = Settings(root="{directory}/root", kubelet_dir="{directory}", cdi_dir="{directory}/cdi")
agent = Agent(settings, dict(gpu=GpuPlugin()))

async def stop_when_served():
    async with asyncio.timeout(60):
        while not all(runner.publisher.served for runner in agent.runners.values()):
            await asyncio.sleep(0.01)
    agent.stop()

async def main():
    await asyncio.gather(node._serve(agent), stop_when_served())

asyncio.run(main())
"""


def test_a_running_agent_without_pages_loads_no_http_and_no_metrics() -> None:
    with tempfile.TemporaryDirectory(dir="/tmp") as directory:  # the path of a socket is limited to 107 bytes
        loaded = loaded_by(RUNNING_AGENT.format(directory=directory))
    assert "accelplane.plugins.gpu.scan" in loaded
    others = (
        "accelplane.dra",
        "accelplane.node.dra",
        "accelplane.kubelet.dra",
        "accelplane.kubelet.pluginregistration",
    )
    pages = ("accelplane.http", "accelplane.apiserver", "accelplane.readings", *others, *(
        f"accelplane.node.{name}" for name in ("exposition", "measurements", "metrics", "observer", "pages", "readings")
    ))  # fmt: skip
    assert sorted(name for name in loaded if name.startswith(pages)) == []


TRACED_AGENT = (
    """
import sys
events = []
sys.addaudithook(lambda event, arguments: events.append(event + " " + repr(arguments)))
"""
    + RUNNING_AGENT
    + """
import os
for event in events:
    if event.startswith(("open ", "os.mkdir ", "os.listdir ", "os.scandir ")) and "{directory}/plugins" in event:
        sys.exit("opened: " + event)
    if event.startswith("socket.connect ") and not ".sock" in event:
        sys.exit("connected: " + event)
assert any("{directory}/device-plugins" in event for event in events), "the hook sees no events"
assert not [name for name in os.listdir("{directory}") if name.startswith("plugins")]
"""
)


def test_a_running_agent_without_dra_opens_and_requests_nothing_for_it() -> None:
    """Neither files below the kubelet's `plugins` and `plugins_registry`, nor the API server."""
    with tempfile.TemporaryDirectory(dir="/tmp") as directory:
        loaded_by(TRACED_AGENT.format(directory=directory))


def test_pages_of_a_node_load_no_unneeded_modules() -> None:
    loaded = loaded_by("import accelplane.pages.server, accelplane.pages.measurements")
    assert "accelplane.http.server" in loaded
    assert NOT_ON_NODES & loaded == set()


def test_the_operator_does_not_load_unneeded_modules() -> None:
    loaded = loaded_by(
        "import accelplane.cli.operator, accelplane.operator.program, accelplane.kube.truststore\n"
        "from accelplane.kube.client import Client\n"
        "from accelplane.apiserver import ClientConfig\n"
        "Client(ClientConfig(server='http://localhost'), field_manager='x')"
    )
    assert "accelplane.kube.manager" in loaded
    assert LOADED_ON_DEMAND & loaded == set()


def test_the_sgx_webhook_does_not_load_unneeded_modules() -> None:
    loaded = loaded_by("import accelplane.cli.sgxwebhook, accelplane.cli.ownsecret")
    assert "accelplane.kube.admission" in loaded
    assert (LOADED_ON_DEMAND | {"prometheus_client"}) & loaded == set()


def test_dependencies_are_exactly_the_imported_distributions() -> None:
    distributions = packages_distributions()
    imported = {name for source in SOURCES for name in imports(source)} - sys.stdlib_module_names - {"accelplane"}
    # many distributions share the package `google`; this one is protobuf
    used = {
        name_of(distribution)
        for name in imported
        for distribution in (["protobuf"] if name == "google" else distributions[name])
    }
    extras = PROJECT["optional-dependencies"]
    requirements = (*PROJECT["dependencies"], *extras["operator"], *extras["simulate"])
    assert used == {name_of(requirement) for requirement in requirements}


def test_every_entry_point_resolves() -> None:
    for target in (*PROJECT["scripts"].values(), *PROJECT["entry-points"]["accelplane.plugins"].values()):
        assert callable(resolve_name(target))


def test_generated_messages_match_the_proto_files(tmp_path: Path) -> None:
    generate = runpy.run_path(str(ROOT / "proto" / "generate.py"))
    assert generate["outdated"](tmp_path) == []


def test_every_dependency_is_pinned_with_hashes_and_without_url() -> None:
    text = (ROOT / "constraints.txt").read_text() + (ROOT / "constraints-extra.txt").read_text()
    assert "://" not in text
    entries = re.sub(r"\\\n|#.*", " ", text).splitlines()
    pinned: set[str] = set()
    for entry in filter(str.strip, entries):
        assert re.fullmatch(r"[a-z0-9.-]+==[\w.]+( +--hash=sha256:[0-9a-f]{64})+ *", entry), entry
        pinned.add(name_of(entry))
    requirements = (
        *PROJECT["dependencies"],
        *(requirement for extra in PROJECT["optional-dependencies"].values() for requirement in extra),
    )
    assert {name_of(requirement) for requirement in requirements} - pinned == set()


def test_the_version_is_the_same_everywhere() -> None:
    newest = re.search(r"^## \[?(\d[^] ]*)", (ROOT / "CHANGELOG.md").read_text(), re.MULTILINE)
    assert newest
    assert accelplane.__version__ == newest[1]
    assert "version" in PROJECT["dynamic"]


@pytest.mark.parametrize("page", [*PAGES, *DECISIONS], ids=lambda page: str(page.relative_to(ROOT)))
def test_links_between_pages_resolve(page: Path) -> None:
    targets = re.findall(r"\]\(([^)\s#:]+)[#)]", page.read_text())
    assert [target for target in targets if not (page.parent / target).exists()] == []


def test_the_index_links_every_decision() -> None:
    index = (ROOT / "docs" / "decisions" / "README.md").read_text()
    assert [page.name for page in DECISIONS if f"]({page.name})" not in index] == []


def test_every_module_has_a_docstring() -> None:
    missing = [file for file in SOURCES if file.stat().st_size and not ast.get_docstring(syntax_tree(file))]
    assert missing == []


def test_modules_have_specific_names() -> None:
    # controller-runtime calls the object that runs controllers a manager
    named = {file.stem for file in SOURCES if file.parent.name != "kube"}
    assert named & {"utils", "util", "helpers", "common", "misc", "manager"} == set()


def test_no_todo_comments() -> None:
    later = re.compile(r"\b(?:T[O]DO|F[I]XME|X[X]X)\b")
    written = [
        file for folder in WRITTEN for file in (ROOT / folder).rglob("*") if file.suffix in {".py", ".md", ".proto"}
    ]
    assert [file for file in (*written, *PAGES) if later.search(file.read_text())] == []


def test_make_rejects_an_interpreter_that_does_not_run() -> None:
    command = ["make", "PYTHON=/nope", ".venv/.pinned"]
    result = subprocess.run(command, cwd=ROOT, capture_output=True, text=True, check=False)
    assert result.returncode != 0
    assert "/nope: found version none, expected 3.11 or newer" in result.stderr
