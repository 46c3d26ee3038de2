"""A model's files: where they are, what they say without the weights, and their digests.

Digests of large files are remembered, so that a start need not read gigabytes again.
"""

from __future__ import annotations

import hashlib
import json
import math
import os
import re
import time
from collections.abc import Collection, Iterable, Mapping, MutableMapping, Sequence
from contextlib import suppress
from dataclasses import dataclass
from fnmatch import fnmatch
from pathlib import Path
from typing import TYPE_CHECKING, Any

from draftwood_model_runner.errors import ModelNotFoundError

if TYPE_CHECKING:
    from draftwood_model_runner.sampling.generation_defaults import GenerationDefaults


BUNDLED_MODEL = str(Path(__file__).parent / "demo")
"""The model that ships with Draftwood; see its README.md."""
HUB_SECONDS = 5.0
"""Until the hub answers whether it is there."""
OFFLINE = "HF_HUB_OFFLINE"

KNOWN_DIGESTS = "digests.json"
"""Name of the file in the folder of converted models."""
_SETTLED_NS = 2_000_000_000
"""A file that has not changed for so long when it is read has another change time if it changes later."""


_OTHER_FORMATS = ("*.gguf", "*.onnx", "*.onnx_data", "*.msgpack", "*.h5", "*.tflite", "*.ot", "original/*")
_PICKLED = ("*.bin", "*.pt", "*.pth", "*.ckpt")
"""Weights that are not read where there are safetensors."""
_MTP = re.compile(r"(^|\.)mtp[._]|\.eh_proj\.")
"""In the names of a module's tensors, see `loading.mtp_heads`; also in forms that are not known."""


def checkpoint_files(names: Collection[str]) -> list[str]:
    """Those of a folder's files that a checkpoint of transformers is read from."""
    left_out = (*_OTHER_FORMATS, *(_PICKLED if any(name.endswith(".safetensors") for name in names) else ()))
    return [name for name in names if not any(fnmatch(name, pattern) for pattern in left_out)]


def require_folder(path_or_id: str) -> None:
    """A path that is meant as one must exist: the hub would answer with something less clear.

    Raises:
        ModelNotFoundError: there is no such folder, or no model in it.
    """
    if Path(path_or_id).is_file():
        raise ModelNotFoundError(
            f"model {path_or_id!r}: is a file; give the folder that has config.json and the weights"
        )
    looks_like_path = os.path.isabs(path_or_id) or path_or_id.startswith((".", "~")) or path_or_id.count("/") > 1
    if not path_or_id or (looks_like_path and not Path(path_or_id).is_dir()):
        raise ModelNotFoundError(f"model {path_or_id!r}: no such folder; give a folder or a hub id such as org/name")
    if Path(path_or_id).is_dir() and not (Path(path_or_id) / "config.json").is_file():
        raise ModelNotFoundError(f"model {path_or_id!r}: the folder has no config.json")


def set_offline_mode(path_or_id: str, environ: MutableMapping[str, str]) -> None:
    """For a model on the hub: if that does not answer, this process and its children use what was downloaded before.

    The hub's client would retry each file for a minute. It reads the environment when it is imported, so not before.

    Raises:
        ModelNotFoundError: nothing of the model was downloaded, and the hub does not answer or must not be asked.
    """
    if Path(path_or_id).is_dir():
        return
    if is_offline(environ):
        if not is_downloaded(path_or_id, environ):
            problem = f"it was not downloaded before, and {OFFLINE} forbids to ask the hub"
            raise ModelNotFoundError(f"model {path_or_id!r}: {problem}")
        return
    import urllib.error
    import urllib.request

    hub = hub_of(environ)
    try:
        urllib.request.urlopen(urllib.request.Request(hub, method="HEAD"), timeout=HUB_SECONDS).close()
    except urllib.error.HTTPError:
        return  # it answers
    except (OSError, ValueError) as error:
        if not is_downloaded(path_or_id, environ):
            problem = f"it was not downloaded before, and {hub} cannot be reached ({error})"
            raise ModelNotFoundError(f"model {path_or_id!r}: {problem}") from error
        environ[OFFLINE] = "1"


def hub_of(environ: Mapping[str, str]) -> str:
    """The hub's address."""
    return environ.get("HF_ENDPOINT") or "https://huggingface.co"


def is_offline(environ: Mapping[str, str]) -> bool:
    """Whether the hub must not be asked."""
    return environ.get(OFFLINE, "").upper() in ("1", "ON", "YES", "TRUE")


def is_downloaded(model: str, environ: Mapping[str, str]) -> bool:
    """Whether the hub's cache has something of the model."""
    cache = environ.get("XDG_CACHE_HOME") or Path.home() / ".cache"
    home = Path(environ.get("HF_HOME") or Path(cache, "huggingface"))
    folder = Path(environ.get("HF_HUB_CACHE") or environ.get("HUGGINGFACE_HUB_CACHE") or home / "hub")
    return any(folder.expanduser().glob(f"models--{model.replace('/', '--')}/snapshots/*/config.json"))


def name_of(path_or_id: str) -> str:
    """What clients know the model as."""
    if path_or_id == BUNDLED_MODEL:
        return "draftwood-demo"
    return Path(path_or_id).resolve().name if Path(path_or_id).is_dir() else path_or_id


