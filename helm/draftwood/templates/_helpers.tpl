{{- define "draftwood.name" -}}
{{- default .Chart.Name .Values.nameOverride | trunc 50 | trimSuffix "-" }}
{{- end }}

{{- define "draftwood.fullname" -}}
{{- if .Values.fullnameOverride }}
{{- .Values.fullnameOverride | trunc 50 | trimSuffix "-" }}
{{- else if contains (include "draftwood.name" .) .Release.Name }}
{{- .Release.Name | trunc 50 | trimSuffix "-" }}
{{- else }}
{{- printf "%s-%s" .Release.Name (include "draftwood.name" .) | trunc 50 | trimSuffix "-" }}
{{- end }}
{{- end }}

{{- define "draftwood.selector" -}}
app.kubernetes.io/name: {{ include "draftwood.name" . }}
app.kubernetes.io/instance: {{ .Release.Name }}
app.kubernetes.io/component: server
{{- end }}

{{- define "draftwood.workerSelector" -}}
app.kubernetes.io/name: {{ include "draftwood.name" . }}
app.kubernetes.io/instance: {{ .Release.Name }}
app.kubernetes.io/component: worker
{{- end }}

{{/* Servers, and those that compute for them. */}}
{{- define "draftwood.podSelector" -}}
{{- if eq (int .Values.nodes.count) 1 -}}
matchLabels:
  {{- include "draftwood.selector" . | nindent 2 }}
{{- else -}}
matchLabels:
  app.kubernetes.io/name: {{ include "draftwood.name" . }}
  app.kubernetes.io/instance: {{ .Release.Name }}
matchExpressions:
  - {key: app.kubernetes.io/component, operator: In, values: [server, worker]}
{{- end }}
{{- end }}

{{- define "draftwood.scaled" -}}
{{- if gt (int .Values.nodes.count) 1 -}}
{apiVersion: leaderworkerset.x-k8s.io/v1, kind: LeaderWorkerSet, name: {{ include "draftwood.fullname" . }}-nodes}
{{- else -}}
{apiVersion: apps/v1, kind: Deployment, name: {{ include "draftwood.fullname" . }}}
{{- end }}
{{- end }}

{{- define "draftwood.valkeySelector" -}}
app.kubernetes.io/name: {{ include "draftwood.name" . }}
app.kubernetes.io/instance: {{ .Release.Name }}
app.kubernetes.io/component: store
{{- end }}

{{- define "draftwood.gatewaySelector" -}}
app.kubernetes.io/name: {{ include "draftwood.name" . }}
app.kubernetes.io/instance: {{ .Release.Name }}
app.kubernetes.io/component: {{ ternary "server" "gateway" (eq .Values.gateway.mode "sidecar") }}
{{- end }}

{{- define "draftwood.commonLabels" -}}
helm.sh/chart: {{ printf "%s-%s" .Chart.Name .Chart.Version }}
app.kubernetes.io/version: {{ .Chart.AppVersion | quote }}
app.kubernetes.io/managed-by: {{ .Release.Service }}
{{- end }}

{{- define "draftwood.labels" -}}
{{ include "draftwood.selector" . }}
{{ include "draftwood.commonLabels" . }}
{{- end }}

{{- define "draftwood.image" -}}
{{- $suffix := ternary "-cuda" "" (eq .Values.device.type "nvidia") }}
{{- if eq .Values.engine "vllm" }}{{ $suffix = "-vllm" }}{{ end }}
{{- $tag := default (printf "%s%s" .Chart.AppVersion $suffix) .Values.image.tag }}
{{- if .Values.image.digest }}
{{- printf "%s@%s" .Values.image.repository .Values.image.digest }}
{{- else }}
{{- printf "%s:%s" .Values.image.repository $tag }}
{{- end }}
{{- end }}

{{- define "draftwood.serviceAccount" -}}
{{- if .Values.serviceAccount.create }}
{{- default (include "draftwood.fullname" .) .Values.serviceAccount.name }}
{{- else }}
{{- default "default" .Values.serviceAccount.name }}
{{- end }}
{{- end }}

{{- define "draftwood.valkeySecret" -}}
{{- default (printf "%s-valkey" (include "draftwood.fullname" .)) .Values.store.valkey.existingSecret }}
{{- end }}

{{- define "draftwood.hasAuthFile" -}}
{{- if .Values.auth.file.existingSecret }}true{{ end }}
{{- end }}

