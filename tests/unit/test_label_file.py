"""The label file that node-feature-discovery reads."""

import os
import stat
import threading
from collections.abc import Iterable, Mapping
from pathlib import Path

import pytest
from trees import write

from accelplane.devices import Device, Inventory
from accelplane.host import Host
from accelplane.node.context import PluginContext
from accelplane.node.publishers.labels import LabelFile, LabelPublisher
from accelplane.node.settings import Settings
from accelplane.plugins import Plugin, ScanError
from accelplane.plugins.base import Config
from accelplane.plugins.gpu import GpuConfig, GpuPlugin

pytestmark = pytest.mark.memory


class TestLabelFile:
    def test_the_file_has_one_line_per_label(self, tmp_path: Path) -> None:
        file = LabelFile(str(tmp_path / "labels.txt"))
        assert file.write({"b": "2", "a": "ü"})
        assert (tmp_path / "labels.txt").read_bytes() == "a=ü\nb=2\n".encode()
        assert stat.S_IMODE((tmp_path / "labels.txt").stat().st_mode) == 0o644
        assert os.listdir(tmp_path) == ["labels.txt"]

    def test_the_file_is_replaced_only_if_labels_differ(self, tmp_path: Path) -> None:
        file = LabelFile(str(tmp_path / "labels.txt"))
        file.write({"a": "1", "b": "2"})
        inode = (tmp_path / "labels.txt").stat().st_ino
        assert not LabelFile(str(tmp_path / "labels.txt")).write({"b": "2", "a": "1"})
        assert (tmp_path / "labels.txt").stat().st_ino == inode
        for labels in ({"a": "1"}, {"a": "1", "b": "2", "c": "3"}):
            assert file.write(labels)

    def test_the_file_is_removed_without_labels(self, tmp_path: Path) -> None:
        file = LabelFile(str(tmp_path / "labels.txt"))
        assert not file.write({})
        file.write({"a": "1"})
        assert file.write({})
        assert not file.remove()
        assert os.listdir(tmp_path) == []

    def test_the_file_is_replaced_atomically(self, tmp_path: Path) -> None:
        """A concurrent reader gets one set of labels or the other. NFD skips other names in the directory."""
        path = tmp_path / "labels.txt"
        sets = [{f"label-{name}-{number}": name * 40 for number in range(50)} for name in "ab"]
        file = LabelFile(str(path))
        file.write(sets[0])
        whole = {path.read_bytes()}
        file.write(sets[1])
        whole.add(path.read_bytes())
        done = threading.Event()
        contents: set[bytes] = set()
        beside: set[str] = set()

        def read() -> None:
            while not done.is_set():
                contents.add(path.read_bytes())
                beside.update(os.listdir(tmp_path))

        reader = threading.Thread(target=read)
        reader.start()
        for number in range(200):
            file.write(sets[number % 2])
        done.set()
        reader.join()
        assert contents <= whole
        assert all(name == "labels.txt" or name.startswith(".") for name in beside)

    def test_other_file_types_at_its_path_are_replaced(self, tmp_path: Path) -> None:
        path = tmp_path / "labels.txt"
        file = LabelFile(str(path))
        os.mkfifo(path)
        assert file.write({"a": "1"})
        path.unlink()
        write(tmp_path / "target", "a=1\n")
        path.symlink_to("target")
        assert file.write({"a": "2"})
        assert (tmp_path / "target").read_text() == "a=1\n"
        assert path.read_text() == "a=2\n"

    def test_a_failed_write_leaves_no_temporary_file(self, tmp_path: Path) -> None:
        (tmp_path / "labels.txt").mkdir()
        with pytest.raises(IsADirectoryError):
            LabelFile(str(tmp_path / "labels.txt")).write({"a": "1"})
        with pytest.raises(FileNotFoundError):
            LabelFile(str(tmp_path / "none/labels.txt")).write({"a": "1"})
        assert os.listdir(tmp_path) == ["labels.txt"]


class Labelled(Plugin[Config]):
    """Labels of a test; with `problem` there are none."""

    namespace = "example.com"
    problem = ""

    def labels(self, devices: Iterable[Device]) -> Mapping[str, str]:
        if self.problem:
            raise ScanError(self.problem)
        return {"a": "1"}


