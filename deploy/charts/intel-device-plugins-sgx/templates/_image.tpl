{{- define "image" -}}
{{- $tag := toString (default .chart.AppVersion .image.tag) -}}
{{- printf "%s/%s:%s" .image.hub .name $tag -}}
{{- with .image.digest }}@{{ . }}{{ end -}}
{{- end -}}
