"""Hostile pods and FPGA objects at the FPGA webhook."""

import asyncio
import base64
import contextlib
import json
import re
from collections.abc import Mapping
from typing import Any

import msgspec
from bitstreams import HASH, INTERFACE, NLB0, NLB3, gbs, metadata
from fpgadocuments import Json, damaged_documents
from hypothesis import given
from hypothesis import strategies as st

from accelplane.admission import fpga
from accelplane.admission.mappings import AcceleratorFunction, FpgaRegion, Names, checker, names_of
from accelplane.fpga import FpgaError
from accelplane.fpga.gbs import parse
from accelplane.fpga.ids import IdError, af_type, region_type, requested_id
from accelplane.fpga.request import parse_config, parse_state
from accelplane.http.messages import HttpError, Request, Response
from accelplane.kube.admission import AdmissionServer, Mutator, Validator
from accelplane.kube.testing import apply_json_patch

PREFIX = "fpga.intel.com/"
OTHER = "9926ab6d6c925a68aabca7d84c545738"
# Valid values are more frequent, otherwise hardly any pod would be admitted.
INTERFACES = st.sampled_from([*[INTERFACE] * 9, *[OTHER] * 4, "12345678", "", "A" * 32, "f" * 63])
AFUS = st.sampled_from([*[NLB0] * 6, *[NLB3] * 4, HASH, "123456789", "", "x"])
WORDS = st.sampled_from([*["a", "b", "c"] * 5, "r", f"region-{INTERFACE}", "", "x/y~1"])
METADATAS = st.fixed_dictionaries({"name": WORDS, "namespace": st.just("n")})
FUNCTIONS = st.fixed_dictionaries(
    {
        "metadata": METADATAS,
        "spec": st.fixed_dictionaries(
            {
                "afuId": AFUS,
                "interfaceId": INTERFACES,
                "mode": st.sampled_from([*["region"] * 6, *["af"] * 2, "afx", ""]),
            }
        ),
    }
)
REGIONS = st.fixed_dictionaries({"metadata": METADATAS, "spec": st.fixed_dictionaries({"interfaceId": INTERFACES})})


def by_name(found: Json) -> str:
    return found["metadata"]["name"]


# The API server guarantees unique names per kind.
NAMESPACES = st.tuples(
    st.lists(FUNCTIONS, min_size=1, max_size=4, unique_by=by_name),
    st.lists(REGIONS, max_size=4, unique_by=by_name),
)

RESOURCES = [f"{PREFIX}{name}" for name in ("r", "", "x/y~1", f"region-{OTHER}", af_type(INTERFACE, NLB0))]
QUANTITIES = [0, "1000m", "3e0", 1.5, -1, "1k", "many", "1e999999999", 10**30]
REQUESTS = st.dictionaries(
    st.sampled_from(
        [
            *[f"{PREFIX}a", f"{PREFIX}b", "cpu"] * 4,
            *[f"{PREFIX}region-{INTERFACE}"] * 2,
            *RESOURCES,
            "fpga.intel.company/a",
        ]
    ),
    st.sampled_from([*[1, "1", 2, "2"] * 9, *QUANTITIES]),
    max_size=2,
)
VARIABLES = st.fixed_dictionaries(
    {
        "name": st.sampled_from(
            [
                "FPGA_REGION_1",
                "FPGA_AFU_1",
                "FPGA_REGION_2",
                "FPGA_AFU_2",
                "FPGA_AFU",
                *["FPGA_REGIONS"] * 2,
                "V",
                "W",
                "",
            ]
        )
    },
    optional={
        "value": st.sampled_from([INTERFACE, OTHER, NLB0, NLB3, "0", "1", "$(V)"]),
        "valueFrom": st.just({"fieldRef": {"fieldPath": "metadata.name"}}),
    },
)
CONTAINERS = st.fixed_dictionaries(
    {
        "name": st.just("c"),
        "resources": st.builds(
            lambda limits, requests, same: {"limits": limits, "requests": dict(limits if same else requests)},
            REQUESTS,
            REQUESTS,
            st.sampled_from([*[True] * 9, False]),
        ),
    },
    optional={"env": st.lists(VARIABLES, max_size=4), "envFrom": st.just([{"configMapRef": {"name": "m"}}])},
)
PODS = st.fixed_dictionaries(
    {
        "metadata": st.fixed_dictionaries({"name": st.just("p")}, optional={"namespace": st.just("n")}),
        "spec": st.fixed_dictionaries(
            {"containers": st.lists(CONTAINERS, min_size=1, max_size=2)},
            optional={"initContainers": st.lists(CONTAINERS, max_size=1)},
        ),
    }
)


