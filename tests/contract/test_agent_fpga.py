"""FPGAs with a kubelet: programmed, crashed and unplugged cards, and the mode of the node."""

import asyncio
import base64
import logging
import struct
import threading
from collections.abc import AsyncIterator, Iterator, Mapping
from pathlib import Path
from typing import Any

import pytest
from bitstreams import INTERFACE, NLB0, NLB3
from conftest import Run, Start
from fpgatrees import Card, one_port
from kubelets import Counts, Kubelet, embedded_only
from mountpoints import mounted_for_test
from node_api import NodeApi, node_api
from peer import Peer, refusal
from tls_peer import TOKEN
from tls_peer import Peer as Server
from waiting import until

from accelplane.apiserver import ApiServer, NoCredentials
from accelplane.fpga.ids import af_type
from accelplane.node.agent import Agent
from accelplane.node.settings import ConfigurationError, Settings
from accelplane.plugins.fpga import FpgaPlugin
from accelplane.plugins.fpga.config import FpgaConfig
from accelplane.plugins.fpga.nodemode import ANNOTATION
from accelplane.simulate import NodeSpec
from accelplane.simulate.kernel import Kernel
from accelplane.simulate.offload import FpgaSpec

# Longer than any test: changes are detected by events, or because the plugin reads again.
PATIENT = {"safety_interval": 3600.0}
SOON = 0.05
WITH_NLB0 = f"fpga.intel.com/{af_type(INTERFACE, NLB0)}"
WITH_NLB3 = f"fpga.intel.com/{af_type(INTERFACE, NLB3)}"
REGION = f"fpga.intel.com/region-{INTERFACE}"
CARD = "0000:63:00.0"


class Memory:
    """Of a process that programs a DFL port with NLB3: the structure at address 0, the bitstream at 64."""

    def __init__(self, port: int = 0) -> None:
        self.content = bytearray(struct.pack("<IIIIQ", 24, 0, port, 32, 64).ljust(64, b"\0"))
        self.content += bytes.fromhex(NLB3) + bytes(16)

    def read(self, address: int, length: int) -> bytes:
        return bytes(self.content[address : address + length])

    def write(self, address: int, data: bytes) -> None:
        self.content[address : address + len(data)] = data


def program(kernel: Kernel) -> None:
    kernel.ioctl("dfl-fme.0", 0xB680, 0, Memory())


@pytest.fixture
def kernel() -> Kernel:
    return Kernel(NodeSpec(fpgas=[FpgaSpec(interface=INTERFACE, afus=(NLB0, NLB0))]))


@pytest.fixture
def root(kernel: Kernel, tmp_path: Path) -> Iterator[Path]:
    with mounted_for_test(kernel, tmp_path) as where:
        yield where


# Cards of an emulated kernel, which sends no events for changed IDs.


@embedded_only("what the kubelet does is tested with the others")
async def test_a_port_keeps_its_resource_while_it_is_programmed_and_then_has_another(
    kernel: Kernel, root: Path, kubelet: Kubelet, start_agent: Start
) -> None:
    agent = await start_agent(PATIENT, fpga=FpgaPlugin(interval=SOON))
    await kubelet.until(lambda resources: resources == {WITH_NLB0: (2, 2)})
    card = kernel.fpga(CARD)
    card.outcomes.append("hang")
    programming = threading.Thread(target=program, args=(kernel,))
    programming.start()
    try:
        await until(lambda: card.attempts == 1)
        before = agent.runners["fpga"].scan.count
        # Another scan, while the AFU ID of the port is unreadable.
        agent.runners["fpga"].scan.request()
        await until(lambda: agent.runners["fpga"].scan.count > before and not agent.runners["fpga"].scan.failing)
        assert card.ports[0].disabled
        assert kubelet.resources() == {WITH_NLB0: (2, 2)}
    finally:
        card.resume.set()
        await asyncio.to_thread(programming.join)
    await kubelet.until(lambda resources: resources == {WITH_NLB0: (1, 1), WITH_NLB3: (1, 1)})
    container = await kubelet.run_pod("pod", {WITH_NLB3: 1})
    assert [device.host_path for device in container.devices] == ["/dev/dfl-port.0"]


