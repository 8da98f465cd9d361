"""Writes the generated files of the monitoring tree: ``python deploy/monitoring/source DIRECTORY``.

The dashboards come from `dashboards.py`, the PrometheusRule from `plain/rules.yaml`. The chart gets copies of the
dashboards, of the rules and of monitors. `DIRECTORY` stands for `deploy`.
"""

from __future__ import annotations

import json
import sys
from pathlib import Path

from dashboards import ALL
from panels import document

MONITORING = Path(__file__).parents[1]
CHART = "charts/accelplane/files/monitoring"
MONITORS = ("agents", "webhooks", "fleet")
HEADER = "# Generated from plain/rules.yaml by make monitoring.\n"
RULE = """apiVersion: monitoring.coreos.com/v1
kind: PrometheusRule
metadata:
  name: accelplane
  labels:
    app.kubernetes.io/part-of: accelplane
spec:
"""


def files() -> dict[str, str]:
    """The text of each generated file, by its path below `deploy`."""
    rules = (MONITORING / "plain/rules.yaml").read_text()
    groups = rules[rules.index("groups:\n") :]
    indented = "".join(f"  {line}" if line.strip() else line for line in groups.splitlines(keepends=True))
    made = {"monitoring/base/prometheus-rule.yaml": f"{HEADER}{RULE}{indented}", f"{CHART}/rules.yaml": groups}
    for name in MONITORS:
        made[f"{CHART}/{name}.yaml"] = (MONITORING / f"base/{name}.yaml").read_text()
    for name, make in ALL.items():
        text = json.dumps(document(make()), indent=1) + "\n"
        made[f"monitoring/dashboards/accelplane-{name}.json"] = text
        made[f"{CHART}/accelplane-{name}.json"] = text
    return made


def main() -> int:
    if len(sys.argv) != 2:
        print(f"usage: python {Path(__file__).parent} DIRECTORY", file=sys.stderr)
        return 2
    for name, text in files().items():
        path = Path(sys.argv[1]) / name
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_text(text)
    return 0


if __name__ == "__main__":
    sys.exit(main())
