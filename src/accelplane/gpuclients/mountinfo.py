"""The name of a container, from the text of `/proc/<pid>/mountinfo` (proc_pid_mountinfo(5)).

The kubelet mounts a separate file into each container, for the termination message. The path of this file contains
the pod's UID and the container's name, which cgroups do not.
"""

import re

_ROOT = 3  # the field with the path in the mounted file system
_FILE = re.compile(r"(?:.*/)?pods/([0-9a-f-]{32,36})/containers/([a-z0-9](?:[a-z0-9-]{0,61}[a-z0-9])?)/[0-9a-f]{1,16}")


def container_name(text: str, pod: str) -> str:
    """The container of the pod with UID `pod` that has these mounts, empty if no mount has it."""
    for line in text.split("\n"):
        fields = line.split(" ", _ROOT + 1)
        match = _FILE.fullmatch(fields[_ROOT]) if len(fields) > _ROOT else None
        if match and match[1] == pod:
            return match[2]
    return ""
