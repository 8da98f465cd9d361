"""Declarative provisioning of devices, in place of the init containers of the device families.

`steps` reconciles a device with its desired state; the planners in `qat`, `idxd` and `dlb` compute the differences.
"""
