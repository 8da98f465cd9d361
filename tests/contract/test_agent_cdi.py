"""CDI files: written before a device is listed, complete at each allocation, removed when unused."""

import asyncio
import os
import shutil
import stat
from collections.abc import Sequence
from pathlib import Path
from typing import ClassVar

import pytest
import yaml
from conftest import Run, Start
from gadgets import GADGET, Table, gadget
from kubelets import Kubelet, embedded_only
from peer import Peer, refusal
from waiting import until

from accelplane.devices import CdiDevice, CdiHook, CdiMount, CdiNode, Device
from accelplane.node.agent import Agent
from accelplane.simulate.tree import SimulatedNode

pytestmark = pytest.mark.memory

KIND = "example.com/gadget"
PATIENT = {"safety_interval": 3600.0}


def cdi(key: str, **more: Sequence[object]) -> CdiDevice:
    fields = {"nodes": (CdiNode(f"/dev/{key}", f"/dev/{key}"),), **more}
    return CdiDevice(kind=KIND, name=key, **fields)  # type: ignore[arg-type]


def listed_ids(*keys: str) -> list[Device]:
    return [gadget(key, cdi=cdi(key)) for key in keys]


def hooked(key: str) -> Device:
    return gadget(key, cdi=cdi(key, hooks=(CdiHook("createRuntime", "/bin/program", ("program", "-x")),)))


class Listed(Table):
    cdi_kinds: ClassVar[Sequence[str]] = (KIND,)


@pytest.fixture
def files(directory: str) -> Path:
    return Path(directory, "cdi")


def names(files: Path) -> list[str]:
    return sorted(os.listdir(files)) if files.exists() else []


def file_of(key: str) -> str:
    return f"example.com-gadget-{key}.yaml"


def peer(directory: str) -> Peer:
    return Peer(f"{directory}/device-plugins/example.com-gadget.sock")


async def scan(agent: Agent) -> None:
    runner = agent.runners["table"]
    scans = runner.scan.count
    runner.scan.request()
    await until(lambda: runner.scan.count > scans and not runner._publishing.locked())


async def test_files_are_complete_before_the_kubelet_gets_the_devices(
    kubelet: Kubelet, start_agent: Start, files: Path
) -> None:
    lists: list[list[str]] = []
    await start_agent(table=Listed(listed_ids("a", "b")))

    def is_known(resources: object) -> bool:
        if resources:
            lists.append(names(files))
        return bool(resources)

    await kubelet.until(is_known)
    assert lists == [[file_of("a"), file_of("b")]]


async def test_a_file_has_the_layout_that_other_tools_write(kubelet: Kubelet, start_agent: Start, files: Path) -> None:
    device = cdi(
        "a",
        mounts=(CdiMount("/host", "/in", "none", ("bind", "ro")),),
        hooks=(CdiHook("createRuntime", "/bin/program", ("program", "-x"), ("A=1",), 5),),
        env=("B=2",),
    )
    await start_agent(table=Listed([gadget("a", cdi=device)]))
    await kubelet.until(lambda resources: GADGET in resources)
    assert stat.S_IMODE(os.stat(files / file_of("a")).st_mode) == 0o644
    assert stat.S_IMODE(os.stat(files).st_mode) == 0o755
    assert (
        (files / file_of("a")).read_text()
        == """\
---
cdiVersion: 0.5.0
containerEdits: {}
devices:
- containerEdits:
    deviceNodes:
    - hostPath: /dev/a
      path: /dev/a
      permissions: rw
    env:
    - B=2
    hooks:
    - args:
      - program
      - -x
      env:
      - A=1
      hookName: createRuntime
      path: /bin/program
      timeout: 5
    mounts:
    - containerPath: /in
      hostPath: /host
      options:
      - bind
      - ro
      type: none
  name: a
kind: example.com/gadget
"""
    )


