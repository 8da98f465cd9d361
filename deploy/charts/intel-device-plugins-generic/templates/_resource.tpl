{{- /*
The hooks that create the custom resource, with semicolons between them; empty for a part of the release. Helm does not
know the kind if a parent chart installs the operator in the same release. Then the resource is created after the
installation and deleted before the operator. The next upgrade makes it a part of the release. Helm takes it over
without its changes, so a hook creates it once more. kind: of the resource; root: $
*/ -}}
{{- define "accelplane.hooks" -}}
{{- $api := "deviceplugin.intel.com/v1" -}}
{{- $created := "post-install,post-rollback" -}}
{{- if .root.Capabilities.APIVersions.Has (printf "%s/%s" $api .kind) -}}
{{- $live := lookup $api .kind "" (include "accelplane.resourceName" .root) -}}
{{- if eq $created (dig "metadata" "annotations" "helm.sh/hook" "" $live) -}}
;post-upgrade
{{- end -}}
{{- else if not .root.Chart.IsRoot -}}
{{ $created }};pre-delete
{{- end -}}
{{- end -}}
{{- define "accelplane.resourceName" -}}
{{- .Values.fullnameOverride | default .Values.nameOverride | default .Values.name -}}
{{- end -}}
{{- /* The metadata of the custom resource. root: $; hook: one of accelplane.hooks, or empty */ -}}
{{- define "accelplane.metadata" -}}
{{- $annotations := deepCopy (default dict .root.Values.annotations) -}}
{{- if .hook -}}
{{- $_ := set $annotations "helm.sh/hook" .hook -}}
{{- $_ := set $annotations "helm.sh/hook-delete-policy" (ternary "before-hook-creation,hook-succeeded" "before-hook-creation" (eq .hook "pre-delete")) -}}
{{- $_ := set $annotations "meta.helm.sh/release-name" .root.Release.Name -}}
{{- $_ := set $annotations "meta.helm.sh/release-namespace" .root.Release.Namespace -}}
labels:
  app.kubernetes.io/managed-by: Helm
{{ end -}}
name: {{ include "accelplane.resourceName" .root }}
{{- with $annotations }}
annotations: {{- toYaml . | nindent 2 }}
{{- end }}
{{- end -}}
