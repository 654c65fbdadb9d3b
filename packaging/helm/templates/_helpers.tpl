{{- define "holdfast.name" -}}
{{- if contains "holdfast" .Release.Name }}{{ .Release.Name | trunc 50 | trimSuffix "-" }}
{{- else }}{{ printf "%s-holdfast" (.Release.Name | trunc 41 | trimSuffix "-") }}{{ end }}
{{- end }}

{{- define "holdfast.selector" -}}
app.kubernetes.io/name: holdfast
app.kubernetes.io/instance: {{ .Release.Name }}
{{- end }}

{{- define "holdfast.labels" -}}
{{ include "holdfast.selector" . }}
app.kubernetes.io/version: {{ .Chart.AppVersion | quote }}
app.kubernetes.io/managed-by: {{ .Release.Service }}
helm.sh/chart: {{ printf "%s-%s" .Chart.Name .Chart.Version }}
{{- end }}

{{- define "holdfast.account" -}}
{{- if .Values.serviceAccount.create }}{{ .Values.serviceAccount.name | default (include "holdfast.name" .) }}
{{- else }}{{ .Values.serviceAccount.name | default "default" }}{{ end }}
{{- end }}

{{- define "holdfast.scheme" -}}
{{ ternary "https" "http" .Values.tls.enabled }}
{{- end }}

{{- define "holdfast.tlsSecret" -}}
{{ .Values.tls.secret | default (printf "%s-tls" (include "holdfast.name" .)) }}
{{- end }}

{{/* What cannot work is refused here, because a schema cannot say it. */}}
{{- define "holdfast.check" -}}
{{- if not .Values.cluster.url }}{{ fail "set cluster.url: the place in a store, such as s3://bucket/jobs" }}{{ end }}
{{- if not .Values.tokens.secret }}
{{- fail "set tokens.secret: a Secret with tokens.toml, which `holdfast token new NAME --file tokens.toml` creates" }}
{{- end }}
{{- if and .Values.store.secretKeys (not .Values.store.secret) }}{{ fail "store.secretKeys needs store.secret" }}{{ end }}
{{- if and .Values.store.secret (not .Values.store.secretKeys) }}{{ fail "store.secret needs store.secretKeys: which of its keys to use" }}{{ end }}
{{- if and .Values.tls.enabled (not .Values.tls.secret) (not .Values.tls.certManager.enabled) }}
{{- fail "tls.enabled needs tls.secret, or tls.certManager.enabled" }}
{{- end }}
{{- if and .Values.tls.certManager.enabled (not .Values.tls.certManager.issuer.name) }}
{{- fail "tls.certManager needs the name of its issuer" }}
{{- end }}
{{- if gt (int .Values.replicas) (int .Values.cluster.shards) }}
{{- fail "replicas is more than cluster.shards: some servers would be idle" }}
{{- end }}
{{- end }}

{{/* What the servers and `cluster init` need to reach the store. */}}
{{- define "holdfast.storeEnv" -}}
- {name: HOLDFAST_CONFIG, value: /etc/holdfast/settings/holdfast.toml}
{{- range .Values.store.secretKeys }}
- {name: HOLDFAST_STORE_{{ upper . }}_FILE, value: /etc/holdfast/store/{{ . }}}
{{- end }}
{{- if .Values.store.caSecret }}
- {name: HOLDFAST_STORE_CA_FILE, value: /etc/holdfast/store-ca/ca.crt}
{{- end }}
- {name: HOLDFAST_BROKER_STORE_CACHE_DIR, value: /var/cache/holdfast}
{{- with .Values.env }}
{{ toYaml . }}
{{- end }}
{{- end }}

{{- define "holdfast.storeMounts" -}}
- {name: settings, mountPath: /etc/holdfast/settings, readOnly: true}
- {name: cache, mountPath: /var/cache/holdfast}
- {name: tmp, mountPath: /tmp}
{{- if .Values.store.secret }}
- {name: store, mountPath: /etc/holdfast/store, readOnly: true}
{{- end }}
{{- if .Values.store.caSecret }}
- {name: store-ca, mountPath: /etc/holdfast/store-ca, readOnly: true}
{{- end }}
{{- end }}

{{- define "holdfast.confined" -}}
allowPrivilegeEscalation: false
readOnlyRootFilesystem: true
capabilities: {drop: [ALL]}
{{- end }}
