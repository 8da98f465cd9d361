"""The scan of GPUs: reads `/sys/class/drm` and `/dev/dri`, yields devices.

The resource of a card is the name of its driver (`i915`, `xe`); a card has `shared-dev-num` IDs. A physical function
with virtual functions is skipped, because its virtual functions are cards too. Each scan reads `/dev/dri/by-path` and
uses only the links that lead to nodes of the card: udev also makes other links with the same address (for simple
framebuffers), and does not always remove dangling ones.

Facts: kernel documents Documentation/ABI/testing/sysfs-bus-pci and sysfs-class-drm; udev's 60-drm.rules.
"""

import functools
import os.path
import re
from collections.abc import Iterable, Iterator, Mapping, Sequence
from typing import NamedTuple

from accelplane.devices import CdiHook, Device, DeviceNode, Mount, Skipped
from accelplane.host import Host, HostError, Missing, pci_address
from accelplane.host.drivers import vf_links
from accelplane.plugins.cdi_mode import split_by_cdi_mode
from accelplane.plugins.gpu.config import GpuConfig, pci_ids, words
from accelplane.plugins.gpu.driverhealth import survivability_mode
from accelplane.plugins.options import normal_prefix

CDI_KIND = "intel.cdi.k8s.io/gpu"
AFFINITY_MASK = "ZE_AFFINITY_MASK"
MONITORING_ID = "all"

_INTEL = "0x8086"
_CARD = re.compile(r"card[0-9]+")
_CONTROL = re.compile(r"controlD[0-9]+")
_PCI_ID = re.compile(r"0x[0-9a-f]{4}")
_BY_PATH = re.compile(r"pci-([0-9a-f]{4,8}:[0-9a-f]{2}:[0-9a-f]{2}\.[0-9a-f])")
# The PCI device of every integrated Intel GPU. Its virtual functions are functions of the same device.
_INTEGRATED = "0000:00:02."


class Places(NamedTuple):
    """The directories that the scan reads."""

    drm: str
    dev: str
    dri: str
    by_path: str
    xe: str

    @classmethod
    def under(cls, prefix: str) -> "Places":
        prefix = normal_prefix(prefix)
        return cls(
            f"{prefix}/sys/class/drm",
            f"{prefix}/dev",
            f"{prefix}/dev/dri",
            f"{prefix}/dev/dri/by-path",
            f"{prefix}/sys/bus/pci/drivers/xe",
        )


class Filter(NamedTuple):
    """The values of an attribute that an option lists, in lower case, and whether these cards are allowed or denied."""

    option: str
    attribute: str
    values: frozenset[str]
    allowed: bool = True


class Scope(NamedTuple):
    """The configuration with the directories and the given filters that follow from it."""

    config: GpuConfig
    places: Places
    filters: Sequence[Filter]

    @classmethod
    def of(cls, config: GpuConfig) -> "Scope":
        filters = (
            Filter("allow-ids", "device-id", pci_ids(config.allow_ids)),
            Filter("deny-ids", "device-id", pci_ids(config.deny_ids), allowed=False),
            Filter("allow-bdfs", "bdf", frozenset(words(config.allow_bdfs))),
            Filter("deny-bdfs", "bdf", frozenset(words(config.deny_bdfs)), allowed=False),
            Filter("drivers", "driver", frozenset(words(config.drivers))),
            Filter("kinds", "kind", frozenset(words(config.kinds))),
            Filter("functions", "function", frozenset(words(config.functions))),
        )
        return cls(config, Places.under(config.prefix), [each for each in filters if each.values])

    def mismatch(self, attributes: Mapping[str, str]) -> str:
        """Returns which filter excludes a card with these attributes, or an empty string."""
        for option, attribute, values, allowed in self.filters:
            value = attributes.get(attribute, "")
            if (value.lower() in values) != allowed:
                return f"filtered: {attribute} {value or 'unknown'} is {'not ' if allowed else ''}in {option}"
        return ""


class Card(NamedTuple):
    """A card to publish, and its DRM nodes with those of its management engine."""

    device: Device
    monitored: tuple[DeviceNode, ...]


class _CardSkipped(Exception):
    """Raised for a card that is skipped by design. The text is the reason."""


def scan(host: Host, scope: Scope) -> Iterator[Device | Skipped]:
    """Yields the GPUs, the skipped cards and the monitoring devices. Raises `HostError`."""
    config = scope.config
    cards: list[Card] = []
    for found in _cards(host, scope):
        if isinstance(found, Skipped):
            yield found
            continue
        cards.append(found)
        yield from found.device.shared(config.shared_dev_num)
    yield from _without_card(host, scope)
    if config.enable_monitoring:
        yield from _monitoring(cards, config)