{{- define "draftwood.hasTenants" -}}
{{- if or .Values.tenants .Values.experiments }}true{{ end }}
{{- end }}

{{- define "draftwood.maxSurge" -}}
{{- default (ternary 0 1 (eq .Values.device.type "nvidia") | toString) (.Values.rollout.maxSurge | toString) }}
{{- end }}

{{- define "draftwood.maxUnavailable" -}}
{{- default (ternary 1 0 (eq .Values.device.type "nvidia") | toString) (.Values.rollout.maxUnavailable | toString) }}
{{- end }}

{{/* Values that contradict each other. The schema refuses what is wrong by itself. */}}
{{- define "draftwood.check" -}}
{{- $auth := .Values.auth }}
{{- $standalone := eq .Values.gateway.mode "standalone" }}
{{- if not (or $standalone $auth.open $auth.file.existingSecret $auth.jwt.jwks) }}
{{- fail "auth: say who may call: auth.file.existingSecret (API keys), auth.jwt (tokens), or auth.open=true for anyone who reaches the port" }}
{{- end }}
{{- if and $auth.open (or $auth.file.existingSecret $auth.jwt.jwks) }}
{{- fail "auth.open: cannot be combined with auth.file or auth.jwt" }}
{{- end }}
{{- if and $auth.jwt.jwks (not (and $auth.jwt.issuer $auth.jwt.audience)) }}
{{- fail "auth.jwt: issuer and audience must be set, since jwks is set" }}
{{- end }}
{{- if and .Values.tls.clientCA (not .Values.tls.existingSecret) (not $standalone) }}
{{- fail "tls.existingSecret: must be set, since tls.clientCA is set" }}
{{- end }}
{{- $store := .Values.store }}
{{- if and (eq $store.mode "external") (not $store.external.url) (not $store.external.existingSecret) }}
{{- fail "store.external: url or existingSecret must be set, since store.mode is external" }}
{{- end }}
{{- if and $store.external.url $store.external.existingSecret }}
{{- fail "store.external.url: cannot be combined with store.external.existingSecret" }}
{{- end }}
{{- if and $store.external.clientCertificate (not $store.external.tlsSecret) }}
{{- fail "store.external.tlsSecret: must be set, since store.external.clientCertificate is set" }}
{{- end }}
{{- if or (regexMatch "^[a-z+]+://[^@]*:[^@]*@" $store.external.url) (contains "password=" $store.external.url) }}
{{- fail "store.external.url: holds a password, which would be in a ConfigMap: put the URL into a secret, store.external.existingSecret" }}
{{- end }}
{{- $local := regexMatch "://([^@/]*@)?(localhost|127[.]|\\[::1\\])" $store.external.url }}
{{- if and (has $store.mode (list "memory" "embedded")) (gt (include "draftwood.mostPods" . | int) 1) }}
{{- fail (printf "store.mode: %s is for one pod, and there may be %s: several would not share memories, tenants, purges and rate limits; set store.mode to valkey, or to external with store.external.url, or %s to 1" $store.mode (include "draftwood.mostPods" .) (ternary "replicas" "autoscaling.maxReplicas" (eq .Values.autoscaling.type "none"))) }}
{{- end }}
{{- if and (eq $store.mode "external") $local (gt (include "draftwood.mostPods" . | int) 1) }}
{{- fail (printf "store.external.url: %s is in each pod, and there may be %s pods, which must share a store: name a host that all of them reach" $store.external.url (include "draftwood.mostPods" .)) }}
{{- end }}
{{- if and .Values.model.existingClaim (not .Values.model.name) }}
{{- fail "model.name: must be set, since model.existingClaim is set: the folder in it" }}
{{- end }}
{{- if and .Values.model.name (not (include "draftwood.modelClaim" .)) .Values.model.offline }}
{{- fail "model.offline: must be false for a model of the hub, or model.existingClaim or model.fetch.source be set" }}
{{- end }}
{{- range $name := list "draftModel" "draftHead" }}
{{- if and (get $.Values.model.fetch $name) (not $.Values.model.fetch.source) }}
{{- fail (printf "model.fetch.source: must be set, since model.fetch.%s is set: both are fetched into one claim" $name) }}
{{- end }}
{{- end }}
{{- if and .Values.model.fetch.draftHead (eq .Values.model.draftHead "none") }}
{{- fail "model.draftHead: must not be none, since model.fetch.draftHead is set" }}
{{- end }}
{{- if and (include "draftwood.draftHeadName" .) (not (include "draftwood.modelClaim" .)) }}
{{- fail "model.draftHead: must be auto, mtp or none, or model.existingClaim or model.fetch.source be set: a head is a folder in that claim" }}
{{- end }}
{{- if and .Values.model.draftModel (not (include "draftwood.modelClaim" .)) .Values.model.offline }}
{{- fail "model.offline: must be false for a draftModel of the hub, or model.existingClaim or model.fetch.source be set" }}
{{- end }}
{{- if and (eq .Values.engine "vllm") (or (include "draftwood.draftModelName" .) (include "draftwood.draftHeadName" .)) }}
{{- fail "engine: must be draftwood, since model.draftModel or model.draftHead is set" }}
{{- end }}
{{- if and (ne .Values.autoscaling.type "none") (not .Values.metrics.enabled) }}
{{- fail "metrics.enabled: must be true, since autoscaling.type is set: pods are added by a metric" }}
{{- end }}
{{- if and (eq (include "draftwood.maxSurge" . | trimSuffix "%") "0") (eq (include "draftwood.maxUnavailable" . | trimSuffix "%") "0") }}
{{- fail "rollout: maxSurge and maxUnavailable cannot both be 0; empty ones are 1 and 0 on CPUs, 0 and 1 on GPUs" }}
{{- end }}
{{- include "draftwood.checkGateway" . }}
{{- if and .Values.cache.claim.create .Values.cache.existingClaim }}
{{- fail "cache.claim.create: cannot be combined with cache.existingClaim" }}
{{- end }}
{{- range $path, $claim := dict "cache.claim" (ternary .Values.cache.claim dict .Values.cache.claim.create) "model.fetch" (ternary .Values.model.fetch dict (not (empty .Values.model.fetch.source))) }}
{{- if and (eq (get $claim "accessMode") "ReadWriteOnce") (gt (include "draftwood.mostPods" $ | int) 1) }}
{{- fail (printf "%s.accessMode: ReadWriteOnce is for one pod; for several take ReadWriteMany, or set replicas, or autoscaling.maxReplicas, to 1" $path) }}
{{- end }}
{{- end }}
{{- if and .Values.model.fetch.source .Values.model.existingClaim }}
{{- fail "model.fetch.source: cannot be combined with model.existingClaim" }}
{{- end }}
{{- if and (eq .Values.engine "vllm") (ne .Values.device.type "nvidia") }}
{{- fail "device.type: must be nvidia, since engine is vllm: no image has vLLM's build for CPUs" }}
{{- end }}
{{- if and (gt (int .Values.nodes.count) 1) (ne .Values.engine "vllm") }}
{{- fail "nodes.count: must be 1, unless engine is vllm" }}
{{- end }}
{{- if mod (mul .Values.device.count .Values.nodes.count) .Values.nodes.pipelineParallel }}
{{- fail "nodes.pipelineParallel: must divide the GPUs of a group, device.count * nodes.count" }}
{{- end }}
{{- if gt (int .Values.autoscaling.minReplicas) (int .Values.autoscaling.maxReplicas) }}
{{- fail "autoscaling.minReplicas: must be at most maxReplicas" }}
{{- end }}
{{- range .Values.extraEnv }}
{{- if hasPrefix "DRAFTWOOD_" .name }}
{{- fail (printf "extraEnv: %s would replace what the chart sets: use config, or the value for it" .name) }}
{{- end }}
{{- end }}
{{- range list "name" "instance" "component" }}
{{- if hasKey $.Values.podLabels (printf "app.kubernetes.io/%s" .) }}
{{- fail (printf "podLabels: app.kubernetes.io/%s selects the pods, and is the chart's" .) }}
{{- end }}
{{- end }}
{{- $outside := or .Values.ingress.enabled .Values.grpcRoute.enabled .Values.routing.httpRoute.enabled (ne .Values.service.type "ClusterIP") (and (ne .Values.gateway.mode "none") (ne .Values.gateway.service.type "ClusterIP")) }}
{{- if and $outside .Values.networkPolicy.enabled (not .Values.networkPolicy.callers) }}
{{- fail "networkPolicy.callers: must name who may call from outside of the namespace, such as the pods of the ingress controller, or networkPolicy.enabled be false" }}
{{- end }}
{{- if and .Values.ingress.enabled (not .Values.ingress.host) }}
{{- fail "ingress.host: must be set, since ingress.enabled is set" }}
{{- end }}
{{- if and .Values.grpcRoute.enabled (not .Values.grpcRoute.parentRefs) }}
{{- fail "grpcRoute.parentRefs: must be set, since grpcRoute.enabled is set" }}
{{- end }}
{{- end }}

