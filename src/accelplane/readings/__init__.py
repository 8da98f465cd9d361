"""What the metrics pages read of accelerators: which files, what their text means, and when reading is allowed.

`Plugin.readings` returns a `DevicePlan` for each physical device: files that exist, in order, each with a function that
turns its text into samples. `accelplane.pages.readings` reads them. Everything here is a plain value or a pure
function; only the functions that make plans list directories.

Facts: kernel documents Documentation/ABI/testing/sysfs-bus-pci-devices-aer_stats, sysfs-driver-intel-i915-hwmon,
sysfs-driver-intel-xe-hwmon, sysfs-driver-qat, debugfs-driver-qat, sysfs-platform-dfl-fme, sysfs-driver-intel_vpu and
Documentation/ABI/stable/sysfs-driver-dma-idxd.
"""

from accelplane.readings.plan import DevicePlan, Source
from accelplane.readings.values import Family, InvalidText, Value

__all__ = ["DevicePlan", "Family", "InvalidText", "Source", "Value"]
