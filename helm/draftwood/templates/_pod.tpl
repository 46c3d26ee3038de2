{{/* The template of a pod: of a server, or with isWorker of one that computes for it. */}}
{{- define "draftwood.pod" -}}
metadata:
  labels:
    {{- if .isWorker }}
    {{- include "draftwood.workerSelector" . | nindent 4 }}
    {{- include "draftwood.commonLabels" . | nindent 4 }}
    {{- else }}
    {{- include "draftwood.labels" . | nindent 4 }}
    {{- with include "draftwood.routingLabels" . | trim }}
    {{- . | nindent 4 }}
    {{- end }}
    {{- end }}
    {{- with .Values.podLabels }}
    {{- toYaml . | nindent 4 }}
    {{- end }}
  annotations:
    # Settings are read at the start alone.
    checksum/config: {{ include "draftwood.config" . | sha256sum }}
    {{- with .Values.podAnnotations }}
    {{- toYaml . | nindent 4 }}
    {{- end }}
spec:
  serviceAccountName: {{ include "draftwood.serviceAccount" . }}
  automountServiceAccountToken: false
  enableServiceLinks: false
  {{- with .Values.imagePullSecrets }}
  imagePullSecrets:
    {{- toYaml . | nindent 4 }}
  {{- end }}
  {{- with .Values.priorityClassName }}
  priorityClassName: {{ . }}
  {{- end }}
  {{- if .Values.device.runtimeClassName }}
  runtimeClassName: {{ .Values.device.runtimeClassName }}
  {{- end }}
  # {{ .Values.drain.preStopSeconds }} s of preStop, {{ include "draftwood.grace" . }} s of drain, and 5 s for the process to end.
  terminationGracePeriodSeconds: {{ add .Values.drain.preStopSeconds (include "draftwood.grace" . | int) 5 }}
  securityContext:
    {{- include "draftwood.podSecurity" . | nindent 4 }}
  initContainers:
    # A wrong value is a line of `kubectl logs --container check`.
    - name: check
      image: {{ include "draftwood.image" . }}
      imagePullPolicy: {{ .Values.image.pullPolicy }}
      args:
        - serve
        - --check{{ if .Values.model.fetch.source }}=without-model{{ end }}
        {{- include "draftwood.serverArgs" . | nindent 8 }}
      securityContext:
        {{- include "draftwood.containerSecurity" . | nindent 8 }}
      env:
        {{- include "draftwood.serverEnv" . | nindent 8 }}
      # Those of the server, which a pod is given once: the driver of a GPU is there for who asks for one.
      resources:
        {{- include "draftwood.resources" . | nindent 8 }}
      volumeMounts:
        {{- include "draftwood.serverMounts" . | nindent 8 }}
    {{- if and (eq .Values.gateway.mode "sidecar") (not .isWorker) }}
    {{- include "draftwood.gatewayCheck" . | nindent 4 }}
    {{- end }}
    {{- range $fetched := include "draftwood.fetched" . | fromJsonArray }}
    # The first of several pods downloads, the others wait for it. What is complete is not asked for again.
    - name: {{ $fetched.name }}
      image: {{ include "draftwood.image" $ }}
      imagePullPolicy: {{ $.Values.image.pullPolicy }}
      args: [models, {{ $fetched.source | quote }}, "--to=/models/{{ $fetched.folder }}"]
      securityContext:
        {{- include "draftwood.containerSecurity" $ | nindent 8 }}
      env:
        - {name: HOME, value: /tmp}
        - {name: HF_HOME, value: /models/.hub}
        {{- with include "draftwood.noGpus" $ }}
        {{- . | nindent 8 }}
        {{- end }}
        {{- with include (ternary "draftwood.s3Env" "draftwood.hubToken" (hasPrefix "s3:" $fetched.source)) $ | trim }}
        {{- . | nindent 8 }}
        {{- end }}
        {{- with $.Values.extraEnv }}
        {{- toYaml . | nindent 8 }}
        {{- end }}
      resources:
        {{- toYaml $.Values.model.fetch.resources | nindent 8 }}
      volumeMounts:
        - {name: models, mountPath: /models}
        - {name: tmp, mountPath: /tmp}
        {{- if $.Values.model.fetch.s3.tlsSecret }}
        - {name: s3-tls, mountPath: /etc/draftwood/s3-tls, readOnly: true}
        {{- end }}
    {{- end }}
    {{- with .Values.initContainers }}
    {{- toYaml . | nindent 4 }}
    {{- end }}
  containers:
    - name: server
      image: {{ include "draftwood.image" . }}
      imagePullPolicy: {{ .Values.image.pullPolicy }}
      args:
        - serve
        {{- include "draftwood.serverArgs" . | nindent 8 }}
      securityContext:
        {{- include "draftwood.containerSecurity" . | nindent 8 }}
      env:
        {{- include "draftwood.serverEnv" . | nindent 8 }}
      {{- if not .isWorker }}
      ports:
        - {name: grpc, containerPort: 50051}
        - {name: health, containerPort: 50052}
        {{- if .Values.metrics.enabled }}
        - {name: metrics, containerPort: 9464}
        {{- end }}
      # The kubelet can do neither TLS nor credentials: probes have a port of their own.
      startupProbe:
        grpc: {port: 50052}
        {{- toYaml .Values.probes.startup | nindent 8 }}
      # NOT_SERVING at once takes the pod out of the service.
      readinessProbe:
        grpc: {port: 50052}
        {{- toYaml .Values.probes.readiness | nindent 8 }}
      # SERVING also while the pod loads or drains; fails for an engine that hangs. One that dies ends the process.
      livenessProbe:
        grpc: {port: 50052, service: liveness}
        {{- toYaml .Values.probes.liveness | nindent 8 }}
      {{- end }}
      lifecycle:
        preStop:
          {{- include "draftwood.preStop" . | nindent 10 }}
      resources:
        {{- include "draftwood.resources" . | nindent 8 }}
      volumeMounts:
        {{- include "draftwood.serverMounts" . | nindent 8 }}
    {{- if and (eq .Values.gateway.mode "sidecar") (not .isWorker) }}
    {{- include "draftwood.gatewayContainer" . | nindent 4 }}
    {{- end }}
  volumes:
    - name: config
      configMap: {name: {{ include "draftwood.fullname" . }}}
    - name: cache
      {{- with include "draftwood.cacheClaim" . }}
      persistentVolumeClaim: {claimName: {{ . }}}
      {{- else }}
      emptyDir: {sizeLimit: {{ include "draftwood.cacheSize" . }}}
      {{- end }}
    - name: tmp
      emptyDir: {sizeLimit: 1Gi}
    - name: shm
      emptyDir: {medium: Memory, sizeLimit: {{ include "draftwood.shmSize" . }}}
    {{- if include "draftwood.hasTenants" . }}
    - name: tenants
      configMap: {name: {{ include "draftwood.fullname" . }}-tenants}
    {{- end }}
    {{- if include "draftwood.hasAuthFile" . }}
    - name: auth
      secret: {secretName: {{ .Values.auth.file.existingSecret }}, defaultMode: 0440}
    {{- end }}
    {{- if .Values.tls.existingSecret }}
    - name: tls
      secret: {secretName: {{ .Values.tls.existingSecret }}, defaultMode: 0440}
    {{- end }}
    {{- if .Values.store.external.tlsSecret }}
    - name: store-tls
      secret: {secretName: {{ .Values.store.external.tlsSecret }}, defaultMode: 0440}
    {{- end }}
    {{- if .Values.store.encryptionSecret }}
    - name: encryption
      secret: {secretName: {{ .Values.store.encryptionSecret }}, defaultMode: 0440}
    {{- end }}
    {{- if eq .Values.store.mode "embedded" }}
    - name: store
      persistentVolumeClaim: {claimName: {{ include "draftwood.fullname" . }}-store}
    {{- end }}
    {{- with include "draftwood.modelClaim" . }}
    - name: models
      persistentVolumeClaim: {claimName: {{ . }}, readOnly: {{ empty $.Values.model.fetch.source }}}
    {{- end }}
    {{- with .Values.model.fetch.s3.tlsSecret }}
    - name: s3-tls
      secret: {secretName: {{ . }}, defaultMode: 0440}
    {{- end }}
    {{- if and (eq .Values.gateway.mode "sidecar") (not .isWorker) }}
    {{- include "draftwood.gatewayVolumes" . | nindent 4 }}
    {{- end }}
    {{- with .Values.extraVolumes }}
    {{- toYaml . | nindent 4 }}
    {{- end }}
  {{- if and .Values.topologySpread.enabled (eq (int .Values.nodes.count) 1) }}
  topologySpreadConstraints:
    {{- $selector := include "draftwood.selector" . }}
    {{- range .Values.topologySpread.topologyKeys }}
    - maxSkew: 1
      topologyKey: {{ . }}
      whenUnsatisfiable: ScheduleAnyway
      labelSelector:
        matchLabels:
          {{- $selector | nindent 10 }}
    {{- end }}
  {{- end }}
  {{- with .Values.nodeSelector }}
  nodeSelector:
    {{- toYaml . | nindent 4 }}
  {{- end }}
  {{- with .Values.tolerations }}
  tolerations:
    {{- toYaml . | nindent 4 }}
  {{- end }}
  {{- with .Values.affinity }}
  affinity:
    {{- toYaml . | nindent 4 }}
  {{- end }}
{{- end }}