{{- define "draftwood.checkGateway" -}}
{{- $gateway := .Values.gateway }}
{{- $routing := .Values.routing }}
{{- $standalone := eq $gateway.mode "standalone" }}
{{- if and $standalone (not $gateway.servers) }}
{{- fail "gateway.servers: must be set, since gateway.mode is standalone: a model and an address for each release behind it" }}
{{- end }}
{{- if and $gateway.servers (not $standalone) }}
{{- fail "gateway.servers: needs gateway.mode standalone; the gateway of a release that has a server serves that one alone" }}
{{- end }}
{{- if and $standalone .Values.tls.clientCA (not $gateway.server.tlsSecret) }}
{{- fail "gateway.server.tlsSecret: must be set, since tls.clientCA is set: its tls.crt and tls.key are shown to the servers" }}
{{- end }}
{{- if and $standalone (or .Values.tls.existingSecret .Values.ingress.enabled .Values.grpcRoute.enabled (ne .Values.autoscaling.type "none")) }}
{{- fail "gateway.mode: standalone has no server, so that tls.existingSecret, ingress, grpcRoute and autoscaling.type are not for it; set gateway.tlsSecret, routing.httpRoute and gateway.autoscaling" }}
{{- end }}
{{- if and (ne $gateway.mode "none") .Values.tls.existingSecret (not $gateway.server.tlsSecret) }}
{{- fail "gateway.server.tlsSecret: must be set, since tls.existingSecret is set: the secret with ca.crt by which the gateway trusts the server" }}
{{- end }}
{{- if and (eq $gateway.mode "sidecar") .Values.tls.existingSecret (not $gateway.server.name) }}
{{- fail "gateway.server.name: must be set, since tls.existingSecret is set: the gateway calls 127.0.0.1, which the certificate does not name" }}
{{- end }}
{{- if and $gateway.autoscaling.enabled (gt (int $gateway.autoscaling.minReplicas) (int $gateway.autoscaling.maxReplicas)) }}
{{- fail "gateway.autoscaling.minReplicas: must be at most maxReplicas" }}
{{- end }}
{{- if and $routing.inferencePool.enabled (ne $gateway.mode "sidecar") }}
{{- fail "gateway.mode: must be sidecar, since routing.inferencePool.enabled is set: a pool's requests are OpenAI's, over HTTP, to pods" }}
{{- end }}
{{- if and $routing.inferencePool.enabled (not $routing.inferencePool.picker.name) }}
{{- fail "routing.inferencePool.picker.name: must be set, since routing.inferencePool.enabled is set: the service of the endpoint picker" }}
{{- end }}
{{- if and (or $routing.inferencePool.enabled $routing.vllmNames (ne $routing.labels "none")) (not .Values.metrics.enabled) }}
{{- fail "metrics.enabled: must be true, since routing is set: endpoint pickers read the metrics of pods" }}
{{- end }}
{{- if and (eq $routing.labels "aibrix") (not $routing.vllmNames) }}
{{- fail "routing.vllmNames: must be true, since routing.labels is aibrix, which knows metrics by vLLM's names alone" }}
{{- end }}
{{- if and (eq $routing.labels "aibrix") (ne $gateway.mode "sidecar") }}
{{- fail "gateway.mode: must be sidecar, since routing.labels is aibrix, which sends requests of OpenAI's API to pods" }}
{{- end }}
{{- if and $routing.httpRoute.enabled (eq $gateway.mode "none") }}
{{- fail "gateway.mode: must be deployment, sidecar or standalone, since routing.httpRoute.enabled is set" }}
{{- end }}
{{- if and $routing.httpRoute.enabled (not $routing.httpRoute.parentRefs) }}
{{- fail "routing.httpRoute.parentRefs: must be set, since routing.httpRoute.enabled is set" }}
{{- end }}
{{- if and (ne .Values.autoscaling.type "none") (eq (int .Values.autoscaling.minReplicas) 0) (or (ne .Values.autoscaling.type "keda") (ne $gateway.mode "deployment")) }}
{{- fail "autoscaling.minReplicas: can be 0 with autoscaling.type keda and gateway.mode deployment alone: nothing else notices a request while no pod runs" }}
{{- end }}
{{- end }}

