"""Writes helm/draftwood/values.schema.json: `python -m tools.chart_schema [--check]`.

Types come from the defaults in values.yaml, settings from the server's own, tenants and experiments from the protocol.
Every object refuses names that it does not know, so that a typo ends an install with its name.
"""

from __future__ import annotations

import json
import sys
from pathlib import Path
from typing import Any

import yaml
from google.protobuf.descriptor import FieldDescriptor

from draftwood.admin.v1 import experiments_pb2, tenants_pb2
from draftwood_service.settings import Settings

CHART = Path(__file__).parents[1] / "helm" / "draftwood"
SCHEMA = CHART / "values.schema.json"
OWNED = frozenset(
    {
        "model", "draft_model", "draft_head", "device",
        "model_cache_folder", "host", "port", "ready_file", "tls_cert", "tls_key", "tls_client_ca",
        "health_port", "auth", "auth_file", "jwt_jwks", "jwt_issuer", "jwt_audience", "tenants_file", "store",
        "store_folder", "store_tls_ca", "store_tls_cert", "store_tls_key", "store_keys", "store_key_file",
        "engine", "nodes", "node_rank", "leader", "pipeline_parallel",
        "metrics_port", "metrics_host", "metrics_tenants", "metrics_vllm_names",
        "otlp_endpoint", "trace_share", "drain_grace", "log_format",
    }
)  # fmt: skip
"""Settings that other values of the chart set."""

_OWNED_FLAGS = sorted(name.replace("_", "-") for name in (*OWNED, "config", "check"))
Schema = dict[str, Any]
_STRINGS: Schema = {"type": "object", "additionalProperties": {"type": "string"}}
_OBJECTS: Schema = {"type": "array", "items": {"type": "object"}}
_QUANTITY: Schema = {"type": ["string", "integer", "number"]}
_COUNT_OR_SHARE: Schema = {"type": ["string", "integer"], "pattern": "^([0-9]+%?)?$", "minimum": 0}
_RESOURCES: Schema = {
    "type": "object",
    "additionalProperties": False,
    "properties": {
        name: {"type": "object", "additionalProperties": _QUANTITY} for name in ("requests", "limits")
    } | {"claims": _OBJECTS},
}  # fmt: skip
_PROBE: Schema = {
    "type": "object",
    "additionalProperties": False,
    "properties": {
        name: {"type": "integer", "minimum": 0 if name == "initialDelaySeconds" else 1}
        for name in ("periodSeconds", "failureThreshold", "timeoutSeconds", "successThreshold", "initialDelaySeconds")
    },
}
_SOURCE: Schema = {
    "type": "string",
    "pattern": "^$|^[A-Za-z0-9_.-]+/[A-Za-z0-9_.-]+(/[A-Za-z0-9_./-]+\\.gguf)?(@[A-Za-z0-9_./-]+)?$"
    "|^s3://[A-Za-z0-9][A-Za-z0-9_.-]+(/[A-Za-z0-9_.+=-]+)+/?$",
}
_PORT: Schema = {"type": "integer", "minimum": 1, "maximum": 65535}


def _listed(**names: str) -> Schema:
    """A list of objects with these names, of these types."""
    properties = {name: {"type": kind} for name, kind in names.items()}
    return {"type": "array", "items": {"type": "object", "additionalProperties": False, "properties": properties}}


