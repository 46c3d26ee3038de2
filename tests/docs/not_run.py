"""The commands of the documentation that `tests/docs` does not run, each with the reason."""

from __future__ import annotations

import re

INSTALLS = "downloads gigabytes; `make install-test` runs it"
DOCKER = "needs Docker; `make image-test` builds the same Dockerfile and runs the image"
CLUSTER = "needs a Kubernetes cluster"
NPM = "the package is not in the registry; tests/client/languages/test_typescript.py packs it and installs that"
CORPUS = "needs a corpus that is not in the repository"
VLLM = "needs vLLM; `make test-vllm` runs it"
SGLANG = "needs SGLang and a GPU; `make test-sglang` runs what does not need the GPU"
SMG = "needs smg; tests/system/test_smg.py starts it"
ELSEWHERE = "needs a server of that name"
CHECKPOINT = "needs a checkpoint in that folder; tests/model_runner/loading loads such folders"
HOURS = "takes hours"
MINUTES = (
    "takes minutes; a small one is in tests/benchmarks, and here its arguments are read by the command's own parser"
)

NOT_RUN = {
    r"(\S*/)?pip (install|wheel) .*": INSTALLS,
    r"python3 -m venv .*": INSTALLS,
    r"docker (build|push|run|compose) .*": DOCKER,
    r"(helm (get|history|rollback|test|upgrade)|kind load) .*": CLUSTER,
    r"kubectl .*": CLUSTER,
    r"npm install .*": NPM,
    r"python tools/train_demo_model\.py .*": CORPUS,
    r"(DRAFTWOOD_\S+ )*vllm serve .*": VLLM,
    r"draftwood serve --engine vllm .*": VLLM,
    r"draftwood serve --model /models/.*": CHECKPOINT,
    r"(DRAFTWOOD_\S+ )*sglang serve .*": SGLANG,
    r"python (examples/sglang/)?gpu_smoke\.py .*": SGLANG,
    r"python (examples/\w+/)?ask\.py .*": VLLM,
    r"curl -s http://127\.0\.0\.1:8000/metrics .*": VLLM,
    r"python -m tools\.train_head .*": HOURS,
    r"smg launch .*": SMG,
    r"DRAFTWOOD_API_KEY=dw_… .*": ELSEWHERE,
}
"""Reason by regular expression of the whole command."""

PARSED = {r"draftwood bench (?!replay ).*": MINUTES}
"""The same of commands that are parsed instead."""


def reason(table: dict[str, str], command: str) -> str | None:
    return next((why for pattern, why in table.items() if re.fullmatch(pattern, command)), None)
