"""The mutation of pods that use SGX."""

import itertools
import json
import tracemalloc
from collections.abc import Mapping, Sequence
from fractions import Fraction
from typing import Any

import msgspec
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from accelplane.admission.sgx import Pod, SgxOptions, mutate, mutator
from accelplane.kube.admission import Decision, Review
from accelplane.kube.quantities import QuantityError, binary_text, parse
from accelplane.kube.testing import apply_json_patch

DEFAULTS = SgxOptions()
MOUNT = {"name": "aesmd-socket", "mountPath": "/var/run/aesmd"}
VARIABLE = {"name": "SGX_AESM_ADDR", "value": "1"}
HOST = {"name": "aesmd-socket", "hostPath": {"path": "/var/run/aesmd", "type": "DirectoryOrCreate"}}
MEMORY = {"name": "aesmd-socket", "emptyDir": {"medium": "Memory"}}

Json = dict[str, Any]


def container(name: str, epc: Any = None, **more: Any) -> Json:
    resources = {} if epc is None else {"sgx.intel.com/epc": epc}
    extra = more.pop("resources", {})
    both = {**resources, **extra}
    return {"name": name, "resources": {"limits": dict(both), "requests": dict(both)} if both else {}, **more}


def pod(*containers: Json, provider: str | None = None, **spec: Any) -> Json:
    annotations = {} if provider is None else {"annotations": {"sgx.intel.com/quote-provider": provider}}
    return {"metadata": {"name": "p", **annotations}, "spec": {"containers": list(containers), **spec}}


def decide_pod(document: Json, options: SgxOptions = DEFAULTS) -> Decision:
    return mutate(msgspec.json.decode(json.dumps(document), type=Pod), options)


def mutated(document: Json, options: SgxOptions = DEFAULTS) -> Json:
    decision = decide_pod(document, options)
    assert decision.denial is None, decision
    return apply_json_patch(document, json.loads(msgspec.json.encode(decision.patch)))


def devices(one: Json) -> set[str]:
    limits, requests = (one.get("resources", {}).get(field, {}) for field in ("limits", "requests"))
    assert limits == requests
    found = {name.partition("/")[2]: value for name, value in limits.items() if name != "sgx.intel.com/epc"}
    assert set(found.values()) <= {"1"}
    return set(found)


@pytest.mark.parametrize(
    ("total", "text"),
    [
        (42, "42"), (900, "900"), (1000, "1k"), (1023, "1023"), (1024, "1Ki"), (1025, "1025"), (3145728, "3Mi"),
        (98566144, "94Mi"), (98041856, "95744Ki"), (1610612736, "1536Mi"), (524288 + 1048576, "1536Ki"),
        (2**60, "1Ei"), (2**70, "1024Ei"), (2000, "2000"),
    ],
)  # fmt: skip
def test_the_total_is_written_with_the_greatest_binary_suffix(total: int, text: str) -> None:
    assert binary_text(total) == text
    assert parse(text) == min(total, 2**63 - 1)


@pytest.mark.parametrize(
    ("text", "number"),
    [
        ("1", 1), (7, 7), (1.5, Fraction(3, 2)), ("1Ki", 1024), ("0.5Gi", 2**29), ("1k", 1000),
        ("1500m", Fraction(3, 2)), ("1e3", 1000), ("1E3", 1000), ("1E", 10**18), ("1Ei", 2**60), ("-2", -2),
        ("+3", 3), (".5", Fraction(1, 2)),
        ("5.", 5), ("2u", Fraction(2, 10**6)), ("1n", Fraction(1, 10**9)), ("0.1n", Fraction(1, 10**9)),
        ("-0.1n", Fraction(-1, 10**9)), ("1e999999999", 2**63 - 1), ("-100E", -(2**63) + 1), ("0e999999999", 0),
        ("1e-999999999", Fraction(1, 10**9)), ("1M", 10**6), ("3T", 3 * 10**12),
    ],
)  # fmt: skip
def test_quantities_are_read_exactly(text: Any, number: Fraction) -> None:
    assert parse(text) == number


@pytest.mark.parametrize(
    "text", ["", " 1", "1 ", "1ki", "1K", "Ki", "1e", "1e1.5", "--1", "1_000", "٣", "0x10", "nan", "1" * 500]
)
def test_invalid_quantities_are_rejected(text: str) -> None:
    with pytest.raises(QuantityError):
        parse(text)


USER = {"enclave"}
QUOTER = {"enclave", "provision"}

