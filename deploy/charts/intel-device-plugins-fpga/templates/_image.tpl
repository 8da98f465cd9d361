{{- /* The image has the digest of the release if its version is that of the chart. */ -}}
{{- define "image" -}}
{{- $tag := toString (default .chart.AppVersion .image.tag) -}}
{{- $released := ternary "" (get (fromJson (include "digests" .)) .name) (not (empty .image.tag)) -}}
{{- printf "%s/%s:%s" .image.hub .name $tag -}}
{{- with default $released .image.digest }}@{{ . }}{{ end -}}
{{- end -}}