def wsl_devices(indices: Iterable[int], config: GpuConfig) -> Iterator[Device]:
    """Yields the GPUs in WSL mode: all have the same device node, an environment variable selects the GPU."""
    node, mount = DeviceNode("/dev/dxg"), Mount("/usr/lib/wsl")
    for index in indices:
        name = f"card{index}"
        nodes, mounts, cdi = split_by_cdi_mode(config.cdi, CDI_KIND, name, (node,), mounts=(mount,))
        envs = {AFFINITY_MASK: str(index)}
        device = Device(resource="dxg", id=name, nodes=nodes, mounts=mounts, envs=envs, cdi=cdi, topology=None)
        yield from device.shared(config.shared_dev_num)


def _monitoring(cards: Iterable[Card], config: GpuConfig) -> Iterator[Device]:
    # The default publishes both: v0.31 of the Go plugin has one resource for each driver, v0.36 one for all GPUs.
    both = not config.monitoring_mode
    groups: dict[str, dict[DeviceNode, None]] = {}
    for card in cards:
        if both or config.monitoring_mode == "single":
            groups.setdefault("monitoring", {}).update(dict.fromkeys(card.monitored))
        if both or config.monitoring_mode == "split":
            groups.setdefault(f"{card.device.resource}_monitoring", {}).update(dict.fromkeys(card.monitored))
    for resource, all_nodes in groups.items():
        nodes, mounts, cdi = split_by_cdi_mode(config.cdi, CDI_KIND, resource, tuple(all_nodes))
        # No topology: a device that has all cards must not restrict its pod to one NUMA node.
        yield Device(resource=resource, id=MONITORING_ID, nodes=nodes, mounts=mounts, cdi=cdi, topology=None, path=None)


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
        except _CardSkipped as skipped:
            yield Skipped(name, str(skipped))
        except HostError as error:
            yield Skipped(name, str(error), warning=True)


def _without_card(host: Host, scope: Scope) -> Iterator[Skipped]:
    """The GPUs that xe does not make a card of, because their firmware has to be flashed first."""
    try:
        names = host.names(scope.places.xe)
    except HostError:
        return
    for name in names:
        device = f"{scope.places.xe}/{name}"
        if pci_address(name) is None or host.exists(f"{device}/drm"):
            continue
        if problem := survivability_mode(host, device):
            yield Skipped(name, problem, warning=True)


def _card(host: Host, scope: Scope, links: "_Links", name: str) -> Card:
    """Raises `HostError` for a card that cannot be read, `_CardSkipped` for one that is skipped by design."""
    config, places, filters = scope
    id_required = any(each.attribute == "device-id" for each in filters)
    entry = f"{places.drm}/{name}"
    device = f"{entry}/device"
    try:
        vendor = host.text(f"{device}/vendor")
    except Missing:
        raise _CardSkipped(f"{device}/vendor does not exist, expected a PCI device") from None
    if vendor != _INTEL:
        raise _CardSkipped(f"vendor {vendor[:20]!a} is not Intel ({_INTEL})")
    try:
        node_names = host.names(f"{device}/drm")
    except Missing:
        raise _CardSkipped(f"{device}/drm does not exist, expected a driver that provides it") from None
    address = _address(host, entry, name)
    attributes = _attributes(host, device, name, address, id_required=id_required)
    if mismatch := scope.mismatch(attributes):
        raise _CardSkipped(mismatch)
    vfs = host.vf_count(device)
    if vfs not in ("0", "-1"):
        raise _CardSkipped(_why_vfs_replace(host, device, vfs))
    nodes = tuple(_drm_nodes(host, places, name, node_names))
    if not nodes:
        # Not a warning: udev makes the nodes of a new card shortly after the kernel makes its sysfs directory.
        raise _CardSkipped(f"no device node in {places.dri}, expected {', '.join(map(ascii, node_names[:8]))}")
    mounts, hooks = links.of(name, address, nodes)
    monitored = (*nodes, *_mei_nodes(host, places, device)) if config.enable_monitoring else nodes
    nodes, mounts, cdi = split_by_cdi_mode(
        config.cdi, CDI_KIND, name, nodes, mounts=mounts, hooks=hooks, cdi_by_default=True
    )
    published = Device(
        resource=attributes["driver"],
        id=name,
        nodes=nodes,
        mounts=mounts,
        cdi=cdi,
        topology=host.topology_of(device),
        attributes=attributes,
        path=device,
    )
    return Card(published, monitored)


def _why_vfs_replace(host: Host, device: str, count: str) -> str:
    """Why a physical function with virtual functions is not published."""
    if not count.isdecimal():
        return f"sriov_numvfs is {count[:20]!a}, expected a number"
    try:
        functions = [f"{device}/{name}" for name in vf_links(host, device)]
    except HostError:
        functions = []
    drivers = sorted({host.driver_or_empty(each) or "no driver" for each in functions})
    if functions and not any(host.exists(f"{each}/drm") for each in functions):
        return f"sriov_numvfs is {count}, and the virtual functions are bound to {', '.join(drivers)}: none is a card"
    return f"sriov_numvfs is {count!a}: the virtual functions are published instead"


