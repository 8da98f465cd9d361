"""The house rules that a machine can check: what CONTRIBUTING.md asks for and no linter knows."""

import ast
import os
import re
import runpy
import subprocess
import sys
import tomllib
from collections.abc import Iterator
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

# What a process on every node must not carry for others: imported at the place of use or not at all.
NOT_ON_NODES = {
    *("lightkube", "httpx2", "cryptography", "accelplane.kube", "starlette", "uvicorn", "prometheus_client"),
    *("grpc", "structlog", "rich", "click", "yaml", "argparse"),
}

# What a process on the API server's side must not carry before somebody asks for it, each of them being megabytes.
NOT_BEFORE_ASKED = {
    *(
        "cryptography",
        "httpcore2",
        "anyio",
        "h11",
        "h2",
        "grpc",
        "rich",
        "click",
        "cProfile",
        "accelplane.operator.crds",
    ),
}


def name_of(requirement: str) -> str:
    """The normalized name of the distribution that a requirement asks for."""
    found = re.match(r"[\w.-]+", requirement)
    assert found, requirement
    return re.sub(r"[-_.]+", "-", found[0]).lower()


def imports(source: Path) -> Iterator[str]:
    """The top-level names that a module imports, anywhere in it."""
    for node in ast.walk(ast.parse(source.read_text())):
        if isinstance(node, ast.Import):
            yield from (alias.name.partition(".")[0] for alias in node.names)
        elif isinstance(node, ast.ImportFrom) and node.module and not node.level:
            yield node.module.partition(".")[0]


def loaded_by(code: str) -> set[str]:
    """The modules that a process has when it has run this."""
    command = [sys.executable, "-c", f"{code}\nimport sys; print(*sys.modules)"]
    # neither measured nor told of proxies
    unwanted = re.compile("COVERAGE_|.*_proxy$", re.IGNORECASE)
    others = {name: value for name, value in os.environ.items() if not unwanted.match(name)}
    return set(subprocess.run(command, env=others, check=True, capture_output=True, text=True).stdout.split())


@pytest.mark.parametrize("module", ["accelplane.cli.main", "accelplane.cli.node", "accelplane.cli.dropin"])
def test_a_node_command_carries_nothing_that_it_does_not_need(module: str) -> None:
    loaded = loaded_by(f"import {module}")
    assert module in loaded
    assert NOT_ON_NODES & loaded == set()


def test_the_pages_of_a_node_load_nothing_that_nodes_do_not_need() -> None:
    loaded = loaded_by("import accelplane.node.pages, accelplane.node.measurements")
    assert "accelplane.http.server" in loaded
    assert NOT_ON_NODES & loaded == set()


def test_the_operator_carries_nothing_that_it_does_not_need() -> None:
    loaded = loaded_by(
        "import accelplane.cli.operator, accelplane.operator.program, accelplane.kube.truststore\n"
        "from accelplane.kube.client import Client\n"
        "from lightkube.config.kubeconfig import KubeConfig\n"
        "Client(KubeConfig.from_server('http://localhost').get(), field_manager='x')"
    )
    assert "accelplane.kube.manager" in loaded
    assert NOT_BEFORE_ASKED & loaded == set()


def test_the_sgx_webhook_carries_nothing_that_it_does_not_need() -> None:
    loaded = loaded_by("import accelplane.cli.sgxwebhook, accelplane.cli.ownsecret")
    assert "accelplane.kube.admission" in loaded
    assert (NOT_BEFORE_ASKED | {"lightkube", "httpx2", "prometheus_client", "yaml"}) & loaded == set()


def test_the_package_asks_for_what_it_imports_and_for_nothing_else() -> None:
    distributions = packages_distributions()
    imported = {name for source in SOURCES for name in imports(source)} - sys.stdlib_module_names - {"accelplane"}
    # `google` is shared by many distributions; ours is the one with the messages
    used = {
        name_of(distribution)
        for name in imported
        for distribution in (["protobuf"] if name == "google" else distributions[name])
    }
    extras = PROJECT["optional-dependencies"]
    wanted = (*PROJECT["dependencies"], *extras["operator"], *extras["simulate"])
    assert used == {name_of(requirement) for requirement in wanted}


def test_every_entry_point_leads_to_something() -> None:
    for target in (*PROJECT["scripts"].values(), *PROJECT["entry-points"]["accelplane.plugins"].values()):
        assert callable(resolve_name(target))


def test_the_generated_messages_are_those_of_the_contracts(tmp_path: Path) -> None:
    generate = runpy.run_path(str(ROOT / "proto" / "generate.py"))
    assert generate["outdated"](tmp_path) == []


def test_every_dependency_is_pinned_with_its_hashes_and_none_with_its_place() -> None:
    text = (ROOT / "constraints.txt").read_text()
    assert "://" not in text
    entries = re.sub(r"\\\n|#.*", " ", text).splitlines()
    pinned: set[str] = set()
    for entry in filter(str.strip, entries):
        assert re.fullmatch(r"[a-z0-9.-]+==[\w.]+( +--hash=sha256:[0-9a-f]{64})+ *", entry), entry
        pinned.add(name_of(entry))
    asked = (
        *PROJECT["dependencies"],
        *(asked for extra in PROJECT["optional-dependencies"].values() for asked in extra),
    )
    assert {name_of(requirement) for requirement in asked} - pinned == set()


def test_the_version_is_the_same_everywhere() -> None:
    newest = re.search(r"^## \[?(\d[^] ]*)", (ROOT / "CHANGELOG.md").read_text(), re.MULTILINE)
    assert newest
    assert accelplane.__version__ == PROJECT["version"] == newest[1]


@pytest.mark.parametrize("page", [*PAGES, *DECISIONS], ids=lambda page: str(page.relative_to(ROOT)))
def test_links_between_pages_lead_somewhere(page: Path) -> None:
    targets = re.findall(r"\]\(([^)\s#:]+)[#)]", page.read_text())
    assert [target for target in targets if not (page.parent / target).exists()] == []


def test_every_decision_stands_in_the_index() -> None:
    index = (ROOT / "docs" / "decisions" / "README.md").read_text()
    assert [page.name for page in DECISIONS if f"]({page.name})" not in index] == []


def test_every_module_tells_its_story() -> None:
    untold = [file for file in SOURCES if (text := file.read_text()) and not ast.get_docstring(ast.parse(text))]
    assert untold == []


def test_modules_are_named_by_what_they_hold() -> None:
    # what runs controllers is called their manager wherever there are any
    named = {file.stem for file in SOURCES if file.parent.name != "kube"}
    assert named & {"utils", "util", "helpers", "common", "misc", "manager"} == set()


def test_nothing_is_left_for_later() -> None:
    later = re.compile(r"\b(?:T[O]DO|F[I]XME|X[X]X)\b")
    written = [
        file for folder in WRITTEN for file in (ROOT / folder).rglob("*") if file.suffix in {".py", ".md", ".proto"}
    ]
    assert [file for file in (*written, *PAGES) if later.search(file.read_text())] == []
