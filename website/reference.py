"""The reference pages: custom resources, flags, metrics and Python packages, made from the code."""

import importlib
import subprocess
import sys
import tomllib
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any

import click
import yaml
from prometheus_client import CollectorRegistry, Gauge

from accelplane.cli import kubectl, logflags
from accelplane.cli.commands import accelplane as accelplane_command
from accelplane.cli.genericplugin import PLUGIN_FLAGS
from accelplane.cli.goflags import Flag, flags_of
from accelplane.cli.node import FLAGS as AGENT_FLAGS
from accelplane.cli.node import NODE_FLAGS
from accelplane.cli.sgxwebhook import metrics_text
from accelplane.fleet.metrics import FleetMetrics
from accelplane.http.validity import Validity
from accelplane.kube.admission import AdmissionServer
from accelplane.kube.metrics import CertificateCollector, Metrics
from accelplane.node.plugins import installed
from accelplane.readings.families import FAMILIES
from website.agentmetrics import METRIC_HEAD, agent_families

DEFINITIONS = ("deploy/operator/crd/bases", "deploy/onload/config/crd/bases")

# Subcommands of `accelplane` with flags in the style of Go, and the modules of their flags.
GO_COMMANDS = {
    "clients": "clients",
    "fleet": "fleet",
    "fpga": "fpgatool",
    "labels": "labels",
    "operator": "operator",
    "webhook sgx": "sgxwebhook",
    "webhook fpga": "fpgawebhook",
}
# Programs whose flags are not FLAGS of their module.
OTHER_FLAGS = {"accelplane.cli.epchook:install": "INSTALL_FLAGS", "accelplane.cli.gpuhook:install": "INIT_FLAGS"}
# The groups of commands of click, which have sections of their own, and the completion of kubectl.
NO_SECTION = ("accelplane", "kubectl-accelplane", "kubectl_complete-accelplane")


def pages(root: Path) -> Mapping[str, str]:
    """Returns the text of each page by its path in the site."""
    return {
        "reference/custom-resources.md": "\n".join(custom_resources(root)),
        "reference/flags.md": "\n".join(commands(root)),
        "reference/metrics.md": "\n".join(metrics()),
        "reference/plugins.md": "\n".join(plugin_api()),
        "reference/kube.md": "\n".join(kube_api(root)),
    }


def _table(*rows: Sequence[str]) -> Iterator[str]:
    """Yields a table. The first row is the head."""
    for number, row in enumerate(rows):
        yield "| " + " | ".join(" ".join(cell.split()).replace("|", "\\|") for cell in row) + " |"
        if not number:
            yield "|" + " --- |" * len(row)
    yield ""


# Custom resources.


def custom_resources(root: Path) -> Iterator[str]:
    """Yields the lines of the page of custom resources."""
    yield from ("# Custom resources", "", "Every field of the custom resources, from their definitions.", "")
    for directory in DEFINITIONS:
        for file in sorted((root / directory).glob("*.yaml")):
            for definition in yaml.safe_load_all(file.read_text()):
                if definition and definition["kind"] == "CustomResourceDefinition":
                    yield from _definition(definition["spec"])


def _definition(spec: Mapping[str, Any]) -> Iterator[str]:
    names = spec["names"]
    short = "".join(f", `{name}`" for name in names.get("shortNames", ()))
    for version in spec["versions"]:
        schema = version["schema"]["openAPIV3Schema"]
        yield from (f"## {names['kind']}", "", schema.get("description", ""), "")
        scope = "cluster-scoped" if spec["scope"] == "Cluster" else "namespaced"
        yield from (f"`{spec['group']}/{version['name']}`, `{names['plural']}`{short}, {scope}.", "")
        for part in ("spec", "status"):
            rows = list(fields(schema["properties"].get(part, {})))
            if rows:
                yield from (f"### {part} of {names['kind']}", "")
                yield from _table(("Field", "Type", "Meaning"), *rows)


def fields(schema: Mapping[str, Any], path: str = "") -> Iterator[tuple[str, str, str]]:
    """Yields the path, type and description of each field below a schema."""
    required = schema.get("required", ())
    for name, child in schema.get("properties", {}).items():
        here = f"{path}.{name}" if path else name
        note = " Required." if name in required else ""
        yield f"`{here}`", _type(child), f"{_prose(child.get('description', ''))}{note}{_limits(child)}"
        inner, suffix = child, ""
        while "items" in inner or isinstance(inner.get("additionalProperties"), dict):
            suffix += "[]" if "items" in inner else ".*"
            inner = inner.get("items") or inner["additionalProperties"]
        yield from fields(inner, here + suffix)


