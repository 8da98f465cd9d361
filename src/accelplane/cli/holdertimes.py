"""Since when containers hold device IDs, as far as a single command can know it.

The kubelet makes the directories of a pod (`pods/UID` below its own) right after it has admitted the pod, and devices
are allocated at the admission. The directory `plugins` of these changes only while the volumes of the pod are mounted,
before its containers start. The checkpoint of the device manager has the UID of the pod that holds an ID.
"""

import os
import re
from collections.abc import Sequence

from accelplane.kubelet import checkpoint

_UID = re.compile(r"[0-9A-Za-z-]{1,64}", re.ASCII)

Key = tuple[str, str]  # resource and ID


def held_since(kubelet_dir: str, holdings: Sequence[checkpoint.Holding]) -> dict[Key, float]:
    """The Unix time since which a pod holds each resource and ID; IDs of pods without directories are not in it."""
    admitted = {uid: _admission(kubelet_dir, uid) for uid in {holding.pod_uid for holding in holdings}}
    return {
        (holding.resource, id_): admitted[holding.pod_uid]
        for holding in holdings
        if admitted[holding.pod_uid]
        for id_ in holding.ids
    }


def _admission(kubelet_dir: str, uid: str) -> float:
    """The Unix time, 0 if it is unknown."""
    if not _UID.fullmatch(uid):
        return 0.0
    try:
        return os.stat(f"{kubelet_dir}/pods/{uid}/plugins").st_mtime
    except OSError:
        return 0.0
