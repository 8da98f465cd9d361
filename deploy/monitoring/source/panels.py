"""Dashboards of Grafana (schema of version 10) from short descriptions: layout, IDs and common fields are added here.

Queries are PromQL with the variables of Grafana. `document` restricts each metric to the variable `cluster`.
"""

from __future__ import annotations

import re
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any, Literal

Object = dict[str, Any]
Kind = Literal["timeseries", "stat", "table", "state-timeline", "bargauge"]

_SCHEMA = 39  # Grafana 10.4
_WIDTH = 24
_SOURCE = {"type": "prometheus", "uid": "${datasource}"}
_METRIC = re.compile(
    r"\b((?:accelplane[_:]|kube_|fpga_|npu_|sgx_|controller_runtime_)[\w:]+|scrape_samples_scraped|up(?=\{))(\{)?"
)
_HIDDEN = ("Time", "__name__", "job", "instance", "agent", "bdf", "container", "phase")


@dataclass(frozen=True)
class Query:
    """`legend` is a template of Grafana, or the name of the column of a table."""

    expr: str
    legend: str = ""


@dataclass(frozen=True, kw_only=True)
class Panel:
    """`none` is shown if the query has no result, which is normal for panels that have it. `states` names numbers."""

    title: str
    queries: Sequence[Query]
    kind: Kind = "timeseries"
    unit: str = "short"
    about: str = ""
    none: str = ""
    width: int = 8
    height: int = 8
    stacked: bool = False
    least: float | None = 0
    states: Sequence[tuple[str, str]] = ()
    shown: Sequence[str] = ()


@dataclass(frozen=True)
class Row:
    title: str
    panels: Sequence[Panel]


@dataclass(frozen=True)
class Variable:
    """A choice of values of `label`, all of them by default."""

    name: str
    query: str
    label: str


@dataclass(frozen=True, kw_only=True)
class Dashboard:
    uid: str
    title: str
    about: str
    rows: Sequence[Row]
    variables: Sequence[Variable] = ()
    since: str = "now-6h"


def query(expr: str, legend: str = "") -> tuple[Query]:
    return (Query(expr, legend),)


def document(dashboard: Dashboard) -> Object:
    """The JSON of a dashboard."""
    return {
        "uid": dashboard.uid,
        "title": dashboard.title,
        "description": dashboard.about,
        "tags": ["accelplane"],
        "schemaVersion": _SCHEMA,
        "version": 1,
        "editable": True,
        "graphTooltip": 1,
        "refresh": "1m",
        "time": {"from": dashboard.since, "to": "now"},
        "timezone": "browser",
        "links": [
            {
                "type": "dashboards", "title": "Accelplane", "tags": ["accelplane"], "asDropdown": True,
                "includeVars": True, "keepTime": True, "targetBlank": False, "icon": "external link", "tooltip": "",
                "url": "",
            }
        ],
        "annotations": {"list": []},
        "templating": {"list": [*_common_variables(), *map(_variable, dashboard.variables)]},
        "panels": _layout(dashboard.rows),
    }  # fmt: skip


def in_cluster(expr: str) -> str:
    """The expression with the variable `cluster` in the selector of each metric."""
    return _METRIC.sub(lambda found: f'{found[1]}{{cluster=~"$cluster"{"," if found[2] else "}"}', expr)


def _common_variables() -> list[Object]:
    source = {"name": "datasource", "label": "Data source", "type": "datasource", "query": "prometheus", "hide": 0}
    # Without a label cluster, ".*" matches.
    return [source, _variable(Variable("cluster", 'label_values(up{job=~".*accelplane-agent"}, cluster)', "Cluster"))]


def _variable(variable: Variable) -> Object:
    text = variable.query if variable.name == "cluster" else in_cluster(variable.query)
    return {
        "name": variable.name,
        "label": variable.label,
        "type": "query",
        "datasource": _SOURCE,
        "query": {"query": text, "refId": "Variable"},
        "definition": text,
        "refresh": 2,
        "sort": 1,
        "multi": True,
        "includeAll": True,
        "allValue": ".*",
        "current": {"text": ["All"], "value": ["$__all"]},
        "hide": 0,
    }