@pytest.mark.parametrize("damage", ["deleted", "emptied", "altered", "directory gone"])
async def test_a_damaged_cdi_file_is_restored_when_the_device_is_allocated(
    kubelet: Kubelet, start_agent: Start, files: Path, damage: str
) -> None:
    await start_agent(PATIENT, table=Listed(listed_ids("a", "b")))
    await kubelet.until(lambda resources: GADGET in resources)
    whole = (files / file_of("a")).read_text()
    match damage:
        case "deleted":
            (files / file_of("a")).unlink()
        case "emptied":
            (files / file_of("a")).write_text("")
        case "altered":
            (files / file_of("a")).write_text(whole.replace("/dev/a", "/dev/x"))
        case _:
            shutil.rmtree(files)
    container = await kubelet.run_pod("pod", {GADGET: 2})
    assert sorted(container.cdi_devices) == ["example.com/gadget=a", "example.com/gadget=b"]
    assert (files / file_of("a")).read_text() == whole
    assert names(files) == [file_of("a"), file_of("b")]


async def test_only_the_file_of_a_changed_device_is_rewritten(
    kubelet: Kubelet, start_agent: Start, files: Path
) -> None:
    plugin = Listed(listed_ids("a", "b"))
    agent = await start_agent(PATIENT, table=plugin)
    await kubelet.until(lambda resources: GADGET in resources)
    before = os.stat(files / file_of("b"))
    plugin.found = [gadget("a", cdi=cdi("a", env=("NEW=1",))), *listed_ids("b")]
    await scan(agent)
    await until(lambda: "NEW=1" in (files / file_of("a")).read_text())
    after = os.stat(files / file_of("b"))
    assert (before.st_ino, before.st_mtime_ns) == (after.st_ino, after.st_mtime_ns)


async def test_an_existing_definition_of_another_program_is_used(
    kubelet: Kubelet, start_agent: Start, files: Path, caplog: pytest.LogCaptureFixture
) -> None:
    files.mkdir()
    document = {"cdiVersion": "0.6.0", "kind": KIND, "devices": [{"name": "a", "containerEdits": {"env": ["X=1"]}}]}
    (files / "theirs.json").write_text(yaml.dump(document))
    agent = await start_agent(PATIENT, table=Listed(listed_ids("a", "b")))
    await kubelet.until(lambda resources: GADGET in resources)
    assert names(files) == [file_of("b"), "theirs.json"]
    container = await kubelet.run_pod("pod", {GADGET: 2})
    assert sorted(container.cdi_devices) == ["example.com/gadget=a", "example.com/gadget=b"]
    assert names(files) == [file_of("b"), "theirs.json"]
    for _ in range(3):
        await scan(agent)
    messages = [record.message for record in caplog.records if "defined in" in record.message]
    assert messages == [f"CDI device example.com/gadget=a is already defined in {files}/theirs.json; that file is used"]
    (files / "theirs.json").unlink()
    async with peer(kubelet.directory) as plugin:
        await plugin.allocate(["a"])
    assert names(files) == [file_of("a"), file_of("b")]


@pytest.mark.parametrize(
    "content",
    [b"", b"\xff\xfe\0", b"kind: [", b"kind: 1\ndevices: 2", b"- a\n- b", b"kind: example.com/gadget", b"&a [*a, *a]",
     b"kind: example.com/gadget\ndevices: [{name: [a]}]", b"? {a: b}\n: c", b"a" * 2_000_000, b"[" * 10_000],
    ids=range(11),
)  # fmt: skip
@embedded_only("the files are under test, the kubelet only shows that the agent goes on")
async def test_other_files_that_are_not_definitions_are_skipped(
    kubelet: Kubelet, start_agent: Start, files: Path, content: bytes
) -> None:
    files.mkdir()
    (files / "odd.yaml").write_bytes(content)
    await start_agent(table=Listed(listed_ids("a")))
    await kubelet.until(lambda resources: resources == {GADGET: (1, 1)})
    assert names(files) == [file_of("a"), "odd.yaml"]


