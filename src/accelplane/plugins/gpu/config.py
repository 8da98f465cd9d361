"""Options of the GPU plugin: the flags of the Go implementation with their defaults, and additional ones."""

import math
import re
from collections.abc import Iterator
from typing import Annotated

from msgspec import Meta

from accelplane.host import pci_address
from accelplane.plugins.base import Config
from accelplane.plugins.cdi_mode import CDI_MODES
from accelplane.plugins.options import AllocationPolicy, CdiMode, Prefix, SharedDevNum, check_choice, normal_prefix
from accelplane.plugins.policies import POLICIES

_PCI_ID = re.compile(r"0x[0-9a-f]{4}")
_DEFAULT_LIMIT = 100
_MAX_SOCKET_PATH = 107  # sun_path of unix(7) without the terminating null byte


class GpuConfig(Config, frozen=True, kw_only=True):
    """Options are checked in the order of the Go implementation, with its error texts: scripts may match them."""

    prefix: Prefix = ""
    enable_monitoring: Annotated[bool, Meta(description="publish resources with the nodes of all GPUs")] = False
    resource_manager: Annotated[
        bool,
        Meta(description="deprecated: give pods the cards and tiles that GPU Aware Scheduling wrote into annotations"),
    ] = False
    health_management: Annotated[bool, Meta(description="check the health of GPUs by the Level-Zero service")] = False
    wsl: Annotated[bool, Meta(description="Windows Subsystem for Linux: publish /dev/dxg for each Intel GPU")] = False
    shared_dev_num: SharedDevNum = 1
    temp_limit: Annotated[int, Meta(description="maximum global temperature in °C")] = _DEFAULT_LIMIT
    gpu_temp_limit: Annotated[int, Meta(description="maximum temperature of the GPU sensor in °C")] = _DEFAULT_LIMIT
    memory_temp_limit: Annotated[int, Meta(description="maximum temperature of the memory in °C")] = _DEFAULT_LIMIT
    allocation_policy: AllocationPolicy = "none"
    monitoring_mode: Annotated[
        str, Meta(description="single (one resource for all GPUs) or split (one for each driver); default: both")
    ] = ""
    xpumd_endpoint: Annotated[str, Meta(description="Unix socket of xpumd; check the health of GPUs by xpumd")] = ""
    bypath: Annotated[
        str,
        Meta(
            description="links of /dev/dri/by-path in containers: single (those of the GPU), none, all (the whole "
            "directory) or links (those of the GPU, as symbolic links that a CDI hook makes)"
        ),
    ] = "single"
    allow_ids: Annotated[str, Meta(description="publish only GPUs with these PCI device ids (0x56c0,0x56c1)")] = ""
    deny_ids: Annotated[str, Meta(description="do not publish GPUs with these PCI device ids")] = ""
    allow_bdfs: Annotated[str, Meta(description="publish only GPUs at these PCI addresses (0000:3d:00.0,...)")] = ""
    deny_bdfs: Annotated[str, Meta(description="do not publish GPUs at these PCI addresses")] = ""
    drivers: Annotated[str, Meta(description="publish only GPUs of these kernel drivers (i915,xe)")] = ""
    kinds: Annotated[str, Meta(description="publish only integrated or only discrete GPUs")] = ""
    functions: Annotated[str, Meta(description="publish only physical (pf) or only virtual functions (vf)")] = ""
    health_fail_closed: Annotated[bool, Meta(description="no answer of the health source is a bad verdict")] = False
    health_bad_verdicts: Annotated[int, Meta(description="consecutive bad verdicts that make a GPU unhealthy")] = 1
    temperature_margin: Annotated[float, Meta(description="°C below its limit at which a GPU is healthy again")] = 5.0
    resource_labels: Annotated[
        bool, Meta(description="write the labels of GPU capacity for NFD; always on with resource-manager")
    ] = False
    cdi: CdiMode = "auto"
    cdi_hook: Annotated[str, Meta(description="path on the host of the CDI hook program for -bypath=links")] = (
        "/usr/local/bin/accelplane-cdi-hook"
    )

    def __post_init__(self) -> None:
        try:
            self._check()
        except ValueError as error:
            raise ValueError(f"argument error: {error}") from None

    def _check(self) -> None:
        if self.shared_dev_num < 1:
            raise ValueError("the number of containers sharing the same GPU must greater than zero")
        if self.resource_manager and self.shared_dev_num == 1:
            raise ValueError("shared-dev-num is 1 with resource-manager, expected more: pods share GPUs then")
        check_choice("preferredAllocationPolicy", self.allocation_policy, POLICIES)
        if self.allow_ids and self.deny_ids:
            raise ValueError("cannot use both allow-ids and deny-ids options at the same time")
        for option, ids in (("allow-ids", self.allow_ids), ("deny-ids", self.deny_ids)):
            try:
                pci_ids(ids)
            except ValueError as error:
                raise ValueError(f"failed to validate {option}: {error}") from None
        if self.monitoring_mode:
            check_choice("monitoring-mode", self.monitoring_mode, ("single", "split"))
        if self.wsl and self.resource_manager:
            raise ValueError("resource-manager is not supported within WSL")
        if self.wsl and self.enable_monitoring:
            raise ValueError("monitoring is not supported within WSL")
        if self.wsl and (self.health_management or self.xpumd_endpoint):
            raise ValueError("health management is not supported within WSL")
        if self.health_management and self.xpumd_endpoint:
            raise ValueError("cannot use both Level-Zero sidecar and xpumd for health management")
        limits = (self.temp_limit, self.gpu_temp_limit, self.memory_temp_limit)
        if self.xpumd_endpoint and limits != (_DEFAULT_LIMIT,) * 3:
            raise ValueError("temperature limits do not work with xpumd health source")
        self._check_filters()
        self._check_additions()

    def _check_filters(self) -> None:
        if self.allow_bdfs and self.deny_bdfs:
            raise ValueError("cannot use both allow-bdfs and deny-bdfs options at the same time")
        for option, addresses in (("allow-bdfs", self.allow_bdfs), ("deny-bdfs", self.deny_bdfs)):
            for address in words(addresses):
                if pci_address(address) is None:
                    raise ValueError(
                        f"failed to validate {option}: found {address!a}, expected an address like 0000:3d:00.0"
                    )
        if not all(words(self.drivers)):
            raise ValueError(f"failed to validate drivers: found {self.drivers!a}, expected no empty name")
        for kind in words(self.kinds):
            check_choice("kinds", kind, ("integrated", "discrete"))
        for function in words(self.functions):
            check_choice("functions", function, ("pf", "vf"))

    def _check_additions(self) -> None:
        """Checks options that the Go implementation does not have or does not check."""
        normal_prefix(self.prefix)
        if len(self.xpumd_endpoint.encode()) > _MAX_SOCKET_PATH:
            raise ValueError(
                f"xpumd-endpoint is {self.xpumd_endpoint!a}, expected a path of at most {_MAX_SOCKET_PATH} bytes"
            )
        if self.health_bad_verdicts < 1:
            raise ValueError(f"health-bad-verdicts is {self.health_bad_verdicts}, expected 1 or more")
        if not (math.isfinite(self.temperature_margin) and self.temperature_margin >= 0):
            raise ValueError(f"temperature-margin is {self.temperature_margin}, expected 0 or more degrees")
        check_choice("cdi", self.cdi, CDI_MODES)
        if self.bypath == "links" and self.cdi == "off":
            raise ValueError("bypath is links, which needs a CDI hook, but cdi is off; expected another value of cdi")
        if self.resource_manager and (self.bypath == "links" or self.cdi == "only"):
            found = "cdi is only" if self.cdi == "only" else "bypath is links"
            raise ValueError(f"{found}, expected another value: responses with resource-manager have no CDI devices")
        if not self.cdi_hook.startswith("/"):
            raise ValueError(f"cdi-hook is {self.cdi_hook!a}, expected an absolute path")


def words(text: str) -> Iterator[str]:
    """Yields the elements of a comma-separated list, stripped and in lower case. An empty text has none."""
    if text:
        for word in text.split(","):
            yield word.strip().lower()


def pci_ids(text: str) -> frozenset[str]:
    """Returns the PCI ids of a comma-separated list, in lower case. Raises `ValueError` that names the invalid one."""
    ids = frozenset(words(text))
    for word in ids:
        if not word:
            raise ValueError("empty PCI ID")
        if not _PCI_ID.fullmatch(word):
            raise ValueError(f"invalid PCI ID: {word}")
    return ids