_PARENTS = _listed(
    name="string", namespace="string", group="string", kind="string", sectionName="string", port="integer"
)
_SERVICE_TYPE: Schema = {"enum": ["ClusterIP", "NodePort", "LoadBalancer"]}
_TOLERATIONS = _listed(key="string", operator="string", value="string", effect="string", tolerationSeconds="integer")
_PEERS = _listed(podSelector="object", namespaceSelector="object", ipBlock="object")
_SPECIAL: dict[str, Schema] = {
    "imagePullSecrets": _listed(name="string"),
    "extraArgs": {
        "type": "array",
        "items": {
            "type": "string",
            "pattern": "^--[a-z]",
            "not": {"pattern": f"^--({'|'.join(_OWNED_FLAGS)})(=|$)"},
        },
    },
    "extraEnv": _listed(name="string", value="string", valueFrom="object"),
    "tolerations": _TOLERATIONS,
    "gateway.tolerations": _TOLERATIONS,
    "gateway.nodeSelector": _STRINGS,
    "extraVolumeMounts": _listed(
        name="string", mountPath="string", subPath="string", subPathExpr="string", readOnly="boolean"
    ),
    "networkPolicy.callers": _PEERS,
    "networkPolicy.prometheus": _PEERS,
    "networkPolicy.egress": _PEERS,
    "networkPolicy.egressPorts": {"type": "array", "items": _PORT},
    "grpcRoute.parentRefs": _PARENTS,
    "test.resources": _RESOURCES,
    "image.digest": {"type": "string", "pattern": "^(sha256:[0-9a-f]{64})?$"},
    "image.pullPolicy": {"enum": ["Always", "IfNotPresent", "Never"]},
    "engine": {"enum": ["draftwood", "vllm"]},
    "replicas": {"type": "integer", "minimum": 0},
    "runAsUser": {"type": ["integer", "null"], "minimum": 1},
    "gateway.mode": {"enum": ["none", "deployment", "sidecar", "standalone"]},
    "gateway.servers": {
        "type": "array",
        "items": {
            "type": "object",
            "additionalProperties": False,
            "required": ["model", "address"],
            "properties": {
                "model": {"type": "string", "pattern": "^[!-<>-~]{1,200}$"},
                "address": {"type": "string", "pattern": ":[0-9]{1,5}$"},
            },
        },
    },
    "gateway.replicas": {"type": "integer", "minimum": 0},
    "gateway.autoscaling.cpuPercent": {"type": "integer", "minimum": 1, "maximum": 100},
    "gateway.service.type": _SERVICE_TYPE,
    "gateway.service.port": _PORT,
    "gateway.corsOrigins": {"type": "array", "items": {"type": "string"}},
    "gateway.resources": _RESOURCES,
    "routing.labels": {"enum": ["none", "llm-d", "aibrix"]},
    "routing.inferencePool.picker.port": _PORT,
    "routing.inferencePool.failureMode": {"enum": ["FailOpen", "FailClose"]},
    "routing.httpRoute.parentRefs": _PARENTS,
    "routing.httpRoute.hostnames": {"type": "array", "items": {"type": "string"}},
    "device.type": {"enum": ["cpu", "nvidia"]},
    "device.count": {"type": "integer", "minimum": 1},
    "nodes.count": {"type": "integer", "minimum": 1},
    "nodes.pipelineParallel": {"type": "integer", "minimum": 1},
    "resources": _RESOURCES,
    "model.fetch.source": _SOURCE,
    "model.fetch.draftModel": _SOURCE,
    "model.fetch.draftHead": _SOURCE,
    "model.fetch.s3.endpoint": {"type": "string", "pattern": "^(https?://.+)?$"},
    "model.fetch.accessMode": {"enum": ["ReadWriteMany", "ReadWriteOnce"]},
    "model.fetch.resources": _RESOURCES,
    "cache.claim.accessMode": {"enum": ["ReadWriteMany", "ReadWriteOnce"]},
    "store.mode": {"enum": ["memory", "embedded", "valkey", "external"]},
    "store.external.url": {
        "type": "string",
        "pattern": "^(|(rediss?|redis\\+(sentinel|cluster)|rediss\\+(sentinel|cluster))://.+)$",
    },
    "store.valkey.resources": _RESOURCES,
    "auth.jwt.jwks": {"type": "string", "pattern": "^(https://.+)?$"},
    "service.type": _SERVICE_TYPE,
    "service.port": _PORT,
    "drain.preStopSeconds": {"type": "integer", "minimum": 1, "maximum": 300},
    "drain.graceSeconds": {"anyOf": [{"const": ""}, {"type": "integer", "minimum": 1, "maximum": 3600}]},
    "rollout.maxSurge": _COUNT_OR_SHARE,
    "rollout.maxUnavailable": _COUNT_OR_SHARE,
    "pdb.maxUnavailable": _COUNT_OR_SHARE,
    "autoscaling.type": {"enum": ["none", "hpa", "keda"]},
    "autoscaling.minReplicas": {"type": "integer", "minimum": 0},
    "autoscaling.maxReplicas": {"type": "integer", "minimum": 1},
    "autoscaling.waitingPerReplica": {"type": "integer", "minimum": 1},
    "autoscaling.slotsInUse": {"type": "number", "exclusiveMinimum": 0, "maximum": 1},
    "autoscaling.idleSeconds": {"type": "integer", "minimum": 10},
    "topologySpread.topologyKeys": {"type": "array", "items": {"type": "string"}},
    "metrics.tenants": {"type": "array", "items": {"type": "string"}, "maxItems": 100},
    "otlp.endpoint": {"type": "string", "pattern": "^(https?://.+)?$"},
    "otlp.traceShare": {"type": "number", "minimum": 0, "maximum": 1},
    "logFormat": {"enum": ["json", "console"]},
    "nodeSelector": _STRINGS,
    "affinity": {"type": "object"},
    "grpcRoute.hostnames": {"type": "array", "items": {"type": "string"}},
}
"""What the default in values.yaml does not tell."""
_FREE = ("annotations", "labels", "podAnnotations", "podLabels")
_WELL_KNOWN: dict[str, Schema] = {
    "google.protobuf.Duration": {"type": "string", "pattern": "^[0-9.]+s$"},
    "google.protobuf.Timestamp": {"type": "string"},
    "google.protobuf.Struct": {"type": "object"},
}


