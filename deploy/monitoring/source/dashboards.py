"""The dashboards: panels and their queries."""

from __future__ import annotations

from panels import Dashboard, Panel, Query, Row, Variable, query

AGENTS = 'up{job=~".*accelplane-agent"}'
OURS = 'resource=~"(gpu|npu|qat|dsa|iaa|dlb|sgx|fpga)_intel_com_.+|amd_com_onload"'
WAITING = (
    "sum by (cluster, namespace, pod) (kube_pod_status_unschedulable == 1)"
    f" and on (cluster, namespace, pod) kube_pod_container_resource_requests{{{OURS}}} > 0"
)
UNHEALTHY = '(accelplane_unit_health{phase="unhealthy"} == 1)'
HEALTH_STATES = (("healthy", "green"), ("suspect", "yellow"), ("recovering", "blue"), ("unhealthy", "red"))
OFF_ON = (("no", "text"), ("yes", "orange"))
AWAKE = (("asleep", "blue"), ("awake", "green"))
OF_UNIT = 'node=~"$node",plugin=~"$plugin",unit=~"$unit"'
OF_DEVICE = 'node=~"$node",plugin=~"$plugin",device=~"$device"'
OF_NODE = 'node=~"$node"'


def _overview_panels() -> list[Panel]:
    return [
        Panel(title="Healthy device IDs", kind="stat", width=4, height=4,
              queries=query('sum(accelplane_devices{health="Healthy"})')),
        Panel(title="Unhealthy device IDs", kind="stat", width=4, height=4,
              queries=query('sum(accelplane_devices{health="Unhealthy"})')),
        Panel(title="Allocated share", kind="stat", unit="percentunit", width=4, height=4,
              queries=query("sum(accelplane_resource_allocated) / sum(accelplane_resource_allocatable)")),
        Panel(title="Power of all devices", kind="stat", unit="watt", width=4, height=4,
              about="Devices whose driver has an energy counter or a power sensor.",
              queries=query("sum(accelplane:device_power:watts)")),
        Panel(title="Agents down", kind="stat", width=4, height=4,
              queries=query(f"count({AGENTS}) - sum({AGENTS})")),
        Panel(title="Pods that wait", kind="stat", width=4, height=4,
              about="Unschedulable pods that request an accelerator. Needs kube-state-metrics.", none="0",
              queries=query(f"count({WAITING})")),
    ]  # fmt: skip


def _devices_panels() -> list[Panel]:
    return [
        Panel(title="Physical devices by kind and state", kind="table", shown=("phase",), queries=query(
            "sum by (plugin, phase) (accelplane_unit_health)"
            ' or label_replace(count by (plugin) (count by (cluster, instance, plugin, unit) (accelplane_unit_info)'
            ' unless on (cluster, instance, plugin, unit) accelplane_unit_health), "phase", "not checked", "", "")',
            "devices")),
        Panel(title="Device IDs by resource and health",
              queries=query("sum by (resource, health) (accelplane_devices)", "{{resource}} {{health}}")),
        Panel(title="Allocated share by resource", unit="percentunit", queries=query(
            "sum by (resource) (accelplane_resource_allocated) / sum by (resource) (accelplane_resource_allocatable)",
            "{{resource}}")),
        Panel(title="Allocated and allocatable", kind="table", queries=[
            Query("sum by (resource) (accelplane_resource_allocated)", "allocated"),
            Query("sum by (resource) (accelplane_resource_allocatable)", "allocatable")]),
        Panel(title="Namespaces with the most device IDs", kind="bargauge",
              queries=query("topk(10, accelplane:namespace_devices:sum)", "{{namespace}} {{resource}}")),
        Panel(title="Power by kind", unit="watt", stacked=True,
              queries=query("sum by (plugin) (accelplane:device_power:watts)", "{{plugin}}")),
    ]  # fmt: skip


