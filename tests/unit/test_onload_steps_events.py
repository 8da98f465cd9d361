"""Nodes with any labels and any order of events end in the desired state."""

from typing import Any

import msgspec
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from onloadcluster import Cluster, app_pod, plugin_pod
from onloadsteps import NEW, OLD, TARGET

from accelplane.onload.observed import NodeView
from accelplane.onload.plan import Target

LABEL = st.sampled_from([None, OLD, NEW, "7.0"])
NODES = st.builds(
    lambda module, gate, sfc, loaded, apps, plugin: {
        "module": module,
        "gate": gate,
        "sfc": sfc,
        "module_loaded": loaded or module is not None,
        "module_loaded_version": module,
        "sfc_loaded": sfc is not None,
        "sfc_loaded_version": sfc,
        "apps": (app_pod(),) if apps else (),
        "plugins": (plugin_pod(plugin),) if gate is not None else (),
    },
    LABEL,
    LABEL,
    LABEL,
    st.booleans(),
    st.booleans(),
    st.sampled_from(["r", "old", None]),
)
EVENTS = st.one_of(
    st.tuples(st.just("decide")),
    st.tuples(st.just("decide")),
    st.tuples(st.just("react"), st.integers(0, 3)),
    st.tuples(st.just("react"), st.integers(0, 3)),
    st.tuples(st.just("time"), st.sampled_from([1, 30, 1000])),
    st.tuples(st.just("app"), st.integers(0, 3)),
    st.tuples(st.just("protect"), st.integers(0, 3)),
    st.tuples(st.just("ready"), st.integers(0, 3)),
    st.tuples(st.just("held"), st.integers(0, 3)),
    st.tuples(st.just("version"), st.sampled_from([OLD, NEW])),
    st.tuples(st.just("sfc"), st.booleans()),
    st.tuples(st.just("kmm"), st.booleans()),
    st.tuples(st.just("select"), st.integers(0, 3), st.booleans()),
    st.tuples(st.just("paused"), st.booleans()),
)


def apply_event(cluster: Cluster, target: Target, event: tuple[Any, ...]) -> Target:
    """One event. Returns the target after it."""
    names = list(cluster.nodes)
    name = names[event[1] % len(names)] if len(event) > 1 and isinstance(event[1], int) else ""
    node = cluster.nodes.get(name)
    match event[0], node:
        case "decide", _:
            for action in cluster.decide(target).actions:
                cluster.apply(action)
        case "react", NodeView():
            cluster.react(name)
        case "time", _:
            cluster.now += event[1]
        case "app", NodeView(advertised=True):
            cluster.change(name, apps=(*node.apps, app_pod()) if len(node.apps) < 3 else node.apps)
        case "protect", NodeView():
            cluster.protected ^= {name}
        case "ready" | "held", NodeView():
            cluster.change(name, **{event[0]: not getattr(node, event[0])})
        case "version" | "sfc" | "kmm" | "paused", _:
            return msgspec.structs.replace(target, **{event[0]: event[1]})
        case "select", NodeView():
            cluster.change(name, selected=event[2])
        case _:
            pass
    return target


@pytest.mark.untraced
@settings(deadline=None)
@given(
    nodes=st.lists(NODES, min_size=1, max_size=4),
    events=st.lists(EVENTS, max_size=60),
    limit=st.integers(1, 3),
    strict=st.booleans(),
)
def test_any_order_of_events_ends_in_the_desired_state(
    nodes: list[dict[str, Any]], events: list[tuple[Any, ...]], limit: int, strict: bool
) -> None:
    views = [msgspec.structs.replace(NodeView(name=f"n{index}"), **each) for index, each in enumerate(nodes)]
    cluster = Cluster(views)
    target = msgspec.structs.replace(TARGET, max_unavailable=limit, strict=strict)
    for event in events:
        target = apply_event(cluster, target, event)
    assert cluster.most_down <= limit
    cluster.protected.clear()
    for name in cluster.nodes:
        cluster.change(name, ready=True, held=False)
    target = msgspec.structs.replace(target, paused=False, node_timeout=1e9)
    plan = cluster.run(target)
    assert plan.is_complete, plan.steps
    assert cluster.most_down <= limit
    for node in cluster.nodes.values():
        module = target.version if target.kmm else None
        expected = (module, module if target.sfc else None, target.version, None)
        found = (node.module, node.sfc, node.gate, node.progress)
        assert found == (expected if node.selected else (None, None, None, None))
    for action in cluster.decide(Target(version="", deleting=True)).actions:
        cluster.apply(action)
    assert cluster.run(Target(version="", deleting=True)).is_complete
    assert all(node.is_clean for node in cluster.nodes.values())