def schema() -> Schema:
    """Of all values."""
    values = yaml.safe_load((CHART / "values.yaml").read_text(encoding="utf-8"))
    made = _of("", values)
    made["properties"]["config"] = _config()
    made["properties"]["tenants"] = {"type": "array", "items": _message(tenants_pb2.Tenant.DESCRIPTOR)}
    made["properties"]["experiments"] = {"type": "array", "items": _message(experiments_pb2.Experiment.DESCRIPTOR)}
    made["properties"]["global"] = {"type": "object"}
    return {"$schema": "http://json-schema.org/draft-07/schema#", **made}


def _of(path: str, default: object) -> Schema:
    name = path.rpartition(".")[2]
    if path in _SPECIAL:
        return _SPECIAL[path]
    if path.startswith("probes."):
        return _PROBE
    if name in _FREE:
        return _STRINGS
    match default:
        case bool():
            return {"type": "boolean"}
        case int():
            return {"type": "integer"}
        case str():
            return {"type": "string"}
        case list():
            return _OBJECTS
        case dict():
            inner = {key: _of(f"{path}.{key}".lstrip("."), value) for key, value in default.items()}
            return {"type": "object", "additionalProperties": False, "properties": inner}
    raise TypeError(f"{path}: {default!r}")


def _config() -> Schema:
    of_settings = Settings.model_json_schema()
    definitions = of_settings.get("$defs", {})
    properties = {}
    for name, setting in of_settings["properties"].items():
        if name in OWNED:
            continue
        kept = {key: value for key, value in setting.items() if key not in ("title", "default")}
        if "$ref" in json.dumps(kept):
            kept = definitions[kept["$ref"].rpartition("/")[2]]
        properties[name] = kept
    for name in ("store_bytes", "memory_bytes", "memory_max_bytes", "max_message_bytes", "delta_padding"):
        properties[name] = {"type": ["integer", "string"], "description": properties[name]["description"]}
    return {"type": "object", "additionalProperties": False, "properties": properties}


def _message(message: Any) -> Schema:
    if message.full_name in _WELL_KNOWN:
        return _WELL_KNOWN[message.full_name]
    properties: Schema = {}
    for field in message.fields:
        properties[field.json_name] = properties[field.name] = _field(field)
    return {"type": "object", "additionalProperties": False, "properties": properties}


def _field(field: FieldDescriptor) -> Schema:
    entry = field.message_type
    if entry is not None and entry.GetOptions().map_entry:
        return {"type": "object", "additionalProperties": _single(entry.fields_by_name["value"])}
    single = _single(field)
    return {"type": "array", "items": single} if field.is_repeated else single


def _single(field: FieldDescriptor) -> Schema:
    if field.message_type is not None:
        return _message(field.message_type)
    if field.enum_type is not None:
        return {"enum": [value.name for value in field.enum_type.values]}
    if field.type == FieldDescriptor.TYPE_BOOL:
        return {"type": "boolean"}
    if field.type in (FieldDescriptor.TYPE_STRING, FieldDescriptor.TYPE_BYTES):
        return {"type": "string"}
    if field.type in (FieldDescriptor.TYPE_DOUBLE, FieldDescriptor.TYPE_FLOAT):
        return {"type": "number"}
    return {"type": ["integer", "string"]}


def main() -> int:
    text = json.dumps(schema(), indent=1) + "\n"
    if "--check" in sys.argv[1:]:
        if SCHEMA.read_text(encoding="utf-8") != text:
            print(f"{SCHEMA} is not current: python -m tools.chart_schema", file=sys.stderr)
            return 1
        return 0
    SCHEMA.write_text(text, encoding="utf-8")
    return 0


if __name__ == "__main__":
    sys.exit(main())
