"""The files of `deploy/monitoring` as values."""

import json
import re
from functools import cache
from typing import Any

import yaml
from manifests import DEPLOY

MONITORING = DEPLOY / "monitoring"
RULES = MONITORING / "plain/rules.yaml"
SCRAPE = MONITORING / "plain/scrape.yaml"

# The values of Grafana's variables that every series has.
_VARIABLES = {
    "$__rate_interval": "5m", "$__range": "1h", "$cluster": ".*", "$node": ".*", "$plugin": ".*", "$device": ".*",
    "$unit": ".*", "$namespace": ".*",
}  # fmt: skip
_METRIC = re.compile(r"\b(?:accelplane[_:]|kube_|fpga_|npu_|sgx_|controller_runtime_|scrape_)[\w:]+|\bup(?=[{ ])")


def groups() -> list[Any]:
    return json.loads(_groups())


@cache
def _groups() -> str:
    return json.dumps(yaml.load(RULES.read_text(), yaml.CSafeLoader)["groups"])


def alerts() -> dict[str, Any]:
    return {rule["alert"]: rule for group in groups() for rule in group["rules"] if "alert" in rule}


def records() -> dict[str, str]:
    return {rule["record"]: rule["expr"] for group in groups() for rule in group["rules"] if "record" in rule}


def dashboards() -> dict[str, Any]:
    files = sorted((MONITORING / "dashboards").glob("*.json"))
    return {file.name: json.loads(file.read_text()) for file in files}


def panels(dashboard: Any) -> list[Any]:
    """The panels of a dashboard that have queries."""
    return [panel for panel in dashboard["panels"] if panel["type"] != "row"]


def queries(panel: Any) -> list[str]:
    """The queries of a panel, for all values of its variables."""
    expressions: list[str] = []
    for target in panel["targets"]:
        text = target["expr"]
        for name, value in _VARIABLES.items():
            text = re.sub(rf"{re.escape(name)}\b", value, text)
        expressions.append(text)
    return expressions


def variable_queries(dashboard: Any) -> list[str]:
    """The selectors of the variables of a dashboard."""
    expressions: list[str] = []
    for variable in dashboard["templating"]["list"]:
        if variable["type"] == "query":
            found = re.fullmatch(r"label_values\((.+), \w+\)", variable["query"]["query"])
            assert found, variable
            expressions += queries({"targets": [{"expr": found[1]}]})
    return expressions


def metrics(expr: str) -> set[str]:
    """The metrics that an expression reads."""
    return {*_METRIC.findall(re.sub(r'"[^"]*"', '""', expr))}