@embedded_only("what the kubelet does is tested with the others")
@pytest.mark.parametrize("published", [("af", WITH_NLB0, 2), ("region", REGION, 1)], ids=["af", "region"])
async def test_a_crashed_card_is_unhealthy_and_an_unplugged_card_is_removed(
    kernel: Kernel, root: Path, kubelet: Kubelet, start_agent: Start, published: tuple[str, str, int]
) -> None:
    mode, resource, ids = published
    agent = await start_agent(PATIENT, fpga=FpgaPlugin(FpgaConfig(mode=mode), interval=SOON))
    await kubelet.until(lambda resources: resources == {resource: (ids, ids)})
    kernel.fpga(CARD).crash()
    await kubelet.until(lambda resources: resources == {resource: (ids, 0)})
    reasons = {device.reason for device in agent.runners["fpga"].context.devices.listed}
    assert all(reason.endswith("the card's firmware has crashed") for reason in reasons)
    kernel.unplug(CARD)
    await kubelet.until(lambda resources: resources == {})


@embedded_only("what the kubelet does is tested with the others")
async def test_a_card_that_is_plugged_in_later_is_found(tmp_path: Path, kubelet: Kubelet, start_agent: Start) -> None:
    await start_agent(PATIENT, fpga=FpgaPlugin())
    one_port(tmp_path)
    await kubelet.until(lambda resources: resources == {WITH_NLB0: (1, 1)})


# Containers.


async def test_a_container_of_a_region_is_programmed_by_the_hook_or_does_not_start(
    tmp_path: Path, directory: str, kubelet: Kubelet, start_agent: Start
) -> None:
    one_port(tmp_path)
    cdi = Path(directory, "cdi")
    cdi.write_text("in the way")
    await start_agent(PATIENT, fpga=FpgaPlugin(FpgaConfig(mode="region")))
    await kubelet.until(lambda resources: resources == {REGION: (1, 1)})
    socket = f"{directory}/device-plugins/fpga.intel.com-region-{INTERFACE}.sock"
    file = cdi / "intel.cdi.k8s.io-fpga-dfl-fme.0.yaml"
    async with Peer(socket) as plugin:
        _code, text = await refusal(plugin.allocate(["dfl-fme.0"]))
        assert text.startswith(f"{REGION}: cannot write {file}")
        cdi.unlink()
        (container,) = await plugin.allocate(["dfl-fme.0"])
        written = file.read_text()
        file.write_text(written.replace("crihook", "oldhook"))
        await plugin.allocate(["dfl-fme.0"])
    assert [device.name for device in container.cdi_devices] == ["intel.cdi.k8s.io/fpga=dfl-fme.0"]
    assert [device.host_path for device in container.devices] == ["/dev/dfl-port.0"]
    assert dict(container.annotations) == {
        "com.intel.fpga.mode": "fpga.intel.com/region",
        "com.intel.fpga.ports/dfl-fme.0": "dfl-port.0",
    }
    assert file.read_text() == written == (
        "---\n"
        "cdiVersion: 0.5.0\n"
        "containerEdits: {}\n"
        "devices:\n"
        "- containerEdits:\n"
        "    hooks:\n"
        "    - args:\n"
        "      - intel-fpga-crihook\n"
        "      - -ports=dfl-port.0\n"
        "      hookName: createRuntime\n"
        "      path: /opt/intel/fpga-sw/intel-fpga-crihook\n"
        "  name: dfl-fme.0\n"
        "kind: intel.cdi.k8s.io/fpga\n"
    )  # fmt: skip


async def test_names_of_april_2020_are_served_in_a_usual_directory(
    tmp_path: Path, kubelet: Kubelet, start_agent: Start
) -> None:
    one_port(tmp_path)
    await start_agent(PATIENT, fpga=FpgaPlugin(FpgaConfig(resource_naming="legacy63")))
    name = f"fpga.intel.com/{INTERFACE[:31]}{NLB0}"
    await kubelet.until(lambda resources: resources == {name: (1, 1)})


async def test_a_directory_that_cannot_hold_sockets_is_rejected_before_one_is_created(
    tmp_path: Path, directory: str
) -> None:
    one_port(tmp_path)
    long = Path(directory, "x" * 40)
    (long / "device-plugins").mkdir(parents=True)
    agent = Agent(Settings(root=str(tmp_path), kubelet_dir=str(long)), {"fpga": FpgaPlugin()})
    with pytest.raises(ConfigurationError, match=r"fpga\.intel\.com-af-.*\.sock: a socket path of 1.. bytes"):
        await asyncio.wait_for(agent.run(), 10)
    assert list((long / "device-plugins").iterdir()) == []


# The node's annotation.


