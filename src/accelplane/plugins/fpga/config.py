"""Options of the FPGA plugin: the Go implementation's flags with their defaults, and what goes beyond them."""

import os
from typing import Annotated, Literal, TypeAlias, get_args

import msgspec
from msgspec import Meta

from accelplane.fpga.ids import Naming
from accelplane.plugins.base import Config
from accelplane.plugins.options import check_choice

Mode: TypeAlias = Literal["af", "region", "regiondevel"]
CdiUse: TypeAlias = Literal["auto", "only", "off"]

MODES: tuple[Mode, ...] = get_args(Mode)
NAMINGS: tuple[Naming, ...] = get_args(Naming)
CDI_USES: tuple[CdiUse, ...] = get_args(CdiUse)


def as_mode(text: str) -> Mode | None:
    """The mode of that name, None where there is none."""
    return next((mode for mode in MODES if mode == text), None)


def _node_name() -> str:
    return os.environ.get("NODE_NAME", "")


class FpgaConfig(Config, frozen=True, kw_only=True):
    """Options of the FPGA plugin."""

    mode: Annotated[
        str,
        Meta(
            description="what is published unless the node's annotation says otherwise: af (ports, by the function in "
            "them), region (regions that are programmed for each container) or regiondevel (regions with their FME)"
        ),
    ] = "af"
    kubeconfig: Annotated[
        str, Meta(description="kubeconfig with which the node is read; the pod's service account when empty")
    ] = ""
    master: Annotated[
        str, Meta(description="URL of the API server instead of that in -kubeconfig; without one it has no effect")
    ] = ""
    node_name: Annotated[str, Meta(description="node whose annotation is read; $NODE_NAME when not given")] = (
        msgspec.field(default_factory=_node_name)
    )
    resource_naming: Annotated[
        str, Meta(description="how ports are named in mode af: default or legacy63 (April 2020); as at the webhook")
    ] = "default"
    cdi: Annotated[
        str,
        Meta(
            description="what containers get through CDI in mode region: the hook (auto); only together with it the "
            "ports, too (only); or nothing, for CRI-O runs the hook by hooks.d (off), as told to the init container"
        ),
    ] = "auto"
    wait_for_driver: Annotated[
        bool, Meta(description="wait for an FPGA driver that is not loaded at the start, instead of ending")
    ] = False

    def __post_init__(self) -> None:
        check_choice("mode", self.mode, MODES)
        check_choice("resource-naming", self.resource_naming, NAMINGS)
        check_choice("cdi", self.cdi, CDI_USES)

    @property
    def own_mode(self) -> Mode:
        """`mode`, which was checked to be one."""
        return as_mode(self.mode) or "af"

    @property
    def cdi_use(self) -> CdiUse:
        """`cdi`, which was checked to be one."""
        return next(use for use in CDI_USES if use == self.cdi)

    @property
    def naming(self) -> Naming:
        """`resource_naming`, which was checked to be one."""
        return next(naming for naming in NAMINGS if naming == self.resource_naming)