def _address(host: Host, entry: str, name: str) -> str | None:
    """Returns the PCI address in the target of the class link (`../../devices/pci…/0000:00:02.0/drm/card0`)."""
    try:
        target = host.link(entry)
    except HostError:
        return None
    last = target.rstrip("/").removesuffix(f"drm/{name}").rstrip("/").rpartition("/")[2]
    if pci_address(last) is None:
        host.note(f"{entry}: target {target[-80:]!a}, expected a PCI address; {name} gets no by-path links")
        return None
    return last


def _attributes(host: Host, device: str, name: str, address: str | None, *, id_required: bool) -> dict[str, str]:
    """Raises `HostError` if the PCI id is required and cannot be read."""
    attributes = {"driver": _driver(host, device, name)}
    try:
        bdf = pci_address(host.link(device).rstrip("/").rpartition("/")[2]) or address
    except HostError:
        bdf = address
    if bdf:
        attributes["bdf"] = bdf
        attributes["kind"] = "integrated" if bdf.startswith(_INTEGRATED) else "discrete"
    try:
        pci_id = host.text(f"{device}/device").partition("\n")[0].lower()
    except HostError:
        if id_required:
            raise
        pci_id = ""
    if _PCI_ID.fullmatch(pci_id):
        attributes["device-id"] = pci_id
    attributes["function"] = "vf" if host.is_vf(device) else "pf"
    return attributes


def _driver(host: Host, device: str, name: str) -> str:
    try:
        driver = host.driver(device)
    except HostError as error:
        host.note(f"{name}: driver unknown, assuming i915: {error}")
        return "i915"
    return driver or "i915"


def _drm_nodes(host: Host, places: Places, card: str, names: Iterable[str]) -> Iterator[DeviceNode]:
    for name in names:
        if _CONTROL.fullmatch(name) or (_CARD.fullmatch(name) and name != card):
            continue
        # The kubelet accepts UTF-8 text only.
        if name.isprintable() and host.exists(f"{places.dri}/{name}"):
            yield DeviceNode(f"{places.dri}/{name}")


def _mei_nodes(host: Host, places: Places, device: str) -> Iterator[DeviceNode]:
    """Yields nodes of the card's management engine. It does not check that they exist: pods mount a part of `/dev`."""
    for engine in _entries(host, device):
        if ".mei-" in engine:
            for name in _entries(host, f"{device}/{engine}/mei"):
                if name.isprintable():
                    yield DeviceNode(f"{places.dev}/{name}")


def _entries(host: Host, directory: str) -> list[str]:
    try:
        return host.names(directory)
    except HostError as error:
        host.note(f"no management engine in monitoring: {error}")
        return []


class _Links:
    """The links in `/dev/dri/by-path`. The directory is read for the first card."""

    def __init__(self, host: Host, scope: Scope) -> None:
        self._host = host
        self._config, self._places, _filters = scope

    def of(
        self, card: str, address: str | None, nodes: Iterable[DeviceNode]
    ) -> tuple[tuple[Mount, ...], tuple[CdiHook, ...]]:
        """Returns the mounts of a card's links, or the hook that makes the links in the container."""
        mode = self._config.bypath
        if mode == "none":
            return (), ()
        if mode == "all":
            return ((Mount(self._places.by_path),) if self._by_address is not None else ()), ()
        if address is None:
            return (), ()
        links = list(self._links_of(card, address, nodes))
        if mode != "links":
            return tuple([Mount(link) for link, _node in links]), ()
        if not links:
            return (), ()
        arguments = [os.path.basename(self._config.cdi_hook), "create-symlinks"]
        for link, node in links:
            arguments += ["--link", f"{os.path.relpath(node, self._places.by_path)}::{link}"]
        return (), (CdiHook("createContainer", self._config.cdi_hook, arguments),)

    def _links_of(self, card: str, address: str, nodes: Iterable[DeviceNode]) -> Iterator[tuple[str, str]]:
        """Yields the links that lead to a node of the card, with that node."""
        names = (self._by_address or {}).get(address)
        if not names:
            return
        host = self._host
        resolved = {host.resolve(node.host_path): node.host_path for node in nodes}
        for name in names:
            link = f"{self._places.by_path}/{name}"
            try:
                target = host.resolve(link)
            except HostError as error:
                host.note(f"by-path link skipped: {error}")
                continue
            if (node := resolved.get(target)) is not None:
                yield link, node
            else:
                host.note(f"{link} skipped: target {target[-80:]!a} is no node of {card}")

    @functools.cached_property
    def _by_address(self) -> dict[str, list[str]] | None:
        """The names of entries by PCI address, or None if the directory cannot be read."""
        try:
            entries = self._host.names(self._places.by_path)
        except HostError as error:
            self._host.note(f"no by-path links: {error}")
            return None
        found: dict[str, list[str]] = {}
        for entry in entries:
            match = _BY_PATH.match(entry)
            if match and entry.isprintable():
                found.setdefault(match[1], []).append(entry)
        return found