@pytest.fixture
async def node(tmp_path: Path) -> AsyncIterator[tuple[NodeApi, Server]]:
    """The Node `one` in mode region, and its server, which outlives the agents."""
    directory = tmp_path / "api"
    directory.mkdir()
    async with node_api(directory) as (api, server):
        api.node["metadata"]["annotations"] = {ANNOTATION: "region"}
        yield api, server


@pytest.fixture
def card(tmp_path: Path) -> Card:
    return one_port(tmp_path)


def following(api: ApiServer, mode: str = "af", **options: Any) -> FpgaPlugin:
    return FpgaPlugin(FpgaConfig(mode=mode, node_name="one", **options), api=lambda: api)


@embedded_only("what the kubelet does is tested with the others")
async def test_the_annotation_of_the_node_sets_the_mode_and_invalid_values_are_ignored(
    node: tuple[NodeApi, Server], card: Card, kubelet: Kubelet, start_agent: Start, caplog: pytest.LogCaptureFixture
) -> None:
    api, server = node
    modes: set[str] = set()

    def has_counts(expected: Mapping[str, Counts | tuple[int, int]]) -> Any:
        def holds(resources: Mapping[str, Counts]) -> bool:
            modes.update(resources)
            return resources == expected

        return holds

    await start_agent(PATIENT, fpga=following(server.api))
    await kubelet.until(has_counts({REGION: (1, 1)}))
    assert modes == {REGION}
    await api.change("metadata", "annotations", ANNOTATION, "af")
    await kubelet.until(has_counts({WITH_NLB0: (1, 1)}))
    rest = "expected one of af, region, regiondevel; the mode stays af"
    messages = [f"node one: annotation {ANNOTATION} is {value!r}, {rest}" for value in ("regional", "")]
    for value, message in zip(("regional", ""), messages, strict=True):
        await api.change("metadata", "annotations", ANNOTATION, value)
        await until(lambda message=message: message in caplog.messages)
    assert kubelet.resources() == {WITH_NLB0: (1, 1)}
    await api.change("metadata", "annotations", ANNOTATION, "regiondevel")
    await kubelet.until(has_counts({REGION: (1, 1)}))
    container = await kubelet.run_pod("pod", {REGION: 1})
    assert [device.host_path for device in container.devices] == ["/dev/dfl-port.0", "/dev/dfl-fme.0"]
    assert container.cdi_devices == ()
    await api.change("metadata", "annotations", ANNOTATION, None)
    await kubelet.until(has_counts({REGION: (1, 0), WITH_NLB0: (1, 1)}))
    await kubelet.delete_pod("pod")
    await kubelet.until(has_counts({WITH_NLB0: (1, 1)}))
    assert [caplog.messages.count(message) for message in messages] == [1, 1]


@embedded_only("what the kubelet does is tested with the others")
async def test_an_old_runtime_gets_only_regions_without_a_hook(
    node: tuple[NodeApi, Server], card: Card, kubelet: Kubelet, start_agent: Start, caplog: pytest.LogCaptureFixture
) -> None:
    api, server = node
    api.node["status"]["nodeInfo"] = {"containerRuntimeVersion": "containerd://1.6.20"}
    agent = await start_agent(PATIENT, fpga=following(server.api))
    await kubelet.until(lambda resources: resources == {REGION: (1, 0)})
    (reason,) = {device.reason for device in agent.runners["fpga"].context.devices.listed}
    assert reason.startswith("the container runtime 'containerd://1.6.20' has no CDI, so no hook would program")
    assert any(reason in message for message in caplog.messages)
    await api.change("metadata", "annotations", ANNOTATION, "regiondevel")
    await kubelet.until(lambda resources: resources == {REGION: (1, 1)})
    await api.change("metadata", "annotations", ANNOTATION, "region")
    await kubelet.until(lambda resources: resources == {REGION: (1, 0)})
    await api.change("status", "nodeInfo", "containerRuntimeVersion", "containerd://1.7.35")
    await kubelet.until(lambda resources: resources == {REGION: (1, 1)})


