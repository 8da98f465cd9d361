"""Configurations of containers whose pod authors attack the hook: only allocated ports, only granted functions.

The webhook and the plugin set some entries; authors of pods choose all others, and the order of all.
"""

import ctypes
import json
import operator
import struct
from collections.abc import Sequence
from typing import Any

import pytest
from bitstreams import INTERFACE, NLB0, NLB3, gbs, metadata
from fpgadriver import Driver
from fpgatrees import Card, with_vf
from hypothesis import event, given
from hypothesis import strategies as st
from trees import write

from accelplane.fpga import FpgaError
from accelplane.fpga.allocation import HOOK, annotations, hook_arguments
from accelplane.fpga.hook import read_request, run
from accelplane.fpga.program import RetryPolicy
from accelplane.host import Host

Json = dict[str, Any]

IDLE = "0" * 32
CRIO = "io.kubernetes.cri-o.Annotations"
QUICK = RetryPolicy(timeout=30, attempts=1, interval=0.001)


class Programmer(Driver):
    """A card on which the programmed function is that of the bitstream."""

    def program(self, name: str, argument: bytearray) -> None:
        size, address = struct.unpack_from("<IQ", argument, 12)
        self.afu = ctypes.string_at(address, size).decode()
        super().program(name, argument)


@pytest.fixture(scope="module", params=["dfl", "opae"])
def card(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> Card:
    """A card with two ports of one region, and a store with two functions for it."""
    card = with_vf(tmp_path_factory.mktemp("card"), request.param)
    for afu in (NLB0, NLB3):
        write(card.root / f"srv/intel.com/fpga/{INTERFACE}/{afu}.gbs", gbs(metadata(afu=afu), afu.encode()))
    return card


def device(path: str, type_: object = "c", major: object = 244, minor: object = 0) -> Json:
    return {"path": path, "type": type_, "major": major, "minor": minor}


PORT_NAMES = st.builds(
    "{}{}".format, st.sampled_from(["dfl-port.", "intel-fpga-port.", "dfl-fme.", "port."]), st.integers(0, 2)
)
PATHS = st.builds(
    "{}{}".format, st.sampled_from(["/dev/", "/dev/", "/x/", "/dev/x/", "//dev/", "/dev/./", ""]), PORT_NAMES
)
# Block volumes are at any path.
DEVICES = st.builds(
    device,
    PATHS | st.sampled_from(["/dev/fuse", "/"]),
    st.sampled_from(["b", "b", "c", "c", "u", "p", None]),
    st.sampled_from([244, 243, 7, "244", None, -1]),
    st.integers(0, 2),
)
NAMES = st.builds(
    "{}{}".format,
    st.sampled_from(["FPGA_REGION_", "FPGA_AFU_", "FPGA_REGIONS", "FPGA_REGION"]),
    st.sampled_from(["1", "2", "3", "01", ""]),
)
VALUES = st.sampled_from([INTERFACE, NLB0, NLB3, "0", "1", "2", "3", ""])
FORGED = st.dictionaries(
    st.sampled_from(["com.intel.fpga.mode", "com.intel.fpga.ports/dfl-fme.1", "com.intel.fpga.ports/x", CRIO, CRIO]),
    st.sampled_from(
        ["any", "dfl-port.0,dfl-port.1", "fpga.intel.com/region", json.dumps({"com.intel.fpga.ports/x": "any"})]
    ),
)


@st.composite
def configurations(draw: st.DrawFn, card: Card) -> tuple[Json, set[str], Sequence[str]]:
    """A configuration, the allocated ports, and the granted functions."""
    allocated = draw(st.sets(st.sampled_from([0, 1]), max_size=2))
    ports = [card.name("port", number) for number in sorted(allocated)]
    granted = draw(st.lists(st.sampled_from([NLB0, NLB3]), max_size=2))
    env = {"FPGA_REGIONS": str(len(granted))}
    for number, afu in enumerate(granted, 1):
        env |= {f"FPGA_REGION_{number}": INTERFACE, f"FPGA_AFU_{number}": afu}
    pair = [("FPGA_REGION_{}", INTERFACE), ("FPGA_AFU_{}", draw(st.sampled_from([NLB0, NLB3])))]
    beyond = [(name.format(len(granted) + 1), value) for name, value in pair]
    others = draw(st.just([]) | st.just(beyond) | st.lists(st.tuples(NAMES, VALUES), max_size=4))
    repeated = draw(st.booleans())  # runtimes may keep a second entry of an image
    entries = [f"{name}={value}" for name, value in (*env.items(), *(o for o in others if repeated or o[0] not in env))]
    of_host = [device(f"/dev/{card.name('port', number)}", minor=number) for number in (0, 1)]
    own = [of_host[number] for number in allocated]
    privileged = draw(st.booleans())  # such containers have all devices of the host
    similar = st.builds(operator.or_, st.sampled_from(of_host), st.sampled_from([{"type": "b"}, {"major": 7}]))
    chosen = draw(st.lists(DEVICES | similar, max_size=4))
    devices = of_host + chosen if privileged else own + [each for each in chosen if each not in of_host]
    config: Json = {
        "process": {"env": draw(st.permutations(entries))},
        "linux": {"devices": draw(st.permutations(devices))},
    }
    record = dict(annotations(card.name("fme", 0), ports)) if ports else {}
    forged = draw(FORGED)
    way = draw(st.sampled_from(["cdi", "cdi", "hooks.d", "none"]))
    if way == "hooks.d":
        annotated = {**forged, **record, CRIO: json.dumps(record)}
        stage = draw(st.sampled_from(["createRuntime", "prestart"]))
        return {**config, "annotations": annotated, "hooks": {stage: [{"path": HOOK}]}}, set(ports), granted
    hooks = [{"path": HOOK, "args": [*hook_arguments([name])]} for name in ports] + [{"path": HOOK}, {"path": "/bin/x"}]
    if way == "none" and not privileged:
        hooks.append({"path": HOOK, "args": ["x", "-ports=any"]})
    return (
        {
            **config,
            "annotations": {**forged, "io.kubernetes.cri.container-type": "container"},
            "hooks": {"createRuntime": draw(st.permutations(hooks))},
        },
        set(ports),
        granted,
    )


@given(data=st.data())
def test_only_allocated_ports_are_programmed_and_only_with_granted_functions(card: Card, data: st.DataObject) -> None:
    config, allocated, granted = data.draw(configurations(card))
    driver = Programmer(card, "")
    before = {path.name: IDLE for path in driver.ports()}
    for path in driver.ports():
        write(path / "afu_id", f"{IDLE}\n")
    bundle = write(card.root / "bundle/config.json", json.dumps(config)).parent
    try:
        run(Host(card.root), read_request(json.dumps({"bundle": str(bundle)}).encode()), call=driver, retry=QUICK)
    except FpgaError as error:
        event(f"rejected: {str(error)[:24]}")
        assert driver.programmed == []
        return
    event(f"programmed: {len(granted)}")
    after = {path.name: (path / "afu_id").read_text().strip() for path in driver.ports()}
    changed = {name: afu for name, afu in after.items() if afu != before[name]}
    assert changed.keys() <= allocated
    assert sorted(changed.values()) == sorted(granted)
