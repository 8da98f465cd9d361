"""The fleet page: the accelerators of a cluster, their state, and the pods that hold them or wait for them."""
