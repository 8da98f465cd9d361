"""The documentation is correct: its code runs, its configurations load, its tables are complete."""

import ast
import asyncio
import importlib.util
import inspect
import re
import sys
import tomllib
import types
from collections import Counter
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any, get_args

import msgspec
import pytest
import yaml
from documentation import DOCS, EXAMPLE, PAGES, ROOT, blocks, command_lines

import accelplane.plugins
from accelplane.cli import clients as clients_command
from accelplane.cli import (
    epchook,
    fleetview,
    fpgawebhook,
    genericplugin,
    levelzero,
    logflags,
    onloadworker,
    sgxwebhook,
    top,
    xpumanager,
)
from accelplane.cli import fleet as fleet_command
from accelplane.cli import inspect as inspect_command
from accelplane.cli import labels as labels_command
from accelplane.cli import node as node_command
from accelplane.cli import onloadoperator as onload_command
from accelplane.cli import operator as operator_command
from accelplane.cli.commands import accelplane as accelplane_command
from accelplane.cli.goflags import Flag, flags_of, parse
from accelplane.devices import Cause, Device, DeviceNode
from accelplane.host import Host
from accelplane.node import config as configuration
from accelplane.node.plugins import Installed, installed
from accelplane.plugins import Plugin
from accelplane.plugins.fpga.config import FpgaConfig
from accelplane.plugins.gpu import GpuConfig
from accelplane.plugins.idxd import DsaConfig, IaaConfig
from accelplane.plugins.npu import NpuConfig
from accelplane.plugins.onload import OnloadConfig
from accelplane.plugins.policies import POLICIES, preferred_ids
from accelplane.plugins.qat import QatConfig
from accelplane.plugins.sgx import SgxConfig
from accelplane.readings.families import FAMILIES
from accelplane.testing import Tree
from website.agentmetrics import agent_families
from website.reference import AUTHOR_MODULES, public_names

WEBHOOK = DOCS / "sgx-webhook.md"
ONLOAD_NODE = DOCS / "onload-node.md"
FPGA_WEBHOOK = DOCS / "fpga-webhook.md"
OPERATOR = DOCS / "operator.md"
FLEET = DOCS / "fleet.md"
ONLOAD = DOCS / "onload.md"
USERS = DOCS / "users-guide.md"
# The pages for authors of plugins, in the order in which their blocks run.
GUIDE = [DOCS / f"{name}.md" for name in ("plugin-authors-guide", "plugin-scans", "plugin-hooks", "plugin-tests")]
GPUS = DOCS / "gpus-and-npus.md"
METRICS = DOCS / "metrics.md"
ACCELERATORS, LABELS = DOCS / "accelerators.md", DOCS / "labels.md"
SIDECARS = DOCS / "gpu-sidecars.md"


def section(page: Path, heading: str) -> str:
    """The text below a heading, up to the next heading of the same or a higher level."""
    text = page.read_text()
    begin = re.search(rf"^(#+) {re.escape(heading)}$", text, re.MULTILINE)
    assert begin, f"{page.name} has no heading {heading!r}"
    end = re.search(rf"^#{{1,{len(begin[1])}}} ", text[begin.end() :], re.MULTILINE)
    return text[begin.end() : begin.end() + end.start()] if end else text[begin.end() :]


def rows(text: str) -> list[list[str]]:
    """The cells of all tables in a text, without the header rows."""
    cells = [[cell.strip() for cell in line.strip("|").split("|")] for line in text.splitlines() if line[:1] == "|"]
    return [row for row, after in zip(cells, [*cells[1:], [""]], strict=True) if not _rule(row) and not _rule(after)]


def _rule(row: Sequence[str]) -> bool:
    return bool(row[0]) and set(row[0]) <= {"-", ":"}


# The plugin author's guide.