async def test_directories_fifos_and_links_among_the_files_are_skipped(
    kubelet: Kubelet, start_agent: Start, files: Path
) -> None:
    files.mkdir()
    (files / "directory.yaml").mkdir()
    os.mkfifo(files / "fifo.yaml")
    (files / "loop.yaml").symlink_to("loop.yaml")
    (files / "nowhere.json").symlink_to("/nowhere")
    (files / "endless.json").symlink_to("/dev/zero")
    writer = os.open(files / "fifo.yaml", os.O_RDWR)
    try:
        await start_agent(table=Listed(listed_ids("a")))
        await kubelet.until(lambda resources: resources == {GADGET: (1, 1)})
    finally:
        os.close(writer)
    assert file_of("a") in names(files)


# A directory that cannot be written


async def test_devices_use_device_specs_and_hooks_fail_the_pod_without_a_writable_cdi_directory(
    directory: str, kubelet: Kubelet, start_agent: Start, files: Path, caplog: pytest.LogCaptureFixture
) -> None:
    files.write_text("in the way")
    agent = await start_agent(PATIENT, table=Listed([*listed_ids("classic"), hooked("programmed")]))
    await kubelet.until(lambda resources: resources == {GADGET: (2, 2)})
    async with peer(directory) as plugin:
        (container,) = await plugin.allocate(["classic"])
        assert [node.host_path for node in container.devices] == ["/dev/classic"]
        assert not container.cdi_devices
        code, text = await refusal(plugin.allocate(["programmed"]))
        assert (code, text) == (
            "UNKNOWN", f"example.com/gadget: cannot write {files}/{file_of('programmed')}: File exists",
        )  # fmt: skip
        for _ in range(3):
            await scan(agent)
        messages = [record.message for record in caplog.records if record.message.startswith("cannot write")]
        assert len([text for text in messages if "programmed" in text]) == 1
        files.unlink()
        (container,) = await plugin.allocate(["programmed"])
        assert [device.name for device in container.cdi_devices] == ["example.com/gadget=programmed"]
    assert file_of("programmed") in names(files)


async def test_a_definition_that_breaks_the_specification_is_never_written(
    directory: str, kubelet: Kubelet, start_agent: Start, files: Path
) -> None:
    bad = gadget("bad", cdi=CdiDevice(kind="no-slash", name="bad", hooks=(CdiHook("createRuntime", "/bin/x"),)))
    await start_agent(table=Listed([*listed_ids("a"), bad]))
    await kubelet.until(lambda resources: resources == {GADGET: (2, 2)})
    assert names(files) == [file_of("a")]
    async with peer(directory) as plugin:
        code, text = await refusal(plugin.allocate(["bad"]))
        assert (code, "no-slash" in text) == ("UNKNOWN", True)


# Files of removed devices


async def test_the_file_of_a_removed_device_is_kept_while_a_pod_uses_it(
    kubelet: Kubelet, start_agent: Start, files: Path
) -> None:
    monitor = Device(resource="monitor", id="all", nodes=(), topology=None)  # has no file
    plugin = Listed([*listed_ids("a", "b", "c"), monitor])
    agent = await start_agent(PATIENT, table=plugin)
    await kubelet.until(lambda resources: resources == {GADGET: (3, 3), "example.com/monitor": (1, 1)})
    await kubelet.run_pod("monitor", {"example.com/monitor": 1})
    allocated = (await kubelet.run_pod("pod", {GADGET: 1})).device_ids[GADGET][0]
    kept, removed = [key for key in "abc" if key != allocated]
    plugin.found = [*listed_ids(kept), monitor]
    await scan(agent)
    await kubelet.until(lambda resources: resources[GADGET] == (2, 1))
    await until(lambda: file_of(removed) not in names(files))
    assert names(files) == sorted([file_of(allocated), file_of(kept)])
    await kubelet.delete_pod("pod")
    await kubelet.run_pod("next", {})  # a kubelet 1.31 counts the last admitted pod until it admits another one
    await kubelet.until(lambda resources: resources[GADGET] == (1, 1))
    await until(lambda: names(files) == [file_of(kept)])