def named(functions: list[Json], regions: list[Json]) -> Names:
    return names_of(msgspec.convert(functions, list[AcceleratorFunction]), msgspec.convert(regions, list[FpgaRegion]))


def allowed_by(functions: list[Json], regions: list[Json]) -> tuple[set[str], set[tuple[str, str]]]:
    """The resources and functions by region that these objects allow for pods."""
    resources: set[str] = set()
    for each in (*functions, *regions):
        spec = each["spec"]
        try:
            result = af_type(spec["interfaceId"], spec["afuId"]) if spec.get("mode") == "af" else None
            if spec.get("mode") == "region":
                requested_id(spec["afuId"])
            resources.add(f"{PREFIX}{result or region_type(spec['interfaceId'])}")
        except IdError:
            continue
    specs = [each["spec"] for each in functions if each["spec"]["mode"] == "region"]
    return resources, {(spec["interfaceId"], spec["afuId"]) for spec in specs}


def reviewed(hook: Mutator[Any] | Validator[Any], of: Any, kind: str = "Pod") -> Json:
    """The response to a review, with its patch decoded."""
    request = {"uid": "u", "kind": {"kind": kind}, "namespace": "n", "operation": "CREATE", "object": of}
    body = json.dumps({"apiVersion": "admission.k8s.io/v1", "kind": "AdmissionReview", "request": request}).encode()
    answer = AdmissionServer([hook]).handle(Request("POST", hook.path, "application/json", body))
    if not isinstance(answer, Response):  # a large review

        async def response() -> Response:
            return await answer

        answer = asyncio.run(response())
    response = json.loads(answer.body)["response"]
    assert response["allowed"] or response["status"]["code"] == 400
    assert response["allowed"] or "\n" not in response["status"]["message"]
    return {**response, "patch": json.loads(base64.b64decode(response.get("patch", "")) or b"[]")}


def containers_of(pod: Json) -> list[Json]:
    spec = pod.get("spec", {})
    return [*(spec.get("initContainers") or ()), *(spec.get("containers") or ())]


def requested(container: Json, field: str) -> Mapping[str, Any]:
    found = ((container.get("resources") or {}).get(field)) or {}
    return {name: units for name, units in found.items() if name.startswith(PREFIX)}


def is_ours(variable: Json) -> bool:
    name = variable.get("name")
    return isinstance(name, str) and name.startswith(("FPGA_REGION", "FPGA_AFU"))


def env_of(container: Json) -> list[Json]:
    """The variables. Invalid entries are unchanged in containers without FPGAs."""
    return [each for each in container.get("env") or [] if isinstance(each, dict)]


