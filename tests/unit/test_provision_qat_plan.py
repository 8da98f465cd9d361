"""Plans for QAT devices: the devices, the steps, arbitrary contents of attributes, groups that are opened."""

from hypothesis import given
from hypothesis import strategies as st
from kernelhost import KernelHost, snapshot
from qatnodes import CY, PF, SYS, Node, qat

from accelplane.provision.qat import QatConfig, planners
from accelplane.provision.steps import Outcome, apply, preview
from accelplane.simulate.offload import QatSpec


def test_devices_are_found_by_their_exact_ids_in_every_domain() -> None:
    node = Node(
        QatSpec(model="4xxx", bdf="0000:61:00.0", vfs=2),
        QatSpec(model="c6xx", bdf="0000:65:00.0"),
        QatSpec(model="dh895xcc", bdf="0000:69:00.0"),
        QatSpec(model="6xxx", bdf="10000:01:00.0"),
    )
    assert [outcome.device for outcome in node.preview()] == ["0000:61:00.0", "0000:65:00.0", "10000:01:00.0"]
    assert [outcome.device for outcome in node.preview(QatConfig(pf_ids=("0435",)))] == ["0000:69:00.0"]


def test_a_plan_shows_the_steps_and_the_current_state() -> None:
    node = Node(qat())
    before = snapshot(node.kernel)
    (outcome,) = node.preview(QatConfig(services="sym;asym", auto_reset="on"))
    assert outcome == Outcome(
        device=PF,
        state="pending",
        steps=[
            "state up -> down",
            "services dc -> sym;asym",
            "state down -> up",
            "VFs 0 -> 16",
            "auto-reset off -> on",
            "driver of the VFs -> vfio-pci",
        ],
        notes=[],
        now={"driver": "4xxx", "state": "up", "services": "dc", "auto-reset": "off", "VFs": "0 of 16"},
    )
    assert (snapshot(node.kernel), node.writes) == (before, [])


def test_groups_of_unchanged_vfs_are_not_opened() -> None:
    node = Node(qat(vfs=2, vf_driver="vfio-pci"))
    opened: list[str] = []

    class Watched(KernelHost):
        def open(self, path: str, flags: int, mode: int = 0o600) -> int:
            opened.append(path)
            return super().open(path, flags, mode)

    host = Watched(node.kernel, node.writes)
    for config, groups in ((QatConfig(), 0), (CY, 2)):
        (planner,) = planners(host, config)
        planner(host)
        assert len([path for path in opened if path.startswith("/dev/vfio/")]) == groups


JUNK = st.binary(max_size=40) | st.sampled_from(
    [b"", b"\n", b"-1", b"16\n", b"0x10", b"up\n", b"down\n", b"dc;sym\n", b"9" * 99]
)


@given(
    st.dictionaries(
        st.sampled_from(
            [
                *("device", "sriov_totalvfs", "sriov_numvfs", "virtfn0/driver_override"),
                *("qat/state", "qat/cfg_services", "qat/auto_reset"),
            ]
        ),
        JUNK,
    )
)
def test_any_attribute_content_results_in_a_reported_state(contents: dict[str, bytes]) -> None:
    node = Node(qat(vfs=2))
    to_do = planners(node.host(), CY)
    for name, content in contents.items():
        node.kernel.set_content(f"{SYS}/{name}", content)
    (planned,) = preview("/", to_do, host=node.host)
    (outcome,) = apply("/", to_do, timeout=0, host=node.host)
    assert (planned.device, outcome.device) == (PF, PF)
