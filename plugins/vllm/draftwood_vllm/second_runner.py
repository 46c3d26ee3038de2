"""Lets vLLM take its second model runner with our drafts, in versions that have what `speculator` needs: 0.26 to 0.33.

Drafts of ours alone are asked for by the method "custom_class", those beside a trained drafter by `OPTION`.

vLLM has no registry for speculators. So its factory of speculators is wrapped, and so is its list of what the second
runner cannot do. Before that, the files of the installed vLLM are read, not imported: all that we need must be there,
as we know it. Otherwise nothing is changed, one line of the log says why, and vLLM takes its first runner, where
`proposer` drafts. Imports nothing but the standard library before vLLM asks.
"""

from __future__ import annotations

import ast
import logging
import os
import sys
from collections.abc import Iterator, Mapping
from functools import cache, wraps
from importlib import import_module
from importlib.util import find_spec
from pathlib import Path
from typing import Any, Literal

_log = logging.getLogger("draftwood")

METHOD = "custom_class"
MODELS = ("draftwood_vllm.Proposer", "draftwood_vllm.proposer.Proposer")
OPTION = "draftwood"
"""In vLLM's `additional_config`: our drafts beside those of vLLM's own speculator."""
BESIDE = ("draft_model", "eagle", "eagle3", "mtp")
"""Methods of vLLM whose speculators this works with."""
_CONFIG = "vllm.config.vllm"
_FACTORY = "vllm.v1.worker.gpu.spec_decode"
_RUNNER = "vllm.v1.worker.gpu.model_runner"
_SPECULATOR = f"{_FACTORY}.speculator"
_UNSUPPORTED = "_get_v2_model_runner_unsupported_features"
_ENABLED = "_draftwood_enabled"
_LOGGED = "DRAFTWOOD_FIRST_RUNNER"
"""Variable with the reason that was logged. Processes that vLLM starts have it, and do not log it again."""

_CLASSES: Mapping[str, Mapping[str, tuple[str, ...]]] = {
    _CONFIG: {"VllmConfig": ("__post_init__", _UNSUPPORTED, "use_v2_model_runner")},
    _SPECULATOR: {"BaseSpeculator": ("init_cudagraph_manager", "capture", "propose")},
    _RUNNER: {
        "GPUModelRunner": ("add_requests", "finish_requests", "load_model", "req_states", "speculator"),
    },
    "vllm.v1.worker.gpu.states": {
        "RequestState": ("all_token_ids", "total_len", "req_id_to_index", "max_seq_len"),
    },
    "vllm.v1.worker.gpu.input_batch": {"InputBatch": ("req_ids", "num_reqs", "idx_mapping")},
    "vllm.v1.core.sched.output": {
        "NewRequestData": ("req_id", "prompt_token_ids", "prefill_token_ids", "prompt_embeds", "sampling_params"),
        "SchedulerOutput": ("scheduled_new_reqs", "finished_req_ids", "preempted_req_ids"),
    },
}
"""Methods and attributes that we need, by module and class."""
_PARAMETERS: Mapping[tuple[str, str], tuple[str, ...]] = {
    (_FACTORY, "init_speculator"): ("vllm_config", "device"),
    (_SPECULATOR, "propose"): ("self", "input_batch", "num_sampled", "num_rejected", "last_sampled", "dummy_run"),
    (_RUNNER, "add_requests"): ("self", "scheduler_output"),
    (_RUNNER, "finish_requests"): ("self", "scheduler_output"),
}
"""Parameters that functions must have among theirs, by module and name."""


def enable() -> None:
    """Wraps vLLM's factory and its list, if the installed version has all that we need, and lets its configuration
    check our option. May be called twice.

    Raises:
        ImportError: vLLM's files cannot be imported; nothing is changed then.
    """
    config = import_module(_CONFIG)
    if hasattr(config.VllmConfig, _ENABLED):
        return
    setattr(config.VllmConfig, _ENABLED, True)
    _check_beside(config.VllmConfig)
    if lacking():
        return
    factory = import_module(_FACTORY)
    _wrap_config(config)
    wrapped = _wrapped_factory(factory.init_speculator)
    factory.init_speculator = wrapped  # type: ignore[attr-defined]
    if _RUNNER in sys.modules:  # which has imported it by its name
        sys.modules[_RUNNER].init_speculator = wrapped  # type: ignore[attr-defined]


