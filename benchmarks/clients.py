"""The cost of `accelplane clients`: processor time of a walk through procfs.

The tree in memory has 2,000 processes: 64 in pods with GPUs, each with ten open files, two of them of a GPU, 936 in
other pods, and 1,000 outside of pods. A file of the real procfs takes about the same time.
"""

import os
import tempfile
import time
from pathlib import Path

from accelplane.gpuclients.walk import ContainerNames, Limits, Pass
from benchmarks.figures import Figure, Result, Scale, median

_PODS, _OTHERS, _OUTSIDE = 64, 936, 1000
_FILES = 10
_DRM = (
    "pos:\t0\nflags:\t02100002\nmnt_id:\t25\nino:\t1203\ndrm-driver:\ti915\ndrm-client-id:\t%d\n"
    "drm-pdev:\t0000:03:00.0\ndrm-total-system0:\t0\ndrm-shared-system0:\t0\ndrm-resident-system0:\t0\n"
    "drm-total-local0:\t64 KiB\ndrm-shared-local0:\t0\ndrm-resident-local0:\t32 KiB\ndrm-engine-render:\t12345 ns\n"
    "drm-engine-copy:\t0 ns\ndrm-engine-video:\t0 ns\ndrm-engine-capacity-video:\t2\ndrm-engine-compute:\t0 ns\n"
)


def measure(scale: Scale) -> Result:
    with tempfile.TemporaryDirectory(dir="/dev/shm" if os.path.isdir("/dev/shm") else None) as directory:  # noqa: S108
        pods = _build(Path(directory))
        names, found = ContainerNames(), 0
        milliseconds: list[float] = []
        for _ in range(scale.of(30, 3)):
            made = Pass(directory, Limits(cpu=10.0), names)
            start = time.thread_time()
            made.run(pods, (), 0, ())
            milliseconds.append((time.thread_time() - start) * 1000)
            found = len(made.result().found)
    walk = median("walk of 2,000 processes, 64 pods with GPUs", milliseconds, "ms", budget=50)
    return Result(figures=[walk, Figure(name="GPU files found", value=found, unit="")])


def _build(proc: Path) -> frozenset[str]:
    """Writes the tree. Returns the UIDs of pods with GPUs."""
    pods: set[str] = set()
    for number in range(_PODS + _OTHERS + _OUTSIDE):
        pid = 1000 + number
        uid = f"00000000-0000-4000-8000-{number:012x}"
        directory = proc / str(pid)
        (directory / "fdinfo").mkdir(parents=True)
        slice_ = f"kubepods.slice/kubepods-pod{uid.replace('-', '_')}.slice/cri-containerd-{number:064x}.scope"
        inside = number < _PODS + _OTHERS
        (directory / "cgroup").write_text(f"0::/{slice_}\n" if inside else "0::/system.slice/x.service\n")
        if number < _PODS:
            pods.add(uid)
            (directory / "mountinfo").write_text(f"1 2 8:1 /pods/{uid}/containers/main/0a /dev/t rw - ext4 x rw\n")
            for file in range(_FILES):
                text = _DRM % (2 * number + file) if file < 2 else "pos:\t0\nflags:\t02\nmnt_id:\t25\nino:\t9\n"
                (directory / f"fdinfo/{file}").write_text(text)
    return frozenset(pods)