# provider, containers (name: EPC), their final resources, socket users, volume
CASES: Sequence[tuple[str | None, Mapping[str, str | None], Mapping[str, set[str]], str, Json | None]] = [
    (None, {"a": "1Mi"}, {"a": USER}, "", None),
    ("", {"a": "1Mi"}, {"a": USER}, "", None),
    ("a", {"a": "1Mi"}, {"a": QUOTER}, "", None),
    ("a", {"a": "1Mi", "b": "1Mi"}, {"a": QUOTER, "b": USER}, "", None),
    ("zzz", {"a": "1Mi"}, {"a": USER}, "", None),
    ("a", {"a": None, "b": "1Mi"}, {"a": set(), "b": USER}, "", None),
    ("aesmd", {"a": "1Mi"}, {"a": USER}, "a", HOST),
    ("aesmd", {"a": "1Mi", "b": "1Mi", "c": "1Mi"}, {"a": USER, "b": USER, "c": USER}, "abc", HOST),
    ("aesmd", {"aesmd": "1Mi"}, {"aesmd": QUOTER}, "aesmd", HOST),
    ("aesmd", {"a": "1Mi", "aesmd": "1Mi"}, {"a": USER, "aesmd": QUOTER}, "aesmd a", MEMORY),
    ("aesmd", {"aesmd": "1Mi", "a": "1Mi"}, {"a": USER, "aesmd": QUOTER}, "aesmd a", MEMORY),
    ("aesmd", {"a": "1Mi", "aesmd": None}, {"a": USER, "aesmd": set()}, "a", HOST),
    ("aesmd", {"a": "1Mi", "b": None, "aesmd": "1Mi"}, {"a": USER, "b": set(), "aesmd": QUOTER}, "aesmd a", MEMORY),
    ("aesmd", {"a": None}, {"a": set()}, "", None),
]


@pytest.mark.parametrize(("provider", "requests", "expected", "sockets", "volume"), CASES)
def test_each_container_gets_what_its_role_needs(
    provider: str | None,
    requests: Mapping[str, str | None],
    expected: Mapping[str, set[str]],
    sockets: str,
    volume: Json | None,
) -> None:
    after = mutated(pod(*(container(name, epc) for name, epc in requests.items()), provider=provider))
    users = sockets.split() if "aesmd" in sockets else list(sockets)
    for one in after["spec"]["containers"]:
        assert devices(one) == expected[one["name"]]
        assert one.get("volumeMounts") == ([MOUNT] if one["name"] in users else None)
        assert one.get("env") == ([VARIABLE] if one["name"] in users else None)
    assert after["spec"].get("volumes") == (None if volume is None else [volume])
    total = sum(epc is not None for epc in requests.values())
    assert after["metadata"].get("annotations", {}).get("sgx.intel.com/epc") == (f"{total}Mi" if total else None)


def test_volumes_and_mounts_of_the_user_are_kept() -> None:
    own = {"name": "aesmd-socket", "persistentVolumeClaim": {"claimName": "x"}}
    mount = {"name": "aesmd-socket", "mountPath": "/var/run/aesmd", "readOnly": True}
    after = mutated(pod(container("a", "1Mi", volumeMounts=[mount]), provider="aesmd", volumes=[own]))
    assert after["spec"]["volumes"] == [own]
    assert after["spec"]["containers"][0]["volumeMounts"] == [mount]
    assert after["spec"]["containers"][0]["env"] == [VARIABLE]


def test_another_volume_at_the_socket_path_is_kept_and_the_host_volume_is_added() -> None:
    mount = {"name": "other", "mountPath": "/var/run/aesmd"}
    after = mutated(pod(container("a", "1Mi", volumeMounts=[mount]), provider="aesmd", volumes=[{"name": "other"}]))
    assert after["spec"]["volumes"] == [{"name": "other"}, HOST]
    assert after["spec"]["containers"][0]["volumeMounts"] == [mount]


def test_only_what_changes_is_patched() -> None:
    document = pod(container("a", "512Ki"))
    assert json.loads(msgspec.json.encode(decide_pod(document).patch)) == [
        {"op": "add", "path": "/spec/containers/0/resources/limits/sgx.intel.com~1enclave", "value": "1"},
        {"op": "add", "path": "/spec/containers/0/resources/requests/sgx.intel.com~1enclave", "value": "1"},
        {"op": "add", "path": "/metadata/annotations", "value": {"sgx.intel.com/epc": "512Ki"}},
    ]