@cache
def lacking() -> str:
    """Why the second runner of the installed vLLM cannot draft with us; "" if it can."""
    found = find_spec("vllm")
    roots = [] if found is None else [*(found.submodule_search_locations or ())]
    try:
        return missing(Path(roots[0]).parent) if roots else "vLLM is not installed"
    except (OSError, SyntaxError) as error:
        return f"vLLM's files cannot be read: {error}"


def missing(root: Path) -> str:
    """What the vLLM in a folder of packages lacks of what we need, or has otherwise; "" if nothing.

    Raises:
        OSError, SyntaxError: a file cannot be read.
    """
    trees: dict[str, ast.Module] = {}
    for module in sorted({*_CLASSES, *(module for module, _ in _PARAMETERS)}):
        path = root.joinpath(*module.split("."))
        file = path / "__init__.py" if path.is_dir() else path.with_suffix(".py")
        if not file.is_file():
            return f"vLLM has no {module}"
        trees[module] = ast.parse(file.read_text(encoding="utf-8"))
    for module, classes in _CLASSES.items():
        for name, needed in classes.items():
            has = _members(trees[module], name)
            if lacks := [one for one in needed if one not in has]:
                return f"{module}.{name} has no {' and no '.join(lacks)}"
    for (module, name), parameters in _PARAMETERS.items():
        [function, *_] = [*_functions(trees[module], name), None]
        names = [] if function is None else [one.arg for one in (*function.args.args, *function.args.kwonlyargs)]
        if lacks := [one for one in parameters if one not in names]:
            return f"{module}.{name} takes no {' and no '.join(lacks)}"
    return _unlike(trees)


def _unlike(trees: Mapping[str, ast.Module]) -> str:
    """What is there, but is used otherwise than we know it; "" if nothing is."""
    known = set(_CLASSES[_SPECULATOR]["BaseSpeculator"])
    base = next(
        one for one in trees[_SPECULATOR].body if isinstance(one, ast.ClassDef) and one.name == "BaseSpeculator"
    )
    abstract = {one.name for one in base.body if isinstance(one, ast.FunctionDef) and one.decorator_list}
    if abstract - known:
        return f"{_SPECULATOR}.BaseSpeculator has {' and '.join(sorted(abstract - known))}, which we do not know"
    calls = [one for function in _functions(trees[_RUNNER], "sample_tokens") for one in ast.walk(function)]
    lines = {ast.unparse(one.func): one.lineno for one in calls if isinstance(one, ast.Call)}
    postprocessed, proposed = (lines.get(f"self.{name}", 0) for name in ("postprocess_sampled", "speculator.propose"))
    if not 0 < postprocessed < proposed:
        return f"{_RUNNER}.sample_tokens does not note what was sampled before it asks for drafts"
    return ""


def _members(tree: ast.Module, name: str) -> set[str]:
    """Names of a class's methods and annotated attributes, and of what its methods set on `self`."""
    found: set[str] = set()
    for one in (node for node in tree.body if isinstance(node, ast.ClassDef) and node.name == name):
        for node in ast.walk(one):
            if isinstance(node, ast.FunctionDef):
                found.add(node.name)
            elif isinstance(node, ast.AnnAssign) and isinstance(node.target, ast.Name):
                found.add(node.target.id)
            elif isinstance(node, ast.Attribute) and isinstance(node.ctx, ast.Store):
                found.add(node.attr)
    return found


def _functions(tree: ast.Module, name: str) -> Iterator[ast.FunctionDef]:
    return (node for node in ast.walk(tree) if isinstance(node, ast.FunctionDef) and node.name == name)


def is_ours(config: Any) -> bool:
    """Whether a `VllmConfig` asks for our drafts."""
    speculative = config.speculative_config
    return speculative is not None and speculative.method == METHOD and speculative.model in MODELS


def is_beside(config: Any) -> bool:
    """Whether a `VllmConfig` asks for our drafts beside its own speculator's.

    Raises:
        ValueError: the option is neither true nor false.
    """
    given = getattr(config, "additional_config", None)
    value = given.get(OPTION, False) if isinstance(given, Mapping) else False
    if not isinstance(value, bool):
        raise ValueError(f"additional_config.{OPTION}={value!r}: allowed are true and false")
    return value


