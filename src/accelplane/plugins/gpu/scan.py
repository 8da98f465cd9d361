"""From `/sys/class/drm` and `/dev/dri` to devices.

A card is published under the name of its driver (`i915`, `xe`), as many times as it may be shared. A physical function
with virtual ones is left out: its virtual functions are cards of their own. What is passed over is said, with the
reason. Links in `/dev/dri/by-path` are looked at anew by every scan, and only those are taken that lead to the card's
own nodes: udev also makes others with the same address (simple framebuffers), and leaves dangling ones behind.

Facts: kernel documents Documentation/ABI/testing/sysfs-bus-pci and sysfs-class-drm; udev's 60-drm.rules.
"""

import os.path
import re
from collections.abc import Iterable, Iterator, Mapping
from typing import NamedTuple

from accelplane.devices import CdiHook, Device, DeviceNode, Mount, Skipped
from accelplane.host import Host, HostError, Missing, pci_address
from accelplane.plugins.delivery import Delivery, delivered
from accelplane.plugins.gpu.config import GpuConfig, pci_ids, words
from accelplane.plugins.options import normal_prefix

CDI_KIND = "intel.cdi.k8s.io/gpu"
AFFINITY_MASK = "ZE_AFFINITY_MASK"
MONITORING_ID = "all"

_INTEL = "0x8086"
_CARD = re.compile(r"card[0-9]+")
_CONTROL = re.compile(r"controlD[0-9]+")
_PCI_ID = re.compile(r"0x[0-9a-f]{4}")
_BY_PATH = re.compile(r"pci-([0-9a-f]{4,8}:[0-9a-f]{2}:[0-9a-f]{2}\.[0-9a-f])")
# Intel's integrated GPU has had this place since the first one; its virtual functions are functions of the same device.
_INTEGRATED = "0000:00:02."


class Places(NamedTuple):
    """Where the scan looks."""

    drm: str
    dev: str
    dri: str
    by_path: str

    @classmethod
    def under(cls, prefix: str) -> "Places":
        prefix = normal_prefix(prefix)
        return cls(f"{prefix}/sys/class/drm", f"{prefix}/dev", f"{prefix}/dev/dri", f"{prefix}/dev/dri/by-path")


class Filters(NamedTuple):
    """Which cards the administrator wants; an empty set wants them all."""

    allow_ids: frozenset[str]
    deny_ids: frozenset[str]
    allow_addresses: frozenset[str]
    deny_addresses: frozenset[str]
    drivers: frozenset[str]
    kinds: frozenset[str]
    functions: frozenset[str]

    @classmethod
    def of(cls, config: GpuConfig) -> "Filters":
        return cls(
            pci_ids(config.allow_ids),
            pci_ids(config.deny_ids),
            frozenset(words(config.allow_bdfs)),
            frozenset(words(config.deny_bdfs)),
            frozenset(words(config.drivers)),
            frozenset(words(config.kinds)),
            frozenset(words(config.functions)),
        )

    def objection(self, facts: Mapping[str, str]) -> str:
        """Why a card with these attributes is not wanted; empty when it is."""
        for option, listed, attribute, wanted in (
            ("allow-ids", self.allow_ids, "device-id", True),
            ("deny-ids", self.deny_ids, "device-id", False),
            ("allow-bdfs", self.allow_addresses, "bdf", True),
            ("deny-bdfs", self.deny_addresses, "bdf", False),
            ("drivers", self.drivers, "driver", True),
            ("kinds", self.kinds, "kind", True),
            ("functions", self.functions, "function", True),
        ):
            fact = facts.get(attribute, "")
            if listed and (fact.lower() in listed) != wanted:
                return f"filtered: {attribute} {fact or 'unknown'} is {'not ' if wanted else ''}in {option}"
        return ""


class Scope(NamedTuple):
    """What a configuration means for the scan."""

    config: GpuConfig
    places: Places
    filters: Filters

    @classmethod
    def of(cls, config: GpuConfig) -> "Scope":
        return cls(config, Places.under(config.prefix), Filters.of(config))


class Card(NamedTuple):
    """A card to publish. `nodes` are its DRM nodes; `monitored` those and its management engine's."""

    name: str
    driver: str
    nodes: tuple[DeviceNode, ...]
    monitored: tuple[DeviceNode, ...]
    delivery: Delivery
    topology: tuple[int, ...] | None
    attributes: Mapping[str, str]


class _NotPublished(Exception):
    """Why a card is passed over by design."""


