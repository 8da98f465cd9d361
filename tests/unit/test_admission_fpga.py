"""The mutation of pods that use FPGAs, and the names that they may use."""

import json
from collections.abc import Mapping
from typing import Any

import msgspec
import pytest
from hypothesis import given
from hypothesis import strategies as st
from msgspec import Raw

from accelplane.admission.fpga import Pod, PodSpec, mutate, mutator
from accelplane.admission.mappings import (
    AcceleratorFunction,
    FpgaRegion,
    FunctionSpec,
    Names,
    RegionSpec,
    checker,
    names_of,
)
from accelplane.kube.admission import Decision, Kind, Review
from accelplane.kube.objects import Metadata
from accelplane.kube.testing import apply_json_patch

I = "69528db6eb31577a8c3668f9faa081f6"  # noqa: E741 - as in the documents
X = "d8424dc4a4a3c413f89e433683f9040b"
Y = "f7df405cbd7acf7222f144b0b93acd18"
AF = "fpga.intel.com/af-695.d84.aVKNtusxV3qMNmj5-qCB9thCTcSko8QT-J5DNoP5BAs"
REGION = f"fpga.intel.com/region-{I}"

Json = dict[str, Any]


def function(name: str, afu: str = X, mode: str = "region", interface: str = I) -> AcceleratorFunction:
    spec = FunctionSpec(afu_id=afu, interface_id=interface, mode=mode)
    return AcceleratorFunction(metadata=Metadata(name=name, namespace="n"), spec=spec)


def region(name: str, interface: str = I) -> FpgaRegion:
    return FpgaRegion(metadata=Metadata(name=name, namespace="n"), spec=RegionSpec(interface_id=interface))


NAMES = names_of([function("a"), function("b", Y), function("set", X, "af"), function("odd", X, "afx")], [region("r")])


def container(resources: Mapping[str, Any] | None = None, **more: Any) -> Json:
    limits = {f"fpga.intel.com/{name}": units for name, units in (resources or {}).items()}
    both = {"resources": {"limits": dict(limits), "requests": dict(limits)}} if resources is not None else {}
    return {"name": "c", **both, **more}


def pod(*containers: Json, **spec: Any) -> Json:
    return {"metadata": {"name": "p"}, "spec": {"containers": list(containers), **spec}}


def decide_pod(document: Json, names: Names = NAMES) -> Decision:
    return mutate(msgspec.json.decode(json.dumps(document), type=Pod), names, "n")


def mutated(document: Json, names: Names = NAMES) -> Json:
    decision = decide_pod(document, names)
    assert decision.denial is None, decision
    return apply_json_patch(document, json.loads(msgspec.json.encode(decision.patch)))


def refusal(document: Json, names: Names = NAMES) -> str:
    decision = decide_pod(document, names)
    assert decision.denial is not None
    assert decision.denial.code == 400
    assert not decision.patch
    return decision.denial.message


def variables(one: Json) -> list[tuple[str, str]]:
    return [(each["name"], each.get("value")) for each in one.get("env", ())]


def test_functions_to_program_are_replaced_by_their_region_and_the_variables_of_the_hook() -> None:
    asking = pod(container({"b": 2, "a": 1}, env=[{"name": "SOME_VAR", "value": "v"}]))
    patch = json.loads(msgspec.json.encode(decide_pod(asking).patch))
    assert [(each["op"], each["path"]) for each in patch] == [
        ("remove", "/spec/containers/0/resources/limits/fpga.intel.com~1a"),
        ("remove", "/spec/containers/0/resources/requests/fpga.intel.com~1a"),
        ("remove", "/spec/containers/0/resources/limits/fpga.intel.com~1b"),
        ("remove", "/spec/containers/0/resources/requests/fpga.intel.com~1b"),
        ("add", f"/spec/containers/0/resources/limits/fpga.intel.com~1region-{I}"),
        ("add", f"/spec/containers/0/resources/requests/fpga.intel.com~1region-{I}"),
        ("add", "/spec/containers/0/env"),
    ]
    (one,) = mutated(asking)["spec"]["containers"]
    assert one["resources"] == {"limits": {REGION: "3"}, "requests": {REGION: "3"}}
    assert variables(one) == [
        ("FPGA_REGIONS", "3"), ("FPGA_REGION_1", I), ("FPGA_AFU_1", X), ("FPGA_REGION_2", I), ("FPGA_AFU_2", Y),
        ("FPGA_REGION_3", I), ("FPGA_AFU_3", Y), ("SOME_VAR", "v"),
    ]  # fmt: skip


