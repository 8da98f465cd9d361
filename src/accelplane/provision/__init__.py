"""Nodes provisioned as desired state: what the init containers of the device families do, with read-back and undo.

`steps` says how a device is brought from what it is to what it should be; `qat`, `idxd` and `dlb` say what that is.
"""
