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

{{- /* Device classes of a file. Kubernetes 1.33 has another version of their API with the same fields. */}}
{{- define "accelplane.classes" -}}
{{- $text := .root.Files.Get (printf "files/dra/%s.yaml" .file) }}
{{- if semverCompare "<1.34.0-0" .root.Capabilities.KubeVersion.Version }}
{{- $text = replace "apiVersion: resource.k8s.io/v1\n" "apiVersion: resource.k8s.io/v1beta1\n" $text }}
{{- end }}
{{- $text }}
{{- end }}