def test_a_pod_without_sgx_is_unchanged() -> None:
    document = pod(container("a", resources={"cpu": "1.5"}))
    document["spec"]["containers"][0]["resources"]["requests"]["cpu"] = "1"
    assert decide_pod(document) == Decision()


def test_values_that_users_wrote_for_enclave_and_annotation_are_replaced() -> None:
    document = pod(container("a", "1Mi", resources={"sgx.intel.com/enclave": "2"}))
    document["metadata"]["annotations"] = {"sgx.intel.com/epc": "7", "x": "y"}
    after = mutated(document)
    assert after["spec"]["containers"][0]["resources"]["limits"]["sgx.intel.com/enclave"] == "1"
    assert after["metadata"]["annotations"] == {"sgx.intel.com/epc": "1Mi", "x": "y"}


@pytest.mark.parametrize("amount", ["0", 0, "0Mi", "0e3"])
@pytest.mark.parametrize("provider", [None, "a", "aesmd"])
def test_epc_of_zero_gives_no_device_and_leaves_the_annotation(amount: Any, provider: str | None) -> None:
    document = pod(container("a", amount), container("aesmd", amount), provider=provider)
    document["metadata"].setdefault("annotations", {})["sgx.intel.com/epc"] = "7"
    assert mutated(document) == document
    warnings = decide_pod(document).warnings
    for name in ("a", "aesmd"):
        assert f"container '{name}': sgx.intel.com/epc is 0, so it gets no enclave" in "\n".join(warnings)


def test_a_container_with_epc_of_zero_gets_no_device_beside_one_with_epc() -> None:
    after = mutated(pod(container("a", "1Mi"), container("b", "0"), provider="b", initContainers=[container("c", "0")]))
    assert [devices(one) for one in after["spec"]["containers"]] == [USER, set()]
    assert devices(after["spec"]["initContainers"][0]) == set()


@pytest.mark.parametrize(
    ("one", "resource"),
    [
        (container("a", resources={"sgx.intel.com/enclave": "1"}), "enclave"),
        (container("a", resources={"sgx.intel.com/provision": "1"}), "provision"),
        (container("a", "0", resources={"sgx.intel.com/enclave": "1"}), "enclave"),
        (container("a", "1Mi", resources={"sgx.intel.com/enclave": "2"}), "enclave"),
        (container("a", "1Mi", resources={"sgx.intel.com/provision": "1"}), "provision"),
    ],
)
@pytest.mark.parametrize("is_init", [False, True])
def test_direct_requests_of_devices_are_denied_with_the_option(one: Json, resource: str, is_init: bool) -> None:
    more = [container("w", resources={"sgx.intel.com/enclave": "1"})] * 30 if not is_init else []
    document = pod(*([] if is_init else [one]), *more, initContainers=[one] if is_init else [])
    assert decide_pod(document).denial is None
    denial = decide_pod(document, SgxOptions(epc_required=True)).denial
    assert denial is not None
    assert f"container 'a': sgx.intel.com/{resource} is for internal use" in denial.message


@pytest.mark.parametrize("provider", [None, "a", "aesmd"])
def test_pods_that_request_epc_are_mutated_with_the_option_in_both_reviews(provider: str | None) -> None:
    options = SgxOptions(epc_required=True)
    after = mutated(pod(container("a", "1Mi"), container("b"), provider=provider), options)
    assert after == mutated(pod(container("a", "1Mi"), container("b"), provider=provider))
    assert mutated(after, options) == after


@pytest.mark.parametrize(
    ("limits", "requests", "words"),
    [
        ({"sgx.intel.com/epc": "1"}, {"sgx.intel.com/epc": "2"}, '"sgx.intel.com/epc" limits requests match'),
        ({"sgx.intel.com/epc": "1"}, None, '"sgx.intel.com/epc" limits requests match'),
        (None, {"sgx.intel.com/epc": "1"}, '"sgx.intel.com/epc" limits requests match'),
        ({"sgx.intel.com/provision": "1"}, {}, '"sgx.intel.com/provision" limits requests match'),
        ({"sgx.intel.com.example/x": "1"}, {}, '"sgx.intel.com.example/x" limits requests match'),
        ({"sgx.intel.com/epc": "1.1"}, {"sgx.intel.com/epc": "1.1"}, '"sgx.intel.com/epc" integral'),
        ({"sgx.intel.com/epc": "1500m"}, {"sgx.intel.com/epc": "1500m"}, '"sgx.intel.com/epc" integral'),
        ({"sgx.intel.com/epc": "many"}, {"sgx.intel.com/epc": "many"}, '"sgx.intel.com/epc" quantity'),
    ],
)
def test_invalid_resources_deny_the_pod(limits: Json | None, requests: Json | None, words: str) -> None:
    broken = {"name": "b", "resources": {"limits": limits, "requests": requests}}
    decision = decide_pod(pod(container("a", "1Mi"), broken))
    assert decision.denial is not None
    assert (decision.denial.code, decision.denial.reason) == (403, "Forbidden")
    assert all(word in decision.denial.message for word in words.split())
    assert not decision.patch