@embedded_only("what the kubelet does is tested with the others")
@pytest.mark.parametrize(
    "runtime_and_cdi",
    [("containerd://1.6.20", "off"), ("containerd://2.1.5", "auto"), ("containerd://1.10.0", "only"),
     ("cri-o://1.6.0", "auto"), ("containerd://unknown", "auto"), ("", "auto")],
    ids=" ".join,
)  # fmt: skip
async def test_regions_are_published_for_a_runtime_of_unknown_version(
    node: tuple[NodeApi, Server], card: Card, kubelet: Kubelet, start_agent: Start, runtime_and_cdi: tuple[str, str]
) -> None:
    (api, server), (runtime, cdi) = node, runtime_and_cdi
    api.node["status"]["nodeInfo"] = {"containerRuntimeVersion": runtime}
    await start_agent(PATIENT, fpga=following(server.api, cdi=cdi))
    await kubelet.until(lambda resources: resources == {REGION: (1, 1)})


@embedded_only("what the kubelet does is tested with the others")
async def test_without_the_api_server_the_option_counts_until_it_answers(
    node: tuple[NodeApi, Server], card: Card, kubelet: Kubelet, start_agent: Start, caplog: pytest.LogCaptureFixture
) -> None:
    api, server = node
    away = ("503 Service Unavailable", {"reason": "ServiceUnavailable", "message": "later"})
    api.refuse["GET"] = [away, away]
    await start_agent(PATIENT, fpga=following(server.api))
    await kubelet.until(lambda resources: resources == {WITH_NLB0: (1, 1)})
    assert "node one not read, the mode is af: " in "\n".join(caplog.messages)
    await kubelet.until(lambda resources: resources == {REGION: (1, 1)})


@embedded_only("what the kubelet does is tested with the others")
async def test_a_missing_api_server_is_logged_and_the_plugin_serves(
    tmp_path: Path, kubelet: Kubelet, start_agent: Start, caplog: pytest.LogCaptureFixture
) -> None:
    def no_request() -> ApiServer:
        raise NoCredentials("not in a cluster", "no variables")

    one_port(tmp_path)
    await start_agent(PATIENT, fpga=FpgaPlugin(FpgaConfig(node_name="one"), api=no_request))
    await kubelet.until(lambda resources: resources == {WITH_NLB0: (1, 1)})
    assert "node one not read, the mode is af: not in a cluster: no variables" in caplog.messages


async def test_a_pod_without_a_service_account_serves_with_the_configured_mode(
    tmp_path: Path, kubelet: Kubelet, start_agent: Start, caplog: pytest.LogCaptureFixture
) -> None:
    one_port(tmp_path)
    with caplog.at_level(logging.INFO):
        await start_agent(PATIENT, fpga=FpgaPlugin(FpgaConfig(node_name="one", mode="region"), api=lambda: None))
        await kubelet.until(lambda resources: resources == {REGION: (1, 1)})
    message = f"the pod has no service account: node one's annotation {ANNOTATION} is not read, the mode is region"
    assert message in caplog.messages
    assert [record.message for record in caplog.records if record.levelno > logging.INFO] == []


async def test_a_node_without_fpgas_sends_no_requests(
    node: tuple[NodeApi, Server], tmp_path: Path, kubelet: Kubelet, start_agent: Start
) -> None:
    _api, server = node
    agent = await start_agent(PATIENT, fpga=following(server.api))
    await asyncio.wait_for(agent.runners["fpga"].scan.completed.wait(), 10)
    assert server.requests == []
    one_port(tmp_path)
    await kubelet.until(lambda resources: resources == {REGION: (1, 1)})
    assert server.requests


@embedded_only("what the kubelet does is tested with the others")
async def test_the_command_takes_its_mode_from_the_node_by_a_kubeconfig(
    node: tuple[NodeApi, Server], tmp_path: Path, kubelet: Kubelet, run: Run
) -> None:
    _api, server = node
    one_port(tmp_path / "tree")
    authority = base64.b64encode((server.directory / "ca.crt").read_bytes()).decode()
    (tmp_path / "kubeconfig").write_text(
        "current-context: it\n"
        "contexts: [{name: it, context: {cluster: there, user: me}}]\n"
        f"clusters: [{{name: there, cluster: {{server: 'https://x:1', certificate-authority-data: {authority}}}}}]\n"
        f"users: [{{name: me, user: {{token: {TOKEN}}}}}]\n"
    )
    where = (f"-kubeconfig={tmp_path}/kubeconfig", "-master", f"https://{server.api.address}", "--node-name", "one")
    process = run("intel_fpga_device_plugin", "-mode=af", *where, "-v=1")
    await process.wait_for_log("FPGA driver DFL, mode region by node one's annotation")
    await kubelet.until(lambda resources: resources == {REGION: (1, 1)})
    assert await process.terminate() == 0
