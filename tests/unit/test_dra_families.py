"""What the families do for a claim: FPGA programming, work queues, drivers of QAT functions, links of GPUs, aesmd."""

from pathlib import Path
from typing import Any

import pytest
from bitstreams import INTERFACE, NLB0, NLB3, gbs, metadata
from draclaims import World, devices_of, error_of
from fpgadriver import Driver
from fpgatrees import PF, one_port
from trees import gpu_card, link, write

from accelplane.dra import programming
from accelplane.dra.model import ClaimRef
from accelplane.dra.preparer import Preparer
from accelplane.fpga.allocation import HOOK
from accelplane.plugins.fpga import FpgaPlugin
from accelplane.plugins.fpga.config import FpgaConfig
from accelplane.plugins.gpu import GpuPlugin
from accelplane.plugins.idxd import DsaPlugin
from accelplane.plugins.qat import QatPlugin
from accelplane.plugins.sgx import SgxPlugin

pytestmark = pytest.mark.memory

DSA = "0000:6a:01.0"


def config(world: World, kind: str, source: str = "FromClaim", **fields: Any) -> list[dict[str, Any]]:
    parameters = {"apiVersion": f"{world.driver}/v1alpha1", "kind": kind, **fields}
    return [{"source": source, "opaque": {"driver": world.driver, "parameters": parameters}}]


async def refusal(preparer: Preparer, claim: ClaimRef) -> str:
    return error_of((await preparer.prepare([claim]))[claim.uid])