def test_preprogrammed_functions_become_only_their_resource() -> None:
    (one,) = mutated(pod(container({"set": "1"})))["spec"]["containers"]
    assert one == {"name": "c", "resources": {"limits": {AF: "1"}, "requests": {AF: "1"}}}


@pytest.mark.parametrize("request_", ["r", f"region-{I}"])
@pytest.mark.parametrize("env", [{}, {"env": []}, {"env": [{"name": "V", "value": "1"}]}], ids=str)
def test_regions_without_functions_become_their_resource_and_the_number_0(request_: str, env: Json) -> None:
    (one,) = mutated(pod(container({request_: "1"}, **env)))["spec"]["containers"]
    assert set(one["resources"]["limits"]) == {REGION}
    assert one["env"] == [{"name": "FPGA_REGIONS", "value": "0"}, *env.get("env", ())]


def test_the_number_of_functions_has_precedence_over_images_and_env_from() -> None:
    for name in ("a", "r", f"region-{I}"):
        for own in ([], [{"name": "FPGA_REGIONS", "valueFrom": {"configMapKeyRef": {"name": "m", "key": "k"}}}]):
            asking = pod(container({name: 1}, env=own, envFrom=[{"configMapRef": {"name": "m"}}]))
            if own and name.startswith("region-"):
                assert "variable 'FPGA_REGIONS' is reserved" in refusal(asking)
                continue
            (one,) = mutated(asking)["spec"]["containers"]
            granted = [value for variable, value in variables(one) if variable == "FPGA_REGIONS"]
            assert granted == ["1" if name == "a" else "0"]


def test_variables_of_users_are_unchanged_and_keep_their_order() -> None:
    kept = [
        {"name": "Z", "valueFrom": {"fieldRef": {"fieldPath": "metadata.name"}}},
        {"name": "A", "value": 'quote " and\nnewline'},
        {"name": "Z", "value": "$(A)"},
    ]
    (one,) = mutated(pod(container({"a": 1}, env=[{"name": "FPGA_AFU_1", "value": Y}, *kept])))["spec"]["containers"]
    own = {"FPGA_REGIONS": "1", "FPGA_REGION_1": I, "FPGA_AFU_1": X}
    assert one["env"] == [*({"name": name, "value": value} for name, value in own.items()), *kept]


@pytest.mark.parametrize("resources", [{"set": 1}, {"r": 1}])
def test_users_cannot_set_the_variables_of_the_hook(resources: Mapping[str, Any]) -> None:
    env = [{"name": "FPGA_AFU_1", "value": X}, {"name": "V", "value": "1"}, {"name": "FPGA_REGIONX"}]
    (one,) = mutated(pod(container(resources, env=env)))["spec"]["containers"]
    number = [{"name": "FPGA_REGIONS", "value": "0"}] if "r" in resources else []
    assert one["env"] == [*number, {"name": "V", "value": "1"}]


@pytest.mark.parametrize("resources", [{}, None])
@pytest.mark.parametrize("field", ["containers", "initContainers"])
def test_variables_of_containers_without_fpgas_are_not_changed(resources: Json | None, field: str) -> None:
    env = [{"name": "FPGA_AFU_1", "value": X}, {"name": "FPGA_REGION_NAME", "value": "eu-1"}]
    assert decide_pod({"metadata": {"name": "p"}, "spec": {field: [container(resources, env=env)]}}) == Decision()


