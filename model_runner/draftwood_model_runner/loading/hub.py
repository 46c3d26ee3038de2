"""Whether the hub can be reached, looked at once before a start: its client retries each file for a minute.

Imports nothing of the hub's client, which reads the environment when it is imported.
"""

from __future__ import annotations

from collections.abc import MutableMapping
from pathlib import Path

from draftwood_model_runner.errors import ModelNotFoundError

_SECONDS = 5.0
"""For the hub's answer, whatever it is. Not tuned."""
_OFFLINE = "HF_HUB_OFFLINE"


def settle_offline(path_or_id: str, environ: MutableMapping[str, str]) -> None:
    """For a model on the hub: if that does not answer, this process and its children use what was downloaded before.

    Raises:
        ModelNotFoundError: nothing of the model was downloaded, and the hub does not answer.
    """
    if Path(path_or_id).is_dir() or environ.get(_OFFLINE, "").upper() in ("1", "ON", "YES", "TRUE"):
        return
    import urllib.error
    import urllib.request

    hub = environ.get("HF_ENDPOINT") or "https://huggingface.co"
    try:
        urllib.request.urlopen(urllib.request.Request(hub, method="HEAD"), timeout=_SECONDS).close()
    except urllib.error.HTTPError:
        return  # it answers
    except (OSError, ValueError) as error:
        if not _downloaded(path_or_id, environ):
            problem = f"it was not downloaded before, and {hub} cannot be reached ({error})"
            raise ModelNotFoundError(f"model {path_or_id!r}: {problem}") from error
        environ[_OFFLINE] = "1"


def _downloaded(model: str, environ: MutableMapping[str, str]) -> bool:
    cache = environ.get("XDG_CACHE_HOME") or Path.home() / ".cache"
    home = Path(environ.get("HF_HOME") or Path(cache, "huggingface"))
    folder = Path(environ.get("HF_HUB_CACHE") or environ.get("HUGGINGFACE_HUB_CACHE") or home / "hub")
    return any(folder.expanduser().glob(f"models--{model.replace('/', '--')}/snapshots/*/config.json"))