def scan(host: Host, scope: Scope) -> Iterator[Device | Skipped]:
    """The GPUs of the host, what was passed over, and the monitoring devices. Raises `HostError` when it cannot see."""
    config = scope.config
    cards: list[Card] = []
    for found in _cards(host, scope):
        if isinstance(found, Skipped):
            yield found
            continue
        cards.append(found)
        nodes, mounts, cdi = found.delivery
        for number in range(config.shared_dev_num):
            yield Device(
                resource=found.driver,
                id=f"{found.name}-{number}",
                unit=found.name,
                nodes=nodes,
                mounts=mounts,
                cdi=cdi,
                topology=found.topology,
                attributes=found.attributes,
            )
    if config.enable_monitoring:
        yield from _monitoring(cards, config)


def wsl_devices(indices: Iterable[int], config: GpuConfig) -> Iterator[Device]:
    """What a Linux under Windows has in the place of cards: one device file for all, told apart by a variable."""
    shared_nodes = (DeviceNode("/dev/dxg"),)
    shared_mounts = (Mount("/usr/lib/wsl"),)
    for index in indices:
        name = f"card{index}"
        nodes, mounts, cdi = delivered(config.cdi, CDI_KIND, name, shared_nodes, mounts=shared_mounts)
        for number in range(config.shared_dev_num):
            yield Device(
                resource="dxg",
                id=f"{name}-{number}",
                unit=name,
                nodes=nodes,
                mounts=mounts,
                envs={AFFINITY_MASK: str(index)},
                cdi=cdi,
                topology=None,
            )


def _monitoring(cards: Iterable[Card], config: GpuConfig) -> Iterator[Device]:
    # Not given: the generations of the Go plugin differ, and pods written for either one must find their resource.
    both = not config.monitoring_mode
    groups: dict[str, dict[DeviceNode, None]] = {}
    for card in cards:
        if both or config.monitoring_mode == "single":
            groups.setdefault("monitoring", {}).update(dict.fromkeys(card.monitored))
        if both or config.monitoring_mode == "split":
            groups.setdefault(f"{card.driver}_monitoring", {}).update(dict.fromkeys(card.monitored))
    for resource, all_nodes in groups.items():
        nodes, mounts, cdi = delivered(config.cdi, CDI_KIND, resource, tuple(all_nodes))
        # Without topology: a device that spans all cards must not tie its pod to one NUMA node.
        yield Device(resource=resource, id=MONITORING_ID, nodes=nodes, mounts=mounts, cdi=cdi, topology=None)


def _cards(host: Host, scope: Scope) -> Iterator[Card | Skipped]:
    links = _Links(host, scope)
    try:
        entries = host.names(scope.places.drm)
    except Missing:
        return
    for name in entries:
        if not _CARD.fullmatch(name):
            continue
        try:
            yield _card(host, scope, links, name)
        except _NotPublished as reason:
            yield Skipped(name, str(reason))
        except HostError as error:
            yield Skipped(name, str(error), warning=True)


def _card(host: Host, scope: Scope, links: "_Links", name: str) -> Card:
    """Raises `HostError` for a card that cannot be read, `_NotPublished` for one that is passed over by design."""
    config, places, filters = scope
    entry = f"{places.drm}/{name}"
    device = f"{entry}/device"
    vendor = host.text(f"{device}/vendor")
    if vendor != _INTEL:
        raise _NotPublished(f"vendor {vendor[:20]!a} is not Intel ({_INTEL})")
    try:
        node_names = host.names(f"{device}/drm")
    except Missing:
        raise _NotPublished(f"{device}/drm does not exist, no driver serves it") from None
    address = _address(host, entry, name)
    facts = _facts(host, device, name, address, id_needed=bool(filters.allow_ids or filters.deny_ids))
    objection = filters.objection(facts)
    if objection:
        raise _NotPublished(objection)
    functions = host.vf_count(device)
    if functions not in ("0", "-1"):
        raise _NotPublished(f"physical function with {functions[:20]!a} virtual functions, which are published instead")
    nodes = tuple(_drm_nodes(host, places, name, node_names))
    if not nodes:
        # Not a warning: a card that is plugged in has its nodes a moment after its sysfs directory.
        raise _NotPublished(f"none of its nodes is in {places.dri}: {', '.join(map(ascii, node_names[:8]))}")
    mounts, hooks = links.of(name, address, nodes)
    monitored = (*nodes, *_mei_nodes(host, places, device)) if config.enable_monitoring else nodes
    return Card(
        name,
        facts["driver"],
        nodes,
        monitored,
        delivered(config.cdi, CDI_KIND, name, nodes, mounts=mounts, hooks=hooks, cdi_by_default=True),
        host.topology_of(device),
        facts,
    )


def _address(host: Host, entry: str, name: str) -> str | None:
    """The card's PCI address, told by where its class link leads (`../../devices/pci…/0000:00:02.0/drm/card0`)."""
    try:
        target = host.link(entry)
    except HostError:
        return None
    last = target.rstrip("/").removesuffix(f"drm/{name}").rstrip("/").rpartition("/")[2]
    if pci_address(last) is None:
        host.note(f"{entry}: leads to {target[-80:]!a}, which names no PCI address; no by-path links for {name}")
        return None
    return last


