"""The labels of GPU capacity in the plugin: read with each scan, with memory sizes from the Level-Zero service."""

import asyncio
from collections.abc import Callable, Mapping, Sequence

from accelplane.host import Host, HostError
from accelplane.nodelabels.gpu import Gpu, LabelOptions, gpu_labels, read_gpus
from accelplane.plugins.base import ScanError

FIRST_RETRY, LAST_RETRY = 1.0, 300.0


class ResourceLabels:
    """The labels of all Intel GPUs of the node, whichever the plugin publishes."""

    def __init__(self, drm: str, environment: Mapping[str, str]) -> None:
        self._drm = drm
        self._options = LabelOptions.of(environment)
        self._gpus: Sequence[Gpu] = ()
        self._problem: Exception | None = ScanError("the GPUs have not been read yet")
        self._sizes: Mapping[str, int] = {}

    def read(self, host: Host) -> None:
        """Reads the GPUs. `labels` raises their errors: devices are also published without labels."""
        try:
            self._gpus = read_gpus(host, self._drm)
            self._problem = None
        except HostError as error:
            self._problem = error

    def labels(self) -> Mapping[str, str]:
        """Raises `HostError` if the last reading failed, or `ScanError` if there is none."""
        if self._problem is not None:
            raise self._problem
        return gpu_labels(self._gpus, self._options, self._sizes)

    async def follow_sizes(self, socket: str, request_scan: Callable[[], None]) -> None:
        """Queries the service for unknown sizes, with backoff: it knows none of integrated GPUs.

        A scan follows each answer. Runs until cancelled.
        """
        from accelplane.gpuservices.levelzero import LevelZero  # noqa: PLC0415 - loads protobuf

        client = LevelZero(socket)
        retry = FIRST_RETRY
        try:
            while True:
                present = {gpu.bdf for gpu in self._gpus if gpu.bdf}
                # Another card may be in the same slot later.
                self._sizes = {bdf: size for bdf, size in self._sizes.items() if bdf in present}
                missing = sorted(present - self._sizes.keys())
                if missing and (sizes := await client.memory_sizes(missing)):
                    self._sizes = {**self._sizes, **sizes}
                    request_scan()
                await asyncio.sleep(retry)
                retry = min(2 * retry, LAST_RETRY)
        finally:
            client.close()
