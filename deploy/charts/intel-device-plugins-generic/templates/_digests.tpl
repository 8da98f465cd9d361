{{- /* The digests of images in releases, which make release adds. */ -}}
{{- define "accelplane.digests" -}}
{}
{{- end -}}