def _layout(rows: Sequence[Row]) -> list[Object]:
    """All panels from left to right, each row below the last one."""
    made: list[Object] = []
    top = 0
    for row in rows:
        made.append({"type": "row", "title": row.title, "collapsed": False, "panels": [], **_place(0, top, _WIDTH, 1)})
        top, left, lowest = top + 1, 0, 0
        for panel in row.panels:
            if left + panel.width > _WIDTH:
                top, left, lowest = top + lowest, 0, 0
            made.append(_panel(panel) | _place(left, top, panel.width, panel.height))
            left, lowest = left + panel.width, max(lowest, panel.height)
        top += lowest
    return [{"id": number, **each} for number, each in enumerate(made, 1)]


def _place(left: int, top: int, width: int, height: int) -> Object:
    return {"gridPos": {"x": left, "y": top, "w": width, "h": height}}


def _panel(panel: Panel) -> Object:
    instant = panel.kind in ("stat", "table", "bargauge")
    targets: list[Object] = []
    for number, each in enumerate(panel.queries):
        target: Object = {
            "refId": chr(ord("A") + number), "datasource": _SOURCE, "expr": in_cluster(each.expr),
            "instant": instant, "range": not instant,
        }  # fmt: skip
        if not instant:
            # The interval of the scrapes: $__rate_interval is four times as long, whatever the data source has.
            target["interval"] = "30s"
        if panel.kind == "table":
            target["format"] = "table"
        elif each.legend:
            target["legendFormat"] = each.legend
        targets.append(target)
    made: Object = {
        "type": panel.kind,
        "title": panel.title,
        "datasource": _SOURCE,
        "targets": targets,
        "fieldConfig": {"defaults": _defaults(panel), "overrides": []},
        "options": _OPTIONS[panel.kind],
    }
    if panel.about:
        made["description"] = panel.about
    if panel.kind == "table":
        made["transformations"] = _columns(panel)
    return made


def _defaults(panel: Panel) -> Object:
    defaults: Object = {"unit": panel.unit}
    if panel.none:
        defaults["noValue"] = panel.none
    if panel.kind == "timeseries":
        if panel.least is not None:
            defaults["min"] = panel.least
        custom: Object = {"lineWidth": 1, "fillOpacity": 10, "showPoints": "never"}
        defaults["custom"] = custom | ({"stacking": {"mode": "normal", "group": "A"}} if panel.stacked else {})
    if panel.states:
        options = {
            str(number): {"text": text, "color": color, "index": number}
            for number, (text, color) in enumerate(panel.states)
        }
        defaults["mappings"] = [{"type": "value", "options": options}]
        steps = [{"value": number or None, "color": color} for number, (_, color) in enumerate(panel.states)]
        defaults["thresholds"] = {"mode": "absolute", "steps": steps}
    return defaults


def _columns(panel: Panel) -> list[Object]:
    names = {f"Value #{chr(ord('A') + number)}": each.legend for number, each in enumerate(panel.queries)}
    if len(panel.queries) == 1:
        names = {"Value": panel.queries[0].legend}
    hidden = {name: True for name in _HIDDEN if name not in panel.shown}
    return [
        {"id": "merge", "options": {}},
        {"id": "organize", "options": {"excludeByName": hidden, "renameByName": names, "indexByName": {}}},
    ]


# Every field that the schema requires is written, also those with default values.
_LEGEND = {"displayMode": "list", "placement": "bottom", "showLegend": True, "calcs": []}
_OPTIONS: dict[Kind, Object] = {
    "timeseries": {
        "legend": _LEGEND,
        "tooltip": {"mode": "multi", "sort": "desc"},
    },
    "stat": {
        "colorMode": "value", "graphMode": "none", "textMode": "auto", "orientation": "auto", "justifyMode": "auto",
        "wideLayout": True, "showPercentChange": False, "percentChangeColorMode": "standard",
        "reduceOptions": {"calcs": ["lastNotNull"], "fields": "", "values": False},
    },
    "bargauge": {
        "displayMode": "basic", "orientation": "horizontal", "showUnfilled": True, "valueMode": "color",
        "namePlacement": "auto", "sizing": "auto", "minVizWidth": 8, "minVizHeight": 16, "maxVizHeight": 300,
        "legend": _LEGEND | {"showLegend": False},
        "reduceOptions": {"calcs": ["lastNotNull"], "fields": "", "values": False},
    },
    "table": {
        "showHeader": True, "cellHeight": "sm", "frameIndex": 0, "footer": {"show": False, "reducer": ["sum"]},
    },
    "state-timeline": {
        "mergeValues": True, "showValue": "auto", "alignValue": "left", "rowHeight": 0.8,
        "legend": _LEGEND,
        "tooltip": {"mode": "single", "sort": "none"},
    },
}  # fmt: skip