@pytest.fixture
def guide_modules() -> Iterator[Mapping[str, types.ModuleType]]:
    """Runs the guide's blocks in order. Blocks with a file name become modules, the others extend the first module."""
    document: dict[str, types.ModuleType] = {}
    try:
        for page in GUIDE:
            for block in blocks(page, "python"):
                if block.title:
                    module = types.ModuleType(block.title.removesuffix(".py"))
                    sys.modules[module.__name__] = document[module.__name__] = module
                else:
                    module = next(iter(document.values()))
                code = "\n" * (block.line - 1) + block.text
                exec(compile(code, str(page), "exec", dont_inherit=True), module.__dict__)  # noqa: S102 - what it is for
        yield document
    finally:
        for name in document:
            sys.modules.pop(name, None)


def test_the_authors_guide_runs_and_the_tests_in_it_pass(
    guide_modules: Mapping[str, types.ModuleType], tmp_path: Path
) -> None:
    tests = [
        function
        for name, module in guide_modules.items()
        if name.startswith("test_")
        for title, function in inspect.getmembers(module, inspect.isfunction)
        if title.startswith("test_")
    ]
    assert len(tests) >= 4
    for number, test in enumerate(tests):
        directory = tmp_path / str(number)
        directory.mkdir()
        outcome = test(directory)
        if inspect.iscoroutine(outcome):
            asyncio.run(outcome)


def test_the_authors_guide_names_all_public_api() -> None:
    text = "".join(page.read_text() for page in GUIDE)
    names = {f"`{field.name}`" for field in msgspec.structs.fields(Device)}
    names |= {name for name in vars(Host) if not name.startswith("_")}
    names |= {name for name in vars(Plugin) if not name.startswith("_")} - {"config_type"}
    names |= set(accelplane.plugins.__all__)
    assert sorted(name for name in names if name not in text) == []


def test_the_first_plugin_is_the_same_everywhere_and_works(tmp_path: Path) -> None:
    pages = (ROOT / "README.md", DOCS / "tutorial.md", GUIDE[0])
    (text,) = {blocks(page, "python")[0].text for page in pages}
    names: dict[str, Any] = {"__name__": "readme"}
    exec(compile(text, "README.md", "exec", dont_inherit=True), names)  # noqa: S102 - what it is for
    tree = Tree(tmp_path)
    tree.class_device("tpu", "tpu0")
    tree.class_device("tpu", "tpu1", node=None)
    device, skipped = names["TpuPlugin"]().scan(tree.host)
    assert device == Device(resource="tpu", id="tpu0", nodes=[DeviceNode("/dev/tpu0")])
    assert (skipped.subject, skipped.warning) == ("tpu1", True)


def test_the_guide_lists_the_public_modules_and_uses_no_others() -> None:
    listed = [row[0].strip("`") for row in rows(section(GUIDE[0], "Packaging"))]
    assert listed == list(AUTHOR_MODULES)
    code = "\n".join(block.text for page in GUIDE for block in blocks(page, "python"))
    used = {*re.findall(r"^from (accelplane[.\w]*) import", code, re.MULTILINE)}
    assert used - {"accelplane_tpu"} <= set(listed)
    for module in listed:
        assert public_names(module), module


def test_guide_metrics_and_runbooks_list_the_causes() -> None:
    (guide,) = re.findall(r"a word of `Cause`.*?\n\n", section(GUIDE[2], "Health"), re.DOTALL)
    (metric,) = re.findall(r"`accelplane_unit_unhealthy_reason`.*", METRICS.read_text())
    for text in (guide, metric, section(DOCS / "runbooks.md", "AccelplaneDeviceUnhealthy")):
        assert set(get_args(Cause)) <= {*re.findall(r"`([\w-]+)`", text)}


# Configurations and command lines of all pages.


def plugin_types(extra: Mapping[str, types.ModuleType]) -> Mapping[str, type[Plugin[accelplane.plugins.Config]]]:
    spec = importlib.util.spec_from_file_location("generic_devices", EXAMPLE / "accelplane_generic_devices.py")
    assert spec
    assert spec.loader
    generic = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(generic)
    return {
        **installed(("generic", "gpu", "npu")).types,
        "device-nodes": generic.GenericPlugin,
        "tpu": extra["accelplane_tpu"].ConfiguredTpuPlugin,
    }


