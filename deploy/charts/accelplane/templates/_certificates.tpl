{{- /*
An authority of the installation's own, whose key stays when its certificate is renewed, and the certificate of a
webhook, as in the trees. Several webhooks can be in one namespace, so the names of the Secrets have the
prefix too.
*/ -}}
{{- define "accelplane.certificates" -}}
apiVersion: cert-manager.io/v1
kind: Issuer
metadata:
  {{- include "accelplane.certificateLabels" . }}
  name: {{ .prefix }}selfsigned-issuer
  namespace: {{ .namespace }}
spec:
  selfSigned: {}
---
apiVersion: cert-manager.io/v1
kind: Certificate
metadata:
  {{- include "accelplane.certificateLabels" . }}
  name: {{ .prefix }}ca-cert
  namespace: {{ .namespace }}
spec:
  commonName: webhook-ca
  duration: 87600h
  isCA: true
  issuerRef:
    kind: Issuer
    name: {{ .prefix }}selfsigned-issuer
  privateKey:
    algorithm: ECDSA
    size: 256
    rotationPolicy: Never
  secretName: {{ .prefix }}webhook-ca-cert
---
apiVersion: cert-manager.io/v1
kind: Issuer
metadata:
  {{- include "accelplane.certificateLabels" . }}
  name: {{ .prefix }}ca-issuer
  namespace: {{ .namespace }}
spec:
  ca:
    secretName: {{ .prefix }}webhook-ca-cert
---
apiVersion: cert-manager.io/v1
kind: Certificate
metadata:
  {{- include "accelplane.certificateLabels" . }}
  name: {{ .prefix }}serving-cert
  namespace: {{ .namespace }}
spec:
  dnsNames:
  - {{ .prefix }}webhook-service.{{ .namespace }}.svc
  - {{ .prefix }}webhook-service.{{ .namespace }}.svc.cluster.local
  issuerRef:
    kind: Issuer
    name: {{ .prefix }}ca-issuer
  privateKey:
    rotationPolicy: Always
  secretName: {{ .prefix }}webhook-server-cert
{{- end -}}
{{- define "accelplane.certificateLabels" -}}
{{- with .labels }}
  labels: {{- toYaml . | nindent 4 }}
{{- end }}
{{- end -}}
{{- define "accelplane.certificateMounts" }}
        volumeMounts:
        - mountPath: /tmp/k8s-webhook-server/serving-certs
          name: cert
          readOnly: true
{{- end -}}
{{- define "accelplane.certificateVolumes" }}
      volumes:
      - name: cert
        secret:
          defaultMode: 420
          secretName: {{ .prefix }}webhook-server-cert
{{- end -}}