def cannot_be_loaded(path_or_id: str, error: Exception, part: str = "") -> ModelNotFoundError:
    """What to raise after transformers raised `error`.

    Args:
        part: of the model, such as "tokenizer"; "" if it is not known.
    """
    text = str(error).strip()
    what = f"model {path_or_id!r}: its {part}" if part else f"model {path_or_id!r}"
    return ModelNotFoundError(f"{what} cannot be loaded: {text.splitlines()[0] if text else type(error).__name__}")


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

    from draftwood_model_runner.sampling.generation_defaults import end_tokens, generation_defaults

    try:
        config: Any = AutoConfig.from_pretrained(path_or_id)
    except (OSError, ValueError) as error:
        raise cannot_be_loaded(path_or_id, error) from error
    try:
        generation: Any = GenerationConfig.from_pretrained(path_or_id)
    except OSError:
        generation = GenerationConfig.from_model_config(config)
    [architecture, *_] = config.architectures or [type(config).__name__]
    of_text = config.get_text_config()
    return CheckpointFacts(
        architecture=architecture,
        parameters=stored_parameters(path_or_id),
        eos_token_ids=end_tokens(of_text, generation),
        defaults=generation_defaults(architecture, generation, source, of_text.vocab_size),
    )


def stored_parameters(path_or_id: str) -> int:
    """Weights of a model in a folder, by the headers of its safetensors files; 0 if they do not tell."""
    from safetensors import safe_open

    total, folder = 0, Path(path_or_id)
    for path in folder.glob("*.safetensors") if folder.is_dir() else ():
        with safe_open(path, framework="numpy") as file:
            total += sum(math.prod(file.get_slice(name).get_shape()) for name in file.keys())  # noqa: SIM118
    return total


def weights_folder(path_or_id: str) -> Path:
    """The folder of a model's weights. Those of an id on the hub are downloaded to its cache, where transformers finds
    them.

    Raises:
        ModelNotFoundError: they are not there.
    """
    if Path(path_or_id).is_dir():
        return Path(path_or_id)
    from huggingface_hub import snapshot_download

    try:
        return Path(snapshot_download(path_or_id, allow_patterns=["*.json", "model*.safetensors"]))
    except Exception as error:
        raise cannot_be_loaded(path_or_id, error) from error


def stored_tensors(folder: Path) -> dict[str, Path]:
    """The tensors of a folder's safetensors files by their names, each with its file."""
    from safetensors import safe_open

    tensors = dict[str, Path]()
    for path in sorted(folder.glob("*.safetensors")):
        with safe_open(path, framework="numpy") as file:
            tensors |= dict.fromkeys(file.keys(), path)
    return tensors


def may_have_mtp(path_or_id: str) -> bool:
    """Whether a folder's checkpoint names tensors of a module for multi-token prediction; False for what is no folder,
    or cannot be read."""
    try:
        return bool(mtp_tensors(stored_tensors(Path(path_or_id))))
    except Exception:  # such as safetensors' own, of a file that ends too early
        return False


def mtp_tensors(names: Iterable[str]) -> list[str]:
    """Those of a checkpoint's tensors that are of a module for multi-token prediction, of any form."""
    return [name for name in names if _MTP.search(name)]


class KnownDigests:
    """Digests of file contents, remembered in a file with the size, inode and times of each.

    A content that changes gets another change time, which no program can set.

    Args:
        path: of the file. If it cannot be read or written, or others may write to its folder, all is read.
    """

    def __init__(self, path: Path) -> None:
        self._path = path

    def digest(self, files: Sequence[Path]) -> str:
        """Of names and contents. Raises OSError."""
        contents = self.sha256(files)
        return _joined([f"{file.name} {content}" for file, content in zip(files, contents, strict=True)])

    def sha256(self, files: Sequence[Path]) -> list[str]:
        """Of each file's content, in hexadecimal digits. Raises OSError."""
        known = self._read()
        digests = {str(file.resolve()): _content(file, known.get(str(file.resolve()))) for file in files}
        if any(known.get(name) != of_file for name, of_file in digests.items()):
            kept = {name: of_file for name, of_file in known.items() if Path(name).exists()}
            with suppress(OSError):
                self._path.write_text(json.dumps(kept | digests), encoding="utf-8")
        return [of_file[-1] for of_file in digests.values()]

    def _read(self) -> dict[str, list[str]]:
        try:
            if not is_private(self._path.parent):
                return {}
            known = json.loads(self._path.read_text(encoding="utf-8"))
        except (OSError, ValueError):
            return {}
        whole = isinstance(known, dict) and all(isinstance(entry, list) and len(entry) == 2 for entry in known.values())
        return known if whole else {}


def is_private(folder: Path) -> bool:
    """Whether a folder belongs to this user, and no other may write to it. Raises OSError."""
    status = folder.stat()
    return status.st_uid == os.getuid() and not status.st_mode & 0o022


def digest_of_contents(files: Sequence[Path]) -> str:
    """Of names and contents, all of which are read. Raises OSError."""
    return _joined([f"{file.name} {_digest(file)}" for file in files])


def _content(file: Path, known: list[str] | None) -> list[str]:
    """What tells a version of a file from others, and its digest."""
    status = file.stat()
    numbers = (status.st_dev, status.st_ino, status.st_size, status.st_mtime_ns, status.st_ctime_ns)
    version = " ".join(map(str, numbers))
    if known is not None and known[0] == version:
        return known
    settled = time.time_ns() - status.st_ctime_ns > _SETTLED_NS
    return [version if settled else "", _digest(file)]


def _digest(file: Path) -> str:
    with file.open("rb") as content:
        return hashlib.file_digest(content, "sha256").hexdigest()


def _joined(lines: Sequence[str]) -> str:
    return hashlib.sha256("\n".join(lines).encode()).hexdigest()