def test_reserved_names_are_case_insensitive() -> None:
    for name in ("FPGA_AFU_1", "\\u0046PGA_AFU_1", "FPGA\\u005fAFU"):
        one = json.dumps(container({"set": 1})).encode().removesuffix(b"}")
        env = f'[{{"name": "{name}", "value": "x"}}, {{"name": "N", "value": 1e999}}]'.encode()
        decision = mutate(Pod(spec=PodSpec(containers=Raw(b'[%b, "env": %b}]' % (one, env)))), NAMES)
        assert b'"value":[{"name": "N", "value": 1e999}]}' in msgspec.json.encode(decision.patch)


@pytest.mark.parametrize("env", [[1], "x", {}, [{"name": 1}], [{"name": "FPGA_AFU"}, None]])
def test_invalid_variables_are_rejected_if_they_are_used(env: Any) -> None:
    assert "its variables cannot be decoded: " in refusal(pod(container({"a": 1}, env=env)))


@pytest.mark.parametrize("env", [True, "FOO", 7, {"name": "FOO"}])
def test_variables_that_are_not_a_list_are_denied(env: Any) -> None:
    assert "its variables cannot be decoded: " in refusal(pod(container({"set": 1}, env=env)))


def test_init_containers_and_sidecars_are_mutated() -> None:
    changed = mutated(pod(container({"a": 1}), initContainers=[container({"b": 1}, restartPolicy="Always")]))
    assert variables(changed["spec"]["initContainers"][0]) == [
        ("FPGA_REGIONS", "1"),
        ("FPGA_REGION_1", I),
        ("FPGA_AFU_1", Y),
    ]
    assert variables(changed["spec"]["containers"][0]) == [
        ("FPGA_REGIONS", "1"),
        ("FPGA_REGION_1", I),
        ("FPGA_AFU_1", X),
    ]


def test_a_resource_requested_by_both_names_is_merged() -> None:
    (one,) = mutated(pod(container({"set": 2, AF.removeprefix("fpga.intel.com/"): "1"})))["spec"]["containers"]
    assert one["resources"] == {"limits": {AF: "3"}, "requests": {AF: "3"}}


@pytest.mark.parametrize(
    "resources", [{"a": 1}, {"a": 2, "b": 1}, {"set": 1}, {"r": 3}, {"a": "1000m"}, {"a": 0}, {"a": 999, "b": 1}]
)
def test_a_mutated_pod_passes_unchanged(resources: Mapping[str, Any]) -> None:
    changed = mutated(pod(container(resources, env=[{"name": "V", "value": "1"}])))
    assert decide_pod(changed) == Decision()


def test_pods_without_fpgas_are_allowed() -> None:
    for document in ({}, pod(), pod(container(None)), pod(container({}, env=[{"name": "V"}]))):
        assert decide_pod(document) == Decision()
    lookalike = {"fpga.intel.community/x": 1, "cpu": "1.5"}
    assert decide_pod(pod({"name": "c", "resources": {"limits": lookalike}})) == Decision()


