"""An agent, its node and its kubelet on a `VirtualTimeLoop`: tests control every interleaving."""

import asyncio
import contextlib
import os
import shutil
import tempfile
from collections.abc import Callable, Iterable, Mapping, Sequence
from pathlib import Path
from typing import Annotated, Any

import msgspec
from scriptedkubelet import ScriptedKubelet
from trees import link
from virtualtime import Threads, VirtualTimeLoop, controlled

from accelplane.devices import CdiDevice, Device, HealthPolicy, Verdict
from accelplane.host import Host, isolation
from accelplane.host.uevent import OVERFLOW, Uevent
from accelplane.kubelet import registration, server
from accelplane.node import allocations, health, runner, scan_loop
from accelplane.node.agent import Agent
from accelplane.node.publishers import cdi, kubelet
from accelplane.node.settings import Settings
from accelplane.plugins import Plugin
from accelplane.plugins.base import Config

# Longer than all delays and retries of the agent but its safety timers, which must not be needed.
LONG, NEVER = 40.0, 1e6
POLLED = 5.0
# PCI functions: a physical one, one of its virtual ones, and another physical one.
PF, VF, OTHER = UNITS = "0000:01:00.0", "0000:01:00.1", "0000:02:00.0"


class ShelfConfig(Config, frozen=True, kw_only=True):
    """The only option, for changes of the configuration."""

    label: Annotated[str, msgspec.Meta(description="any text")] = ""


class Shelf(Plugin[ShelfConfig]):
    """A device for each file of each directory below `/NAME`; the directory is the unit. It handles no errors.

    `bad` has the units that are unhealthy. `health` reads it immediately and returns when the test completes the call.
    With `polled` it is a source of health only if the last scan has found a device, and notifies nobody.
    """

    config_type = ShelfConfig
    exclusive_namespace = True

    def __init__(self, setup: "Setup", name: str, config: ShelfConfig | None = None) -> None:
        super().__init__(config)
        self.namespace = f"{name}.example.com"
        self.name = name
        self.crash = False
        self.cdi = False
        self.polled = name == "b"
        self.policy = HealthPolicy(bad_verdicts=1, good_verdicts=1, interval=POLLED if self.polled else NEVER)
        self._found = False
        self.answers = True
        self.checks = 0
        self._setup = setup

    @property
    def health_policy(self) -> HealthPolicy:
        return self.policy

    def overrides(self, hook: str) -> bool:
        if self.crash and hook == "health":
            self.crash = False
            raise RuntimeError("injected crash")
        return super().overrides(hook) and (self._found or not self.polled or hook != "health")

    def prepare(self, host: Host) -> None:
        """Overridden so that scans change hardware: they must not run concurrently."""

    def scan(self, host: Host) -> Sequence[Device]:
        found = list(self._devices(host, f"/{self.name}"))
        self._found = bool(found)
        return found

    def _devices(self, host: Host, shelf: str) -> Iterable[Device]:
        for unit in host.optional_names(shelf):
            for id_ in host.names(f"{shelf}/{unit}"):
                assert host.text(f"{shelf}/{unit}/{id_}") == ""
                kind = f"{self.namespace}/thing"
                cdi = CdiDevice(kind=kind, name=id_, env=(f"ID={id_}",)) if self.cdi else None
                yield Device(resource="thing", id=id_, unit=unit, topology=None, cdi=cdi)

    async def health(self, host: Host, devices: Sequence[Device]) -> Mapping[str, Verdict]:
        self.checks += 1
        if not self.answers:
            raise ConnectionError("no answer")
        verdicts = {unit: Verdict("bad" if unit in self._setup.bad else "good") for unit in {d.unit for d in devices}}
        await self._setup.reply()
        return verdicts

    async def background(self, host: Host, request_scan: Callable[[], None]) -> None:
        notify = (lambda: None) if self.polled else request_scan
        self._setup.notify.append(notify)
        try:
            await asyncio.Event().wait()
        finally:
            self._setup.notify.remove(notify)


