"""What a checkpoint says of itself, read without its weights: for an engine that loads them elsewhere."""

from __future__ import annotations

import json
import struct
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from draftwood_model_runner.loading.checkpoint import cannot_be_loaded
from draftwood_model_runner.sampling.generation_defaults import GenerationDefaults, end_tokens, generation_defaults


@dataclass(frozen=True, slots=True)
class CheckpointFacts:
    """Of a model in a folder or on the hub.

    Attributes:
        architecture: class of the transformers model.
        parameters: 0 if the files do not tell.
    """

    architecture: str
    parameters: int
    eos_token_ids: frozenset[int]
    defaults: GenerationDefaults


def read_checkpoint(path_or_id: str, source: str) -> CheckpointFacts:
    """The facts of a model.

    Args:
        source: of defaults of requests, "model" or "greedy".

    Raises:
        ModelNotFoundError: there is no such model.
        UnsupportedModelError: its generation config asks for what we do not have.
    """
    from transformers import AutoConfig, GenerationConfig

    try:
        config: Any = AutoConfig.from_pretrained(path_or_id)
    except (OSError, ValueError) as error:
        raise cannot_be_loaded(path_or_id, error) from error
    try:
        generation: Any = GenerationConfig.from_pretrained(path_or_id)
    except OSError:
        generation = GenerationConfig.from_model_config(config)
    [architecture, *_] = config.architectures or [type(config).__name__]
    return CheckpointFacts(
        architecture=architecture,
        parameters=_parameters(Path(path_or_id)),
        eos_token_ids=end_tokens(config.get_text_config(), generation),
        defaults=generation_defaults(architecture, generation, source),
    )


def _parameters(folder: Path) -> int:
    """By the shapes in the headers of safetensors files."""
    total = 0
    for path in folder.glob("*.safetensors") if folder.is_dir() else ():
        with path.open("rb") as file:
            [size] = struct.unpack("<Q", file.read(8))
            header = json.loads(file.read(size))
        for name, entry in header.items():
            if name != "__metadata__":
                count = 1
                for length in entry["shape"]:
                    count *= length
                total += count
    return total
