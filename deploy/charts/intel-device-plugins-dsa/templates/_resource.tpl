{{- /*
When the custom resource is created: with the release, which is one empty line, or by hooks. Helm does not know its kind
if a parent chart installs the operator in the same release. Then it is created after the installation and deleted
before the operator, and the next upgrade makes it a part of the release. kind: of the resource; root: $
*/ -}}
{{- define "accelplane.hooks" -}}
{{- $known := .root.Capabilities.APIVersions.Has (printf "deviceplugin.intel.com/v1/%s" .kind) -}}
{{- if not (or $known .root.Chart.IsRoot) -}}
post-install,post-rollback;pre-delete
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
