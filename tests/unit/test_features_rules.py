"""The table of rules equals the node feature rules that users apply, and evaluates as NFD does."""

import json
from collections.abc import Mapping, Sequence
from itertools import product
from typing import Any

import pytest
import yaml
from hypothesis import given
from hypothesis import strategies as st
from manifests import DEPLOY, run_kubectl

from accelplane.nodelabels import RULES, Features, Function, Rule, RuleOutput, evaluate
from accelplane.nodelabels.rules import Term

I_LABEL, G_LABEL = "intel.feature.node.kubernetes.io", "gpu.intel.com"
FILES = DEPLOY / "nfd/overlays/node-feature-rules"


def written_rules() -> list[dict[str, Any]]:
    kustomization = yaml.safe_load((FILES / "kustomization.yaml").read_text())
    objects = [yaml.safe_load((FILES / name).read_text()) for name in kustomization["resources"]]
    return [rule for each in objects for rule in each["spec"]["rules"]]


def in_set(values: Sequence[str]) -> dict[str, Any]:
    return {"op": "In", "value": list(values)}


def terms_of(terms: Sequence[Term]) -> list[dict[str, Any]]:
    features: dict[str, dict[str, Any]] = {}
    for term in terms:
        features.setdefault(term.feature, {})[term.name] = {"op": term.op}
    return [{"feature": name, "matchExpressions": expressions} for name, expressions in features.items()]


def as_written(rule: Rule) -> dict[str, Any]:
    """The rule in NFD's format, without its template."""
    features = terms_of(rule.terms)
    if rule.classes:
        expressions = {"vendor": in_set(["8086"]), "class": in_set(rule.classes)}
        if rule.devices:
            expressions["device"] = in_set(rule.devices)
        features.insert(0, {"feature": "pci.device", "matchExpressions": expressions})
    parts: dict[str, Any] = {
        "labels": dict(rule.labels),
        "extendedResources": dict(rule.resources),
        "matchFeatures": features,
        "matchAny": [{"matchFeatures": terms_of(terms)} for terms in rule.any_of],
    }
    return {"name": rule.name, **{key: part for key, part in parts.items() if part}}


def test_the_table_has_the_rules_of_the_manifest() -> None:
    assert [rule.name for rule in RULES] == [rule["name"] for rule in written_rules()]


@pytest.mark.parametrize("rule", RULES, ids=lambda rule: rule.name)
def test_each_rule_equals_the_one_in_the_manifest(rule: Rule) -> None:
    (written,) = [each for each in written_rules() if each["name"] == rule.name]
    template = written.pop("labelsTemplate", "")
    assert bool(template) == bool(rule.each)
    assert written == as_written(rule)


SETS_OF_GPUS = [
    [],
    [("0300", "56a0")],
    [("0380", "56c1"), ("0380", "56c1"), ("0380", "0bda")],
    [("0300", "56a0"), ("0380", "56c0"), ("0300", "4680"), ("0300", "56a0")],
]


@pytest.mark.parametrize("rule", [rule for rule in RULES if rule.each], ids=lambda rule: rule.name)
def test_a_template_gives_the_same_labels(rule: Rule) -> None:
    """Expands a Go template with kubectl, which prints an object with any template."""
    (written,) = [each for each in written_rules() if each["name"] == rule.name]
    for gpus in SETS_OF_GPUS:
        devices = [
            {"class": cls, "device": device}
            for cls, device in gpus
            if cls in rule.classes and (not rule.devices or device in rule.devices)
        ]
        if not devices:
            continue
        document = {"apiVersion": "v1", "kind": "ConfigMap", "metadata": {"name": "x"}, "pci": {"device": devices}}
        words = ["label", "--local", "--filename=-", "x=y", f"--output=go-template={written['labelsTemplate']}"]
        lines = [line.strip() for line in run_kubectl(*words, text=json.dumps(document)).splitlines()]
        expected = dict(line.split("=") for line in lines if line)
        found = evaluate(Features(pci=tuple(Function(*gpu) for gpu in gpus)), [rule]).labels
        assert found == {**expected, **rule.labels}


def features(*functions: tuple[str, str], loaded: str = "", enabled: str = "", **more: Mapping[str, str]) -> Features:
    modules = {"kernel.loadedmodule": dict.fromkeys(loaded.split(), "")}
    modules["kernel.enabledmodule"] = dict.fromkeys((loaded + " " + enabled).split(), "")
    others = {name.replace("_", "."): elements for name, elements in more.items()}
    return Features(pci=tuple(Function(*each) for each in functions), elements={**modules, **others})