@pytest.mark.parametrize(
    ("limit", "request_"), [("1048576", "1Mi"), (1048576, "1Mi"), ("1024Ki", "1.0Mi"), ("1k", "1e3")]
)
def test_the_same_number_in_two_notations_is_the_same(limit: Any, request_: Any) -> None:
    one = {
        "name": "a",
        "resources": {"limits": {"sgx.intel.com/epc": limit}, "requests": {"sgx.intel.com/epc": request_}},
    }
    assert decide_pod(pod(one)).denial is None


def test_names_outside_of_the_namespace_may_have_fractions() -> None:
    assert decide_pod(pod(container("a", resources={"sgx.intel.com.example/x": "1.5"}))).denial is None


def test_only_init_containers_that_request_epc_get_devices() -> None:
    inits = [container("i", "3Mi"), container("j"), container("k", resources={"sgx.intel.com/enclave": "1.5"})]
    after = mutated(pod(container("a", "1Mi"), provider="i", initContainers=inits))
    first, second, third = after["spec"]["initContainers"]
    assert devices(first) == QUOTER
    assert [second, third] == inits[1:]


@pytest.mark.parametrize(
    ("inits", "annotation"),
    [
        ([("i", "3Mi", "")], "3Mi"),
        ([("i", "1Mi", "")], "2Mi"),
        ([("i", "1Mi", "Always")], "3Mi"),
        ([("s", "4Mi", "Always"), ("i", "3Mi", "")], "7Mi"),
        ([("i", "3Mi", ""), ("s", "4Mi", "Always")], "6Mi"),
    ],
)
def test_the_request_is_the_maximum_of_concurrent_containers(
    inits: Sequence[tuple[str, str, str]], annotation: str
) -> None:
    containers_ = [container(name, epc, **({"restartPolicy": policy} if policy else {})) for name, epc, policy in inits]
    after = mutated(pod(container("a", "1Mi"), container("b", "1Mi"), initContainers=containers_))
    assert after["metadata"]["annotations"]["sgx.intel.com/epc"] == annotation


def test_a_restartable_init_container_named_aesmd_is_a_sidecar() -> None:
    daemon = container("aesmd", "1Mi", restartPolicy="Always")
    after = mutated(pod(container("a", "1Mi"), provider="aesmd", initContainers=[daemon]))
    assert after["spec"]["volumes"] == [MEMORY]
    assert devices(after["spec"]["initContainers"][0]) == QUOTER
    assert after["spec"]["initContainers"][0]["volumeMounts"] == [MOUNT]


@pytest.mark.parametrize(
    ("document", "words"),
    [
        (pod(container("a", "1Mi"), provider="zzz"), "quote-provider 'zzz' names no container"),
        (pod(container("a", "1Mi"), container("b"), provider="b"), "quote-provider 'b' names no container"),
        (pod(container("a"), provider="aesmd"), "quote-provider no effect"),
        (pod(container("a", "1Mi"), container("aesmd"), provider="aesmd"), "'aesmd' not sidecar"),
        (pod(container("a", "1025"), runtimeClassName="kata-qemu-sgx"), "1025 Kata"),
        (pod(container("a", resources={"sgx.intel.com/enclave": "1"})), "'a' sgx.intel.com/enclave internal"),
        (pod(container("a", "1Mi", resources={"sgx.intel.com/enclave": "2"})), "'a' sgx.intel.com/enclave internal"),
        (pod(container("a", "1Mi", resources={"sgx.intel.com/provision": "1"})), "sgx.intel.com/provision internal"),
    ],
)
def test_probable_mistakes_cause_warnings_and_no_denial(document: Json, words: str) -> None:
    decision = decide_pod(document)
    assert decision.denial is None
    assert len(decision.warnings) == 1
    assert all(word in decision.warnings[0] for word in words.split())


