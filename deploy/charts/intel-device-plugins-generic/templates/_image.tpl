{{- /*
The reference of an image. It has the digest of the release if its version is that of the chart. Fails for images that
do not exist, and for those of the Intel device plugins, whose releases are 0.x, if the chart cannot run them.

image: hub, tag and digest; at: their place in the values; name: of the image; originals: the chart can run images of
the Intel device plugins; chart: .Chart
*/ -}}
{{- define "accelplane.image" -}}
{{- $hub := .image.hub -}}
{{- $given := toString (default "" .image.tag) -}}
{{- $tag := default .chart.AppVersion $given -}}
{{- $ours := "the registry with the images of Accelplane" -}}
{{- if hasSuffix ".invalid" (first (splitList "/" $hub)) -}}
{{- fail (printf "%s.hub: found the placeholder %q, expected %s; build the images and push them to a registry (docs/images.md), or install the charts of a release" .at $hub $ours) -}}
{{- end -}}
{{- if not .image.digest -}}
{{- $vendor := last (splitList "/" $hub) -}}
{{- $original := regexMatch "^v?0\\." $tag -}}
{{- if and (eq $vendor "intel") (not .originals) -}}
{{- fail (printf "%s.hub: found %q, a place of the Intel device plugins, whose images this chart cannot run; set %s.hub to %s, and %s.tag to \"\"" .at $hub .at $ours .at) -}}
{{- else if and $original (or (eq $vendor "accelplane") (not .originals)) -}}
{{- fail (printf "%s.tag: found %q with hub %q, a version of the Intel device plugins, expected %s or newer; set %s.tag to \"\"" .at $tag $hub .chart.AppVersion .at) -}}
{{- else if and (eq $vendor "intel") (not $given) -}}
{{- fail (printf "%s.tag: found \"\" with hub %q, which has no image of the version %s of this chart; set %s.hub to %s, or %s.tag to a release of the Intel device plugins such as 0.36.0" .at $hub $tag .at $ours .at) -}}
{{- else if and (or (eq $hub "intel") (eq $hub "docker.io/intel")) (not $original) (ne $tag "devel") -}}
{{- fail (printf "%s.tag: found %q with hub %q, expected a release of the Intel device plugins such as 0.36.0; set %s.hub to %s for a release of Accelplane" .at $tag $hub .at $ours) -}}
{{- else if and (eq $vendor "intel") (regexMatch "^\\d+\\.\\d+\\.\\d+" $tag) (semverCompare "<0.31.1-0" $tag) -}}
{{- fail (printf "%s.tag: found %q with hub %q, expected 0.31.1 or newer; the operator does not accept older images" .at $tag $hub) -}}
{{- end -}}
{{- end -}}
{{- $released := ternary "" (get (fromJson (include "accelplane.digests" .)) .name) (not (empty .image.tag)) -}}
{{- printf "%s/%s:%s" $hub .name $tag -}}
{{- with default $released .image.digest }}@{{ . }}{{ end -}}
{{- end -}}