class Setup:
    """The node's files, its kubelet and an agent with the plugins `enabled`, on one loop."""

    def __init__(self) -> None:
        self.loop = VirtualTimeLoop()
        self.threads = Threads()
        self.directory = tempfile.mkdtemp(prefix="aw")
        self.root = Path(self.directory, "root")
        self.root.mkdir()
        plugins = Path(self.directory, "device-plugins")
        plugins.mkdir()
        self.config = Path(self.directory, "etc", "config")
        self.config.parent.mkdir()
        self.config.write_text("")
        self.bad: set[str] = set()
        self.wedged: set[str] = set()
        self.unit_of: dict[tuple[str, str], str] = {}  # by plugin and ID where the device is, or was last
        self.notify: list[Callable[[], None]] = []
        self.replies: list[asyncio.Future[None]] = []
        self.immediate_replies = True
        self.late = False  # whether a health source has missed its deadline
        self.enabled: dict[str, Any] = {}
        self.labels: dict[str, str] = {}  # the options of plugins
        self._changes = 0
        self._stack = contextlib.ExitStack()
        self._stack.enter_context(
            controlled(
                self.loop,
                self.threads,
                allocations,
                health,
                isolation,
                runner,
                scan_loop,
                registration,
                server,
                cdi,
                kubelet,
            )
        )
        self.settings = Settings(
            root=str(self.root),
            kubelet_dir=self.directory,
            cdi_dir=f"{self.directory}/cdi",
            safety_interval=NEVER,
            unwatched_interval=NEVER,
        )
        self.kubelet = ScriptedKubelet(str(plugins))
        self.loop.run(self.kubelet.start())
        functions = self.root / "sys/bus/pci/devices"
        for unit in UNITS:
            link(functions / unit / "driver", functions / "driver")
        link(functions / VF / "physfn", functions / PF)
        self.enabled["a"] = self.plugin("a", "")
        self._start_agent()

    def plugin(self, name: str, label: str) -> Plugin[Any]:
        """A plugin object with this option."""
        return Shelf(self, name, ShelfConfig(label=label))

    def _start_agent(self) -> None:
        # The events and locks of the agent belong to this loop from their first use on.
        self.agent = Agent(
            self.settings,
            self.enabled,
            config_file=str(self.config),
            reload=lambda: (self.settings, dict(self.enabled)),
        )
        self.task = self.loop.create_task(self.agent.run())
        self.step()  # it receives the events of the kernel from now on

    def _stop_agent(self) -> None:
        self.agent.stop()
        self.threads.kill()
        self.threads.immediate = self.immediate_replies = True
        self.threads.deliver_all()
        while self.replies:
            self.answer_health()
        self.loop.run(self.task)

    # Events on the node

    def plug(self, name: str, unit: str, id_: str) -> None:
        path = self.root / name / unit
        path.mkdir(parents=True, exist_ok=True)
        (path / id_).touch()
        self.unit_of[name, id_] = unit

    def unplug(self, name: str, unit: str, id_: str) -> None:
        (self.root / name / unit / id_).unlink(missing_ok=True)

    def set_health(self, unit: str, *, good: bool) -> None:
        """Changes a unit's health; the source notifies the plugins."""
        (self.bad.discard if good else self.bad.add)(unit)
        for notify in list(self.notify):
            notify()

    def wedge(self, unit: str) -> None:
        """The driver declares a GPU wedged: it cannot be used, nor its virtual functions, until a driver is bound."""
        self.wedged.add(unit)
        devpath = f"/devices/pci0000:00/{unit}/drm/card0"
        self.agent.events.record(Uevent("change", devpath, "drm", {"WEDGED": "rebind"}))

    def block(self, unit: str) -> None:
        """Reads of the unit's files do not return."""
        self.threads.blocks.add(unit)

    def unblock(self, unit: str) -> None:
        self.threads.unblock(unit)

    def rebind(self, unit: str, *, lost: bool = False) -> None:
        """Binds the driver again. The event is `lost` if the kernel's buffer overflows."""
        functions = self.root / "sys/bus/pci/devices"
        os.replace(link(functions / unit / "new", functions / "driver"), functions / unit / "driver")
        self.wedged.discard(unit)
        event = Uevent("bind", f"/devices/pci0000:00/{unit}", "pci", {})
        self.agent.events.record(OVERFLOW if lost else event)

    async def reply(self) -> None:
        if self.immediate_replies:
            return
        reply: asyncio.Future[None] = asyncio.get_running_loop().create_future()
        self.replies.append(reply)
        try:
            await reply
        except asyncio.CancelledError:
            self.late = True
            raise

    def answer_health(self, index: int = 0) -> None:
        reply = self.replies.pop(index)
        if not reply.done():
            reply.set_result(None)

    def reload(self) -> None:
        """Makes the agent read its configuration again."""
        self._changes += 1
        self.config.write_text(str(self._changes))

    def enable(self, name: str, label: str = "") -> None:
        self.enabled[name] = self.plugin(name, label)
        self.labels[name] = label
        self.reload()

    def disable(self, name: str) -> None:
        self.enabled.pop(name, None)
        self.reload()

    def restart_agent(self) -> None:
        """Ends the agent as SIGTERM does, and starts it with new plugin objects."""
        self._stop_agent()
        for name in self.enabled:
            self.enabled[name] = self.plugin(name, self.labels.get(name, ""))
        self._start_agent()

    def restart_kubelet(self) -> None:
        self.loop.run(self._restart())

    async def _restart(self) -> None:
        await self.kubelet.stop()
        await self.kubelet.start()

    # Time

    def step(self, count: int = 1) -> None:
        self.loop.step(count)

    def advance(self, seconds: float) -> None:
        self.loop.run(asyncio.sleep(seconds))

    def scans(self, name: str) -> int:
        """The number of the plugin's scans running in threads, without those that block or were left."""
        scanning = [
            thread
            for thread in self.threads.running
            if "ScanLoop" in thread.function.__qualname__ and not thread.blocked and not thread.abandoned
        ]
        plugins = [thread.function.__closure__[1].cell_contents for thread in scanning if thread.function.__closure__]
        return sum(getattr(plugin, "name", None) == name for plugin in plugins)

    def complete_work(self) -> None:
        """Completes all running work."""
        self.kubelet.answers_register = True
        self.threads.immediate = self.immediate_replies = True
        self.threads.deliver_all()
        while self.replies:
            self.answer_health()
        if self.late:  # a source that recovers notifies
            self.late = False
            for notify in list(self.notify):
                notify()
        if self.threads.blocks:  # a device that blocks is known when it is read
            for runner_ in self.agent.runners.values():
                runner_.request_check()
        self.advance(LONG)

    def hold(self) -> None:
        """Lets threads and health sources wait for the test."""
        self.threads.immediate = self.immediate_replies = False

    # Invariants

    def expected(self, name: str) -> dict[str, bool]:
        """The list at rest: plugged devices with their health, and other held devices as Unhealthy.

        Without devices that block: whether they are listed depends on what was read before.
        """
        found = {id_: self.is_good(unit) for unit, id_ in self.plugged(name)}
        expected = {**dict.fromkeys(self.kubelet.allocated.get(self.resource(name), ()), False), **found}
        return {id_: good for id_, good in expected.items() if not self.blocks(name, id_)}

    def plugged(self, name: str) -> Iterable[tuple[str, str]]:
        """The units and IDs of the devices that the node has."""
        shelf = self.root / name
        for unit in os.listdir(shelf) if shelf.exists() else ():
            yield from ((unit, id_) for id_ in os.listdir(shelf / unit))

    def is_good(self, unit: str) -> bool:
        return unit not in self.bad | self.wedged and not (unit == VF and PF in self.wedged)

    def resource(self, name: str) -> str:
        return f"{name}.example.com/thing"

    def blocks(self, name: str, id_: str) -> bool:
        return self.unit_of.get((name, id_)) in self.threads.blocks

    def check_rest(self) -> None:
        assert not self.task.done(), self.task
        for name in self.enabled:
            resource, expected = self.resource(name), self.expected(name)
            may_start = self.kubelet.may_start(resource, self.loop.now)
            shown: dict[str, bool] = {}
            for id_, good in self.kubelet.list_at_rest(resource).items():
                if self.blocks(name, id_):
                    assert not good, f"{name}: found {id_} Healthy, which blocks"
                elif good or id_ in expected or id_ not in may_start:
                    shown[id_] = good
            assert shown == expected, f"{name}: found {shown}, expected {expected}"
        assert self.kubelet.crashes == []
        shelves = sum(isinstance(plugin, Shelf) for plugin in self.enabled.values())
        assert len(self.notify) == shelves, "one background task for each plugin"
        # A scan and a reading of addresses of each plugin may have begun before the device is known to block.
        assert len(self.threads.waiting) <= 4 * len(self.threads.blocks)

    def close(self) -> None:
        """Stops the agent; no task, thread or subscription may remain."""
        try:
            self.threads.blocks.clear()
            self._stop_agent()
            self.loop.run(self.kubelet.stop())
            self.step(5)
            assert asyncio.all_tasks(self.loop) == set()
            assert self.threads.running == []
            assert self.notify == []
            assert [error["message"] for error in self.loop.errors] == []
        finally:
            self._stack.close()
            self.loop.close()
            shutil.rmtree(self.directory)
