"""Helm charts as objects, rendered by Helm."""

import json
import re
import shutil
import subprocess
from functools import cache
from pathlib import Path
from typing import Any

import pytest
import yaml
from cluster.build import tool
from cluster.product_image import HUB
from manifests import DEPLOY, Object

from accelplane.operator.settings import PLACEHOLDER

CHARTS = DEPLOY / "charts"
OPERATOR = "intel-device-plugins-operator"
# Helm itself assumes an old release when it renders without a cluster.
KUBE_VERSION = "1.34.0"


@cache
def helm() -> str:
    built = tool("helm")
    found = str(built) if built.exists() else shutil.which("helm")
    if not found:
        pytest.skip("no helm to render charts with: make kube, or put one in PATH")
    return found


def run_helm(*words: str | Path, text: str = "", status: int = 0) -> str:
    """The output of a command, or its errors if `status` is not 0."""
    result = subprocess.run([helm(), *words], input=text, capture_output=True, text=True, check=False)
    assert result.returncode == status, result.stderr
    return result.stderr if status else result.stdout


def _words(chart: str | Path, namespace: str) -> list[str | Path]:
    return ["template", "release", CHARTS / chart, "--namespace", namespace, "--kube-version", KUBE_VERSION]


def template(chart: str, namespace: str = "default", /, **values: object) -> list[Object]:
    """The objects of a chart with these values, without those of `helm test`."""
    return _objects(_template(chart, namespace, json.dumps(with_hub(chart, values)), "--skip-tests"))


def template_of(chart: Path, *options: str, **values: object) -> list[Object]:
    """The objects of a chart in another directory, with those of its hooks."""
    return _objects(
        run_helm(*_words(chart, "default"), *options, "--values=-", text=json.dumps(with_hub(chart, values)))
    )


def parent_chart(directory: Path, *charts: str) -> Path:
    """A chart with these charts as dependencies, each with a condition."""
    dependencies = [{"name": name, "version": ">=0.26.0", "condition": f"{name}.enabled"} for name in charts]
    for name in charts:
        shutil.copytree(CHARTS / name, directory / "charts" / name)
    text = {"apiVersion": "v2", "name": "parent", "version": "1.0.0", "dependencies": dependencies}
    (directory / "Chart.yaml").write_text(yaml.safe_dump(text))
    return directory


def hook_objects(chart: str, namespace: str = "default", /, **values: object) -> list[Object]:
    """The objects of `helm test`."""
    objects = _objects(_template(chart, namespace, json.dumps(with_hub(chart, values))))
    return [each for each in objects if each["metadata"].get("annotations", {}).get("helm.sh/hook") == "test"]


@cache
def _template(chart: str, namespace: str, values: str, *options: str) -> str:
    return run_helm(*_words(chart, namespace), *options, "--values=-", text=values)


def _objects(text: str) -> list[Object]:
    return [found for each in re.split("^---$", text, flags=re.MULTILINE) if (found := json.loads(_as_json(each)))]


@cache
def _as_json(text: str) -> str:
    """An object as JSON, which is read ten times as fast: most objects are the same with other values."""
    return json.dumps(yaml.load(text, yaml.CSafeLoader))


def read(chart: str | Path, name: str) -> Any:
    """The content of a YAML file of a chart."""
    return yaml.load((CHARTS / chart / name).read_text(), yaml.CSafeLoader)


def rejected(chart: str, **values: object) -> str:
    """The message of Helm for values that it does not accept."""
    return run_helm(*_words(chart, "default"), "--values=-", text=json.dumps(with_hub(chart, values)), status=1)


def in_hub(objects: list[Object]) -> list[Object]:
    """The objects of a kustomization with images of `HUB`, as the charts have in these tests."""
    return json.loads(json.dumps(objects).replace(PLACEHOLDER, HUB))


def with_hub(chart: str | Path, values: Object) -> Object:
    """The values, with `HUB` for all images of the chart and of its dependencies that have no hub in the values."""
    file = CHARTS / chart / "values.yaml"
    hubs = _hubs(read(chart, file.name)) if file.exists() else {}
    for each in read(chart, "Chart.yaml").get("dependencies", []):
        hubs[each.get("alias", each["name"])] = _hubs(read(each["name"], file.name))
    return _merged(hubs, values)


def _hubs(values: Object) -> Object:
    nested = {key: _hubs(each) for key, each in values.items() if isinstance(each, dict)}
    return {key: each for key, each in nested.items() if each} | ({"hub": HUB} if "hub" in values else {})


def _merged(defaults: Object, values: Object) -> Object:
    nested = {
        key: _merged(each, values[key])
        for key, each in defaults.items()
        if isinstance(each, dict) and isinstance(values.get(key), dict)
    }
    return {**defaults, **values, **nested}