def say_first_runner(reason: str) -> None:
    """Logs, once for all processes of vLLM, why drafts are made on the host."""
    if os.environ.get(_LOGGED) != reason:
        os.environ[_LOGGED] = reason
        _log.warning("drafts are made on the host, by vLLM's first model runner: %s", reason)


def _wrap_config(module: Any) -> None:
    owner = module.VllmConfig
    unsupported, post_init = getattr(owner, _UNSUPPORTED), owner.__post_init__

    @wraps(unsupported)
    def without_ours(self: Any) -> list[str]:
        listed: list[str] = unsupported(self)
        rest = [one for one in listed if METHOD not in one]
        if not is_ours(self) or rest:  # with something else on its list vLLM takes the first runner anyway
            return listed
        if reason := _refusal(self):
            say_first_runner(reason)
            return listed
        return rest

    @wraps(post_init)
    def asynchronous(self: Any, *args: Any, **kwargs: Any) -> None:
        """vLLM 0.26 lists the methods for which it schedules asynchronously, whatever the runner."""
        known = getattr(module, "NgramGPUTypes", None)
        if known is None or not is_ours(self) or not self.use_v2_model_runner:
            post_init(self, *args, **kwargs)
            return
        module.NgramGPUTypes = Literal["ngram_gpu", "custom_class"]
        try:
            post_init(self, *args, **kwargs)
        finally:
            module.NgramGPUTypes = known

    setattr(owner, _UNSUPPORTED, without_ours)
    owner.__post_init__ = asynchronous


def _check_beside(owner: Any) -> None:
    """Lets a configuration with our option fail at the start, if it cannot be followed."""
    post_init = owner.__post_init__

    @wraps(post_init)
    def checked(self: Any, *args: Any, **kwargs: Any) -> None:
        asked = is_beside(self)
        post_init(self, *args, **kwargs)
        if not asked or _is_of_drafter(self):
            return
        if reason := _unfit_beside(self):
            raise ValueError(f"additional_config.{OPTION}=True: {reason}")

    owner.__post_init__ = checked


def _is_of_drafter(config: Any) -> bool:
    """Whether vLLM made this configuration for a drafter, of one that was checked."""
    speculative, model = config.speculative_config, config.model_config
    if speculative is None or model is speculative.target_model_config:
        return False
    return model is speculative.draft_model_config


def _unfit_beside(config: Any) -> str:
    """Why our drafts cannot be made beside those of a configuration's speculator; "" if they can."""
    speculative, allowed = config.speculative_config, " and ".join([", ".join(BESIDE[:-1]), BESIDE[-1]])
    if speculative is None:
        return f"there is no speculative_config; it goes with its methods {allowed}"
    if speculative.method not in BESIDE:
        return f"speculative_config.method={speculative.method!r}: allowed are {allowed}"
    if getattr(speculative, "enable_adaptive_verification", False):
        return "speculative_config.enable_adaptive_verification=True: it would judge their drafts by ours"
    if reason := lacking():
        return reason
    if not config.use_v2_model_runner:
        return "vLLM takes its first model runner, and this needs the second one (VLLM_USE_V2_MODEL_RUNNER)"
    return _refusal(config)


def _refusal(config: Any) -> str:
    """Why the second runner does not draft with us in this configuration; "" if it does. Raises nothing."""
    try:
        from draftwood_vllm.device_support import refusal

        return refusal(config, os.environ)
    except Exception as error:
        return f"{type(error).__name__}: {error}"


def _wrapped_factory(init_speculator: Any) -> Any:
    @wraps(init_speculator)
    def init(vllm_config: Any, device: Any, *args: Any, **kwargs: Any) -> Any:
        if is_ours(vllm_config):
            from draftwood_vllm.speculator import Speculator

            return Speculator(vllm_config, device)
        theirs = init_speculator(vllm_config, device, *args, **kwargs)
        if is_beside(vllm_config):
            from draftwood_vllm.beside import Beside

            Beside(vllm_config, device, theirs)
        return theirs

    return init