def test_every_configuration_shown_is_accepted(guide_modules: Mapping[str, types.ModuleType], tmp_path: Path) -> None:
    types_by_name = plugin_types(guide_modules)
    count = 0
    for page in PAGES:
        for block in blocks(page, "yaml"):
            content = yaml.safe_load(block.text)
            if not isinstance(content, dict) or not {"plugins", "enabled"} & content.keys():
                continue
            path = tmp_path / "agent.yaml"
            path.write_text(block.text)
            where = f"{page.name}:{block.line}"
            config = configuration.read(str(path))
            assert set(config.plugins) <= set(types_by_name), where
            assert set(configuration.choose(config, Installed(types_by_name), where).plugins) == set(types_by_name)
            count += 1
    assert count >= 2


NODE_FLAGS = (Flag("plugins", ""), Flag("config", ""), *node_command.FLAGS)
PROGRAMS: Mapping[str, Sequence[Flag]] = {
    "accelplane": (),
    "intel_gpu_device_plugin": (*flags_of(GpuConfig), *node_command.FLAGS),
    "intel_npu_device_plugin": (*flags_of(NpuConfig), *node_command.FLAGS),
    "intel_qat_device_plugin": (*flags_of(QatConfig), *node_command.FLAGS),
    "intel_dsa_device_plugin": (*flags_of(DsaConfig), *node_command.FLAGS),
    "intel_iaa_device_plugin": (*flags_of(IaaConfig), *node_command.FLAGS),
    "intel_dlb_device_plugin": node_command.FLAGS,
    "intel_sgx_device_plugin": (*flags_of(SgxConfig), *node_command.FLAGS),
    "intel_fpga_device_plugin": (*flags_of(FpgaConfig), *node_command.FLAGS),
    "generic-device-plugin": genericplugin.ALL_FLAGS,
}


def test_every_command_line_shown_parses() -> None:
    lines = list(command_lines(PROGRAMS))
    assert len(lines) >= 8
    for where, (program, *arguments) in lines:
        own = {"node": NODE_FLAGS, "labels": labels_command.FLAGS}
        if program == "accelplane" and arguments[0] not in own:
            command = accelplane_command.commands[arguments[0]]
            assert command.make_context(program, arguments[1:]), where
            continue
        if program == "accelplane":
            flags, words = own[arguments[0]], arguments[1:]
        else:
            flags, words = PROGRAMS[program], arguments
        assert parse(flags, words)[1] == [], where


# Tables that must be complete.


def flag_text(flag: Flag) -> str:
    if isinstance(flag.default, bool):
        return str(flag.default).lower()
    return f"{flag.default:g}" if isinstance(flag.default, float) else f"{flag.default}"


