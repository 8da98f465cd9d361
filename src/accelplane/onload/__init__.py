"""The Onload operator: kernel modules through Kernel Module Management, the device plugin, and ordered upgrades."""