class TestLabelPublisher:
    def publisher(self, plugin: Plugin[Config], nfd_dir: Path | str = "") -> tuple[LabelPublisher, PluginContext]:
        context = PluginContext("test", plugin, Settings(nfd_dir=str(nfd_dir)))
        return LabelPublisher(context), context

    async def test_the_file_in_the_nfd_directory_has_the_name_of_the_plugin(self, tmp_path: Path) -> None:
        publisher, _context = self.publisher(Labelled(), tmp_path)
        await publisher.publish(Inventory())
        assert (tmp_path / "accelplane-test.txt").read_text() == "a=1\n"
        publisher.close()
        assert os.listdir(tmp_path) == []

    @pytest.mark.parametrize("label", ["1", "2"])
    async def test_an_agent_that_ends_does_not_remove_the_labels_of_its_successor(
        self, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, label: str
    ) -> None:
        old, _context = self.publisher(Labelled(), tmp_path)
        await old.publish(Inventory())
        monkeypatch.setattr(Labelled, "labels", lambda _self, _devices: {"a": label})
        new, _context = self.publisher(Labelled(), tmp_path)
        await new.publish(Inventory())
        if label == "1":
            await old.publish(Inventory())
        old.close()
        assert (tmp_path / "accelplane-test.txt").read_text() == f"a={label}\n"
        new.close()
        assert os.listdir(tmp_path) == []

    async def test_without_a_directory_nothing_is_written(self) -> None:
        publisher, _context = self.publisher(Labelled())
        await publisher.publish(Inventory())
        publisher.close()

    async def test_the_file_has_the_name_that_other_programs_expect(
        self, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
    ) -> None:
        monkeypatch.setattr(Labelled, "label_file", str(tmp_path / "known/labels.txt"))
        (tmp_path / "known").mkdir()
        publisher, context = self.publisher(Labelled())
        await publisher.publish(Inventory())
        assert (tmp_path / "known/labels.txt").read_text() == "a=1\n"
        # A changed directory removes the old file.
        context.settings = Settings(nfd_dir=str(tmp_path))
        await publisher.publish(Inventory())
        assert (tmp_path / "labels.txt").read_text() == "a=1\n"
        assert os.listdir(tmp_path / "known") == []

    async def test_the_file_is_removed_if_the_new_options_have_no_labels(self, tmp_path: Path) -> None:
        publisher, context = self.publisher(GpuPlugin(GpuConfig(resource_labels=True)), tmp_path)
        context.plugin.prepare(Host(tmp_path))
        await publisher.publish(Inventory())
        assert (tmp_path / "intel-gpu-resources.txt").read_text() == "gpu.intel.com/tiles=0\n"
        context.plugin = GpuPlugin()
        await publisher.publish(Inventory())
        assert os.listdir(tmp_path) == []

    async def test_a_plugin_without_a_first_scan_keeps_the_labels_of_an_earlier_run(self, tmp_path: Path) -> None:
        write(tmp_path / "intel-gpu-resources.txt", "gpu.intel.com/tiles=4\n")
        publisher, _context = self.publisher(GpuPlugin(GpuConfig(resource_labels=True)), tmp_path)
        await publisher.publish(Inventory())
        assert (tmp_path / "intel-gpu-resources.txt").read_text() == "gpu.intel.com/tiles=4\n"

    async def test_a_problem_is_logged_once_and_the_file_is_kept(
        self, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
    ) -> None:
        publisher, _context = self.publisher(Labelled(), tmp_path)
        await publisher.publish(Inventory())
        for problem in ("one", "one", "two", "", "two"):
            monkeypatch.setattr(Labelled, "problem", problem)
            await publisher.publish(Inventory())
        assert [record.message for record in caplog.records] == [
            f"test: labels: not written: {problem}" for problem in ("one", "two", "two")
        ]
        assert (tmp_path / "accelplane-test.txt").read_text() == "a=1\n"

    async def test_invalid_labels_are_left_out_and_logged_once(
        self, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
    ) -> None:
        """A value with a line feed would add labels of its own, and a number is no text."""
        labels = {"example.com/a": "1", "b": "x\ny=z", "c": 4, "d=e": "1", "f": "x" * 64, "g": ""}
        monkeypatch.setattr(Labelled, "labels", lambda _self, _devices: labels)
        publisher, context = self.publisher(Labelled(), tmp_path)
        await publisher.publish(Inventory())
        await publisher.publish(Inventory())
        assert (tmp_path / "accelplane-test.txt").read_text() == "example.com/a=1\ng=\n"
        expected = "expected a text of at most 63 characters of [A-Za-z0-9_.-]"
        assert caplog.messages[:3] == [
            rf"test: labels: b: found 'x\ny=z', {expected}",
            f"test: labels: c: found 4, {expected}",
            "test: labels: found the name 'd=e', expected a label name of Kubernetes",
        ]
        assert len(caplog.messages) == len(context.problems.texts) == 4

    async def test_a_hook_that_blocks_delays_only_its_own_labels(
        self, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
    ) -> None:
        ended = threading.Event()
        monkeypatch.setattr("accelplane.node.publishers.labels._TIMEOUT", 0.05)
        monkeypatch.setattr(Labelled, "labels", lambda _self, _devices: {"b": str(ended.wait(30))})
        publisher, context = self.publisher(Labelled(), tmp_path)
        for _ in range(2):
            await publisher.publish(Inventory())
        assert context.problems.texts == ["labels: not written: no result within 0.05 s"]
        ended.set()
        assert await publisher.thread.wait_idle("test")
        await publisher.publish(Inventory())
        assert context.problems.texts == []
        assert (tmp_path / "accelplane-test.txt").read_text() == "b=True\n"

    async def test_a_missing_directory_is_logged(self, tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
        publisher, _context = self.publisher(Labelled(), tmp_path / "none")
        await publisher.publish(Inventory())
        publisher.close()
        assert ["labels: not written" in record.message for record in caplog.records] == [True]