def _problems_panels() -> list[Panel]:
    return [
        Panel(title="Unhealthy devices with reason", kind="table", width=12, none="None", queries=query(
            f"{UNHEALTHY} * on (cluster, instance, plugin, unit) group_right () accelplane_unit_unhealthy_reason",
            "unhealthy")),
        Panel(title="Unhealthy time in the last 24 hours", kind="table", unit="s", width=12, none="None", queries=query(
            "increase(accelplane_unit_unhealthy_seconds_total[1d])"
            f" and on (cluster, instance, plugin, unit) {UNHEALTHY}", "time")),
        Panel(title="Containers that hold unhealthy devices", kind="table", width=12, none="None", shown=("container",),
              queries=query(f"accelplane_container_devices and on (cluster, instance, plugin, unit) {UNHEALTHY}",
                            "IDs")),
        Panel(title="Allocated and idle for 30 minutes", kind="table", unit="s", width=12, none="None",
              queries=query("accelplane_unit_idle_seconds > 1800", "idle")),
        Panel(title="Agents that do not answer", kind="table", width=12, none="None", shown=("agent",),
              queries=query(f"{AGENTS} == 0", "up")),
        Panel(title="Waiting pods", kind="table", width=12, none="None",
              queries=query(WAITING, "waiting")),
    ]  # fmt: skip


def _recovery_panels() -> list[Panel]:
    return [
        Panel(title="Failures by reason", width=12, none="None", queries=query(
            "sum by (plugin, reason) (increase(accelplane_unit_failures_total[$__rate_interval]))",
            "{{plugin}} {{reason}}")),
        Panel(title="Time to recover, 90th percentile of a day", unit="s", width=12, none="None", queries=query(
            "histogram_quantile(0.9, sum by (plugin, le) (increase(accelplane_unit_recovery_seconds_bucket[1d])))",
            "{{plugin}}")),
    ]  # fmt: skip


def fleet() -> Dashboard:
    return Dashboard(
        uid="accelplane-fleet",
        title="Accelplane / Fleet",
        about="All accelerators of a cluster: state, allocation, problems.",
        rows=[
            Row("Overview", _overview_panels()),
            Row("Devices", _devices_panels()),
            Row("Problems", _problems_panels()),
            Row("Recovery", _recovery_panels()),
        ],
    )


def _health_panels() -> list[Panel]:
    return [
        Panel(title="Health", kind="state-timeline", width=12, states=HEALTH_STATES, queries=query(
            f'accelplane_unit_health{{phase="suspect",{OF_UNIT}}}'
            f' + ignoring (phase) 2 * accelplane_unit_health{{phase="recovering",{OF_UNIT}}}'
            f' + ignoring (phase) 3 * accelplane_unit_health{{phase="unhealthy",{OF_UNIT}}}',
            "{{node}} {{unit}}")),
        Panel(title="Reasons", kind="state-timeline", width=12, states=OFF_ON, none="None",
              queries=query(f"accelplane_unit_unhealthy_reason{{{OF_UNIT}}}", "{{node}} {{unit}} {{reason}}")),
        Panel(title="Containers that hold IDs", width=12, stacked=True, none="None",
              queries=query(f"accelplane_container_devices{{{OF_UNIT}}}",
                            "{{unit}} {{namespace}}/{{pod}}/{{container}}")),
        Panel(title="Idle time of held devices", unit="s", width=12, none="None",
              queries=query(f"accelplane_unit_idle_seconds{{{OF_UNIT}}}", "{{node}} {{unit}}")),
    ]  # fmt: skip


def _sensors_panels() -> list[Panel]:
    return [
        Panel(title="Power and limits", unit="watt", queries=[
            Query(f"accelplane:device_power:watts{{{OF_DEVICE}}}", "{{device}}"),
            Query(f"accelplane_device_power_limit_watts{{{OF_DEVICE}}}", "{{device}} {{sensor}} {{limit}}")]),
        Panel(title="Temperatures and limits", unit="celsius", least=None, queries=[
            Query(f"accelplane_device_temperature_celsius{{{OF_DEVICE}}}", "{{device}} {{sensor}}"),
            Query(f"accelplane_device_temperature_limit_celsius{{{OF_DEVICE}}}", "{{device}} {{sensor}} {{limit}}")]),
        Panel(title="Alarms", kind="state-timeline", states=OFF_ON,
              queries=query(f"accelplane_device_alarm{{{OF_DEVICE}}}", "{{device}} {{sensor}}")),
        Panel(title="Voltages", unit="volt", queries=query(
            f"accelplane_device_voltage_volts{{{OF_DEVICE}}}", "{{device}} {{sensor}}")),
        Panel(title="Currents", unit="amp", queries=query(
            f"accelplane_device_current_amperes{{{OF_DEVICE}}}", "{{device}} {{sensor}}")),
        Panel(title="Fans", unit="rotrpm", queries=query(
            f"accelplane_device_fan_rpm{{{OF_DEVICE}}}", "{{device}} {{sensor}}")),
    ]  # fmt: skip


