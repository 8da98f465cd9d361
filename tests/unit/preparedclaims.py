"""A preparer and its claims, for tests of the preparer."""

from pathlib import Path

from draclaims import World, devices_of, error_of
from trees import gpu_card

from accelplane.dra.model import ClaimRef
from accelplane.dra.preparer import Preparer
from accelplane.plugins.gpu import GpuPlugin


def gpu_world(tmp_path: Path) -> World:
    """Two GPUs, which belong to DRA."""
    for index in (0, 1):
        gpu_card(tmp_path, index)
    return World(tmp_path, GpuPlugin())


async def prepare(preparer: Preparer, claim: ClaimRef) -> list[list[str]]:
    """The CDI names of the claim's devices."""
    answer = devices_of((await preparer.prepare([claim]))[claim.uid])
    return [list(each.cdi_ids) for each in answer]


async def refusal(preparer: Preparer, claim: ClaimRef) -> str:
    return error_of((await preparer.prepare([claim]))[claim.uid])