{{- define "draftwood.mostPods" -}}
{{- ternary .Values.replicas .Values.autoscaling.maxReplicas (eq .Values.autoscaling.type "none") | mul .Values.nodes.count }}
{{- end }}

{{/* What one GPU, or no GPU, needs by default. */}}
{{- define "draftwood.gpus" -}}
{{- ternary .Values.device.count 0 (eq .Values.device.type "nvidia") }}
{{- end }}

{{- define "draftwood.grace" -}}
{{- default (ternary 120 25 (eq .Values.device.type "nvidia")) .Values.drain.graceSeconds }}
{{- end }}

{{- define "draftwood.shmSize" -}}
{{- default (ternary (printf "%dGi" (mul 2 .Values.device.count)) "256Mi" (eq .Values.device.type "nvidia")) .Values.shm.size }}
{{- end }}

{{- define "draftwood.cacheSize" -}}
{{- default (ternary (printf "%dGi" (mul 50 .Values.device.count)) "10Gi" (eq .Values.device.type "nvidia")) .Values.cache.size }}
{{- end }}

{{- define "draftwood.modelClaim" -}}
{{- default (ternary (printf "%s-models" (include "draftwood.fullname" .)) "" (not (empty .Values.model.fetch.source))) .Values.model.existingClaim }}
{{- end }}