def _activity_panels() -> list[Panel]:
    return [
        Panel(title="GPU frequencies", unit="hertz", queries=query(
            f"accelplane_gpu_frequency_hertz{{{OF_DEVICE}}}", "{{device}} {{gt}} {{kind}}")),
        Panel(title="GT active", unit="percentunit", about="An upper bound of the use of the engines.", queries=query(
            f"accelplane:gt_active:ratio{{{OF_DEVICE}}}", "{{device}} {{gt}}")),
        Panel(title="Throttling", kind="state-timeline", states=OFF_ON, queries=query(
            f"accelplane_gpu_throttled{{{OF_DEVICE}}}", "{{device}} {{gt}} {{reason}}")),
    ]  # fmt: skip


def _bus_panels() -> list[Panel]:
    return [
        Panel(title="Link speed and maximum", unit="suffix:GT/s", about="Transfers per second of a lane.", queries=[
            Query(f"accelplane_pci_link_transfers_per_second{{{OF_DEVICE}}} / 1e9", "{{device}}"),
            Query(f"accelplane_pci_link_max_transfers_per_second{{{OF_DEVICE}}} / 1e9", "{{device}} maximum")]),
        Panel(title="Lanes and maximum", queries=[
            Query(f"accelplane_pci_link_lanes{{{OF_DEVICE}}}", "{{device}}"),
            Query(f"accelplane_pci_link_max_lanes{{{OF_DEVICE}}}", "{{device}} maximum")]),
        Panel(title="PCIe errors", queries=query(
            f"increase(accelplane_pci_errors_total{{{OF_DEVICE}}}[$__rate_interval])", "{{device}} {{severity}}")),
        Panel(title="Power state", kind="state-timeline", states=AWAKE,
              queries=query(f"accelplane_device_awake{{{OF_DEVICE}}}", "{{device}}")),
        Panel(title="Reads of device files by outcome", unit="ops", width=16, queries=query(
            'sum by (plugin, outcome) (rate(accelplane_reads_total{node=~"$node",plugin=~"$plugin"}'
            "[$__rate_interval]))",
            "{{plugin}} {{outcome}}")),
    ]  # fmt: skip


def node() -> Dashboard:
    return Dashboard(
        uid="accelplane-node",
        title="Accelplane / Node and device",
        about="Health, holders, sensors and activity of the devices of a node.",
        rows=[
            Row("Health", _health_panels()),
            Row("Sensors", _sensors_panels()),
            Row("GPU activity", _activity_panels()),
            Row("Bus", _bus_panels()),
        ],
        variables=[
            Variable("node", "label_values(accelplane_build_info, node)", "Node"),
            Variable("plugin", 'label_values(accelplane_device_info{node=~"$node"}, plugin)', "Plugin"),
            Variable("device", 'label_values(accelplane_device_info{node=~"$node",plugin=~"$plugin"}, device)',
                     "Device"),
            Variable("unit", f"label_values(accelplane_unit_info{{{OF_DEVICE}}}, unit)", "Unit"),
        ],
    )  # fmt: skip


def _kind(metric: str, legend: str = "{{node}} {{device}}") -> tuple[Query]:
    return query(f'{metric}{{node=~"$node"}}', legend)


def _rate(metric: str, legend: str = "{{node}} {{device}}") -> tuple[Query]:
    return query(f'rate({metric}{{node=~"$node"}}[$__rate_interval])', legend)