def _type(schema: Mapping[str, Any]) -> str:
    if schema.get("x-kubernetes-int-or-string"):
        return "integer or string"
    if "items" in schema:
        return f"list of {_type(schema['items'])}"
    if isinstance(schema.get("additionalProperties"), dict):
        return f"map of {_type(schema['additionalProperties'])}"
    return str(schema.get("type", "any"))


def _limits(schema: Mapping[str, Any]) -> str:
    text = f" One of {', '.join(f'`{value}`' for value in schema['enum'])}." if "enum" in schema else ""
    for key, word in (
        ("default", "Default"), ("minimum", "Minimum"), ("maximum", "Maximum"), ("minLength", "Minimum length"),
        ("maxLength", "Maximum length"), ("maxItems", "Maximum items"), ("pattern", "Pattern"),
    ):  # fmt: skip
        if key in schema:
            value = schema[key]
            shown = str(value).lower() if isinstance(value, bool) else str(value)
            text += f" {word}: `` {shown} ``."
    rules = (rule.get("message") or rule["rule"] for rule in schema.get("x-kubernetes-validations", ()))
    return text + "".join(f" Rule: {_prose(rule)}." for rule in rules)


def _prose(text: str) -> str:
    """Protects characters of a plain text that Markdown would interpret."""
    return "".join(f"\\{letter}" if letter in "<*_[]`" else letter for letter in text)


# Flags.


def commands(root: Path) -> Iterator[str]:
    """Yields the lines of the page of commands and flags."""
    yield from (
        "# Commands and flags",
        "",
        "Every command with its flags. `-x`, `--x`, `-x=v` and `-x v` are equal.",
        "",
    )
    scripts: Mapping[str, str] = tomllib.loads((root / "pyproject.toml").read_text())["project"]["scripts"]
    own = {flag.name for flag in logflags.FLAGS}
    yield from ("## Logging flags", "", "Programs that run until they are stopped have these flags for their log.", "")
    yield from _flags(logflags.FLAGS, set())
    yield from (
        "## Flags of node commands",
        "",
        "`accelplane node` and all device plugin commands have these flags.",
        "",
    )
    yield from _flags(AGENT_FLAGS, own)
    node = own | {flag.name for flag in AGENT_FLAGS}
    yield from ("## accelplane node", "")
    yield from _flags(NODE_FLAGS, node)
    for name, module in GO_COMMANDS.items():
        yield from (f"## accelplane {name}", "")
        yield from _flags(importlib.import_module(f"accelplane.cli.{module}").FLAGS, own)
    yield from _click_commands(accelplane_command, "accelplane")
    yield from _click_commands(kubectl.plugin, "kubectl accelplane")
    families = installed().types
    for script, target in scripts.items():
        module, function = target.split(":")
        if module.endswith(".dropin"):
            yield from (f"## {script}", "")
            own_flags = PLUGIN_FLAGS if function == "generic" else flags_of(families[function].config_type)
            yield from _flags(own_flags, node)
            continue
        name = OTHER_FLAGS.get(target, "FLAGS" if function == "main" else "")
        flags = getattr(importlib.import_module(module), name, None) if name else None
        if flags is not None:
            yield from (f"## {script}", "")
            yield from _flags(flags, own)
        elif script not in NO_SECTION:
            yield from (f"## {script}", "", "```text", *_usage(script, module, function), "```", "")


def _usage(script: str, module: str, function: str) -> Iterator[str]:
    """Yields the lines that a program prints about its arguments."""
    call = f"import sys; from {module} import {function} as main; sys.argv[:] = [{script!r}, '-h']; sys.exit(main())"
    done = subprocess.run(
        [sys.executable, "-c", call], stdin=subprocess.DEVNULL, capture_output=True, text=True, check=False
    )
    lines = f"{done.stdout}{done.stderr}".rstrip().splitlines()
    start = next((number for number, line in enumerate(lines) if line.lower().startswith("usage")), None)
    if start is None:
        raise RuntimeError(f"{script} -h: found no line that begins with usage: {lines}")
    yield from lines[start:]


def _flags(flags: Sequence[Flag], elsewhere: set[str]) -> Iterator[str]:
    rows = [
        (f"`-{flag.name}`", flag.kind, f"`{_shown(flag)}`" if _shown(flag) else "", _prose(flag.help))
        for flag in sorted(flags, key=lambda flag: flag.name)
        if flag.name not in elsewhere
    ]
    yield from _table(("Flag", "Type", "Default", "Meaning"), *rows) if rows else ("No flags of its own.", "")


def _shown(flag: Flag) -> str:
    if isinstance(flag.default, bool):
        return str(flag.default).lower()
    return f"{flag.default:g}" if isinstance(flag.default, float) else str(flag.default)