{{/* Folder of what is fetched; empty for nothing. */}}
{{- define "draftwood.fetchedName" -}}
{{- if . }}{{ regexReplaceAll "@[^@]*$" . "" | base | trimSuffix ".gguf" }}{{ end }}
{{- end }}

{{/* Folder in the claim, or id on the hub; empty for the demo model. */}}
{{- define "draftwood.modelName" -}}
{{- default (include "draftwood.fetchedName" .Values.model.fetch.source) .Values.model.name }}
{{- end }}

{{/* Likewise; empty for none. */}}
{{- define "draftwood.draftModelName" -}}
{{- default (include "draftwood.fetchedName" .Values.model.fetch.draftModel) .Values.model.draftModel }}
{{- end }}

{{/* Folder in the claim; empty for auto, mtp and none. */}}
{{- define "draftwood.draftHeadName" -}}
{{- $named := ternary "" .Values.model.draftHead (has .Values.model.draftHead (list "auto" "mtp" "none")) }}
{{- default (include "draftwood.fetchedName" .Values.model.fetch.draftHead) $named }}
{{- end }}

{{/* What init containers fetch: the name of each, its source, and the folder in the claim, as JSON. */}}
{{- define "draftwood.fetched" -}}
{{- $fetch := .Values.model.fetch }}
{{- $model := dict "name" "model" "source" $fetch.source "folder" (include "draftwood.modelName" .) }}
{{- $draft := dict "name" "draft-model" "source" $fetch.draftModel "folder" (include "draftwood.draftModelName" .) }}
{{- $head := dict "name" "draft-head" "source" $fetch.draftHead "folder" (include "draftwood.draftHeadName" .) }}
{{- $fetched := list }}
{{- range list $model $draft $head }}{{ if .source }}{{ $fetched = append $fetched . }}{{ end }}{{ end }}
{{- toJson $fetched }}
{{- end }}

{{- define "draftwood.cacheClaim" -}}
{{- default (ternary (printf "%s-cache" (include "draftwood.fullname" .)) "" .Values.cache.claim.create) .Values.cache.existingClaim }}
{{- end }}

{{/* Whether a volume belongs to one pod at a time. */}}
{{- define "draftwood.onePod" -}}
{{- $cache := .Values.cache.claim }}
{{- $fetch := .Values.model.fetch }}
{{- if or (eq .Values.store.mode "embedded") (and $cache.create (eq $cache.accessMode "ReadWriteOnce")) (and $fetch.source (eq $fetch.accessMode "ReadWriteOnce")) }}true{{ end }}
{{- end }}

{{/* What pods write on the node: the cache, unless it is a claim, /tmp, and logs. Empty if the size is not in Gi. */}}
{{- define "draftwood.ephemeral" -}}
{{- if include "draftwood.cacheClaim" . }}3Gi
{{- else if regexMatch "^[0-9]+Gi$" (include "draftwood.cacheSize" .) }}{{ add 3 (include "draftwood.cacheSize" . | trimSuffix "Gi" | int) }}Gi
{{- end }}
{{- end }}