def _facts(host: Host, device: str, name: str, address: str | None, *, id_needed: bool) -> dict[str, str]:
    """The card's attributes. Raises `HostError` when its PCI id is needed and cannot be read."""
    facts = {"driver": _driver(host, device, name)}
    try:
        bdf = pci_address(host.link(device).rstrip("/").rpartition("/")[2]) or address
    except HostError:
        bdf = address
    if bdf:
        facts["bdf"] = bdf
        facts["kind"] = "integrated" if bdf.startswith(_INTEGRATED) else "discrete"
    try:
        pci_id = host.text(f"{device}/device").partition("\n")[0].lower()
    except HostError:
        if id_needed:
            raise
        pci_id = ""
    if _PCI_ID.fullmatch(pci_id):
        facts["device-id"] = pci_id
    facts["function"] = "vf" if host.is_vf(device) else "pf"
    return facts


def _driver(host: Host, device: str, name: str) -> str:
    try:
        driver = host.driver(device)
    except HostError as error:
        host.note(f"{name}: driver unknown, taken for i915: {error}")
        return "i915"
    return driver or "i915"


def _drm_nodes(host: Host, places: Places, card: str, names: Iterable[str]) -> Iterator[DeviceNode]:
    for name in names:
        if _CONTROL.fullmatch(name) or (_CARD.fullmatch(name) and name != card):
            continue
        # A name that is no UTF-8 text cannot be told to the kubelet.
        if name.isprintable() and host.exists(f"{places.dri}/{name}"):
            yield DeviceNode(f"{places.dri}/{name}")


def _mei_nodes(host: Host, places: Places, device: str) -> Iterator[DeviceNode]:
    """Nodes of the card's management engine; not looked for, as plugin pods see only a part of `/dev`."""
    for engine in _entries(host, device):
        if ".mei-" in engine:
            for name in _entries(host, f"{device}/{engine}/mei"):
                if name.isprintable():
                    yield DeviceNode(f"{places.dev}/{name}")


def _entries(host: Host, directory: str) -> list[str]:
    try:
        return host.names(directory)
    except HostError as error:
        host.note(f"management engine left out of monitoring: {error}")
        return []


class _Links:
    """The links in `/dev/dri/by-path`, read when the first card asks."""

    def __init__(self, host: Host, scope: Scope) -> None:
        self._host = host
        self._config, self._places, _filters = scope
        self._names: dict[str, list[str]] | None = None
        self._looked = False

    def of(
        self, card: str, address: str | None, nodes: Iterable[DeviceNode]
    ) -> tuple[tuple[Mount, ...], tuple[CdiHook, ...]]:
        """What brings a card's links into a container: mounts, or the hook that makes them there."""
        mode = self._config.bypath
        if mode == "none":
            return (), ()
        if mode == "all":
            return ((Mount(self._places.by_path),) if self._listed() is not None else ()), ()
        if address is None:
            return (), ()
        own = list(self._own(card, address, nodes))
        if mode != "links":
            return tuple([Mount(link) for link, _node in own]), ()
        if not own:
            return (), ()
        arguments = [os.path.basename(self._config.cdi_hook), "create-symlinks"]
        for link, node in own:
            arguments += ["--link", f"{os.path.relpath(node, self._places.by_path)}::{link}"]
        return (), (CdiHook("createContainer", self._config.cdi_hook, arguments),)

    def _own(self, card: str, address: str, nodes: Iterable[DeviceNode]) -> Iterator[tuple[str, str]]:
        """The card's links that lead to one of its nodes, each with that node."""
        names = (self._listed() or {}).get(address)
        if not names:
            return
        host = self._host
        resolved = {host.resolve(node.host_path): node.host_path for node in nodes}
        for name in names:
            link = f"{self._places.by_path}/{name}"
            try:
                target = host.resolve(link)
            except HostError as error:
                host.note(f"by-path link left out: {error}")
                continue
            node = resolved.get(target)
            if node is not None:
                yield link, node
            else:
                host.note(f"{self._places.by_path}/{name} leads to {target[-80:]!a}, no node of {card}; left out")

    def _listed(self) -> dict[str, list[str]] | None:
        """Entry names by PCI address; None when the directory cannot be listed."""
        if self._looked:
            return self._names
        self._looked = True
        try:
            entries = self._host.names(self._places.by_path)
        except HostError as error:
            self._host.note(f"no by-path links: {error}")
            return None
        self._names = {}
        for entry in entries:
            match = _BY_PATH.match(entry)
            if match and entry.isprintable():
                self._names.setdefault(match[1], []).append(entry)
        return self._names
