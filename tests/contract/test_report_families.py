"""The documents that `accelplane node` serves for all families, decoded as the fleet page and the commands do it."""

import asyncio
import urllib.request
from pathlib import Path

import msgspec
from conftest import Run
from kubelets import Embedded
from msgspec.structs import replace
from waiting import until

from accelplane import simulate
from accelplane.report.decoding import decode_inventory, decode_readings
from accelplane.simulate import NodeSpec, SimulatedNode
from accelplane.simulate.offload import FpgaSpec

EVERY_KIND = Path(simulate.__file__).with_name("configs") / "demo.yaml"
FAMILIES = {"gpu", "npu", "qat", "dsa", "iaa", "dlb", "fpga", "sgx"}


async def test_the_documents_of_all_families_are_decoded_without_loss(
    tmp_path: Path, directory: str, run: Run, unused_tcp_port: int
) -> None:
    SimulatedNode(tmp_path / "tree").build(replace(NodeSpec.load(EVERY_KIND), fpgas=(FpgaSpec(),)))
    kubelet = Embedded(directory)
    await kubelet.start()
    address = f"127.0.0.1:{unused_tcp_port}"
    run("accelplane", "node", "-http-address", address)

    async def get(path: str) -> bytes:
        def read() -> bytes:
            with urllib.request.urlopen(f"http://{address}/api/v1/{path}", timeout=10) as answer:
                return bytes(answer.read())

        return await asyncio.to_thread(read)

    async def is_complete() -> bool:
        try:
            found = decode_inventory(await get("inventory"))
        except OSError:
            return False
        return {each.name for each in found.plugins if each.units} >= FAMILIES

    await until(is_complete, 60)
    body = await get("inventory")
    found = decode_inventory(body)
    served = msgspec.json.decode(body)
    assert msgspec.json.decode(msgspec.json.encode(found)) == served, (
        "the agent serves the fields that readers know, and no others"
    )
    assert {each.plugin for each in found.units} >= FAMILIES
    values = await get("readings")
    readings = decode_readings(values)
    assert msgspec.json.decode(msgspec.json.encode(readings)) == msgspec.json.decode(values)
    devices = {(each.plugin, each.device) for plugin in readings.plugins for each in plugin.devices}
    assert {(each.plugin, each.device) for each in found.units if each.device} <= devices
    await kubelet.kill()
