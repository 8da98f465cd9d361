{{- /* Fails if a parent chart disables the chart without a condition, because Helm renders the chart anyway. */ -}}
{{- define "accelplane.checkEnabled" -}}
{{- if eq (toString .Values.enabled) "false" -}}
{{- fail (printf "enabled: found false for the chart %s, which Helm renders anyway; add \"condition: %s.enabled\" to its dependency in the parent chart" .Chart.Name .Chart.Name) -}}
{{- end -}}
{{- end -}}