@pytest.mark.parametrize(
    ("document", "words"),
    [
        (pod(container({"gone": 1})), "'fpga.intel.com/gone': namespace 'n' has no AcceleratorFunction and no FpgaReg"),
        (pod(container({f"region-{X}": 1})), "has no AcceleratorFunction"),
        (pod(container({"odd": 1})), "mode: found 'afx', expected af or region"),
        (pod(container({"a": 1, "r": 1})), "one mode: 'fpga.intel.com/a' (region), 'fpga.intel.com/r' (regiondevel)"),
        (pod(container({"a": "1500m"})), "1500m is not a whole number"),
        (pod(container({"a": -1})), "-1 is not a whole number"),
        (pod(container({"a": "many"})), "'many' is not a quantity"),
        (pod(container({"a": "10G"})), "not a whole number from 0 to 1000"),
        (
            pod(container({"a": 1, "b": "1k"})),
            "found requests of 1001 FPGA resources in this and earlier containers of the pod, expected at most 1000",
        ),
        (pod(container({"a": 500}), initContainers=[container({"a": 501})]), "found requests of 1001 FPGA resources"),
        (pod({"name": "c", "resources": {"limits": {"fpga.intel.com/a": 1}}}), "limits and requests have to be the"),
        (
            pod({"name": "c", "resources": {"limits": {"fpga.intel.com/a": 1}, "requests": {"fpga.intel.com/a": 2}}}),
            "(limits: 1, requests: 2)",
        ),
    ],
)
def test_invalid_requests_are_denied_with_a_message_for_the_user(document: Json, words: str) -> None:
    assert words in refusal(document)
    assert refusal(document).startswith("container 'c': ")


@pytest.mark.parametrize("env", [[], [{"name": "FPGA_AFU"}]], ids=["none", "reserved"])
def test_a_pod_whose_patch_is_too_large_is_denied(env: Json) -> None:
    one = container({"a": 0}, env=env)
    assert decide_pod(pod(*[one] * 1000)).denial is None
    decision = decide_pod(pod(*[one] * 10_001))
    assert decision.denial is not None
    assert (decision.denial.code, decision.patch) == (413, ())
    assert "container 'c': the patch exceeds 2097152 bytes" in decision.denial.message


def test_an_environment_that_is_too_large_for_a_patch_is_denied() -> None:
    decision = decide_pod(pod(container({"a": 1}, env=[{"name": "V", "value": "x" * 3_000_000}])))
    assert decision.denial is not None
    assert decision.denial.code == 413


def direct(*told: tuple[str, Any], units: int = 1, resource: str = REGION) -> Json:
    env = [{"name": name, "value": value} for name, value in told]
    return pod(container({resource.removeprefix("fpga.intel.com/"): units}, env=env))


def test_a_region_requested_by_name_can_be_programmed_only_with_functions_of_the_namespace() -> None:
    right = (("FPGA_REGION_1", I), ("FPGA_AFU_1", X))
    number = ("FPGA_REGIONS", "1")
    for env in ((number, *right), (*reversed(right), number), (("FPGA_REGIONS", "0"),)):
        assert decide_pod(direct(*env)) == Decision()
    for env in (right, tuple(reversed(right))):
        assert variables(mutated(direct(*env))["spec"]["containers"][0]) == [number, *right]
    for env, units in (
        ((("FPGA_REGION_1", I), ("FPGA_AFU_1", "0" * 32)), 1),
        ((("FPGA_REGION_1", X), ("FPGA_AFU_1", X)), 1),
        ((*right, ("FPGA_REGION_2", I), ("FPGA_AFU_2", X)), 1),
        ((*right, ("FPGA_REGION_3", I), ("FPGA_AFU_3", X)), 3),
        (right, 0),
        (right[:1], 1),
        ((("FPGA_REGION_2", I), ("FPGA_AFU_2", X)), 1),
        ((*right, ("FPGA_REGION_1", I)), 1),
        ((*right, ("FPGA_REGION", I)), 1),
        ((("FPGA_REGION_1", I), ("FPGA_AFU_1", None)), 1),
        ((("FPGA_REGION_01", I), ("FPGA_AFU_01", X)), 1),
        ((*right, ("FPGA_REGIONS", "2")), 2),
        ((*right, ("FPGA_REGIONS", "01")), 1),
        ((*right, ("FPGA_REGIONS", None)), 1),
        ((*right, number, number), 1),
        ((number,), 1),
    ):
        assert refusal(direct(*env, units=units))


