"""GGUF files as ordinary folders: their weights are made dense once, and kept in the folder of converted models.

All other code sees such a folder only. It is keyed by the file's content, and has the name that clients see. Weights
are kept in bfloat16 (docs/decisions/quantized-weights.md). One process at a time writes here, into a temporary folder
that is renamed when it is complete. A child process converts, so that this one imports no torch.
"""

from __future__ import annotations

import fcntl
import hashlib
import json
import logging
import math
import os
import shutil
import subprocess
import sys
import tempfile
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from functools import cache
from pathlib import Path
from typing import Any

from draftwood_model_runner.errors import DraftwoodError, ModelNotFoundError, UnsupportedModelError
from draftwood_model_runner.loading.checkpoint import KNOWN_DIGESTS, KnownDigests, is_private

_log = logging.getLogger(__name__)

DENSE = "dense"
"""The folder of all of them, in that of converted models."""
UNREADABLE, UNSUPPORTED = 3, 4
"""Exit statuses of the conversion, with the reason on standard output: a file that cannot be read or written, and a
model that transformers does not read from a GGUF file."""
_FORMAT = 1
"""Another number makes all files be converted again."""
_CONVERSION = "draftwood_model_runner.loading.gguf"

_BYTES = 2
"""Of a weight in bfloat16."""
_OTHER_FILES = 32 << 20
"""Bytes beside the weights, at most: a tokenizer of 262,144 tokens has 33 MB."""
_NAME = "model.gguf"
_LONG = (".tokens", ".scores", ".token_type", ".merges")
_ENDS = ("tokenizer.ggml.eos_token_id", "tokenizer.ggml.eot_token_id")


def dense_place(cache: Path, sha256: str, name: str) -> Path:
    """Where the dense folder of a GGUF file is, or will be.

    Args:
        sha256: of the file, in hexadecimal digits.
        name: that clients see.
    """
    return cache / DENSE / hashlib.sha256(f"{_FORMAT} {sha256}".encode()).hexdigest()[:32] / name


def dense_folder(file: Path, cache: Path | None) -> Path:
    """The dense folder of a GGUF file, which is made if there is none. It is called as the file without its ending.

    Raises:
        ModelNotFoundError: the file cannot be read, or the folder not be written; gives the reason.
        UnsupportedModelError: transformers does not read such a model from a GGUF file.
    """
    require_gguf(file)
    with file_errors(str(file)):
        cache = required(cache, str(file))
        [sha256] = KnownDigests(cache / KNOWN_DIGESTS).sha256([file])
        folder = dense_place(cache, sha256, file.stem)
        if not is_used(folder):
            with writing(folder) as part:
                if part is not None:
                    convert(file, part, str(file))
    return folder


def require_gguf(file: Path) -> None:
    """Raises ModelNotFoundError for a file that cannot be read, or does not begin as one."""
    with file_errors(str(file)), file.open("rb") as opened:
        begins = opened.read(4)
    if begins != b"GGUF":
        problem = f"is not a GGUF file (it begins with {begins!r}); give one, or a folder that has config.json"
        raise ModelNotFoundError(f"model {str(file)!r}: {problem} and the weights")


def required(cache: Path | None, model: str) -> Path:
    """The folder of converted models. Raises ModelNotFoundError if there is none."""
    if cache is None:
        problem = "its weights are kept in the folder of converted models; set --model-cache-folder"
        raise ModelNotFoundError(f"model {model!r}: {problem}, and leave --no-model-cache out")
    return cache


def is_used(folder: Path) -> bool:
    """Whether a dense folder is there; if so, the time of its last use is now."""
    if not folder.is_dir():
        return False
    with suppress(OSError):  # of a folder that is mounted to be read
        os.utime(folder)
    return True


@contextmanager
def file_errors(model: str) -> Iterator[None]:
    """Errors of files in the terms of the model."""
    try:
        yield
    except OSError as error:
        where = f"{error.filename}: " if error.filename else ""
        raise ModelNotFoundError(f"model {model!r}: {where}{(error.strerror or '').lower() or error}") from error


@contextmanager
def writing(folder: Path) -> Iterator[Path | None]:
    """A temporary folder that becomes a dense folder when the context ends; None if another process made it meanwhile.

    Nothing else writes to the folder of all dense ones meanwhile, so what is half-written there was left by a process
    that was killed, and is removed.

    Raises:
        OSError: the folder cannot be made, or others may write to it.
    """
    root = folder.parents[1]
    require_private(root.parent)
    root.mkdir(mode=0o700, exist_ok=True)
    descriptor = os.open(root, os.O_RDONLY)
    try:
        _lock(descriptor)
        for left in root.glob("part-*"):
            shutil.rmtree(left, ignore_errors=True)
        if folder.is_dir():
            yield None
            return
        with tempfile.TemporaryDirectory(prefix="part-", dir=root, ignore_cleanup_errors=True) as part:
            written = Path(part, "model")
            written.mkdir()
            yield written
            folder.parent.mkdir(exist_ok=True)
            written.rename(folder)
    finally:
        os.close(descriptor)


def _lock(descriptor: int) -> None:
    """Waits until no other process has the lock."""
    try:
        fcntl.flock(descriptor, fcntl.LOCK_EX | fcntl.LOCK_NB)
    except BlockingIOError:
        _log.info("another process prepares a model: waiting until it has finished")
        fcntl.flock(descriptor, fcntl.LOCK_EX)


def convert(file: Path, folder: Path, model: str) -> None:
    """Writes the dense folder of a GGUF file, in a child process.

    Args:
        model: for errors.

    Raises:
        ModelNotFoundError, UnsupportedModelError: as `dense_folder`.
    """
    _log.info("%s: its weights are made dense, once", model)
    command = [sys.executable, "-P", "-m", _CONVERSION, str(file.absolute()), str(folder)]
    environ = os.environ | {"HF_HUB_OFFLINE": "1", "TRANSFORMERS_VERBOSITY": "error"}
    done = subprocess.run(command, capture_output=True, text=True, errors="replace", env=environ, check=False)
    if done.returncode in (UNREADABLE, UNSUPPORTED):
        kind = ModelNotFoundError if done.returncode == UNREADABLE else UnsupportedModelError
        raise kind(f"model {model!r}: {done.stdout.strip()}")
    if done.returncode:
        last = (done.stderr.strip().splitlines() or ["it gave no reason"])[-1]
        reason = "it was killed, as if memory ran out" if done.returncode < 0 else last
        raise ModelNotFoundError(f"model {model!r}: its weights cannot be made dense: {reason}")


def require_private(cache: Path) -> None:
    """Makes the folder for this user alone.

    Raises:
        OSError: it cannot be made, or others may write to it.
    """
    cache.mkdir(mode=0o700, parents=True, exist_ok=True)
    if not is_private(cache):
        raise PermissionError(f"{cache} must belong to the user of the service, and no other may write to it")


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
