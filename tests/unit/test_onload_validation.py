"""Validation of Onload resources at admission."""

import json
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st
from msgspec import Raw
from onloadresources import DEFAULTS, MAPPING, onload, resource

from accelplane.kube.admission import Decision, Review
from accelplane.onload import validation
from accelplane.onload.models import Onload
from accelplane.onload.validation import pattern_error, verdict
from accelplane.onload.webhooks import PATH, validator

EXTERNAL = {"onload__moduleManagement": "External", "onload__kernelMappings": []}


@pytest.mark.parametrize(
    "fields",
    [
        {},
        EXTERNAL,
        {"devicePlugin__setPreload": False, "devicePlugin__mountOnload": True},
        {"devicePlugin__preload": False, "devicePlugin__mountOnload": True},
        {"devicePlugin__libMountPath": "/usr/lib"},
        {"devicePlugin__libMountPath": "/usr/lib", "devicePlugin__libMounthPath": "/usr/lib"},
        {"devicePlugin__baseMountPath": "/"},
        {"devicePlugin__hostOnloadPath": "/var/lib/onload"},
        {"devicePlugin__maxPodsPerNode": 0},
        {"onload__imagePullPolicy": "Always", "devicePlugin__imagePullPolicy": "Never"},
        {"onload__kernelMappings": [MAPPING | {"regexp": r"^5\.14\.0-[0-9]+\.el9_\d+\.x86_64\z"}]},
        {"serviceAccountName": ""},
        {"upgrade": {"maxUnavailable": "50%", "nodeTimeout": "1h30m"}},
    ],
)
def test_a_valid_resource_is_admitted(fields: dict[str, Any]) -> None:
    assert verdict(onload(**fields)) == validation.Verdict()


def mapping(**fields: str) -> dict[str, Any]:
    return {"onload__kernelMappings": [MAPPING, MAPPING | fields]}


@pytest.mark.parametrize(
    ("fields", "message"),
    [
        ({"onload__kernelMappings": []}, "onload.kernelMappings is empty"),
        ({"onload__moduleManagement": "External"}, "moduleManagement is External and onload.kernelMappings is set"),
        ({"onload__version": ""}, "onload.version is empty, expected a version"),
        ({"onload__controlPlane": {"parameters": ["-K", "a\nb"]}}, "parameters is '-K a\\nb', expected printable"),
        ({"onload__controlPlane": {"parameters": ["x" * 500] * 2}}, "parameters has 1001 characters"),
        ({"onload__version": "v" * 64}, "expected a label value: at most 63"),
        ({"onload__version": "8.1/2"}, "onload.version is 8.1/2"),
        ({"onload__userImage": ""}, "userImage is empty"),
        ({"onload__imagePullPolicy": "always"}, "onload.imagePullPolicy is always"),
        ({"devicePlugin__imagePullPolicy": "x"}, "devicePlugin.imagePullPolicy is x"),
        ({"devicePlugin__maxPodsPerNode": -1}, "maxPodsPerNode is -1"),
        ({"devicePlugin__mountOnload": True}, "SetPreload and MountOnload mutually exclusive"),
        ({"devicePlugin__preload": True, "devicePlugin__setPreload": False}, "preload is true and setPreload is false"),
        ({"devicePlugin__libMountPath": "/a", "devicePlugin__libMounthPath": "/b"}, "libMountPath is /a"),
        (mapping(regexp=""), "kernelMappings[1].regexp is empty"),
        (mapping(regexp="("), "kernelMappings[1].regexp is '(', expected a regular expression"),
        (mapping(kernelModuleImage=""), "kernelMappings[1].kernelModuleImage is empty"),
        ({"devicePlugin__hostOnloadPath": "opt"}, "hostOnloadPath is 'opt', expected an absolute path"),
        ({"devicePlugin__hostOnloadPath": ""}, "hostOnloadPath is ''"),
        ({"devicePlugin__hostOnloadPath": "/opt/../etc"}, "hostOnloadPath is '/opt/../etc'"),
        ({"devicePlugin__hostOnloadPath": "/opt//x"}, "expected an absolute path"),
        ({"devicePlugin__hostOnloadPath": "//opt"}, "expected an absolute path"),
        ({"devicePlugin__hostOnloadPath": "/opt/a\nb"}, "expected an absolute path"),
        ({"devicePlugin__hostOnloadPath": "/"}, "hostOnloadPath is /, expected a directory for Onload only"),
        ({"devicePlugin__hostOnloadPath": "/opt/"}, "hostOnloadPath is /opt, expected a directory for Onload only"),
        ({"devicePlugin__hostOnloadPath": "/etc/onload"}, "expected a directory for Onload only"),
        ({"devicePlugin__hostOnloadPath": "/var/lib/kubelet/x"}, "expected a directory for Onload only"),
        ({"devicePlugin__libMounthPath": "lib"}, "libMounthPath is 'lib'"),
        ({"devicePlugin__libMountPath": "lib"}, "libMountPath is 'lib'"),
        ({"devicePlugin__baseMountPath": "/", "devicePlugin__binMountPath": "/dev/x"}, "leads to /dev/x in pods"),
        ({"serviceAccountName": "A"}, "serviceAccountName is 'A'"),
        ({"imagePullSecret": {"name": ""}}, "imagePullSecret.name is empty"),
        ({"imagePullSecret": {"name": "a b"}}, "imagePullSecret.name is 'a b'"),
        ({"upgrade": {"maxUnavailable": 0}}, "upgrade.maxUnavailable is 0"),
        ({"upgrade": {"maxUnavailable": "200%"}}, "upgrade.maxUnavailable is 200%"),
        ({"upgrade": {"nodeTimeout": "0s"}}, "upgrade.nodeTimeout is 0s"),
        ({"upgrade": {"evictionTimeout": "soon"}}, "upgrade.evictionTimeout is 'soon'"),
    ],
)
def test_an_invalid_resource_is_rejected_with_a_message(fields: dict[str, Any], message: str) -> None:
    found = verdict(onload(**fields)).refusal
    assert found.startswith("invalid resource: ")
    assert message in found


