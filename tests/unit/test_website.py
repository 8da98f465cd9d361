"""The documentation site: links, versions and references. `make docs-check` builds all pages."""

import json
import tomllib
from collections.abc import Mapping
from pathlib import Path

import memorydirectory
import pytest
import yaml

from website import reference
from website.links import ROOT, adapt_fence, adapt_page
from website.output import requests_to_other_servers, versions, write_versions


@pytest.mark.parametrize(
    ("path", "text", "expected"),
    [
        ("users-guide.md", "[a](accelerators.md#qat)", "[a](accelerators.md#qat)"),
        ("users-guide.md", "[a](../SECURITY.md)", "[a](project/security.md)"),
        ("project/security.md", "[a](docs/versioning.md)", "[a](../versioning.md)"),
        ("decisions/0003-layers.md", "[a](../architecture.md#layers)", "[a](../architecture.md#layers)"),
        ("develop/generic-devices.md", "[a](generic-devices.yaml)", "a"),
        ("index.md", "[a](../examples/generic-devices)", "[a](develop/generic-devices.md)"),
        ("index.md", "[a](https://example.com/b) [c](#d)", "[a](https://example.com/b) [c](#d)"),
        ("index.md", "```sh\n[a](../Makefile)\n```", "```sh\n[a](../Makefile)\n```"),
    ],
)
def test_links_of_pages_lead_to_pages_of_the_site(path: str, text: str, expected: str) -> None:
    assert adapt_page(text, path, "") == expected


def test_links_to_other_files_lead_to_the_repository_if_its_address_is_known() -> None:
    adapted = adapt_page("[a](../Makefile) [b](../deploy)", "index.md", "https://forge.example/x")
    assert "(https://forge.example/x/blob/v" in adapted
    assert "/Makefile) [b](https://forge.example/x/blob/" not in adapted


def test_a_link_to_a_missing_file_is_a_warning(caplog: pytest.LogCaptureFixture) -> None:
    adapt_page("[a](missing.md)", "index.md", "")
    assert "docs/missing.md, which does not exist" in caplog.text


def test_the_file_name_of_a_fence_becomes_its_title() -> None:
    assert adapt_fence("```python a.py\nx\n```", "") == '```python title="a.py"\nx\n```'


def test_the_newest_version_is_the_first_and_the_default(tmp_path: Path) -> None:
    for name in ("1.9.0", "1.10.0", "1.2.3", "assets"):
        (tmp_path / name).mkdir()
    write_versions(tmp_path)
    assert versions(tmp_path) == ["1.10.0", "1.9.0", "1.2.3"]
    assert "url=1.10.0/" in (tmp_path / "index.html").read_text()
    entries = yaml.safe_load((tmp_path / "versions.json").read_text())
    assert [entry["version"] for entry in entries] == ["1.10.0", "1.9.0", "1.2.3"]


def test_files_from_other_servers_are_detected(tmp_path: Path) -> None:
    (tmp_path / "a.html").write_text(
        '<a href="https://x/"></a><link rel="canonical" href="https://x/">'
        '<script src="//x/a.js"></script><img src="a.png">'
    )
    (tmp_path / "a.css").write_text("@import 'https://x/b.css'; a { background: url(c.png) }")
    assert sorted(requests_to_other_servers(tmp_path)) == [
        "a.css: loads https://x/b.css, expected a file of the site",
        "a.html: loads //x/a.js, expected a file of the site",
    ]


@pytest.fixture(scope="module")
def reference_pages() -> Mapping[str, str]:
    """The pages of the reference, which are made once for all processes."""

    def build(directory: Path) -> None:
        (directory / "pages.json").write_text(json.dumps(reference.pages(ROOT)))

    return json.loads((memorydirectory.build_once("reference", build) / "pages.json").read_text())


def test_the_reference_lists_every_described_field_of_custom_resources(reference_pages: Mapping[str, str]) -> None:
    text = reference_pages["reference/custom-resources.md"]
    for directory in reference.DEFINITIONS:
        for file in (ROOT / directory).glob("*.yaml"):
            definition = yaml.load(file.read_text(), yaml.CSafeLoader)
            if definition["kind"] != "CustomResourceDefinition":
                continue
            described = _described_fields(definition["spec"]["versions"][0]["schema"]["openAPIV3Schema"])
            lines = text.partition(f"\n## {definition['spec']['names']['kind']}\n")[2].partition("\n## ")[0]
            assert lines.count("\n| `") == described, file.name


def _described_fields(schema: object) -> int:
    """Counts the fields of spec and status."""

    def count(node: object) -> int:
        if not isinstance(node, dict):
            return 0
        own = node.get("properties", {})
        return sum(1 + count(child) for child in own.values()) + count(node.get("items")) + count(
            node.get("additionalProperties")
        )  # fmt: skip

    assert isinstance(schema, dict)
    return sum(count(schema["properties"].get(part)) for part in ("spec", "status"))


def test_the_reference_lists_every_command_with_flags(reference_pages: Mapping[str, str]) -> None:
    text = reference_pages["reference/flags.md"]
    for command in ("accelplane node", "accelplane webhook fpga", "accelplane inspect", "intel_qat_device_plugin"):
        assert f"\n## {command}\n" in text
    assert "| `-dpdk-driver` | string | `vfio-pci` |" in text


def test_the_reference_has_a_section_for_each_installed_program(reference_pages: Mapping[str, str]) -> None:
    text = reference_pages["reference/flags.md"]
    scripts = tomllib.loads((ROOT / "pyproject.toml").read_text())["project"]["scripts"]
    sections = {line.removeprefix("## ") for line in text.splitlines() if line.startswith("## ")}
    assert {*scripts} - sections == {*reference.NO_SECTION}
    for script, words in {
        "qat-init.sh": "-config-dir string",
        "accelplane-fpga-hook": "-require-annotation",
        "accelplane-cdi-hook": "--link TARGET::LINKPATH",
        "profile_to_configmap.sh": "--strict",
        "sgx-init.sh": "| `-source-dir` |",
    }.items():
        assert words in text.partition(f"\n## {script}\n")[2].partition("\n## ")[0], script


def test_the_reference_lists_the_metrics_of_fleet_and_webhook(reference_pages: Mapping[str, str]) -> None:
    text = reference_pages["reference/metrics.md"]
    fleet = text.partition("\n## Fleet page\n")[2].partition("\n## ")[0]
    for name in ("generation", "nodes", "agents", "inventory_seconds", "inventory_bytes", "viewers"):
        assert f"| `accelplane_fleet_{name}` |" in fleet
    webhook = text.partition("\n## SGX webhook without the operator\n")[2]
    assert "| `accelplane_webhook_reviews_total` | counter |" in webhook
    assert text.count("| `accelplane_serving_certificate_not_after_timestamp_seconds` | gauge |") == 3
    assert "| `controller_runtime_webhook_requests_in_flight` | gauge |" in webhook