def test_a_region_and_a_function_of_it_request_more_units_than_are_programmed() -> None:
    changed = mutated(pod(container({"b": 1, f"region-{I}": 2})))
    (one,) = changed["spec"]["containers"]
    assert one["resources"]["limits"] == {REGION: "3"}
    assert variables(one) == [("FPGA_REGIONS", "1"), ("FPGA_REGION_1", I), ("FPGA_AFU_1", Y)]
    assert decide_pod(changed) == Decision()


def test_variables_of_regions_that_are_not_requested_are_denied() -> None:
    other = "9926ab6d6c925a68aabca7d84c545738"
    names = names_of([function("a"), function("b", Y, interface=other)], [])
    variables_ = [("FPGA_REGION_1", I), ("FPGA_AFU_1", X), ("FPGA_REGION_2", I), ("FPGA_AFU_2", X)]
    env = [{"name": name, "value": value} for name, value in variables_]
    asking = pod(container({f"region-{I}": 1, f"region-{other}": 1}, env=env))
    assert "-69528db6eb31577a8c3668f9faa081f6' 2 times, but 1 are requested" in refusal(asking, names)


def test_variables_from_other_sources_cause_a_warning() -> None:
    source = [{"configMapRef": {"name": "m"}}]
    for resources, warned in (({"a": 1}, 1), ({f"region-{I}": 1}, 1), ({"r": 1}, 1), ({"a": 0}, 0), ({"set": 1}, 0)):
        assert len(decide_pod(pod(container(resources, envFrom=source))).warnings) == warned


def test_a_name_of_two_objects_resolves_to_neither() -> None:
    names = names_of([function("a")], [region("a"), region("b")])
    assert "an AcceleratorFunction and a FpgaRegion of the name 'a'" in refusal(pod(container({"a": 1})), names)
    assert mutated(pod(container({"b": 1})), names)
    for twice in (names_of([function("a")], [region("a", "")]), names_of([function("a", interface="")], [region("a")])):
        assert "an AcceleratorFunction and a FpgaRegion of the name 'a'" in refusal(pod(container({"a": 1})), twice)


def test_a_function_without_a_valid_resource_name_causes_a_warning() -> None:
    names = names_of([function("short", "123456789", "af")], [])
    assert "AcceleratorFunction 'short'" in refusal(pod(container({"short": 1})), names)
    assert names.resources == frozenset()


def test_a_pod_before_the_cache_sync_is_denied_with_retry() -> None:
    known: list[Names] = []
    hook = mutator(lambda _namespace: known[0] if known else Names(), lambda: bool(known))

    def requested_limits(document: Json) -> Decision:
        thing = msgspec.Raw(json.dumps(document).encode())
        return hook.handle(Review("u", "CREATE", Kind(kind="Pod"), namespace="n", object=thing))

    early = requested_limits(pod(container({"a": 1}))).denial
    assert early is not None
    assert (early.code, early.reason) == (503, "ServiceUnavailable")
    assert "try again" in early.message
    assert requested_limits(pod(container())).denial is None
    known.append(NAMES)
    assert requested_limits(pod(container({"a": 1}))).patch


@pytest.mark.parametrize("afu", ["", "0123456", "0" * 41, "../" + X])
def test_a_function_that_no_hook_would_program_causes_a_warning(afu: str) -> None:
    names = names_of([function("odd", afu)], [])
    assert "AcceleratorFunction 'odd': AFU id " in refusal(pod(container({"odd": 1})), names)


def test_a_namespace_without_objects_has_no_fpga() -> None:
    for name in ("a", f"region-{I}", AF.removeprefix("fpga.intel.com/")):
        assert "has no AcceleratorFunction" in refusal(pod(container({name: 1})), Names())


