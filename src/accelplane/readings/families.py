"""The families of hardware samples, in the order of the metrics page.

The names are a contract with dashboards and alerts.
"""

from accelplane.readings.values import Family

INFO = Family("accelplane_device_info", "A physical device: its driver, model and place.")
UNIT_INFO = Family("accelplane_unit_info", "The physical device that a unit belongs to.")
AWAKE = Family("accelplane_device_awake", "1 while the runtime power management has not suspended the device.")
STUCK = Family("accelplane_device_stuck", "1 while a read of the device blocks, or has blocked a short time ago.")
PCI_ERRORS = Family(
    "accelplane_pci_errors_total", "PCIe errors (AER) by severity, without the totals of the kernel.", "counter"
)
PCI_ERROR_MESSAGES = Family("accelplane_pci_error_messages_total", "PCIe error messages (AER) by severity.", "counter")
PCI_RECOVERIES = Family("accelplane_pci_recoveries_total", "Recoveries from PCIe errors by outcome.", "counter")
LINK_SPEED = Family(
    "accelplane_pci_link_transfers_per_second", "Current speed of the PCIe link, in transfers per second of a lane."
)
LINK_MAX_SPEED = Family(
    "accelplane_pci_link_max_transfers_per_second", "Highest speed of the PCIe link, in transfers per second of a lane."
)
LINK_LANES = Family("accelplane_pci_link_lanes", "Current width of the PCIe link.")
LINK_MAX_LANES = Family("accelplane_pci_link_max_lanes", "Largest width of the PCIe link.")
RUNTIME = Family(
    "accelplane_device_runtime_seconds_total", "Time in a runtime power state since the driver was bound.", "counter"
)
ENERGY = Family(
    "accelplane_device_energy_joules_total",
    "Energy that the device used. After a gap in reading it is a lower bound.",
    "counter",
)
ENERGY_GAPS = Family(
    "accelplane_device_energy_gaps_total",
    "Times without reading in which the energy counter may have wrapped.",
    "counter",
)
POWER = Family("accelplane_device_power_watts", "Power that the device uses.")
POWER_LIMIT = Family("accelplane_device_power_limit_watts", "Power limits in force.")
TEMPERATURE = Family("accelplane_device_temperature_celsius", "Temperature of a sensor.")
TEMPERATURE_LIMIT = Family("accelplane_device_temperature_limit_celsius", "Temperature limits of a sensor.")
ALARM = Family("accelplane_device_alarm", "1 while a sensor is above the limit that its name ends in.")
VOLTAGE = Family("accelplane_device_voltage_volts", "Voltage of a sensor.")
CURRENT = Family("accelplane_device_current_amperes", "Current of a sensor.")
FAN = Family("accelplane_device_fan_rpm", "Rotations of a fan per minute.")
GPU_FREQUENCY = Family("accelplane_gpu_frequency_hertz", "Frequencies of a GT: actual, requested, and their limits.")
GPU_IDLE = Family("accelplane_gpu_idle_seconds_total", "Time that a GT was idle.", "counter")
GPU_THROTTLED = Family(
    "accelplane_gpu_throttled",
    "1 while a GT runs slower than requested, by reason. Reasons that do not apply are absent.",
)
GPU_HEALTH = Family("accelplane_gpu_health", "1 for the health that the driver reports.")
GPU_WEDGED = Family("accelplane_gpu_wedged_total", "Times that the driver declared the GPU wedged.", "counter")
GPU_MEMORY = Family("accelplane_gpu_memory_size_bytes", "Size of the local memory of a GPU.")
NPU_BUSY = Family("accelplane_npu_busy_seconds_total", "Time that the NPU executed jobs.", "counter")
NPU_MEMORY = Family("accelplane_npu_memory_bytes", "Memory that the buffers of the NPU use.")
NPU_FREQUENCY = Family(
    "accelplane_npu_frequency_hertz", "Frequencies of the NPU. The current one is 0 while it is suspended."
)
QAT_UP = Family("accelplane_qat_up", "1 while the QAT device is up.")
QAT_REQUESTS = Family("accelplane_qat_requests_total", "Requests to the firmware, of all engines.", "counter")
QAT_RESPONSES = Family("accelplane_qat_responses_total", "Responses of the firmware, of all engines.", "counter")
QAT_HEARTBEAT_QUERIES = Family("accelplane_qat_heartbeat_queries_total", "Heartbeat queries of the driver.", "counter")
QAT_HEARTBEAT_FAILURES = Family("accelplane_qat_heartbeat_failures_total", "Heartbeat queries that failed.", "counter")
QAT_ERRORS = Family("accelplane_qat_errors_total", "Errors that the device reported, by severity.", "counter")
QAT_SLICE_UTILIZATION = Family(
    "accelplane_qat_slice_utilization_ratio", "Utilization of a slice, from the telemetry of the driver."
)
QAT_SLICE_EXECUTIONS = Family(
    "accelplane_qat_slice_executions", "Executions of a slice, from the telemetry of the driver."
)
QAT_BANDWIDTH = Family(
    "accelplane_qat_bandwidth_bytes_per_second", "PCIe bandwidth by direction, from the telemetry of the driver."
)
QAT_LATENCY = Family("accelplane_qat_latency_seconds", "Latencies, from the telemetry of the driver.")
IDXD_ENABLED = Family("accelplane_idxd_device_enabled", "1 while the DSA or IAA device is enabled.")
IDXD_CLIENTS = Family("accelplane_idxd_device_clients", "Open user contexts of the device.")
IDXD_COMMAND_STATUS = Family(
    "accelplane_idxd_device_command_status", "Status of the last administrative command, 0 for success."
)
IDXD_ERROR = Family("accelplane_idxd_device_error", "1 while the software error register has an error.")
IDXD_QUEUE_ENTRIES = Family("accelplane_idxd_queue_entries", "Entries in the work queue.")
IDXD_QUEUE_SIZE = Family("accelplane_idxd_queue_size", "Largest number of entries of the work queue.")
IDXD_QUEUE_CLIENTS = Family("accelplane_idxd_queue_clients", "Open user contexts of the work queue.")
IDXD_QUEUE_ENABLED = Family("accelplane_idxd_queue_enabled", "1 while the work queue is enabled.")
IDXD_FAULTS = Family(
    "accelplane_idxd_completion_faults_total",
    "Page faults at completion records of the files of a queue, since the agent reads them.",
    "counter",
)
IDXD_ENGINES = Family("accelplane_idxd_engines", "Engines that belong to a group.")
DLB_RESOURCES = Family("accelplane_dlb_resources", "Resources of the DLB device.")
DLB_AVAILABLE = Family("accelplane_dlb_resources_available", "Resources of the DLB device that are free.")
FPGA_ERRORS = Family("accelplane_fpga_error_flags", "Bits that are set in an error register.")
FPGA_PORT_POWER = Family("accelplane_fpga_port_power_state", "Power state of a port: 0 normal, 1 AP1, 2 AP2, 6 AP6.")
NIC_BYTES = Family("accelplane_nic_bytes_total", "Bytes of a network interface.", "counter")
NIC_PACKETS = Family("accelplane_nic_packets_total", "Packets of a network interface.", "counter")
NIC_ERRORS = Family("accelplane_nic_errors_total", "Packets with errors of a network interface.", "counter")
NIC_DROPS = Family("accelplane_nic_drops_total", "Packets that a network interface dropped.", "counter")
NIC_CARRIER_CHANGES = Family(
    "accelplane_nic_carrier_changes_total", "Times that a network interface got or lost its carrier.", "counter"
)

# The families whose values show whether a device is used.
ACTIVITY = frozenset((GPU_IDLE, NPU_BUSY, QAT_REQUESTS, IDXD_QUEUE_CLIENTS, IDXD_QUEUE_ENTRIES))
FAMILIES = tuple(family for family in globals().values() if isinstance(family, Family))
