"""The feature rules and their evaluation.

A test compares them with deploy/nfd/overlays/node-feature-rules: a node gets the same labels from NFD and from this
table. A later rule overrides labels of an earlier one.
"""

from collections.abc import Mapping, Sequence
from typing import Literal

import msgspec

from accelplane.nodelabels.discovery import Features
from accelplane.nodelabels.gpu import FRACTIONS
from accelplane.nodelabels.gpu import PREFIX as _GPU

_DEVICES = "intel.feature.node.kubernetes.io"


class Term(msgspec.Struct, frozen=True):
    """Requires that an element exists, or (`IsTrue`) that its value is `true`."""

    feature: str
    name: str
    op: Literal["Exists", "IsTrue"] = "Exists"

    def holds(self, features: Features) -> bool:
        value = features.element(self.feature, self.name)
        return value is not None and (self.op == "Exists" or value == "true")


class Rule(msgspec.Struct, frozen=True, kw_only=True):
    """Labels and resources of hosts that match all conditions.

    The conditions: a PCI function of one of the `classes` and `devices` (any if empty); all `terms`; all terms of one
    of the alternatives in `any_of`. `each` are labels for each matching function: format strings with its `cls` and
    `device`, the number of `alike` functions and the `count` of all. A resource's value names an element: `@`, its
    feature, a dot and its name.
    """

    name: str
    labels: Mapping[str, str] = {}
    each: Mapping[str, str] = {}
    resources: Mapping[str, str] = {}
    classes: Sequence[str] = ()
    devices: Sequence[str] = ()
    terms: Sequence[Term] = ()
    any_of: Sequence[Sequence[Term]] = ()


class RuleOutput(msgspec.Struct, frozen=True):
    labels: Mapping[str, str]
    resources: Mapping[str, str]


def evaluate(features: Features, rules: Sequence[Rule] | None = None) -> RuleOutput:
    """Applies the rules, `RULES` by default, to the features."""
    labels: dict[str, str] = {}
    resources: dict[str, str] = {}
    for rule in RULES if rules is None else rules:
        matching = [
            function
            for function in features.pci
            if function.cls in rule.classes and (not rule.devices or function.device in rule.devices)
        ]
        if (rule.classes and not matching) or not all(term.holds(features) for term in rule.terms):
            continue
        if rule.any_of and not any(all(term.holds(features) for term in terms) for terms in rule.any_of):
            continue
        labels.update(rule.labels)
        for function in matching:
            facts = {
                "cls": function.cls,
                "device": function.device,
                "alike": sum(other == function for other in matching),
                "count": len(matching),
            }
            labels.update({key.format(**facts): value.format(**facts) for key, value in rule.each.items()})
        for name, source in rule.resources.items():
            domain, feature, element = source.removeprefix("@").split(".", 2)
            value = features.element(f"{domain}.{feature}", element)
            if value is not None:
                resources[name] = value
    return RuleOutput(labels, resources)


def _loaded(*names: str) -> tuple[Term, ...]:
    return tuple(Term("kernel.loadedmodule", name) for name in names)


def _enabled(*names: str) -> tuple[Term, ...]:
    return tuple(Term("kernel.enabledmodule", name) for name in names)


def _either(*names: str) -> tuple[tuple[Term, ...], ...]:
    """One of the modules is loaded or built in."""
    return tuple(terms for name in names for terms in (_loaded(name.replace("-", "_")), _enabled(name)))


def _plugin(
    name: str, classes: Sequence[str], devices: Sequence[str] = (), any_of: Sequence[Sequence[Term]] = ()
) -> Rule:
    """The rule of the nodes that a plugin runs on."""
    labels = {f"{_DEVICES}/{name}": "true"}
    return Rule(name=f"intel.{name}", labels=labels, classes=classes, devices=devices, any_of=any_of)


_MAX_SERIES = ("0bda", "0bd5", "0bd9", "0bdb", "0bd7", "0bd6", "0bd0")
_A_SERIES = (
    "56a6", "56a5", "56a1", "56a0", "5694", "5693", "5692", "5691", "5690", "56b3", "56b2", "56a4",
    "56a3", "5697", "5696", "5695", "56b1", "56b0", "56a2", "56ba", "56bc", "56bd", "56bb",
)  # fmt: skip


def _product(name: str, device: str, **labels: str) -> Rule:
    """The rule of one model of GPU."""
    return Rule(
        name=f"intel.gpu.{name}",
        labels={f"{_GPU}/{key}": value for key, value in labels.items()},
        each={f"{_GPU}/device.count": "{count}"},
        classes=("0380",),
        devices=(device,),
    )


RULES: tuple[Rule, ...] = (
    _plugin("dlb", ("0b40",), ("2710",), _either("dlb2")),
    _plugin("dsa", ("0880",), ("0b25", "11fb", "1212"), _either("idxd")),
    _plugin("fpga-arria10", ("1200",), ("09c4",), _either("dfl-pci", "intel-fpga-pci")),
    _plugin("gpu", ("0300", "0380"), (), _either("i915", "xe")),
    _plugin("iaa", ("0880",), ("0cfe", "1216"), _either("idxd")),
    _plugin(
        "qat",
        ("0b40",),
        ("37c8", "4940", "4942", "4944", "4946", "4948"),
        tuple(
            qat + vfio
            for qat in (_loaded("intel_qat"), _enabled("intel_qat"))
            for vfio in (_loaded("vfio_pci"), _enabled("vfio-pci"))
        ),
    ),
    Rule(
        name="intel.sgx",
        labels={f"{_DEVICES}/sgx": "true"},
        resources={"sgx.intel.com/epc": "@cpu.security.sgx.epc"},
        terms=(
            Term("cpu.cpuid", "SGX"),
            Term("cpu.cpuid", "SGXLC"),
            Term("cpu.security", "sgx.enabled", "IsTrue"),
            Term("kernel.config", "X86_SGX"),
        ),
    ),
    _plugin("npu", ("1200",), ("7e4c", "643e", "ad1d", "7d1d", "b03e", "fd3e", "d71d"), _either("intel_vpu")),
    Rule(
        name="intel.gpu.fractionalresources",
        resources={f"{_GPU}/{name}": f"@local.label.{_GPU}/{name}" for name in FRACTIONS},
        terms=tuple(Term("local.label", f"{_GPU}/{name}") for name in FRACTIONS),
    ),
    Rule(
        name="intel.gpu.generic.deviceid",
        each={f"{_GPU}/device-id.{{cls}}-{{device}}.present": "true"},
        classes=("0300", "0380"),
    ),
    *(
        Rule(
            name=f"intel.gpu.generic.count.{cls.removeprefix('0')}",
            each={f"{_GPU}/device-id.{cls}-{{device}}.count": "{alike}"},
            classes=(cls,),
        )
        for cls in ("0300", "0380")
    ),
    _product("max.1100", "0bda", product="Max_1100"),
    _product("max.1550", "0bd5", product="Max_1550"),
    Rule(name="intel.gpu.max.series", labels={f"{_GPU}/family": "Max_Series"}, classes=("0380",), devices=_MAX_SERIES),
    _product("flex.170", "56c0", family="Flex_Series", product="Flex_170"),
    _product("flex.140", "56c1", family="Flex_Series", product="Flex_140"),
    Rule(name="intel.gpu.a.series", labels={f"{_GPU}/family": "A_Series"}, classes=("0300",), devices=_A_SERIES),
)
