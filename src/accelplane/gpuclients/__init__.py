"""GPU use of containers, from the statistics that DRM drivers publish for each open file.

`accelplane clients` runs it in a separate process: reading other processes needs rights that the agent does not have,
and the xe driver may block a reader. The agent requests a report on a Unix socket.
"""