@pytest.mark.parametrize(
    ("page", "heading", "flags"),
    [
        (GPUS, "GPU options", flags_of(GpuConfig)),
        (GPUS, "NPU options", flags_of(NpuConfig)),
        (ACCELERATORS, "QAT options", flags_of(QatConfig)),
        (ACCELERATORS, "DSA options", flags_of(DsaConfig)),
        (ACCELERATORS, "IAA options", flags_of(IaaConfig)),
        (ACCELERATORS, "SGX options", flags_of(SgxConfig)),
        (ACCELERATORS, "FPGA options", flags_of(FpgaConfig)),
        (ONLOAD_NODE, "Options of the device plugin", flags_of(OnloadConfig)),
        (ONLOAD_NODE, "Flags of the worker", [flag for flag in onloadworker.FLAGS if flag not in logflags.FLAGS]),
        (DOCS / "gpu-clients.md", "Flags", [flag for flag in clients_command.FLAGS if flag not in logflags.FLAGS]),
        (LABELS, "accelplane labels", [flag for flag in labels_command.FLAGS if flag not in logflags.FLAGS]),
        (LABELS, "EPC", [flag for flag in epchook.FLAGS if flag not in logflags.FLAGS]),
        (SIDECARS, "Flags of the Level-Zero service", [flag for flag in levelzero.FLAGS if flag not in logflags.FLAGS]),
        (SIDECARS, "Flags of the Xe-Link sidecar", [flag for flag in xpumanager.FLAGS if flag not in logflags.FLAGS]),
        (FPGA_WEBHOOK, "Running it", [flag for flag in fpgawebhook.FLAGS if flag not in logflags.FLAGS]),
        (WEBHOOK, "Running it", [flag for flag in sgxwebhook.FLAGS if flag not in logflags.FLAGS]),
        (OPERATOR, "Flags", [flag for flag in operator_command.FLAGS if flag not in logflags.FLAGS]),
        (FLEET, "Flags", [flag for flag in fleet_command.FLAGS if flag not in logflags.FLAGS]),
        (ONLOAD, "Flags", [flag for flag in onload_command.FLAGS if flag not in logflags.FLAGS]),
        (USERS, "Flags of every node command", [flag for flag in node_command.FLAGS if flag not in logflags.FLAGS]),
        (USERS, "Logging flags", list(logflags.FLAGS)),
    ],
    ids=lambda value: value if isinstance(value, str) else "",
)
def test_option_tables_list_every_option_with_its_default(page: Path, heading: str, flags: Sequence[Flag]) -> None:
    listed = {row[0].strip("`-"): row[1].strip("`") for row in rows(section(page, heading))}
    assert listed == {flag.name: flag_text(flag) for flag in flags}


def test_the_configuration_file_table_lists_every_key() -> None:
    listed = {row[0].strip("`") for row in rows(section(USERS, "The configuration file"))}
    assert listed == {field.encode_name for field in msgspec.structs.fields(configuration.AgentConfig)}


def test_the_metrics_table_lists_every_metric() -> None:
    names = {name for name, _type, _help in agent_families()}
    listed = {
        row[0].strip("`") for row in rows(section(METRICS, "Metrics of the agent")) if row[0].startswith("`accelplane_")
    }
    assert listed == names


def test_the_table_of_device_metrics_lists_every_family_in_the_order_of_the_page() -> None:
    listed = [row[0].strip("`") for row in rows(section(METRICS, "Metrics of devices"))]
    assert listed == [family.name for family in FAMILIES]


def test_the_onload_page_lists_every_reason_of_degraded() -> None:
    text = "".join(file.read_text() for file in (ROOT / "src/accelplane/onload").glob("*.py"))
    reasons = {*re.findall(r'(?:Problem\(\s*|reason=)"(\w+)"', text), "ModuleRejected", "WriteRejected"}
    tables = section(DOCS / "onload-upgrades.md", "Status and events")
    listed = {name for row in rows(tables) for name in re.findall(r"`([A-Z]\w+)`", row[0])}
    assert listed == reasons | {"Ready", "Progressing", "Degraded"}


def test_the_policy_table_shows_the_preferred_devices() -> None:
    free = [device for card in ("card0", "card1") for device in Device(resource="i915", id=card).shared(3)]
    listed = {
        row[0].strip("`"): row[2:] for row in rows(section(DOCS / "resources.md", "Sharing and allocation policies"))
    }
    choices: dict[str, list[str]] = {}
    for policy in POLICIES:
        first = preferred_ids(policy, free, (), 2, {})
        in_use = Counter(device.unit for device in free if device.id in first)
        second = preferred_ids(policy, [device for device in free if device.id not in first], (), 2, in_use)
        choices[policy] = [", ".join(f"`{id_}`" for id_ in ids) for ids in (first, second)]
    assert listed == choices