@pytest.mark.parametrize(
    ("one", "words"),
    [
        (function("a"), []),
        (function("a", mode="af"), []),
        (
            function("a", mode="afx"),
            ["pods that request it are rejected: spec.mode: 'afx': expected one of af, region"],
        ),
        (function("a", mode="myregion"), ["pods that request it are rejected: spec.mode: 'myregion'"]),
        (function("a", "123456789", "af"), ["pods that request it are rejected: AcceleratorFunction 'a'"]),
    ],
    ids=["region", "af", "afx", "myregion", "odd"],
)
def test_an_unusable_function_causes_a_warning_and_no_denial(one: AcceleratorFunction, words: list[str]) -> None:
    decision = checker().handle(Review(uid="u", object=Raw(msgspec.json.encode(one))))
    assert decision.denial is None
    assert [warning[: len(word)] for warning, word in zip(decision.warnings, words, strict=True)] == words


def test_names_of_existing_resources_mean_these_resources() -> None:
    other = "9926ab6d6c925a68aabca7d84c545738"
    names = names_of([function("a"), function(f"region-{I}", interface=other)], [region(f"region-{other}")])
    for name in (I, other):
        asking = pod(container({f"region-{name}": 1}))
        assert (
            mutated(asking, names)["spec"]["containers"][0]["resources"] == asking["spec"]["containers"][0]["resources"]
        )
    assert mutated(pod(container({f"region-{other}": 1})), names_of([], [region(f"region-{other}")]))["spec"][
        "containers"
    ][0]["resources"]["limits"] == {REGION: "1"}


_RESOURCES = st.dictionaries(
    st.sampled_from(["a", "b", "set", "r", "odd", f"region-{I}", AF.removeprefix("fpga.intel.com/"), "x/y~z"]),
    st.one_of(st.integers(-1, 4), st.sampled_from(["1", "1000m", "1k", "", "1e9"])),
    max_size=4,
)
_ENV = st.lists(
    st.fixed_dictionaries(
        {"name": st.sampled_from(["FPGA_REGIONS", "FPGA_REGION_1", "FPGA_AFU_1", "FPGA_AFU", "V", ""])},
        optional={"value": st.one_of(st.sampled_from([I, X, Y]), st.text(max_size=8))},
    ),
    max_size=5,
)


@given(_RESOURCES, _ENV)
def test_no_pod_is_programmed_with_a_function_outside_its_namespace(resources: dict[str, Any], env: list[Json]) -> None:
    asking = pod(container(resources, env=env))
    decision = decide_pod(asking)
    if not resources:
        assert decision == Decision()
    if not resources or decision.denial is not None:
        return
    (one,) = apply_json_patch(asking, json.loads(msgspec.json.encode(decision.patch)))["spec"]["containers"]
    assignments = {name: value for name, value in variables(one) if name.startswith(("FPGA_REGION", "FPGA_AFU"))}
    assert {value for name, value in assignments.items() if "AFU" in name} <= {X, Y}
    number = assignments.pop("FPGA_REGIONS", None)
    assert {value for name, value in assignments.items() if "REGION" in name} <= {I}
    assert number == (str(len(assignments) // 2) if REGION in one["resources"]["limits"] else None)
    assert set(one["resources"]["limits"]) <= {AF, REGION}
    assert one["resources"]["limits"] == one["resources"]["requests"]
    assert [each for each in one.get("env", ()) if each["name"] in ("V", "")] == [
        each for each in env if each["name"] in ("V", "")
    ]


_CONTAINERS = st.lists(
    st.builds(
        lambda resources, env, more: container(resources, env=env, **more),
        _RESOURCES,
        _ENV,
        st.sampled_from([{}, {"envFrom": [{"configMapRef": {"name": "m"}}]}]),
    ),
    max_size=3,
)


@given(_CONTAINERS, _CONTAINERS)
def test_mutation_is_idempotent(containers: list[Json], initial: list[Json]) -> None:
    asking = pod(*containers, initContainers=initial)
    decision = decide_pod(asking)
    if decision.denial is not None:
        return
    again = decide_pod(apply_json_patch(asking, json.loads(msgspec.json.encode(decision.patch))))
    assert (list(again.patch), again.denial, list(again.warnings)) == ([], None, list(decision.warnings))
