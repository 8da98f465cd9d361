"""SGX with a kubelet: IDs stay listed without their device node, and containers get each node once."""

import asyncio
import os
from collections.abc import Mapping
from pathlib import Path

import pytest
from agentsockets import plugins_dir
from conftest import Start
from kubelets import Counts, Kubelet, PodRejected
from peer import Peer, refusal
from trees import write

from accelplane.plugins.sgx import SgxConfig, SgxPlugin

# Longer than any test: changes are detected by events.
PATIENT = {"safety_interval": 3600.0}
ENCLAVE, PROVISION = "sgx.intel.com/enclave", "sgx.intel.com/provision"


@pytest.fixture
def node(tmp_path: Path) -> Path:
    """The directory of the two device nodes."""
    for name in ("sgx_enclave", "sgx_provision"):
        write(tmp_path / "dev" / name, "")
    return tmp_path / "dev"


def both(capacity: int, allocatable: int) -> Mapping[str, Counts]:
    return {ENCLAVE: Counts(capacity, allocatable), PROVISION: Counts(capacity, allocatable)}


@pytest.mark.parametrize("vanishing", ["sgx_enclave", "sgx_provision"])
async def test_all_ids_are_unhealthy_while_a_device_node_is_missing(
    node: Path, kubelet: Kubelet, start_agent: Start, vanishing: str
) -> None:
    await start_agent(PATIENT, sgx=SgxPlugin())
    await kubelet.until(lambda resources: resources == both(110, 110))
    await kubelet.run_pod("before", {ENCLAVE: 1})
    (node / vanishing).unlink()
    await kubelet.until(lambda resources: resources == both(110, 0))
    with pytest.raises(PodRejected):
        await kubelet.run_pod("meanwhile", {ENCLAVE: 1})
    (node / vanishing).touch()
    await kubelet.until(lambda resources: resources == both(110, 110))
    container = await kubelet.run_pod("after", {ENCLAVE: 1, PROVISION: 1})
    assert [device.host_path for device in container.devices] == ["/dev/sgx_enclave", "/dev/sgx_provision"]


async def test_nodes_that_appear_after_the_start_are_registered(
    tmp_path: Path, directory: str, kubelet: Kubelet, start_agent: Start
) -> None:
    (tmp_path / "dev").mkdir()
    agent = await start_agent(PATIENT, sgx=SgxPlugin())
    await asyncio.wait_for(agent.runners["sgx"].scan.completed.wait(), 10)
    assert kubelet.resources() == {}
    for name in ("sgx_enclave", "sgx_provision"):
        (tmp_path / "dev" / name).touch()
    await kubelet.until(lambda resources: resources == both(110, 110))
    assert {"sgx.intel.com-enclave.sock", "sgx.intel.com-provision.sock"} <= set(os.listdir(plugins_dir(directory)))


async def test_a_container_with_two_ids_gets_the_node_once(node: Path, kubelet: Kubelet, start_agent: Start) -> None:
    await start_agent(PATIENT, sgx=SgxPlugin(SgxConfig(enclave_limit=2, provision_limit=0)))
    await kubelet.until(lambda resources: resources == {ENCLAVE: (2, 2)})
    container = await kubelet.run_pod("pod", {ENCLAVE: 2})
    (device,) = container.devices
    assert (device.host_path, device.container_path, device.permissions) == (
        "/dev/sgx_enclave", "/dev/sgx_enclave", "rw",
    )  # fmt: skip


async def test_ids_above_a_lowered_limit_are_removed_without_delay(
    node: Path, kubelet: Kubelet, start_agent: Start
) -> None:
    agent = await start_agent(PATIENT, sgx=SgxPlugin())
    await kubelet.until(lambda resources: resources == both(110, 110))
    lowered = SgxPlugin(SgxConfig(enclave_limit=5, provision_limit=5))
    agent.runners["sgx"].reconfigure(lowered, agent.settings)
    await kubelet.until(lambda resources: resources == both(5, 5))
    (node / "sgx_enclave").unlink()
    await kubelet.until(lambda resources: resources == both(5, 0))


async def test_a_registration_tool_gets_efivarfs_only_if_it_exists(
    node: Path, directory: str, kubelet: Kubelet, start_agent: Start
) -> None:
    cdi = Path(directory, "cdi")
    cdi.write_text("in the way")
    await start_agent(PATIENT, sgx=SgxPlugin(SgxConfig(dcap_infra_resources=True)))
    await kubelet.until(lambda resources: resources.get("sgx.intel.com/registration") == (1, 1))
    async with Peer(f"{directory}/device-plugins/sgx.intel.com-registration.sock") as plugin:
        _code, text = await refusal(plugin.allocate(["registration-1"]))
        assert text.startswith(f"sgx.intel.com/registration: cannot write {cdi}/intel.cdi.k8s.io-sgx-efivarfs.yaml")
        cdi.unlink()
        (container,) = await plugin.allocate(["registration-1"])
    assert [device.name for device in container.cdi_devices] == ["intel.cdi.k8s.io/sgx=efivarfs"]
    assert [device.host_path for device in container.devices] == ["/dev/sgx_enclave", "/dev/sgx_provision"]
    assert (cdi / "intel.cdi.k8s.io-sgx-efivarfs.yaml").read_text() == (
        "---\n"
        "cdiVersion: 0.5.0\n"
        "containerEdits: {}\n"
        "devices:\n"
        "- containerEdits:\n"
        "    mounts:\n"
        "    - containerPath: /run/efivars\n"
        "      hostPath: efivarfs\n"
        "      options:\n"
        "      - rw\n"
        "      - nosuid\n"
        "      - nodev\n"
        "      - noexec\n"
        "      - relatime\n"
        "      type: efivarfs\n"
        "  name: efivarfs\n"
        "kind: intel.cdi.k8s.io/sgx\n"
    )
