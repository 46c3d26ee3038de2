{{/* The gateway: a container of its own deployment, or of each server's pod. */}}
{{- define "draftwood.gatewayContainer" -}}
{{- $scheme := ternary "HTTPS" "HTTP" (not (empty .Values.gateway.tlsSecret)) }}
- name: gateway
  {{- include "draftwood.gatewayProgram" (list . false) | trim | nindent 2 }}
  ports:
    - {name: http, containerPort: 8080}
  # Health is that of the servers behind it: a gateway of which none serves takes no requests, and is not restarted for it.
  readinessProbe:
    httpGet: {path: /health, port: http, scheme: {{ $scheme }}}
    periodSeconds: 5
    timeoutSeconds: 3
    failureThreshold: 2
  livenessProbe:
    tcpSocket: {port: http}
    periodSeconds: 10
    failureThreshold: 6
  lifecycle:
    preStop:
      {{- include "draftwood.preStop" . | nindent 6 }}
{{- end }}

{{- define "draftwood.gatewayCheck" -}}
- name: check-gateway
  {{- include "draftwood.gatewayProgram" (list . true) | trim | nindent 2 }}
{{- end }}

{{/* What it runs, of the container that serves, or with true of the one that checks before. */}}
{{- define "draftwood.gatewayProgram" -}}
{{- $check := index . 1 }}
{{- with index . 0 }}
{{- $gateway := .Values.gateway }}
{{- $sidecar := eq $gateway.mode "sidecar" }}
{{- $standalone := eq $gateway.mode "standalone" }}
image: {{ include "draftwood.gatewayImage" . }}
imagePullPolicy: {{ .Values.image.pullPolicy }}
args:
  - gateway
  {{- if $check }}
  - --check
  {{- end }}
  - --host=0.0.0.0
  - --port=8080
  {{- range $gateway.servers }}
  - {{ printf "--server=%s=%s" .model .address | quote }}
  {{- end }}
  {{- if not $standalone }}
  - --target={{ if $sidecar }}127.0.0.1:50051{{ else }}dns:///{{ include "draftwood.fullname" . }}-headless.{{ .Release.Namespace }}:50051{{ end }}
  {{- end }}
  - --drain-grace={{ include "draftwood.grace" . }}
  {{- range $gateway.corsOrigins }}
  - --cors-origin={{ . }}
  {{- end }}
  {{- if $gateway.tlsSecret }}
  - --http-tls-cert=/etc/draftwood/http-tls/tls.crt
  - --http-tls-key=/etc/draftwood/http-tls/tls.key
  {{- end }}
  {{- if include "draftwood.gatewayTls" . }}
  - --tls-ca=/etc/draftwood/server-tls/ca.crt
  {{- if $gateway.server.name }}
  - --tls-server-name={{ $gateway.server.name }}
  {{- end }}
  {{- if .Values.tls.clientCA }}
  - --tls-cert=/etc/draftwood/server-tls/tls.crt
  - --tls-key=/etc/draftwood/server-tls/tls.key
  {{- end }}
  {{- else if not $sidecar }}
  # Callers' keys go on to the server, inside of the cluster.
  - --plaintext-credentials
  {{- end }}
  {{- if $gateway.apiKeySecret }}
  - --share-credential
  {{- end }}
securityContext:
  {{- include "draftwood.containerSecurity" . | nindent 2 }}
env:
  - {name: HOME, value: /tmp}
  {{- with include "draftwood.noGpus" . }}
  {{- . | nindent 2 }}
  {{- end }}
  {{- if $gateway.apiKeySecret }}
  - name: DRAFTWOOD_API_KEY
    valueFrom:
      secretKeyRef: {name: {{ $gateway.apiKeySecret }}, key: {{ $gateway.apiKeyKey }}}
  {{- end }}
resources:
  {{- toYaml $gateway.resources | nindent 2 }}
volumeMounts:
  - {name: gateway-tmp, mountPath: /tmp}
  {{- if $gateway.tlsSecret }}
  - {name: http-tls, mountPath: /etc/draftwood/http-tls, readOnly: true}
  {{- end }}
  {{- if include "draftwood.gatewayTls" . }}
  - {name: server-tls, mountPath: /etc/draftwood/server-tls, readOnly: true}
  {{- end }}
{{- end }}
{{- end }}

{{/* Whether the servers behind it have TLS. */}}
{{- define "draftwood.gatewayTls" -}}
{{- if or .Values.tls.existingSecret (and (eq .Values.gateway.mode "standalone") .Values.gateway.server.tlsSecret) }}true{{ end }}
{{- end }}

{{/* Images for GPUs ask the runtime for all of the node, unless the pod is given some. */}}
{{- define "draftwood.noGpus" -}}
{{- if eq .Values.device.type "nvidia" -}}
- {name: NVIDIA_VISIBLE_DEVICES, value: void}
{{- end }}
{{- end }}

{{/* A deployment needs neither CUDA nor vLLM; beside a server, the node has the server's image. */}}
{{- define "draftwood.gatewayImage" -}}
{{- if or (eq .Values.gateway.mode "sidecar") .Values.image.tag .Values.image.digest }}
{{- include "draftwood.image" . }}
{{- else }}
{{- printf "%s:%s" .Values.image.repository .Chart.AppVersion }}
{{- end }}
{{- end }}

{{- define "draftwood.gatewayVolumes" -}}
- name: gateway-tmp
  emptyDir: {sizeLimit: 64Mi}
{{- if .Values.gateway.tlsSecret }}
- name: http-tls
  secret: {secretName: {{ .Values.gateway.tlsSecret }}, defaultMode: 0440}
{{- end }}
{{- if include "draftwood.gatewayTls" . }}
- name: server-tls
  secret: {secretName: {{ .Values.gateway.server.tlsSecret }}, defaultMode: 0440}
{{- end }}
{{- end }}

{{- define "draftwood.preStop" -}}
{{- if semverCompare ">=1.30-0" .Capabilities.KubeVersion.Version -}}
sleep: {seconds: {{ .Values.drain.preStopSeconds }}}
{{- else -}}
exec: {command: [sleep, {{ .Values.drain.preStopSeconds | quote }}]}
{{- end }}
{{- end }}

{{/* By which endpoint pickers know a pod. */}}
{{- define "draftwood.routingLabels" -}}
{{- $routing := .Values.routing }}
{{- $engine := ternary "vllm" "draftwood" $routing.vllmNames }}
{{- $model := default "draftwood-demo" (include "draftwood.modelName" .) | base | trunc 63 | trimAll "-_." }}
{{- if eq $routing.labels "llm-d" }}
llm-d.ai/engine-type: {{ $engine }}
llm-d.ai/model: {{ $model | quote }}
{{- else if eq $routing.labels "aibrix" }}
model.aibrix.ai/engine: vllm
model.aibrix.ai/name: {{ $model | quote }}
model.aibrix.ai/port: "8080"
model.aibrix.ai/metric-port: "9464"
{{- end }}
{{- end }}