@pytest.mark.parametrize("provider", [None, "a", "aesmd"])
def test_an_ordinary_pod_causes_no_warnings_in_both_reviews(provider: str | None) -> None:
    document = pod(container("a", "1Mi"), container("b", "1Mi"), provider=provider)
    assert decide_pod(document).warnings == []
    assert decide_pod(mutated(document)) == Decision(warnings=[])


def test_aesmd_without_epc_is_a_sidecar_with_the_option() -> None:
    options = SgxOptions(sidecar_without_epc=True)
    document = pod(container("a", "1Mi"), container("aesmd"), provider="aesmd")
    after = mutated(document, options)
    assert after["spec"]["volumes"] == [MEMORY]
    assert [one["volumeMounts"] for one in after["spec"]["containers"]] == [[MOUNT], [MOUNT]]
    assert devices(after["spec"]["containers"][1]) == set()
    assert decide_pod(document, options).warnings == []


def test_the_annotation_is_rounded_up_to_pages_with_the_option() -> None:
    after = mutated(pod(container("a", "4097")), SgxOptions(whole_pages=True))
    assert after["metadata"]["annotations"]["sgx.intel.com/epc"] == "8Ki"


@pytest.mark.parametrize(
    ("kind", "containers", "volume"), [("emptyDir", ["a"], "emptyDir"), ("hostPath", ["a", "quoted"], "hostPath")]
)
def test_name_directory_and_volume_of_aesmd_can_be_chosen(kind: Any, containers: Sequence[str], volume: str) -> None:
    options = SgxOptions(aesmd_name="quoted", socket_directory="/run/q", socket_volume=kind)
    after = mutated(pod(*(container(name, "1Mi") for name in containers), provider="quoted"), options)
    assert volume in after["spec"]["volumes"][0]
    assert after["spec"]["containers"][0]["volumeMounts"] == [{"name": "aesmd-socket", "mountPath": "/run/q"}]


@pytest.mark.parametrize(("env", "added"), [(["1"], False), (["2", "1"], False), (["1", "2"], True), ([], True)])
def test_the_variable_is_added_unless_its_last_value_matches(env: Sequence[str], added: bool) -> None:
    env_vars = [{"name": "SGX_AESM_ADDR", "value": value} for value in env]
    after = mutated(pod(container("a", "1Mi", env=env_vars), provider="aesmd"))
    assert after["spec"]["containers"][0]["env"] == [*env_vars, *([VARIABLE] if added else [])]


def test_parents_of_added_fields_may_be_null() -> None:
    document = pod(container("a", "1Mi", env=None, volumeMounts=None), volumes=None, initContainers=None)
    document["metadata"]["annotations"] = None
    assert devices(mutated(document)["spec"]["containers"][0]) == USER


@pytest.mark.parametrize("provider", [None, "aesmd"])
def test_thousands_of_containers_are_mutated_completely(provider: str | None) -> None:
    document = pod(*(container(f"c{number}", "1Ki") for number in range(3000)), provider=provider)
    after = mutated(document)
    assert all("enclave" in devices(each) for each in after["spec"]["containers"])
    assert all(("env" in each) == (provider == "aesmd") for each in after["spec"]["containers"])
    assert after["metadata"]["annotations"]["sgx.intel.com/epc"] == "3000Ki"


def test_a_pod_whose_patch_is_too_large_is_denied_and_not_mutated_in_part() -> None:
    decision = decide_pod(pod(*(container(f"c{number}", "1Ki") for number in range(12_000))))
    assert decision.denial is not None
    assert (decision.denial.code, decision.denial.reason) == (413, "RequestEntityTooLarge")
    assert "use fewer containers" in decision.denial.message
    assert not decision.patch


HOSTILE = [
    b'{"metadata": {}, "spec": {"containers": [%b{}]}}' % (b"{}," * 2_000_000),
    b'{"metadata": {}, "spec": {"volumes": [%b{}], "containers": []}}' % (b"{}," * 2_000_000),
    b'{"metadata": {"annotations": {%b"a": "b"}}, "spec": {}}' % (b'"a":"b",' * 800_000),
    b'{"metadata": {}, "spec": {"containers": [{"env": [%b{}]}]}}' % (b"{}," * 2_000_000),
    b'{"metadata": {}, "spec": {"containers": [%b{}]}}' % (b'{"env": [{}, {}]},' * 49_000),
    b'{"metadata": {}, "spec": {"containers": [{"resources": {"limits": {%b"sgx.intel.com/epc": "1"}}}]}}'
    % (b'"a":"1",' * 800_000),
]


