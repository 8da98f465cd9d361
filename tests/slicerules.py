"""Devices of slices that the API accepts and refuses, for its local copy and for a real API server."""

from collections.abc import Mapping
from typing import Any

Json = dict[str, Any]
LONG = "a" * 64
PER_COUNTER = {"value": "1"}


def document(**device: Any) -> Json:
    devices = [{"name": "one", **device}]
    pool = {"name": "node-1", "generation": 1, "resourceSliceCount": 1}
    spec = {"driver": "gpu.intel.com", "nodeName": "node-1", "pool": pool, "devices": devices}
    return {"metadata": {"name": "node-1-gpu.intel.com-0"}, "spec": spec}


def attributes(count: int) -> Mapping[str, Json]:
    return {f"a{number}": {"int": number} for number in range(count)}


def counters(count: int) -> Mapping[str, Json]:
    return {f"c{number}": PER_COUNTER for number in range(count)}


def policy(value: str = "10", **fields: Any) -> Json:
    return {"allowMultipleAllocations": True, "capacity": {"shares": {"value": value, "requestPolicy": fields}}}


VALID: list[Json] = [
    {},
    {"attributes": {"a": {"string": "x" * 64}, "resource.kubernetes.io/numaNode": {"int": 0}}},
    {"attributes": {"a": {"version": "1.2.3-rc.1+b"}}},
    {"attributes": attributes(31), "capacity": {"memory": {"value": "16Gi"}}},
    {"taints": [{"key": "gpu.intel.com/health", "value": "hot", "effect": "None"}]},
    policy(default="1"),
    policy(default="1", validRange={"min": "1"}),
    policy(default="4", validRange={"min": "1", "max": "10", "step": "3"}),
    policy(default="2", validValues=["1", "2"]),
    {"consumesCounters": [{"counterSet": "set", "counters": counters(32)}]},
]  # fmt: skip

INVALID: list[tuple[Json, str]] = [
    ({"name": "One"}, ".name"),
    ({"name": LONG}, ".name"),
    ({"name": ""}, ".name"),
    ({"attributes": {"a-b": {"int": 1}}}, ".attributes[a-b]"),
    ({"attributes": {"a" * 33: {"int": 1}}}, f".attributes[{'a' * 33}]"),
    ({"attributes": {"/a": {"int": 1}}}, ".attributes[/a]"),
    ({"attributes": {f"{LONG}/a": {"int": 1}}}, f".attributes[{LONG}/a]"),
    ({"attributes": {"a": {}}}, ".attributes[a]"),
    ({"attributes": {"a": {"int": 1, "bool": True}}}, ".attributes[a]"),
    ({"attributes": {"a": {"string": "é" * 33}}}, ".attributes[a]"),
    ({"attributes": {"a": {"int": 2**63}}}, ".attributes[a]"),
    ({"attributes": {"a": {"version": "1.2"}}}, ".attributes[a]"),
    ({"attributes": {"a": {"version": "1.02.3"}}}, ".attributes[a]"),
    ({"attributes": {"a": {"version": f"1.2.3-{LONG}"}}}, ".attributes[a]"),
    ({"attributes": attributes(32), "capacity": {"memory": {"value": "1"}}}, ""),
    ({"capacity": {"memory": {"value": "much"}}}, ".capacity[memory]"),
    ({"capacity": {"m.": {"value": "1"}}}, ".capacity[m.]"),
    ({"capacity": {"shares": {"value": "2", "requestPolicy": {"default": "1"}}}}, ".capacity[shares]"),
    (policy(validRange={"min": "1"}), ".capacity[shares]"),
    (policy(default="x"), ".capacity[shares]"),
    (policy(default="1", validRange={}), ".capacity[shares]"),
    (policy(default="1", validRange={"min": "2"}), ".capacity[shares]"),
    (policy(default="3", validRange={"min": "1", "max": "2"}), ".capacity[shares]"),
    (policy(default="1", validRange={"min": "1", "max": "11"}), ".capacity[shares]"),
    (policy(default="1", validRange={"min": "1", "step": "0"}), ".capacity[shares]"),
    (policy(default="1", validRange={"min": "1", "step": "10"}), ".capacity[shares]"),
    (policy(default="2", validRange={"min": "1", "step": "2"}), ".capacity[shares]"),
    (policy(default="1", validRange={"min": "1", "max": "4", "step": "2"}), ".capacity[shares]"),
    (policy(default="1", validValues=["2", "1"]), ".capacity[shares]"),
    (policy(default="1", validValues=["1", "1"]), ".capacity[shares]"),
    (policy(default="3", validValues=["1", "2"]), ".capacity[shares]"),
    (policy(default="1", validValues=["1", "11"]), ".capacity[shares]"),
    (policy(default="1", validValues=[str(number) for number in range(11)]), ".capacity[shares]"),
    (policy(default="1", validValues=["1"], validRange={"min": "1"}), ".capacity[shares]"),
    ({"taints": [{"key": LONG, "effect": "NoSchedule"}]}, ".taints[0]"),
    ({"taints": [{"key": "a b", "effect": "NoSchedule"}]}, ".taints[0]"),
    ({"taints": [{"key": "a", "value": "too hot", "effect": "NoSchedule"}]}, ".taints[0]"),
    ({"taints": [{"key": "a", "effect": "PreferNoSchedule"}]}, ".taints[0]"),
    ({"consumesCounters": [{"counterSet": "Set", "counters": counters(1)}]}, ".consumesCounters[0]"),
    ({"consumesCounters": [{"counterSet": "set", "counters": {}}]}, ".consumesCounters[0].counters"),
    ({"consumesCounters": [{"counterSet": "set", "counters": counters(33)}]}, ".consumesCounters[0].counters"),
    ({"consumesCounters": [{"counterSet": "set", "counters": {"c_1": PER_COUNTER}}]},
     ".consumesCounters[0].counters"),
    ({"consumesCounters": [{"counterSet": f"s{number}", "counters": counters(1)} for number in range(3)]},
     ".consumesCounters"),
    ({"consumesCounters": [{"counterSet": "set", "counters": counters(1)}] * 2}, ".consumesCounters"),
]  # fmt: skip
"""Devices with one violation each, and the path of its field in the device."""

STRICTER: list[tuple[Json, str]] = [
    ({"attributes": {"a/b/c": {"int": 1}}}, ".attributes[a/b/c]"),
    ({"attributes": {"a": {"version": f"1.2.{'3' * 19}"}}}, ".attributes[a]"),
    (policy(default="11", validRange={"min": "1"}), ".capacity[shares]"),
    (policy(default="1", validRange={"min": "-1"}), ".capacity[shares]"),
    (policy("16E", default="1", validRange={"min": "1", "max": "16E"}), ".capacity[shares]"),
    ({"taints": [{"key": f"k{number}", "effect": "NoSchedule"} for number in range(5)]}, ".taints"),
]  # fmt: skip
"""As `INVALID`, but some versions accept them."""