{{/* Requests and limits: of memory and storage one stands for the other, and a default for both. */}}
{{- define "draftwood.resources" -}}
{{- $gpus := include "draftwood.gpus" . | int }}
{{- $cpu := ternary (printf "%d" (add 2 (mul 4 $gpus))) "2" (gt $gpus 0) }}
{{- $memory := ternary (printf "%dGi" (mul 32 $gpus)) "4Gi" (gt $gpus 0) }}
{{- $made := deepCopy .Values.resources }}
{{- $requests := default dict $made.requests }}
{{- $limits := default dict $made.limits }}
{{- if not $requests.cpu }}{{ $_ := set $requests "cpu" (default $cpu $limits.cpu) }}{{ end }}
{{- range $name, $default := dict "memory" $memory "ephemeral-storage" (include "draftwood.ephemeral" . | trim) }}
{{- $request := get $requests $name | default (get $limits $name) | default $default }}
{{- $limit := get $limits $name | default (get $requests $name) | default $default }}
{{- if $request }}{{ $_ := set $requests $name $request }}{{ $_ := set $limits $name $limit }}{{ end }}
{{- end }}
{{- if $gpus }}
{{- $_ := set $requests .Values.device.resourceName $gpus }}
{{- $_ := set $limits .Values.device.resourceName $gpus }}
{{- end }}
{{- set (set $made "requests" $requests) "limits" $limits | toYaml }}
{{- end }}

{{/* The settings file of the server, as JSON, which is YAML: Helm would write large numbers as 1e+06. */}}
{{- define "draftwood.config" -}}
{{- $own := dict "host" "0.0.0.0" "port" 50051 "health_port" 50052 "log_format" .Values.logFormat "drain_grace" (include "draftwood.grace" . | int) }}
{{- if ne .Values.engine "vllm" }}{{ $own = set $own "device" (ternary "cuda" "cpu" (eq .Values.device.type "nvidia")) }}{{ end }}
{{- $ranks := mul .Values.device.count .Values.nodes.count }}
{{- if and (eq .Values.device.type "nvidia") (gt $ranks 1) }}{{ $own = set $own "tensor_parallel" (div $ranks .Values.nodes.pipelineParallel) }}{{ end }}
{{- if gt (int .Values.nodes.count) 1 }}
{{- $own = merge (dict "nodes" .Values.nodes.count "pipeline_parallel" .Values.nodes.pipelineParallel) $own }}
{{- end }}
{{- $own = set $own "model_cache_folder" "/var/cache/draftwood/models" }}
{{- with include "draftwood.modelName" . }}
{{- $own = set $own "model" (ternary (printf "/models/%s" .) . (not (empty (include "draftwood.modelClaim" $)))) }}
{{- end }}
{{- with include "draftwood.draftModelName" . }}
{{- $own = set $own "draft_model" (ternary (printf "/models/%s" .) . (not (empty (include "draftwood.modelClaim" $)))) }}
{{- end }}
{{- if has .Values.model.draftHead (list "mtp" "none") }}{{ $own = set $own "draft_head" .Values.model.draftHead }}{{ end }}
{{- with include "draftwood.draftHeadName" . }}{{ $own = set $own "draft_head" (printf "/models/%s" .) }}{{ end }}
{{- if .Values.metrics.enabled }}
{{- $own = set $own "metrics_port" 9464 }}
{{- if .Values.routing.vllmNames }}{{ $own = set $own "metrics_vllm_names" true }}{{ end }}
{{- if .Values.metrics.tenants }}{{ $own = set $own "metrics_tenants" .Values.metrics.tenants }}{{ end }}
{{- end }}
{{- if .Values.otlp.endpoint }}
{{- $own = set $own "otlp_endpoint" .Values.otlp.endpoint }}
{{- $own = set $own "trace_share" .Values.otlp.traceShare }}
{{- end }}
{{- if .Values.auth.open }}{{ $own = set $own "auth" "open" }}{{ end }}
{{- if include "draftwood.hasAuthFile" . }}{{ $own = set $own "auth_file" (printf "/etc/draftwood/auth/%s" .Values.auth.file.key) }}{{ end }}
{{- with .Values.auth.jwt }}
{{- if .jwks }}{{ $own = set $own "jwt_jwks" .jwks }}{{ $own = set $own "jwt_issuer" .issuer }}{{ $own = set $own "jwt_audience" .audience }}{{ end }}
{{- end }}
{{- if .Values.tls.existingSecret }}
{{- $own = set $own "tls_cert" "/etc/draftwood/tls/tls.crt" }}
{{- $own = set $own "tls_key" "/etc/draftwood/tls/tls.key" }}
{{- if .Values.tls.clientCA }}{{ $own = set $own "tls_client_ca" "/etc/draftwood/tls/ca.crt" }}{{ end }}
{{- end }}
{{- if include "draftwood.hasTenants" . }}{{ $own = set $own "tenants_file" "/etc/draftwood/tenants/tenants.yaml" }}{{ end }}
{{- $store := .Values.store }}
{{- if eq $store.mode "embedded" }}
{{- $own = set $own "store" "embedded" }}
{{- $own = set $own "store_folder" "/var/lib/draftwood/store" }}
{{- else if and (eq $store.mode "external") $store.external.url }}
{{- $own = set $own "store" $store.external.url }}
{{- end }}
{{- if $store.external.tlsSecret }}
{{- $own = set $own "store_tls_ca" "/etc/draftwood/store-tls/ca.crt" }}
{{- if $store.external.clientCertificate }}
{{- $own = set $own "store_tls_cert" "/etc/draftwood/store-tls/tls.crt" }}
{{- $own = set $own "store_tls_key" "/etc/draftwood/store-tls/tls.key" }}
{{- end }}
{{- end }}
{{- if $store.encryptionSecret }}{{ $own = set $own "store_key_file" (printf "/etc/draftwood/encryption/%s" $store.encryptionKey) }}{{ end }}
{{- mergeOverwrite (deepCopy .Values.config) $own | toPrettyJson }}
{{- end }}