def _gpu_panels() -> list[Panel]:
    return [
        Panel(title="GT active", unit="percentunit",
              queries=_kind("accelplane:gt_active:ratio", "{{node}} {{device}} {{gt}}")),
        Panel(title="Power", unit="watt",
              queries=query('accelplane:device_power:watts{plugin="gpu",node=~"$node"}', "{{node}} {{device}}")),
        Panel(title="Throttled GTs", none="None", queries=query(
            'sum by (node, device) (accelplane_gpu_throttled{reason="any",node=~"$node"})', "{{node}} {{device}}")),
        Panel(title="Use by containers", unit="percentunit", none="None",
              about="Needs accelplane clients.", queries=query(
            'rate(accelplane_container_gpu_busy_seconds_total{node=~"$node"}[$__rate_interval])',
            "{{namespace}}/{{pod}} {{engine}}")),
        Panel(title="Memory of containers", unit="bytes", none="None", about="Needs accelplane clients.",
              queries=query('accelplane_container_gpu_memory_bytes{kind="resident",node=~"$node"}',
                            "{{namespace}}/{{pod}} {{region}}")),
        Panel(title="Health reported by the driver", none="None",
              queries=query('sum by (state) (accelplane_gpu_health{node=~"$node"})', "{{state}}")),
    ]  # fmt: skip


def _npu_panels() -> list[Panel]:
    return [
        Panel(title="Busy", unit="percentunit", queries=_rate("accelplane_npu_busy_seconds_total")),
        Panel(title="Memory", unit="bytes", queries=_kind("accelplane_npu_memory_bytes")),
        Panel(title="Frequencies", unit="hertz",
              queries=_kind("accelplane_npu_frequency_hertz", "{{node}} {{device}} {{kind}}")),
    ]  # fmt: skip


def _qat_panels() -> list[Panel]:
    return [
        Panel(title="Up", kind="state-timeline", states=(("down", "red"), ("up", "green")),
              queries=_kind("accelplane_qat_up")),
        Panel(title="Requests", unit="reqps", queries=_rate("accelplane_qat_requests_total")),
        Panel(title="Heartbeat failures", queries=query(
            'increase(accelplane_qat_heartbeat_failures_total{node=~"$node"}[$__rate_interval])',
            "{{node}} {{device}}")),
        Panel(title="Utilization of slices", unit="percentunit",
              about="Only while the telemetry of the driver is switched on.",
              queries=_kind("accelplane_qat_slice_utilization_ratio", "{{node}} {{device}} {{slice}}")),
        Panel(title="Bandwidth", unit="Bps", about="Only while the telemetry of the driver is switched on.",
              queries=_kind("accelplane_qat_bandwidth_bytes_per_second", "{{node}} {{device}} {{direction}}")),
        Panel(title="Errors", queries=query(
            'increase(accelplane_qat_errors_total{node=~"$node"}[$__rate_interval])',
            "{{node}} {{device}} {{severity}}")),
    ]  # fmt: skip


def _idxd_panels() -> list[Panel]:
    return [
        Panel(title="Fill of work queues", unit="percentunit", queries=query(
            'accelplane_idxd_queue_entries{node=~"$node"} / accelplane_idxd_queue_size{node=~"$node"}',
            "{{node}} {{unit}}")),
        Panel(title="Clients of work queues", queries=_kind("accelplane_idxd_queue_clients", "{{node}} {{unit}}")),
        Panel(title="Completion faults", none="None", queries=query(
            'increase(accelplane_idxd_completion_faults_total{node=~"$node"}[$__rate_interval])',
            "{{node}} {{unit}} {{outcome}}")),
    ]  # fmt: skip


def _others_panels() -> list[Panel]:
    return [
        Panel(title="DLB: resources in use", queries=query(
            'accelplane_dlb_resources{node=~"$node"} - accelplane_dlb_resources_available{node=~"$node"}',
            "{{node}} {{device}} {{resource}}")),
        Panel(title="SGX: enclave page cache", unit="bytes",
              queries=_kind("accelplane_sgx_epc_bytes", "{{node}} NUMA {{numa_node}}")),
        Panel(title="SGX: enclave IDs held", none="None", queries=query(
            'sum by (node) (accelplane_container_devices{resource="sgx.intel.com/enclave",node=~"$node"})',
            "{{node}}")),
        Panel(title="FPGA: programming operations", queries=query(
            'increase(fpga_programmings_total{node=~"$node"}[$__rate_interval])', "{{node}} {{device}} {{outcome}}")),
        Panel(title="FPGA: error bits",
              queries=_kind("accelplane_fpga_error_flags", "{{node}} {{device}} {{register}}")),
        Panel(title="FPGA: temperature", unit="celsius", least=None, none="None", queries=query(
            'accelplane_device_temperature_celsius{plugin="fpga",node=~"$node"}', "{{node}} {{device}} {{sensor}}")),
        Panel(title="Network cards: bytes", unit="Bps",
              queries=_rate("accelplane_nic_bytes_total", "{{node}} {{interface}} {{direction}}")),
        Panel(title="Network cards: errors",
              queries=_rate("accelplane_nic_errors_total", "{{node}} {{interface}} {{direction}}")),
        Panel(title="Network cards: temperature", unit="celsius", least=None, none="None", queries=query(
            'accelplane_device_temperature_celsius{plugin="onload",node=~"$node"}', "{{node}} {{device}} {{sensor}}")),
    ]  # fmt: skip


