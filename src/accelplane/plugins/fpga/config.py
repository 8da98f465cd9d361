"""Options of the FPGA plugin: the flags of the Go implementation with their defaults, and additional ones."""

import os
from typing import Annotated, Literal, TypeAlias, get_args

import msgspec
from msgspec import Meta

from accelplane.fpga.ids import Naming
from accelplane.plugins.base import Config
from accelplane.plugins.options import check_choice

Mode: TypeAlias = Literal["af", "region", "regiondevel"]

MODES: tuple[Mode, ...] = get_args(Mode)
NAMINGS: tuple[Naming, ...] = get_args(Naming)


def as_mode(text: str) -> Mode | None:
    """Returns the mode with the name, or None."""
    return next((mode for mode in MODES if mode == text), None)


class FpgaConfig(Config, frozen=True, kw_only=True):
    mode: Annotated[
        str,
        Meta(
            description="what is published, unless the node has an annotation: af (ports, by their programmed "
            "function), region (regions that are programmed for each container) or regiondevel (regions with their FME)"
        ),
    ] = "af"
    kubeconfig: Annotated[
        str, Meta(description="kubeconfig for reading the Node object; default: the service account of the pod")
    ] = ""
    master: Annotated[str, Meta(description="URL of the API server that replaces the one in -kubeconfig")] = ""
    node_name: Annotated[str, Meta(description="name of the Node whose annotation is read; default: $NODE_NAME")] = (
        msgspec.field(default_factory=lambda: os.environ.get("NODE_NAME", ""))
    )
    resource_naming: Annotated[
        str, Meta(description="names of resources in mode af: default or legacy63 (April 2020), as at the webhook")
    ] = "default"
    cdi: Annotated[
        str,
        Meta(
            description="what is given by CDI in mode region: auto (the hook), only (the hook and the ports) or off "
            "(nothing: CRI-O runs the hook from hooks.d, which the init container configures)"
        ),
    ] = "auto"
    wait_for_driver: Annotated[
        bool, Meta(description="wait for an FPGA driver if none is loaded at the start, instead of exiting")
    ] = False

    def __post_init__(self) -> None:
        check_choice("mode", self.mode, MODES)
        check_choice("resource-naming", self.resource_naming, NAMINGS)
        check_choice("cdi", self.cdi, ("auto", "only", "off"))

    @property
    def own_mode(self) -> Mode:
        """The validated option `mode`."""
        return as_mode(self.mode) or "af"

    @property
    def naming(self) -> Naming:
        """The validated option `resource_naming`."""
        return next(naming for naming in NAMINGS if naming == self.resource_naming)