async def test_without_a_kubelet_cdi_files_are_not_removed(directory: str, start_agent: Start, files: Path) -> None:
    os.mkdir(f"{directory}/device-plugins")
    plugin = Listed(listed_ids("a", "b"))
    agent = await start_agent(PATIENT, table=plugin)
    await until(lambda: len(names(files)) == 2)
    plugin.found = listed_ids("a")
    await scan(agent)
    await until(lambda: len(agent.runners["table"].context.devices.listed) == 1)
    assert names(files) == [file_of("a"), file_of("b")]


async def test_files_of_an_earlier_process_are_removed_and_those_of_others_are_kept(
    kubelet: Kubelet, start_agent: Start, files: Path
) -> None:
    files.mkdir()
    for name, kind, devices in (
        (file_of("old"), KIND, ["old"]),
        (file_of("two"), KIND, ["two", "more"]),
        (file_of("named-otherwise"), KIND, ["x"]),
        ("example.com-other-old.yaml", "example.com/other", ["old"]),
    ):
        entries = [{"name": device, "containerEdits": {"env": ["X=1"]}} for device in devices]
        (files / name).write_text(yaml.dump({"cdiVersion": "0.5.0", "kind": kind, "devices": entries}))
    await start_agent(PATIENT, table=Listed(listed_ids("a")))
    await kubelet.until(lambda resources: resources == {GADGET: (1, 1)})
    await until(lambda: file_of("old") not in names(files))
    assert names(files) == sorted(
        [file_of("a"), file_of("two"), file_of("named-otherwise"), "example.com-other-old.yaml"]
    )


async def test_a_kubelet_that_does_not_list_pods_does_not_delay_the_devices(
    directory: str, kubelet: Kubelet, start_agent: Start, files: Path
) -> None:
    files.mkdir()
    entry = {"name": "old", "containerEdits": {"env": ["X=1"]}}
    (files / file_of("old")).write_text(yaml.dump({"cdiVersion": "0.5.0", "kind": KIND, "devices": [entry]}))
    os.unlink(f"{directory}/pod-resources/kubelet.sock")
    silent = await asyncio.start_unix_server(_hold, f"{directory}/pod-resources/kubelet.sock")
    try:
        await start_agent(PATIENT, table=Listed(listed_ids("a")))
        await kubelet.until(lambda resources: resources == {GADGET: (1, 1)}, 3)
        assert file_of("old") in names(files)
    finally:
        silent.close()


async def _hold(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
    await reader.read()
    writer.close()


async def test_the_drop_in_command_writes_the_cdi_file_of_a_gpu(
    run: Run, kubelet: Kubelet, files: Path, tmp_path: Path
) -> None:
    node = SimulatedNode(tmp_path / "tree")
    node.plug_gpu()
    process = run("intel_gpu_device_plugin", "-cdi=all")
    await kubelet.until(lambda resources: resources == {"gpu.intel.com/i915": (1, 1)})
    assert names(files) == ["intel.cdi.k8s.io-gpu-card0.yaml"]
    container = await kubelet.run_pod("pod", {"gpu.intel.com/i915": 1})
    assert container.cdi_devices == ("intel.cdi.k8s.io/gpu=card0",)
    assert await process.terminate() == 0
    assert names(files) == ["intel.cdi.k8s.io-gpu-card0.yaml"], "running pods use it"


@pytest.mark.parametrize("keep", [True, False])
async def test_keep_cdi_decides_whether_files_stay_when_the_agent_ends(
    kubelet: Kubelet, start_agent: Start, files: Path, directory: str, keep: bool
) -> None:
    agent = await start_agent({"keep_cdi": keep}, table=Listed(listed_ids("a", "b")))
    await kubelet.until(lambda resources: resources == {GADGET: (2, 2)})
    changed = files / file_of("b")
    changed.write_text("of another program")
    agent.stop()
    await until(lambda: not os.path.exists(f"{directory}/device-plugins/example.com-gadget.sock"))
    await until(lambda: names(files) == [file_of("a")] * keep + [file_of("b")])
