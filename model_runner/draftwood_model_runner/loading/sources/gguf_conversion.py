"""The process that makes the weights of a GGUF file dense: `python -m ... FILE FOLDER`. It alone reads such files.

transformers reads the file, so that the dense model is the one that its own users get. This process ends with status 0,
or with one of `dense_weights` and a line on standard output that says why.
"""

from __future__ import annotations

import json
import math
import shutil
import sys
import tempfile
from functools import cache
from pathlib import Path
from typing import Any

from draftwood_model_runner.errors import DraftwoodError, ModelNotFoundError, UnsupportedModelError
from draftwood_model_runner.loading.sources.dense_weights import UNREADABLE, UNSUPPORTED

_BYTES = 2
"""Of a weight in bfloat16."""
_OTHER_FILES = 32 << 20
"""Bytes beside the weights, at most: a tokenizer of 262,144 tokens has 33 MB."""
_NAME = "model.gguf"
_LONG = (".tokens", ".scores", ".token_type", ".merges")
_ENDS = ("tokenizer.ggml.eos_token_id", "tokenizer.ggml.eot_token_id")


def main(file: Path, folder: Path) -> int:
    """Writes the dense folder of a file. Returns the exit status."""
    try:
        write_dense(file, folder)
    except UnsupportedModelError as error:
        print(error)
        return UNSUPPORTED
    except (DraftwoodError, OSError) as error:
        print(error)
        return UNREADABLE
    return 0


def write_dense(file: Path, folder: Path) -> None:
    """Writes model, tokenizer and configs into an empty folder.

    Raises:
        ModelNotFoundError: the file is damaged, or the folder has too little space.
        UnsupportedModelError: it is one part of several, has no tokenizer, or transformers does not read its kind.
        OSError: a file cannot be read or written.
    """
    # Alone in a folder: transformers would read what lies beside it, too.
    with tempfile.TemporaryDirectory(dir=folder.parent) as alone:
        link = Path(alone, _NAME)
        link.symlink_to(file)
        reader = _read(str(link))
        facts = {key: field.contents() for key, field in reader.fields.items() if not key.endswith(_LONG)}
        _require_whole(facts)
        needed = sum(_BYTES * math.prod(map(int, tensor.shape)) for tensor in reader.tensors) + _OTHER_FILES
        if (free := shutil.disk_usage(folder).free) < needed:
            where = f"in {folder.parents[1]}, which has {free / 1e6:,.0f} MB left"
            raise ModelNotFoundError(f"its dense weights need {needed / 1e6:,.0f} MB {where}")
        _write(alone, folder, facts)


def _read(path: str) -> Any:
    """gguf's reader of a file, all of whose tensors are there."""
    import gguf

    # transformers makes a reader four times, which is most of the time that a small model takes: it visits each token.
    gguf.GGUFReader = cache(gguf.GGUFReader)  # type: ignore[misc, assignment]
    try:
        return gguf.GGUFReader(path)
    except OSError:
        raise
    except Exception as error:  # of many types, for the reader believes what the file says
        raise ModelNotFoundError(f"the GGUF file is truncated or damaged ({error})") from error


def _require_whole(facts: dict[str, Any]) -> None:
    """Raises UnsupportedModelError for one part of several, and for a model without a tokenizer."""
    if (parts := facts.get("split.count", 0)) > 1:
        raise UnsupportedModelError(f"it is one of {parts} parts; join them with llama-gguf-split --merge")
    if "tokenizer.ggml.model" not in facts:
        raise UnsupportedModelError("the GGUF file has no tokenizer (tokenizer.ggml.model)")


def _write(source: str, folder: Path, facts: dict[str, Any]) -> None:
    import torch
    from transformers import AutoConfig, AutoModelForCausalLM, AutoTokenizer
    from transformers.utils.logging import disable_progress_bar

    disable_progress_bar()
    architecture, options = facts.get("general.architecture"), dict[str, Any](gguf_file=_NAME)
    try:
        config: Any = AutoConfig.from_pretrained(source, **options)
        tokenizer: Any = AutoTokenizer.from_pretrained(source, **options)
        options |= {"config": config, "dtype": torch.bfloat16, "output_loading_info": True, **_unpacked()}
        loaded: Any = AutoModelForCausalLM.from_pretrained(source, **options)
    except Exception as error:  # of many types: transformers has no check of its own
        [reason, *_] = str(error).splitlines() or [type(error).__name__]
        raise UnsupportedModelError(
            f"transformers cannot read architecture {architecture!r} from GGUF: {reason}"
        ) from error
    model, report = loaded
    if missing := sorted(report["missing_keys"]):
        raise UnsupportedModelError(
            f"transformers finds no weight {missing[0]!r} for architecture {architecture!r} in it"
        )
    _tie(model)
    model.hf_quantizer = None
    if hasattr(model.config, "quantization_config"):
        del model.config.quantization_config
    named = model.generation_config.eos_token_id
    ends = {facts[key] for key in _ENDS if key in facts} | set(named if isinstance(named, list) else [named]) - {None}
    model.generation_config.eos_token_id = sorted(ends) or None
    if _ENDS[0] in facts:
        tokenizer.eos_token = tokenizer.convert_ids_to_tokens(facts[_ENDS[0]])
    try:
        model.save_pretrained(folder)
        _save_tokenizer(tokenizer, folder, config.get_text_config().vocab_size)
    except Exception as error:  # safetensors has its own for a full disk
        raise ModelNotFoundError(f"its dense weights cannot be written: {error}") from error


def _save_tokenizer(tokenizer: Any, folder: Path, vocab_size: int) -> None:
    """Without the special tokens that transformers adds to those of the file: the model has no embedding of them."""
    for name in ("bos", "eos", "unk", "pad"):
        if (getattr(tokenizer, f"{name}_token_id") or 0) >= vocab_size:
            setattr(tokenizer, f"{name}_token", None)
    tokenizer.save_pretrained(folder)
    saved = folder / "tokenizer.json"
    content = json.loads(saved.read_text(encoding="utf-8"))
    content["added_tokens"] = [token for token in content["added_tokens"] if token["id"] < vocab_size]
    saved.write_text(json.dumps(content, ensure_ascii=False, indent=2), encoding="utf-8")


def _unpacked() -> dict[str, Any]:
    """The argument that makes weights dense; versions of transformers without it do so anyway."""
    try:
        from transformers import GgufConfig
    except ImportError:
        return {}
    return {"quantization_config": GgufConfig(gguf_file=_NAME, dequantize=True)}


def _tie(model: Any) -> None:
    """A head that is written out although it equals the input embedding is the embedding."""
    head, embedding = model.get_output_embeddings(), model.get_input_embeddings()
    if head is None or getattr(head, "bias", None) is not None or head.weight is embedding.weight:
        return
    if head.weight.shape == embedding.weight.shape and head.weight.equal(embedding.weight):
        model.config.tie_word_embeddings = True
        model.tie_weights()


if __name__ == "__main__":
    sys.exit(main(Path(sys.argv[1]), Path(sys.argv[2])))
