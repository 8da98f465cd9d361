"""A small kernel in memory: sysfs, debugfs and device nodes of QAT, DSA, IAA, DLB and SGX that react as in Linux.

kernel = Kernel(NodeSpec(qats=[QatSpec()], dsas=[DsaSpec(queues=[QueueSpec()] * 4)]))
qat = "/sys/bus/pci/devices/0000:61:00.0"
kernel.write(f"{qat}/sriov_numvfs", "16")            # virtual functions and their IOMMU groups appear
kernel.write(f"{qat}/virtfn0/driver_override", "vfio-pci")
kernel.fail(f"{qat}/qat/state", errno.EIO, times=1)  # the next write fails
kernel.hold("wq0.0")                                 # a client of the first queue
write_tree(kernel, tmp_path)                         # its present state as plain files, without reactions
"""

from accelplane.host.uevent import Uevent
from accelplane.simulate.kernel.kernel import Kernel
from accelplane.simulate.kernel.snapshot import write_tree

__all__ = ["Kernel", "Uevent", "write_tree"]