def kinds() -> Dashboard:
    return Dashboard(
        uid="accelplane-kinds",
        title="Accelplane / Kinds",
        about="The metrics that only one kind of device has.",
        rows=[
            Row("GPU", _gpu_panels()),
            Row("NPU", _npu_panels()),
            Row("QAT", _qat_panels()),
            Row("DSA and IAA", _idxd_panels()),
            Row("DLB, SGX, FPGA, network cards", _others_panels()),
        ],
        variables=[Variable("node", "label_values(accelplane_build_info, node)", "Node")],
    )


def namespace() -> Dashboard:
    of = 'namespace=~"$namespace"'
    busy = "max by (cluster, instance, plugin, device) (accelplane:gt_active:ratio)"
    panels = [
        Panel(title="Device IDs held", width=12, stacked=True, none="None",
              queries=query(f"accelplane:namespace_devices:sum{{{of}}}", "{{namespace}} {{resource}}")),
        Panel(title="Containers", kind="table", width=12, none="None", shown=("container",),
              queries=query(f"accelplane_container_devices{{{of}}}", "IDs")),
        Panel(title="Device hours", kind="table", none="None",
              about="IDs held, times hours, in the time range.", queries=query(
            f"sum_over_time(accelplane:namespace_devices:sum{{{of}}}[$__range:1m]) / 60", "hours")),
        Panel(title="Busy share of the GPUs held", unit="percentunit", none="None", queries=query(
            f'avg by (namespace) (accelplane:container_device:one{{plugin="gpu",{of}}}'
            f" * on (cluster, instance, plugin, device) group_left () {busy})", "{{namespace}}")),
        Panel(title="Energy of the devices held", kind="table", unit="joule", none="None",
              about="A shared device counts fully for each of its namespaces.", queries=query(
            f"sum_over_time(sum by (namespace) (accelplane:container_device_power:watts{{{of}}})[$__range:1m]) * 60",
            "energy")),
        Panel(title="Allocated and idle", kind="table", unit="s", width=24, none="None", queries=query(
            f"accelplane:container_device:one{{{of}}}"
            " * on (cluster, instance, plugin, unit) group_left () accelplane_unit_idle_seconds", "idle")),
    ]  # fmt: skip
    return Dashboard(
        uid="accelplane-namespace",
        title="Accelplane / Namespace",
        about="What the pods of a namespace hold, and how much they use it.",
        rows=[Row("Use", panels)],
        variables=[
            Variable("namespace", "label_values(accelplane_container_devices, namespace)", "Namespace"),
        ],
        since="now-24h",
    )


def _kubelet_panels() -> list[Panel]:
    return [
        Panel(title="Resources that are not registered", kind="table", none="None",
              queries=query(f"accelplane_registered{{{OF_NODE}}} == 0", "registered")),
        Panel(title="Registrations", queries=query(
            f"increase(accelplane_registrations_total{{{OF_NODE}}}[$__rate_interval])", "{{node}} {{resource}}")),
        Panel(title="Lists sent", unit="ops", queries=query(
            f"sum by (resource) (rate(accelplane_lists_sent_total{{{OF_NODE}}}[$__rate_interval]))", "{{resource}}")),
        Panel(title="Allocations by outcome", none="None", queries=query(
            f"sum by (resource, outcome) (increase(accelplane_allocations_total{{{OF_NODE}}}[$__rate_interval]))",
            "{{resource}} {{outcome}}")),
        Panel(title="Allocate, 99th percentile", unit="s", none="None", queries=query(
            "histogram_quantile(0.99, sum by (resource, le) "
            f"(rate(accelplane_allocation_seconds_bucket{{{OF_NODE}}}[$__rate_interval])))", "{{resource}}")),
        Panel(title="Requests to pod-resources", unit="ops", queries=query(
            f"sum by (method, outcome) (rate(accelplane_kubelet_asks_total{{{OF_NODE}}}[$__rate_interval]))",
            "{{method}} {{outcome}}")),
    ]  # fmt: skip


