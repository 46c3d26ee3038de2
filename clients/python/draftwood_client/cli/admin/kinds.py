"""The kinds of resources that the commands are for."""

from __future__ import annotations

from draftwood.admin.v1 import experiments_pb2, tenants_pb2
from draftwood_client.admin.resources import Experiment, Tenant
from draftwood_client.cli.admin.documents import Kind

TENANT = Kind("tenant", Tenant, tenants_pb2.Tenant)
EXPERIMENT = Kind(
    "experiment",
    Experiment,
    experiments_pb2.Experiment,
    frozenset({"state", "start_time", "end_time", "salt", "winner", "stopped_arms"}),
)
