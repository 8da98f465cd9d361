"""The identity of a boot: the kernel's boot ID, and a marker file in the directory of CDI files.

CDI files are usually in memory, so a missing marker shows a reboot also where the boot ID stays the same, as in
containers that simulate a node.
"""

import fcntl
import os
import secrets

from accelplane.descriptors import closing

BOOT_ID = "/proc/sys/kernel/random/boot_id"
MARKER = ".accelplane-boot"
_LIMIT = 256


def boot_identity(directory: str, boot_id: str) -> str:
    """The identity of this boot, the boot ID followed by a word. Writes the marker if there is none of this boot.

    An empty boot ID is one that cannot be read now; that shows no reboot. All drivers with the same directory get the
    same identity. Raises `OSError`.
    """
    os.makedirs(directory, mode=0o755, exist_ok=True)
    flags = os.O_RDWR | os.O_CREAT | os.O_CLOEXEC | os.O_NOFOLLOW
    # Others can open the directory, and a lock of it would last as long as they like.
    with closing(os.open(f"{directory}/{MARKER}", flags, 0o600)) as descriptor:
        os.fchmod(descriptor, 0o600)
        fcntl.flock(descriptor, fcntl.LOCK_EX)
        found = os.pread(descriptor, _LIMIT, 0).decode("ascii", "replace").strip()
        if " " not in found or (boot_id and boot_of(found) != boot_id):
            found = f"{boot_id} {secrets.token_hex(8)}"
            os.ftruncate(descriptor, 0)
            os.pwrite(descriptor, f"{found}\n".encode(), 0)
            os.fsync(descriptor)
        return found


def boot_of(identity: str) -> str:
    """The boot ID in an identity."""
    return identity.partition(" ")[0]
