"""The counts of extended resources that pods request."""

import msgspec
import pytest
from hypothesis import given
from hypothesis import strategies as st

from accelplane.fleet.families import is_known
from accelplane.kube.kinds import Pod, pod_requests

I915 = "gpu.intel.com/i915"


def container(count: int | str, *, sidecar: bool = False) -> dict[str, object]:
    resources = {"resources": {"requests": {I915: count, "cpu": "1"}}}
    return {**resources, "restartPolicy": "Always"} if sidecar else resources


@pytest.mark.parametrize(
    ("containers", "before", "count"),
    [
        ([container("2"), container("1")], [], 3),
        ([container("1")], [container("4")], 4),
        ([container("3")], [container("2")], 3),
        ([container("1")], [container("2", sidecar=True)], 3),
        ([container("1")], [container("2", sidecar=True), container("2")], 4),
        ([container("1")], [container("2"), container("2", sidecar=True)], 3),
        ([container(5)], [], 5),
        ([container("1k")], [], 1000),
        ([container("no number"), container("-1"), container("0")], [], None),
        ([], [], None),
    ],
    ids=[
        "containers are added", "a larger init container counts", "a smaller one does not", "a sidecar is added",
        "an init container runs beside earlier sidecars", "and not beside later ones", "number", "quantity",
        "no quantity, or none of it", "nothing",
    ],
)  # fmt: skip
def test_requests_are_counted_as_by_the_scheduler(
    containers: list[object], before: list[object], count: int | None
) -> None:
    spec = {"containers": containers, "initContainers": before}
    pod = msgspec.convert({"metadata": {"name": "one"}, "spec": spec}, Pod)
    assert pod_requests(pod.spec, is_known) == ({I915: count} if count is not None else {})


@pytest.mark.untraced
@given(st.dictionaries(st.text(), st.one_of(st.text(), st.integers(), st.floats(allow_nan=False))))
def test_requests_of_any_quantities_are_whole_numbers(quantities: dict[str, str | int | float]) -> None:
    spec = {"containers": [{"resources": {"requests": quantities}}]}
    pod = msgspec.convert({"metadata": {}, "spec": spec}, Pod)
    found = pod_requests(pod.spec, lambda _name: True)
    assert found.keys() <= quantities.keys()
    assert all(isinstance(count, int) and count > 0 for count in found.values())


def test_the_overhead_of_a_pod_is_added_and_a_limit_is_a_request() -> None:
    spec = {"containers": [{"resources": {"limits": {I915: "2"}}}], "overhead": {I915: "1", "cpu": "250m"}}
    pod = msgspec.convert({"metadata": {}, "spec": spec}, Pod)
    assert pod_requests(pod.spec, is_known) == {I915: 3}