def test_too_long_names_are_rejected() -> None:
    assert verdict(onload("a" * 16, "b" * 16)).refusal == ""
    found = verdict(onload("a" * 17, "b" * 16)).refusal
    assert "Combined length of Onload name and namespace is too long" in found


@pytest.mark.parametrize(
    ("pattern", "valid"),
    [
        (r"^.*\.x86_64$", True),
        (r"\Qa.b\E", True),
        (r"[[:alpha:]]+", True),
        (r"(?i)el9", True),
        (r"(?<name>x)", True),
        ("(" * 1025, True),  # KMM decides
        (r"a{1000}", True),
        (r"a{1001}", False),
        (r"(", False),
        (r"*", False),
        (r"[z-a]", False),
        (r"(?=x)", False),
        (r"[(?=]x", True),
        (r"(?<!x)", False),
        (r"(a)\1", False),
        (r"a\\1", True),
    ],
)
def test_patterns_of_kernel_versions_are_those_of_kmm(pattern: str, valid: bool) -> None:
    assert (pattern_error(pattern) == "") == valid


@given(st.text(max_size=60) | st.text("()[]{}?*+|\\^$.:<=!-,0123abzQE", max_size=60))
def test_any_pattern_is_evaluated(pattern: str) -> None:
    assert isinstance(pattern_error(pattern), str)


@given(st.text("/.a b\n", max_size=12))
def test_an_accepted_host_path_is_absolute_and_outside_of_system_directories(path: str) -> None:
    if not verdict(onload(devicePlugin__hostOnloadPath=path)).refusal:
        assert path.startswith("/")
        assert {"", ".", ".."} & {*path.strip("/").split("/")} == set()


def test_warnings_report_degraded_functions() -> None:
    build = {"build": {"dockerfileConfigMap": {}}}
    untagged = MAPPING | {"kernelModuleImage": "registry:5000/onload-module"} | build
    found = verdict(onload("a.b", onload__kernelMappings=[MAPPING, untagged]))
    assert found.refusal == ""
    assert [text.partition(" ")[0] for text in found.warnings] == [
        "metadata.name",
        "onload.kernelMappings[1].kernelModuleImage",
        "onload.kernelMappings[1].build.dockerfileConfigMap.name",
    ]


NODES = {f"n{number}": {"node-role.kubernetes.io/worker": "", "rack": str(number % 2)} for number in range(8)}


def test_resources_that_select_the_same_nodes_are_a_warning() -> None:
    first = onload()
    others = [
        first,
        onload("second", selector={"rack": "1"}),
        onload("third", "elsewhere", selector={"rack": "0", "node-role.kubernetes.io/worker": "x"}),
        onload("everything", selector={}),
    ]
    everything, second = verdict(first, others=others, nodes=NODES).warnings
    assert everything.startswith("Onload default/everything also selects nodes n0, n1, n2 and ")
    assert second == "Onload default/second also selects nodes n1, n3, n5 and 1 more; change a selector"


# The webhook


def review(new: dict[str, Any], old: dict[str, Any] | None = None, others: tuple[Onload, ...] = ()) -> Decision:
    hook = validator(lambda: others, lambda: NODES)
    assert hook.path == PATH == "/validate-onload-amd-com-v1alpha1-onload"
    return hook.handle(
        Review(
            uid="1",
            operation="CREATE" if old is None else "UPDATE",
            object=Raw(json.dumps(new).encode()),
            old_object=Raw(json.dumps(old).encode()),
        )
    )


def test_the_webhook_admits_refuses_and_warns() -> None:
    assert review(resource()) == Decision()
    denied = review(resource(onload__version=""))
    assert denied.denial is not None
    assert "onload.version is empty" in denied.denial.message
    assert "default/second" in review(resource(), others=(onload("second"),)).warnings[0]


def test_a_resource_without_spec_is_rejected() -> None:
    bare = resource()
    del bare["spec"]
    denied = review(bare).denial
    assert denied is not None
    assert "spec" in denied.message


def test_an_update_of_a_stored_invalid_resource_may_leave_its_spec() -> None:
    invalid = resource(onload__version="")
    labelled = resource(onload__version="")
    labelled["metadata"]["labels"] = {"x": "y"}
    decision = review(labelled, invalid)
    assert decision.denial is None
    assert "onload.version is empty" in decision.warnings[0]
    assert review(resource(onload__version="", onload__userImage="2"), invalid).denial is not None
    assert review(invalid, {"spec": 1}).denial is not None


def test_a_resource_in_deletion_can_lose_its_finalizer() -> None:
    deleted = resource(onload__version="")
    deleted["metadata"] |= {"deletionTimestamp": "2024-01-01T00:00:00Z", "finalizers": ["example.com/a"]}
    changed = deleted | {"metadata": deleted["metadata"] | {"finalizers": []}}
    assert review(changed, deleted).denial is None
    del changed["spec"]
    assert review(changed, deleted).denial is None


def test_the_default_of_the_host_path_is_valid() -> None:
    assert DEFAULTS["hostOnloadPath"].endswith("/")
    assert verdict(onload()).refusal == ""
