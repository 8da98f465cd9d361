"""A DRA driver with one device per claim for tests with the real kubelet: `python dra_driver.py LOG`.

It writes a CDI file for each claim. LOG gets a line for each call, and for each change of the registration.
"""

import asyncio
import json
import signal
import sys
from collections.abc import Mapping, Sequence
from pathlib import Path

from accelplane.dra.model import ClaimError, ClaimRef, DeviceHealth, PreparedDevice
from accelplane.dra.service import DriverService
from accelplane.kubelet.notifier import Notifier

DRIVER = "gpu.example.com"
CDI = Path("/var/run/cdi")
DEVICES = ("gpu-0", "gpu-1")


class Preparer:
    """Prepares gpu-0 for each claim; a claim whose name starts with `bad` fails."""

    def __init__(self, log: Path) -> None:
        self._log = log

    def note(self, text: str) -> None:
        with self._log.open("a") as log:
            log.write(f"{text}\n")

    async def prepare(self, claims: Sequence[ClaimRef]) -> Mapping[str, Sequence[PreparedDevice] | ClaimError]:
        results: dict[str, Sequence[PreparedDevice] | ClaimError] = {}
        for claim in claims:
            self.note(f"prepare {claim.name}")
            if claim.name.startswith("bad"):
                results[claim.uid] = ClaimError("device gpu-0 is still held by claim default/other")
                continue
            device = f"{claim.uid}-gpu-0"
            edits = {"env": [f"CLAIM={claim.name}"]}
            document = {
                "cdiVersion": "0.6.0",
                "kind": f"k8s.{DRIVER}/claim",
                "devices": [{"name": device, "containerEdits": edits}],
            }
            CDI.mkdir(parents=True, exist_ok=True)
            (CDI / f"{claim.uid}.json").write_text(json.dumps(document))
            prepared = PreparedDevice(("gpu",), "node-1", "gpu-0", (f"k8s.{DRIVER}/claim={device}",))
            results[claim.uid] = (prepared,)
        return results

    async def unprepare(self, claims: Sequence[ClaimRef]) -> Mapping[str, ClaimError | None]:
        for claim in claims:
            self.note(f"unprepare {claim.name}")
            (CDI / f"{claim.uid}.json").unlink(missing_ok=True)
        return {claim.uid: None for claim in claims}

    def prepared(self) -> Mapping[str, Sequence[str]]:
        return {}


async def main(log: Path) -> None:
    preparer = Preparer(log)
    service = DriverService(
        DRIVER,
        "/var/lib/kubelet",
        preparer,
        lambda: [DeviceHealth(name, "HEALTHY") for name in DEVICES],
        Notifier(),
        pool="node-1",
        kubelet_version=lambda: None,
        registered=lambda registered: preparer.note("registered" if registered else "not registered"),
    )
    asyncio.get_running_loop().add_signal_handler(signal.SIGTERM, service.stop)
    running = asyncio.create_task(service.run())
    while not running.done():
        service.wake.notify_all()
        await asyncio.sleep(0.2)
    await running


if __name__ == "__main__":
    asyncio.run(main(Path(sys.argv[1])))
