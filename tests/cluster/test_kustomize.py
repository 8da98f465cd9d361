"""Every tree builds with the releases of kustomize that users have, without warnings, and to equal objects."""

from __future__ import annotations

import json
import subprocess
from pathlib import Path

import pytest
import yaml
from manifests import DEPLOY, Object, trees

from .build import KUSTOMIZE_VERSIONS, kustomize

pytestmark = pytest.mark.cluster

RENAMED = (
    "operator/default",
    "operator/device/qat",
    "operator/overlays/default-with-certmanager",
    "operator/overlays/ocp",
    "fpga_admissionwebhook/default",
    "fpga_plugin/overlays/region",
    "sgx_admissionwebhook/overlays/default-with-own-certificates",
    "sgx_plugin/overlays/epc-nfd",
)


def built(directory: Path) -> list[dict[tuple[str, str, str], Object]]:
    """The objects by kind, namespace and name, as each release renders them."""
    running = [
        subprocess.Popen(
            [kustomize(version), "build", directory], stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True
        )
        for version in KUSTOMIZE_VERSIONS
    ]
    texts: list[str] = []
    for version, process in zip(KUSTOMIZE_VERSIONS, running, strict=True):
        text, errors = process.communicate(timeout=120)
        assert (process.returncode, errors) == (0, ""), f"kustomize {version}: {errors}"
        texts.append(text)
    parsed = {text: _by_name(text) for text in {*texts}}
    return [parsed[text] for text in texts]


def _by_name(text: str) -> dict[tuple[str, str, str], Object]:
    objects = [*yaml.load_all(text, yaml.CSafeLoader)]
    for each in objects:
        if each["kind"].startswith("ValidatingAdmissionPolicy"):
            each["metadata"].pop("namespace", None)  # kustomize 5.0 does not know that the kind has none
    names = [(each["kind"], each["metadata"].get("namespace", ""), each["metadata"]["name"]) for each in objects]
    found = dict(zip(names, objects, strict=True))
    assert len(found) == len(objects)
    return found


def check_that_all_are_equal(directory: Path) -> None:
    first, *others = built(directory)
    assert first
    for other in others:
        assert {*other} == {*first}
        for name, document in first.items():
            assert other[name] == document


@pytest.mark.by_turns
@pytest.mark.parametrize("tree", trees())
def test_all_releases_render_a_tree_to_equal_objects(tree: str) -> None:
    check_that_all_are_equal(DEPLOY / tree)


@pytest.mark.parametrize("tree", RENAMED)
def test_all_releases_render_an_overlay_to_equal_objects(tree: str, tmp_path: Path) -> None:
    (tmp_path / "deploy").symlink_to(DEPLOY)
    fields = {"resources": [f"deploy/{tree}"], "namePrefix": "x-", "namespace": "elsewhere"}
    (tmp_path / "kustomization.yaml").write_text(json.dumps(fields))
    check_that_all_are_equal(tmp_path)