def test_the_command_line_page_names_every_column_and_option_of_inspect_and_top() -> None:
    text = (DOCS / "command-line.md").read_text() + (DOCS / "inspection.md").read_text()
    columns = {column.title for module in (inspect_command, top, fleetview) for column in module._COLUMNS}
    assert sorted(title for title in columns if title not in text) == []
    options = {
        option
        for name in ("inspect", "top")
        for parameter in accelplane_command.commands[name].params
        for option in parameter.opts
    }
    assert sorted(option for option in options if f"`{option}" not in text and f"{option} " not in text) == []


def test_the_helm_page_lists_every_chart() -> None:
    first = (DOCS / "helm.md").read_text().partition("\n## ")[0]
    prefix = "intel-device-plugins"
    listed = {
        f"{prefix}{name}" if name.startswith("-") else name
        for row in rows(first)
        for name in re.findall(r"`([^`]+)`", row[0])
    }
    assert listed == {chart.parent.name for chart in (ROOT / "deploy/charts").glob("*/Chart.yaml")}


def test_the_page_of_versions_names_the_architectures_of_the_images() -> None:
    (assigned,) = re.findall(r"^ARCHITECTURES = (.*)$", (ROOT / "deploy/images/debian.py").read_text(), re.MULTILINE)
    (listed,) = [row[1] for row in rows((DOCS / "versioning.md").read_text()) if row[0] == "architectures"]
    assert {*re.findall(r"\b[a-z]+64\b", listed)} == {*ast.literal_eval(assigned)}


def test_the_architecture_lists_the_layers_of_import_linter() -> None:
    contracts = tomllib.loads((ROOT / "pyproject.toml").read_text())["tool"]["importlinter"]["contracts"]
    layers = [re.findall(r"\w+", layer) for layer in reversed(contracts[0]["layers"]) if layer != "__main__"]
    expected = {(str(number), package) for number, layer in enumerate(layers, start=1) for package in layer}
    assert {(row[0], row[1].strip("`")) for row in rows(section(DOCS / "architecture.md", "Layers"))} == expected


# All pages.


def slugs(page: Path) -> set[str]:
    headings = re.findall(r"^#+ (.*)$", re.sub(r"```.*?```", "", page.read_text(), flags=re.DOTALL), re.MULTILINE)
    return {re.sub(r"[^\w\- ]", "", heading.lower()).replace(" ", "-") for heading in headings}


@pytest.mark.parametrize("page", PAGES, ids=lambda page: str(page.relative_to(ROOT)))
def test_links_to_sections_resolve(page: Path) -> None:
    links = re.findall(r"\]\(([^)\s#:]*)#([^)\s]+)\)", re.sub(r"```.*?```", "", page.read_text(), flags=re.DOTALL))
    assert [link for link in links if link[1] not in slugs(page.parent / link[0] if link[0] else page)] == []


@pytest.mark.parametrize("page", PAGES, ids=lambda page: str(page.relative_to(ROOT)))
def test_lines_have_at_most_120_characters(page: Path) -> None:
    long = [
        line for line in page.read_text().splitlines() if len(line) > 120 and line[:1] not in "|!<" and "](" not in line
    ]
    assert long == []


def test_pages_have_at_most_300_lines() -> None:
    long = {page.name for page in DOCS.glob("*.md") if len(page.read_text().splitlines()) > 300}
    # All alerts have the address of one page, followed by their own anchor.
    assert long <= {"runbooks.md"}


def test_the_index_links_every_page() -> None:
    index = (DOCS / "index.md").read_text()
    assert [page.name for page in DOCS.glob("*.md") if page.name != "index.md" and f"]({page.name})" not in index] == []


def test_the_tests_that_the_threat_model_names_exist() -> None:
    cited = re.findall(r"`((?:unit|contract|cluster|browser)/\w+\.py)(?:::(\w+))?`", (ROOT / "SECURITY.md").read_text())
    assert len(cited) > 30
    for file, name in cited:
        text = (ROOT / "tests" / file).read_text()
        assert not name or re.search(rf"^(async )?def {name}\(", text, re.MULTILINE), (file, name)