class TestFpga:
    @pytest.fixture(params=["dfl", "opae"])
    def driver(self, request: pytest.FixtureRequest, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Driver:
        """The driver of a card whose port has NLB0, and programs NLB3."""
        driver = Driver(one_port(tmp_path, request.param), NLB3)
        monkeypatch.setattr(programming, "CALL", driver)
        write(tmp_path / "srv/intel.com/fpga" / INTERFACE / f"{NLB3}.gbs", gbs(metadata(afu=NLB3), b"nlb3"))
        return driver

    @pytest.fixture
    def world(self, tmp_path: Path, driver: Driver) -> World:
        return World(tmp_path, FpgaPlugin(FpgaConfig(mode="region")), driver="fpga.intel.com")

    @pytest.mark.parametrize("afu", [NLB3, f"{NLB3[:8]}-{NLB3[8:]}".upper()])
    async def test_port_is_programmed_before_the_answer_and_stays_programmed(
        self, world: World, driver: Driver, afu: str
    ) -> None:
        preparer = await world.start()
        claim = world.claim("a1", world.device(), config=config(world, "FpgaConfig", afu=afu))

        devices_of((await preparer.prepare([claim]))["a1"])

        assert [(port, content) for _fme, port, content in driver.programmed] == [(0, b"nlb3")]
        assert world.journal()["a1"]["devices"][0]["afu"] == NLB3
        edits = world.cdi_file("a1")[f"a1-{world.device()}"]
        assert [node["path"] for node in edits["deviceNodes"]] == [f"/dev/{driver.card.name('port', 0)}"]
        assert HOOK not in str(edits)
        calls = len(driver.calls)
        devices_of((await preparer.prepare([claim]))["a1"])
        await preparer.unprepare([claim])
        assert len(driver.calls) == calls

    async def test_port_that_lost_its_function_is_programmed_again(self, world: World, driver: Driver) -> None:
        preparer = await world.start()
        claim = world.claim("a1", world.device(), config=config(world, "FpgaConfig", afu=NLB3))
        before = await preparer.prepare([claim])
        write(driver.ports()[0] / "afu_id", f"{NLB0}\n")

        assert await preparer.prepare([claim]) == before
        assert len(driver.programmed) == 2

    async def test_claim_stays_prepared_if_its_port_cannot_be_programmed_again(
        self, world: World, driver: Driver
    ) -> None:
        preparer = await world.start()
        claim = world.claim("a1", world.device(), config=config(world, "FpgaConfig", afu=NLB3))
        before = await preparer.prepare([claim])
        journal, file = world.journal(), world.cdi_file("a1")
        write(driver.ports()[0] / "afu_id", f"{NLB0}\n")
        driver.afu = NLB0

        assert "after programming" in await refusal(preparer, claim)

        assert world.journal() == journal
        assert world.cdi_file("a1") == file
        driver.afu = NLB3
        assert await preparer.prepare([claim]) == before
        await preparer.unprepare([claim])
        assert world.leftovers() == []

    async def test_file_of_the_region_is_found_by_its_name(self, world: World, driver: Driver, tmp_path: Path) -> None:
        write(tmp_path / "srv/intel.com/fpga" / INTERFACE / "loopback.gbs", gbs(metadata(afu=NLB3), b"by name"))
        preparer = await world.start()

        await preparer.prepare([world.claim("a1", world.device(), config=config(world, "FpgaConfig", afu="loopback"))])

        assert driver.programmed[0][2] == b"by name"

    async def test_function_without_bitstream_changes_nothing(self, world: World, driver: Driver) -> None:
        preparer = await world.start()
        other = "ce48969398f05f33946d560708be108a"

        message = await refusal(
            preparer, world.claim("a1", world.device(), config=config(world, "FpgaConfig", afu=other))
        )

        assert f"no bitstream for AFU {other} in region {INTERFACE}" in message
        assert world.leftovers() == []
        assert driver.programmed == []

    async def test_wrong_function_after_programming_fails_the_claim(self, world: World, driver: Driver) -> None:
        preparer = await world.start()
        driver.afu = NLB0

        message = await refusal(
            preparer, world.claim("a1", world.device(), config=config(world, "FpgaConfig", afu=NLB3))
        )

        assert f"AFU id is {NLB0} after programming" in message
        assert world.leftovers() == []

    async def test_port_is_reset_at_the_end_if_the_class_says_so(self, world: World, driver: Driver) -> None:
        preparer = await world.start()
        configs = config(world, "FpgaConfig", "FromClass", afu=NLB3, release="reset")
        claim = world.claim("a1", world.device(), config=configs)
        devices_of((await preparer.prepare([claim]))["a1"])
        assert 0x40 not in [request & 0xFF for _node, request in driver.calls]

        assert await preparer.unprepare([claim]) == {"a1": None}

        assert driver.calls[-1][1] & 0xFF == 0x40
        assert world.leftovers() == []

    async def test_port_that_vanished_is_unprepared(self, world: World, driver: Driver, tmp_path: Path) -> None:
        preparer = await world.start()
        configs = config(world, "FpgaConfig", "FromClass", afu=NLB3, release="reset")
        claim = world.claim("a1", world.device(), config=configs)
        devices_of((await preparer.prepare([claim]))["a1"])
        (tmp_path / "dev" / driver.card.name("port", 0)).unlink()

        assert await preparer.unprepare([claim]) == {"a1": None}

    async def test_unit_is_the_card(self, world: World) -> None:
        assert [offer.unit.text("pciAddress") for offer in world.offers.units().values()] == [PF]


class TestQueues:
    @pytest.fixture
    def queue(self, tmp_path: Path) -> Path:
        function = tmp_path / "sys/devices/pci0000:6a" / DSA
        directory = function / "dsa0/wq0.0"
        for name, text in {"state": "enabled", "type": "user", "mode": "dedicated", "clients": "0"}.items():
            write(directory / name, f"{text}\n")
        link(tmp_path / "sys/bus/dsa/devices/dsa0", function / "dsa0")
        link(tmp_path / "sys/bus/pci/devices" / DSA, function)
        write(tmp_path / "dev/dsa/wq0.0", "")
        return directory

    @pytest.fixture
    def world(self, tmp_path: Path, queue: Path) -> World:
        return World(tmp_path, DsaPlugin(), driver="dsa.intel.com")

    async def test_enabled_queue_is_prepared(self, world: World) -> None:
        preparer = await world.start()

        devices_of((await preparer.prepare([world.claim("a1", world.device())]))["a1"])

        nodes = world.cdi_file("a1")[f"a1-{world.device()}"]["deviceNodes"]
        assert [node["path"] for node in nodes] == ["/dev/dsa/wq0.0"]

    async def test_queue_that_was_disabled_meanwhile_is_refused_with_its_state(self, world: World, queue: Path) -> None:
        preparer = await world.start()
        write(queue / "state", "disabled\n")

        assert "its state is 'disabled', expected 'enabled'" in await refusal(
            preparer, world.claim("a1", world.device())
        )
        assert world.leftovers() == []

    async def test_queue_that_was_removed_is_refused(self, world: World, queue: Path) -> None:
        preparer = await world.start()
        queue.rename(queue.with_name("wq0.7"))

        assert "has no queue 0" in await refusal(preparer, world.claim("a1", world.device()))

    async def test_queue_in_use_is_refused_if_the_claim_says_so(self, world: World, queue: Path) -> None:
        preparer = await world.start()
        write(queue / "clients", "2\n")
        devices_of((await preparer.prepare([world.claim("a1", world.device())]))["a1"])
        await preparer.unprepare([ClaimRef("shop", "a1", "claim-a1")])

        configs = config(world, "WorkQueueConfig", requireClientsZero=True)
        assert "is open in 2 processes" in await refusal(preparer, world.claim("a2", world.device(), config=configs))


class TestGpu:
    @pytest.fixture
    def world(self, tmp_path: Path) -> World:
        for index in (0, 1):
            gpu_card(tmp_path, index, mei=("mei0",))
        write(tmp_path / "dev/mei0", "")
        function = tmp_path / "sys/devices/pci0000:00/0000:03:00.0"
        link(tmp_path / "sys/bus/pci/devices/0000:03:00.0", function)
        return World(tmp_path, GpuPlugin())

    @pytest.mark.parametrize(
        ("mode", "mounts"),
        [
            ("none", []),
            ("single", [f"/dev/dri/by-path/pci-0000:03:00.0-{kind}" for kind in ("card", "render")]),
            ("all", ["/dev/dri/by-path"]),
        ],
    )
    async def test_links_are_those_of_the_configuration(self, world: World, mode: str, mounts: list[str]) -> None:
        preparer = await world.start()

        await preparer.prepare([world.claim("a1", world.device(), config=config(world, "GpuConfig", byPath=mode))])

        edits = world.cdi_file("a1")[f"a1-{world.device()}"]
        assert [mount["containerPath"] for mount in edits.get("mounts", [])] == mounts

    async def test_links_by_hook_need_the_option_of_the_plugin(self, world: World) -> None:
        preparer = await world.start()
        claim = world.claim("a1", world.device(), config=config(world, "GpuConfig", byPath="links"))

        assert "needs the option bypath: links" in await refusal(preparer, claim)

    async def test_affinity_mask_is_that_of_the_request(self, world: World) -> None:
        preparer = await world.start()
        configs = config(world, "GpuConfig", affinityMask="0.1")
        configs[0]["requests"] = ["r1"]

        await preparer.prepare([world.claim("a1", world.device(0), world.device(1), config=configs)])

        found = {name: edits.get("env", []) for name, edits in world.cdi_file("a1").items()}
        assert [name for name, env in found.items() if "ZE_AFFINITY_MASK=0.1" in env] == ["a1-r1"]

    async def test_management_engine_is_for_admin_access_only(self, world: World) -> None:
        preparer = await world.start()
        await preparer.prepare([world.claim("a1", world.device())])
        monitor = world.api.add(ClaimRef("shop", "a2", "monitor"), [world.result(world.device(), adminAccess=True)])
        await preparer.prepare([monitor])

        assert "mei0" not in str(world.cdi_file("a1"))
        assert "/dev/mei0" in str(world.cdi_file("a2"))


class TestQat:
    async def test_variables_are_numbered_through_the_claim_and_a_missing_driver_is_an_error(
        self, tmp_path: Path
    ) -> None:
        address = "0000:6b:00.{}"
        for number in (1, 2):
            function = tmp_path / "sys/devices/pci0000:6b" / address.format(number)
            for name, text in {"vendor": "0x8086", "device": "0x4941", "class": "0x0b4000"}.items():
                write(function / name, f"{text}\n")
            link(function / "driver", tmp_path / "sys/bus/pci/drivers/vfio-pci")
            link(function / "iommu_group", tmp_path / f"sys/kernel/iommu_groups/{number}")
            link(tmp_path / "sys/bus/pci/devices" / function.name, function)
            write(tmp_path / f"dev/vfio/{number}", "")
        write(tmp_path / "dev/vfio/vfio", "")
        world = World(tmp_path, QatPlugin(), driver="qat.intel.com")
        preparer = await world.start()

        await preparer.prepare([world.claim("a1", world.device(0), world.device(1))])

        env = [world.cdi_file("a1")[f"a1-r{number}"]["env"] for number in (0, 1)]
        assert [[each for each in one if each.startswith("QAT")] for one in env] == [
            ["QAT0=0000:6b:00.1"], ["QAT1=0000:6b:00.2"]
        ]  # fmt: skip
        await preparer.unprepare([ClaimRef("shop", "a1", "claim-a1")])
        configs = config(world, "QatConfig", driver="igb_uio")
        message = await refusal(preparer, world.claim("a2", world.device(), config=configs))
        assert "is bound to vfio-pci, the claim requires igb_uio" in message


class TestSgx:
    async def test_aesmd_is_mounted_if_the_class_says_so(self, tmp_path: Path) -> None:
        for name in ("sgx_enclave", "sgx_provision"):
            write(tmp_path / "dev" / name, "")
        world = World(tmp_path, SgxPlugin(), driver="sgx.intel.com")
        preparer = await world.start()
        configs = config(world, "SgxConfig", "FromClass", aesmd="socket")

        assert "/var/run/aesmd does not exist" in await refusal(
            preparer, world.claim("a1", "sgx-enclave", config=configs)
        )
        (tmp_path / "var/run/aesmd").mkdir(parents=True)
        devices_of((await preparer.prepare([world.claim("a1", "sgx-enclave", config=configs)]))["a1"])

        file = world.cdi_file("a1")
        assert [mount["containerPath"] for mount in file["a1-sgx-enclave"]["mounts"]] == ["/var/run/aesmd"]
        assert "SGX_AESM_ADDR=1" in file["a1-r0"]["env"]
