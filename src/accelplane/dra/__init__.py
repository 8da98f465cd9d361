"""Dynamic resource allocation (DRA): the devices of a node as ResourceSlices, and claims prepared for the kubelet."""