def _scans_panels() -> list[Panel]:
    return [
        Panel(title="Scans", unit="ops", queries=query(
            f"sum by (plugin) (rate(accelplane_scans_total{{{OF_NODE}}}[$__rate_interval]))", "{{plugin}}")),
        Panel(title="Duration of the last scan", unit="s",
              queries=query(f"max by (plugin) (accelplane_scan_seconds{{{OF_NODE}}})", "{{plugin}}")),
        Panel(title="Failed scans and CDI files", queries=[
            Query(f"sum by (plugin) (increase(accelplane_scan_failures_total{{{OF_NODE}}}[$__rate_interval]))",
                  "{{plugin}} scans"),
            Query(f"sum by (plugin) (increase(accelplane_cdi_write_failures_total{{{OF_NODE}}}[$__rate_interval]))",
                  "{{plugin}} CDI files")]),
        Panel(title="Skipped hardware", none="None",
              queries=query(f"sum by (plugin) (accelplane_skipped{{{OF_NODE}}})", "{{plugin}}")),
        Panel(title="Uevents", unit="ops", none="None", queries=query(
            f"sum by (subsystem) (rate(accelplane_uevents_total{{{OF_NODE}}}[$__rate_interval]))", "{{subsystem}}")),
        Panel(title="Stuck devices", kind="table", none="None",
              queries=query(f"accelplane_device_stuck{{{OF_NODE}}} == 1", "stuck")),
    ]  # fmt: skip


def _agents_panels() -> list[Panel]:
    return [
        Panel(title="Pages, 99th percentile", unit="s", none="None", queries=query(
            f"histogram_quantile(0.99, sum by (page, le) (rate(accelplane_page_seconds_bucket{{{OF_NODE}}}"
            "[$__rate_interval])))", "{{page}}")),
        Panel(title="Requests of pages", unit="reqps", queries=query(
            f"sum by (page, code) (rate(accelplane_page_requests_total{{{OF_NODE}}}[$__rate_interval]))",
            "{{page}} {{code}}")),
        Panel(title="Dropped samples", none="None", queries=query(
            f"sum by (plugin, cause) (increase(accelplane_samples_dropped_total{{{OF_NODE}}}[$__rate_interval]))",
            "{{plugin}} {{cause}}")),
        Panel(title="Versions", kind="table", queries=query(
            f"count by (version) (accelplane_build_info{{{OF_NODE}}})", "agents")),
        Panel(title="Series per scrape", queries=query(
            f'scrape_samples_scraped{{job=~".*accelplane-agent",{OF_NODE}}}', "{{node}} {{agent}}")),
        Panel(title="Age of the holders", unit="s", none="None", queries=query(
            f"accelplane_holders_age_seconds{{{OF_NODE}}}", "{{node}} {{agent}}")),
    ]  # fmt: skip


def _operator_panels() -> list[Panel]:
    return [
        Panel(title="Reconciliations", unit="ops", none="None", queries=query(
            "sum by (controller, result) (rate(controller_runtime_reconcile_total[$__rate_interval]))",
            "{{controller}} {{result}}")),
        Panel(title="Admission reviews", unit="ops", none="None", queries=query(
            "sum by (webhook, outcome) (rate(accelplane_webhook_reviews_total[$__rate_interval]))",
            "{{webhook}} {{outcome}}")),
        Panel(title="Agents as the fleet page sees them", none="None",
              queries=query("sum by (state) (accelplane_fleet_agents)", "{{state}}")),
    ]  # fmt: skip


def framework() -> Dashboard:
    return Dashboard(
        uid="accelplane-framework",
        title="Accelplane / Framework",
        about="Agents, operator and webhooks themselves.",
        rows=[
            Row("Kubelet", _kubelet_panels()),
            Row("Scans", _scans_panels()),
            Row("Agents", _agents_panels()),
            Row("API side", _operator_panels()),
        ],
        variables=[Variable("node", "label_values(accelplane_build_info, node)", "Node")],
    )


ALL = {
    "fleet": fleet,
    "node": node,
    "kinds": kinds,
    "namespace": namespace,
    "framework": framework,
}