{{- define "draftwood.tenantsFile" -}}
{{- dict "tenants" .Values.tenants "experiments" .Values.experiments | toPrettyJson }}
{{- end }}

{{/* Linux of any distribution, as the restricted pod security standard wants it. */}}
{{- define "draftwood.podSecurity" -}}
runAsNonRoot: true
{{- if and .Values.runAsUser (not (.Capabilities.APIVersions.Has "security.openshift.io/v1")) }}
runAsUser: {{ .Values.runAsUser }}
runAsGroup: {{ .Values.runAsUser }}
fsGroup: {{ .Values.runAsUser }}
{{- end }}
fsGroupChangePolicy: OnRootMismatch
seccompProfile: {type: RuntimeDefault}
{{- end }}

{{- define "draftwood.containerSecurity" -}}
allowPrivilegeEscalation: false
readOnlyRootFilesystem: true
capabilities: {drop: [ALL]}
{{- end }}

{{- define "draftwood.serverArgs" -}}
- --config=/etc/draftwood/config/draftwood.yaml
{{- if ne .Values.engine "draftwood" }}
- --engine={{ .Values.engine }}
{{- end }}
{{- if gt (int .Values.nodes.count) 1 }}
# Variables of the LeaderWorkerSet's operator.
- --node-rank=$(LWS_WORKER_INDEX)
- --leader=$(LWS_LEADER_ADDRESS)
{{- end }}
{{- with .Values.extraArgs }}
{{ toYaml . }}
{{- end }}
{{- end }}

{{- define "draftwood.serverEnv" -}}
- {name: HOME, value: /var/cache/draftwood}
# For the compiled functions and graphs of libraries, such as vLLM's.
- {name: XDG_CACHE_HOME, value: /var/cache/draftwood}
{{- if eq .Values.device.type "nvidia" }}
- {name: TORCHINDUCTOR_CACHE_DIR, value: /var/cache/draftwood/inductor}
{{- end }}
{{- if eq .Values.engine "vllm" }}
# Its image has none.
- {name: NUMBA_CACHE_DIR, value: /var/cache/draftwood/numba}
{{- end }}
{{- if gt (int .Values.nodes.count) 1 }}
# The address that the other pods of a group reach vLLM at.
- name: VLLM_HOST_IP
  valueFrom: {fieldRef: {fieldPath: status.podIP}}
{{- end }}
# For libraries that ask who runs them: a user that a cluster chooses has no name.
- {name: USER, value: draftwood}
{{- if not (or (eq .Values.engine "vllm") .Values.config.threads (dig "limits" "cpu" "" .Values.resources)) }}
# Without a CPU limit there is no quota that the server could read.
- name: DRAFTWOOD_THREADS
  valueFrom: {resourceFieldRef: {resource: requests.cpu, divisor: "1"}}
{{- end }}
- {name: HF_HOME, value: /var/cache/draftwood/hub}
{{- if .Values.model.offline }}
- {name: HF_HUB_OFFLINE, value: "1"}
{{- end }}
{{- if not .Values.model.fetch.source }}
{{- include "draftwood.hubToken" . }}
{{- end }}
{{- if and (eq .Values.store.mode "external") .Values.store.external.existingSecret }}
- name: DRAFTWOOD_STORE
  valueFrom:
    secretKeyRef: {name: {{ .Values.store.external.existingSecret }}, key: {{ .Values.store.external.key }}}
{{- else if eq .Values.store.mode "valkey" }}
- name: VALKEY_PASSWORD
  valueFrom:
    secretKeyRef: {name: {{ include "draftwood.valkeySecret" . }}, key: {{ .Values.store.valkey.key }}}