@given(namespace=NAMESPACES, pod=PODS | damaged_documents(PODS))
def test_pods_get_only_functions_of_their_namespace_and_mutation_is_idempotent(
    namespace: tuple[list[Json], list[Json]], pod: Json
) -> None:
    names = named(*namespace)
    resources, pairs = allowed_by(*namespace)
    hook = fpga.mutator(lambda _namespace: names)
    first = reviewed(hook, pod)
    if not first["allowed"]:
        return
    after = apply_json_patch(pod, first["patch"])
    for old, new in zip(containers_of(pod), containers_of(after), strict=True):
        limits = requested(new, "limits")
        if not limits and not requested(old, "limits"):
            assert new == old
            continue
        assert set(limits) <= resources
        assert set(limits) == set(requested(new, "requests"))
        variables = {each["name"]: each.get("value") for each in env_of(new) if is_ours(each)}
        number = variables.pop("FPGA_REGIONS", None)
        count = len(variables) // 2
        assert number == (str(count) if any(name.startswith(f"{PREFIX}region-") for name in limits) else None)
        assert set(variables) == {f"FPGA_{prefix}_{n}" for prefix in ("REGION", "AFU") for n in range(1, count + 1)}
        for n in range(1, count + 1):
            pair = (variables[f"FPGA_REGION_{n}"], variables[f"FPGA_AFU_{n}"])
            assert pair in pairs
            assert f"{PREFIX}region-{pair[0]}" in limits
        assert [each for each in env_of(new) if not is_ours(each)] == [
            each for each in env_of(old) if not is_ours(each)
        ]
        strangers = (old.get("resources") or {}).get("limits") or {}
        for name in strangers:
            assert name.startswith(PREFIX) or new["resources"]["limits"][name] == strangers[name]
    second = reviewed(hook, after)
    assert (second["allowed"], second["patch"], second.get("warnings")) == (True, [], first.get("warnings"))


@given(NAMESPACES)
def test_any_objects_have_valid_resource_names_and_distinct_pairs(
    namespace: tuple[list[Json], list[Json]],
) -> None:
    names = named(*namespace)
    resources, pairs = allowed_by(*namespace)
    assert names.resources == resources
    assert all(re.fullmatch(rf"{PREFIX}[a-z0-9][A-Za-z0-9_.\-]{{0,61}}[A-Za-z0-9]", name) for name in names.resources)
    assert {target.resource for target in names.targets.values()} <= resources
    assert {(pair.interface_id, pair.afu_id) for found in names.programmable.values() for pair in found} <= pairs
    assert not set(names.targets) & set(names.faulty)
    written = [f"{PREFIX}{each['metadata']['name']}" for group in namespace for each in group]
    assert {*names.targets, *names.faulty} == set(written)


@given(damaged_documents(FUNCTIONS, 3), st.sampled_from(["default", "legacy63"]))
def test_any_function_is_stored_with_a_warning_if_it_is_unusable(function: Json, naming: Any) -> None:
    response = reviewed(checker(naming), function, "AcceleratorFunction")
    assert not response["patch"]
    assert all(text.isprintable() for text in response.get("warnings", ()))
    assert response["allowed"] or "cannot be decoded" in response["status"]["message"]


@given(st.integers(0, 3000), st.sampled_from([("[", "]"), ('{"a":', "}")]), st.integers(0, 1))
def test_no_depth_of_nesting_is_too_deep_for_an_answer(depth: int, brackets: tuple[str, str], missing: int) -> None:
    deep = f"{brackets[0] * depth}1{brackets[1] * (depth - missing)}"
    container = f'{{"name": "c", "env": [{{"name": "V", "value": {deep}}}, {{"name": "FPGA_AFU_1"}}]}}'
    review = f'{{"uid": "u", "kind": {{"kind": "Pod"}}, "object": {{"spec": {{"containers": [{container}]}}}}}}'
    body = f'{{"apiVersion": "admission.k8s.io/v1", "kind": "AdmissionReview", "request": {review}}}'.encode()
    server = AdmissionServer([fpga.mutator(lambda _namespace: Names())])
    with contextlib.suppress(HttpError):
        server.handle(Request("POST", fpga.PATH, "application/json", body))
    for act in (
        lambda: parse_state(f'{{"bundle": {deep}}}'.encode()),
        lambda: parse_config(f'{{"process": {{"env": {deep}}}}}'.encode(), "config.json"),
        lambda: parse(gbs(f'{{"afu-image": {deep}}}'.encode()[:4095]), "x.gbs"),
        lambda: parse(gbs(metadata("INTERFACE").replace(b'"INTERFACE"', deep.encode())[:4095]), "x.gbs"),
    ):
        with contextlib.suppress(FpgaError):
            act()
