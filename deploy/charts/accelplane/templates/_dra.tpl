{{- /* The value of the flag -dra-api: one API for all families, or by family, and then by PCI address. */}}
{{- define "accelplane.draApi" -}}
{{- $entries := list }}
{{- if kindIs "string" .api }}
{{- $entries = append $entries .api }}
{{- else }}
{{- range $family, $api := .api }}
{{- $entries = append $entries (printf "%s=%s" $family $api) }}
{{- end }}
{{- end }}
{{- range $address, $api := .devices }}
{{- $entries = append $entries (printf "%s=%s" $address $api) }}
{{- end }}
{{- join "," $entries }}
{{- end }}

{{- /*
The drivers that the agent may publish, as a YAML list: those of the families that agent.dra.api names, of generic
devices, and agent.dra.drivers. A family that changes to another API must be able to withdraw its devices.
*/}}
{{- define "accelplane.draDrivers" -}}
{{- $drivers := .dra.drivers | default list }}
{{- $all := or (kindIs "string" .dra.api) (not (empty .dra.devices)) }}
{{- range list "dlb" "dsa" "fpga" "gpu" "iaa" "npu" "qat" "sgx" }}
{{- if or $all (hasKey $.dra.api .) }}
{{- $drivers = append $drivers (printf "%s.intel.com" .) }}
{{- end }}
{{- end }}
{{- $plugins := (.config | default dict).plugins | default dict }}
{{- if or (and $all (hasKey $plugins "generic")) (and (kindIs "map" .dra.api) (hasKey .dra.api "generic")) }}
{{- $drivers = append $drivers (($plugins.generic | default dict).domain | default "squat.ai") }}
{{- end }}
{{- if not $drivers }}
{{- fail "agent.dra.drivers: found none, expected the namespaces of the plugins that agent.dra.api names" }}
{{- end }}
{{- toYaml ($drivers | uniq | sortAlpha) }}
{{- end }}

{{- /* Device classes of a file. Kubernetes 1.33 has another version of their API with the same fields. */}}
{{- define "accelplane.classes" -}}
{{- $text := .root.Files.Get (printf "files/dra/%s.yaml" .file) }}
{{- if semverCompare "<1.34.0-0" .root.Capabilities.KubeVersion.Version }}
{{- $text = replace "apiVersion: resource.k8s.io/v1\n" "apiVersion: resource.k8s.io/v1beta1\n" $text }}
{{- end }}
{{- $text }}
{{- end }}