def _click_commands(command: click.Command, path: str) -> Iterator[str]:
    if isinstance(command, click.Group):
        for name, child in sorted(command.commands.items()):
            yield from _click_commands(child, f"{path} {name}")
        return
    if command.context_settings.get("ignore_unknown_options"):
        return  # a command with flags in the style of Go
    yield from (f"## {path}", "", command.get_short_help_str(500), "")
    options = [each for each in command.params if isinstance(each, click.Option) and not each.hidden]
    rows = [
        (", ".join(f"`{name}`" for name in each.opts), _prose(each.type.name), _prose(each.help or ""))
        for each in options
    ]
    context = click.Context(command)
    arguments = " ".join(each.make_metavar(context) for each in command.params if isinstance(each, click.Argument))
    if arguments:
        yield from (f"Arguments: `{arguments}`", "")
    yield from _table(("Option", "Type", "Meaning"), *rows) if rows else ()


# Metrics.


def metrics() -> Iterator[str]:
    """Yields the lines of the page of metrics."""
    yield from ("# Metrics in the code", "", "Type and help text of metrics, from the code.", "")
    yield from ("[Metrics](../metrics.md) explains labels and use.", "")
    yield from ("## Agent", "")
    yield from _table(
        ("Metric", "Type", "Help"), *((f"`{n}`", kind, _prose(text)) for n, kind, text in agent_families())
    )
    yield from ("## Devices", "")
    devices = ((f"`{family.name}`", family.kind, _prose(family.help)) for family in FAMILIES)
    yield from _table(("Metric", "Type", "Help"), *devices)
    yield from ("## Operators, webhooks and other controllers", "")
    controllers, certificate = Metrics().registry, Validity(0.0, 1.0)
    controllers.register(CertificateCollector(lambda: certificate))
    yield from _collected(controllers)
    yield from ("## Fleet page", "", "In addition to those of controllers. [Fleet page](../fleet.md#metrics).", "")
    yield from _collected(_fleet())
    yield from ("## SGX webhook without the operator", "")
    texts = METRIC_HEAD.findall(metrics_text(AdmissionServer(), certificate))
    yield from _table(("Metric", "Type", "Help"), *((f"`{n}`", kind, _prose(text)) for n, text, kind in texts))


def _collected(registry: CollectorRegistry) -> Iterator[str]:
    rows = [
        (f"`{family.name}{'_total' if family.type == 'counter' else ''}`", family.type, _prose(family.documentation))
        for family in registry.collect()
        if not family.name.startswith("process_")
    ]
    yield from _table(("Metric", "Type", "Help"), *rows)


def _fleet() -> CollectorRegistry:
    registry = CollectorRegistry()
    FleetMetrics(registry, lambda: (0, {}, {}))
    Gauge("accelplane_fleet_viewers", "Open pages that get updates", registry=registry)
    return registry


# Python packages.


# The modules for authors of plugins, which docs/plugin-authors-guide.md lists.
AUTHOR_MODULES = (
    "accelplane.plugins",
    "accelplane.plugins.policies",
    "accelplane.readings",
    "accelplane.readings.values",
    "accelplane.host.drivers",
    "accelplane.cli.node",
    "accelplane.testing",
    "accelplane.kubelet.embedded",
)
# Modules of which only these names are public.
PUBLIC_NAMES = {"accelplane.cli.node": ("dropin",), "accelplane.host.drivers": ("bind", "BindError")}


def plugin_api() -> Iterator[str]:
    """Yields the lines of the page of the modules for authors of plugins. A name is described once."""
    yield from ("# Modules for authors of plugins", "", "The")
    yield from ("[plugin author's guide](../plugin-authors-guide.md) explains their use.", "")
    described = {"Meta"}
    for module in AUTHOR_MODULES:
        yield from (f"## {module}", "")
        for name in public_names(module):
            if name not in described:
                described.add(name)
                yield from (f"::: {module}.{name}", "    options:", "      show_if_no_docstring: true")
                yield from ("      inherited_members: true", "")


def public_names(module: str) -> Sequence[str]:
    """Returns the names that are listed here or in `__all__`, otherwise all that the module defines."""
    if module in PUBLIC_NAMES:
        return PUBLIC_NAMES[module]
    loaded = importlib.import_module(module)
    defined = [
        name
        for name, value in vars(loaded).items()
        if not name.startswith("_") and getattr(value, "__module__", "") == module
    ]
    return getattr(loaded, "__all__", defined)


def kube_api(root: Path) -> Iterator[str]:
    """Yields the lines of the page of `accelplane.kube`."""
    yield from ("# accelplane.kube", "", "The controller runtime. [Controllers](../kube.md) explains its use.", "")
    for file in sorted((root / "src/accelplane/kube").glob("*.py")):
        if not file.stem.startswith("_"):
            yield from (f"::: accelplane.kube.{file.stem}", "")