PLUGINS = [
    # family, class, device, modules of which all are needed (loaded), the same as built in
    ("dlb", "0b40", "2710", "dlb2", "dlb2"),
    ("dsa", "0880", "0b25", "idxd", "idxd"),
    ("dsa", "0880", "1212", "idxd", "idxd"),
    ("iaa", "0880", "0cfe", "idxd", "idxd"),
    ("fpga-arria10", "1200", "09c4", "dfl_pci", "dfl-pci"),
    ("fpga-arria10", "1200", "09c4", "intel_fpga_pci", "intel-fpga-pci"),
    ("gpu", "0300", "ffff", "i915", "i915"),
    ("gpu", "0380", "ffff", "xe", "xe"),
    ("npu", "1200", "7d1d", "intel_vpu", "intel_vpu"),
    ("qat", "0b40", "4940", "intel_qat vfio_pci", "intel_qat vfio-pci"),
]


@pytest.mark.parametrize(("family", "cls", "device", "loaded", "built_in"), PLUGINS)
def test_devices_and_modules_give_the_label_of_a_plugin(
    family: str, cls: str, device: str, loaded: str, built_in: str
) -> None:
    label = f"{I_LABEL}/{family}"
    for how in ({"loaded": loaded}, {"enabled": built_in}):
        assert evaluate(features((cls, device), **how)).labels.get(label) == "true"
        assert label not in evaluate(features((cls, "9999" if device != "ffff" else device), loaded="other")).labels
        assert label not in evaluate(features(("0200", device), **how)).labels
        assert label not in evaluate(features(**how)).labels
    assert label not in evaluate(features((cls, device))).labels
    for part in loaded.split()[:-1]:
        assert label not in evaluate(features((cls, device), loaded=part)).labels


def test_a_qat_module_may_be_loaded_and_the_other_built_in() -> None:
    qat = ("0b40", "4940")
    for found in (
        features(qat, loaded="intel_qat", enabled="vfio-pci"),
        features(qat, loaded="vfio_pci", enabled="intel_qat"),
    ):
        assert evaluate(found).labels == {f"{I_LABEL}/qat": "true"}


SGX = {
    "cpu_cpuid": {"SGX": "", "SGXLC": ""},
    "cpu_security": {"sgx.enabled": "true", "sgx.epc": "98566144"},
    "kernel_config": {"X86_SGX": ""},
}


def test_sgx_is_a_label_and_its_memory_a_resource() -> None:
    assert evaluate(features(**SGX)) == RuleOutput({f"{I_LABEL}/sgx": "true"}, {"sgx.intel.com/epc": "98566144"})


@pytest.mark.parametrize(
    ("part", "elements"),
    [
        ("cpu_cpuid", {"SGX": ""}),
        ("cpu_cpuid", {"SGXLC": ""}),
        ("cpu_security", {}),
        ("cpu_security", {"sgx.enabled": "false", "sgx.epc": "1"}),
        ("kernel_config", {}),
    ],
)
def test_sgx_requires_all_features(part: str, elements: Mapping[str, str]) -> None:
    assert evaluate(features(**{**SGX, part: elements})) == RuleOutput({}, {})


def test_gpus_are_counted_by_model_and_named_by_product() -> None:
    found = evaluate(features(("0380", "56c0"), ("0380", "56c0"), ("0380", "0bda"), ("0300", "56a0")))
    assert found.labels == {
        f"{G_LABEL}/device-id.0380-56c0.present": "true",
        f"{G_LABEL}/device-id.0380-0bda.present": "true",
        f"{G_LABEL}/device-id.0300-56a0.present": "true",
        f"{G_LABEL}/device-id.0380-56c0.count": "2",
        f"{G_LABEL}/device-id.0380-0bda.count": "1",
        f"{G_LABEL}/device-id.0300-56a0.count": "1",
        # the later rule determines the label of two products
        f"{G_LABEL}/product": "Flex_170",
        f"{G_LABEL}/device.count": "2",
        f"{G_LABEL}/family": "A_Series",
    }


def test_labelled_gpu_fractions_are_resources() -> None:
    labels = {f"{G_LABEL}/{name}": amount for name, amount in product(("millicores", "memory.max", "tiles"), "7")}
    assert evaluate(features(local_label=labels)).resources == labels
    del labels[f"{G_LABEL}/tiles"]
    assert evaluate(features(local_label=labels)).resources == {}


hexadecimal = st.text("0123456789abcdef", min_size=4, max_size=4)
classes = st.sampled_from(["0300", "0380", "0b40", "0880", "1200"]) | hexadecimal


@given(st.lists(st.tuples(classes, hexadecimal), max_size=20), st.sets(st.sampled_from(["i915", "idxd", "dlb2"])))
def test_labels_are_valid_for_the_api_server(functions: list[tuple[str, str]], modules: set[str]) -> None:
    for key, value in evaluate(features(*functions, loaded=" ".join(modules))).labels.items():
        prefix, _, name = key.partition("/")
        assert prefix in (I_LABEL, G_LABEL)
        assert 0 < len(name) <= 63
        assert len(value) <= 63
        assert name.replace(".", "").replace("-", "").isalnum()
        assert value.replace("_", "").isalnum()
