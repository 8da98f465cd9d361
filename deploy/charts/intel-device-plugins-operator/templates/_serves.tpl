{{- /* "true" if the operator serves the family: a dictionary with devices, of values.yaml, and family. */ -}}
{{- define "accelplane.serves" -}}
{{- $any := false -}}
{{- range .devices }}{{ if . }}{{ $any = true }}{{ end }}{{ end -}}
{{- if or (not $any) (get .devices .family) }}true{{ end -}}
{{- end -}}