@pytest.mark.parametrize("text", HOSTILE, ids=range(len(HOSTILE)))
def test_the_memory_of_a_hostile_pod_is_proportional_to_its_size(text: bytes) -> None:
    tracemalloc.start()
    try:
        steps = mutator(DEFAULTS).steps(Review("u", object=msgspec.Raw(text)))
        for _ in itertools.islice(steps, 50):
            pass
        peak = tracemalloc.get_traced_memory()[1]
    finally:
        tracemalloc.stop()
    assert peak < len(text) + 1_000_000


NAMES = st.sampled_from(["a", "b", "aesmd", "zzz"])
QUANTITIES = st.sampled_from(["1Mi", "1Ki", "1025", 4096, "0", "1e3", "1.5", "x", ""])
EXTRA = st.dictionaries(st.sampled_from(["later", "x~/y", "status"]), st.recursive(st.none() | st.text(), st.lists))
RESOURCES = st.dictionaries(
    st.sampled_from(
        ["sgx.intel.com/epc", "sgx.intel.com/enclave", "sgx.intel.com/provision", "cpu", "sgx.intel.com.x/y"]
    ),
    QUANTITIES | st.sampled_from(["1Mi", "1"]),
)


@st.composite
def containers(draw: st.DrawFn) -> Json:
    containers_: Json = {**draw(EXTRA), "name": draw(NAMES)}
    limits = draw(RESOURCES)
    containers_["resources"] = draw(
        st.sampled_from([None, {"limits": limits, "requests": dict(limits), "claims": []}, {}])
    )
    if draw(st.booleans()):
        containers_["env"] = draw(st.lists(st.sampled_from([VARIABLE, {"name": "X", "valueFrom": {}}, {"name": "Y"}])))
    if draw(st.booleans()):
        containers_["volumeMounts"] = draw(st.lists(st.sampled_from([MOUNT, {"name": "v", "mountPath": "/v", "x": 1}])))
    if draw(st.booleans()):
        containers_["restartPolicy"] = draw(st.sampled_from(["Always", None]))
    return containers_


@st.composite
def pods(draw: st.DrawFn) -> Json:
    annotations = draw(
        st.none()
        | st.fixed_dictionaries({}, optional={"sgx.intel.com/quote-provider": NAMES, "sgx.intel.com/epc": st.text()})
    )
    spec: Json = {**draw(EXTRA), "containers": draw(st.lists(containers(), max_size=4))}
    if draw(st.booleans()):
        spec["initContainers"] = draw(st.lists(containers(), max_size=3))
    if draw(st.booleans()):
        spec["volumes"] = draw(st.lists(st.sampled_from([HOST, {"name": "v", "secret": {}}])))
    return {**draw(EXTRA), "metadata": {**draw(EXTRA), "annotations": annotations}, "spec": spec}


OPTIONS = st.builds(
    SgxOptions,
    aesmd_name=NAMES,
    socket_volume=st.sampled_from(["auto", "hostPath", "emptyDir"]),
    sidecar_without_epc=st.booleans(),
    whole_pages=st.booleans(),
    epc_required=st.booleans(),
)


@given(pods(), OPTIONS)
@settings(deadline=None)
def test_mutation_is_idempotent_and_keeps_all_fields_of_the_user(document: Json, options: SgxOptions) -> None:
    decision = decide_pod(document, options)
    patch = json.loads(msgspec.json.encode(decision.patch))
    if decision.denial is not None:
        assert not patch
        return
    after = apply_json_patch(document, patch)
    assert not decide_pod(after, options).patch
    assert_kept(document, after, ())
    for field in ("containers", "initContainers"):
        for one, other in zip(document["spec"].get(field, ()), after["spec"].get(field, ()), strict=True):
            if ((one["resources"] or {}).get("limits") or {}).get("sgx.intel.com/epc", "0") == "0":
                assert one["resources"] == other["resources"]


def assert_kept(before: Any, after: Any, where: tuple[str, ...]) -> None:
    """All fields are unchanged, except for those that the webhook sets."""
    if where and where[-1] in ("sgx.intel.com/enclave", "sgx.intel.com/provision", "sgx.intel.com/epc"):
        return
    if isinstance(before, dict):
        for key, value in before.items():
            assert_kept(value, after[key], (*where, key))
    elif isinstance(before, list):
        for index, value in enumerate(before):
            assert_kept(value, after[index], (*where, str(index)))
    elif before is not None or where[-1] not in ("annotations", "env", "volumeMounts", "volumes"):
        assert before == after