- name: DRAFTWOOD_STORE
  value: redis://:$(VALKEY_PASSWORD)@{{ include "draftwood.fullname" . }}-valkey:6379
{{- end }}
{{- if .Values.otlp.endpoint }}
- name: POD_NAME
  valueFrom: {fieldRef: {fieldPath: metadata.name}}
- name: OTEL_RESOURCE_ATTRIBUTES
  value: k8s.namespace.name={{ .Release.Namespace }},k8s.pod.name=$(POD_NAME)
{{- end }}
{{- with .Values.extraEnv }}
{{- toYaml . | nindent 0 }}
{{- end }}
{{- end }}

{{- define "draftwood.serverMounts" -}}
- {name: config, mountPath: /etc/draftwood/config, readOnly: true}
- {name: cache, mountPath: /var/cache/draftwood}
- {name: tmp, mountPath: /tmp}
- {name: shm, mountPath: /dev/shm}
{{- if include "draftwood.hasTenants" . }}
- {name: tenants, mountPath: /etc/draftwood/tenants, readOnly: true}
{{- end }}
{{- if include "draftwood.hasAuthFile" . }}
- {name: auth, mountPath: /etc/draftwood/auth, readOnly: true}
{{- end }}
{{- if .Values.tls.existingSecret }}
- {name: tls, mountPath: /etc/draftwood/tls, readOnly: true}
{{- end }}
{{- if .Values.store.external.tlsSecret }}
- {name: store-tls, mountPath: /etc/draftwood/store-tls, readOnly: true}
{{- end }}
{{- if .Values.store.encryptionSecret }}
- {name: encryption, mountPath: /etc/draftwood/encryption, readOnly: true}
{{- end }}
{{- if eq .Values.store.mode "embedded" }}
- {name: store, mountPath: /var/lib/draftwood}
{{- end }}
{{- if include "draftwood.modelClaim" . }}
- {name: models, mountPath: /models, readOnly: true}
{{- end }}
{{- with .Values.extraVolumeMounts }}
{{- toYaml . | nindent 0 }}
{{- end }}
{{- end }}

{{- define "draftwood.hubToken" -}}
{{- if .Values.model.hubTokenSecret }}
- name: HF_TOKEN
  valueFrom:
    secretKeyRef: {name: {{ .Values.model.hubTokenSecret }}, key: {{ .Values.model.hubTokenKey }}}
{{- end }}
{{- end }}

{{- define "draftwood.s3Env" -}}
{{- with .Values.model.fetch.s3 }}
{{- if .existingSecret }}
- name: AWS_ACCESS_KEY_ID
  valueFrom:
    secretKeyRef: {name: {{ .existingSecret }}, key: {{ .accessKeyIdKey }}}
- name: AWS_SECRET_ACCESS_KEY
  valueFrom:
    secretKeyRef: {name: {{ .existingSecret }}, key: {{ .secretAccessKeyKey }}}
{{- end }}
{{- if .endpoint }}
- {name: AWS_ENDPOINT_URL, value: {{ .endpoint | quote }}}
{{- end }}
{{- if .tlsSecret }}
- {name: AWS_CA_BUNDLE, value: /etc/draftwood/s3-tls/ca.crt}
{{- end }}
{{- if .region }}
- {name: AWS_REGION, value: {{ .region | quote }}}
{{- end }}
{{- end }}
{{- end }}

{{- define "draftwood.dnsPorts" -}}
[{port: 53, protocol: UDP}, {port: 53, protocol: TCP}, {port: 5353, protocol: UDP}, {port: 5353, protocol: TCP}]
{{- end }}
