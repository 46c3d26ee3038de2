"""All that touches SGLang: the algorithm DRAFTWOOD, in 0.5.23.

SGLang's n-gram worker asks its corpus for the trees of a batch; everything behind that, from masks to CUDA graphs, is
its own. So the algorithm is its n-gram one with our corpus. `register` is called in each of SGLang's processes; it
imports nothing large, and where this version lacks something it says what and registers nothing. Nor does it import
prometheus_client: SGLang names the folder of its multi-process mode later, and the metrics of a process that has
imported it before are lost. Our metrics are files in that folder, which SGLang's `/metrics` reads with its own.
"""

from __future__ import annotations

import ast
import logging
import os
import weakref
from collections.abc import Collection, Iterator, Mapping, Sequence
from contextlib import contextmanager
from importlib.metadata import version
from importlib.util import find_spec
from pathlib import Path
from typing import Any

from draftwood_sglang.corpus import Corpus

_log = logging.getLogger("draftwood")

ALGORITHM = "DRAFTWOOD"
NEEDED = "0.5.23"
"""The version of SGLang that this was tried with."""
_WORKER = "sglang.srt.speculative.ngram_worker"
_METHODS = ("__init__", "_prepare_draft_tokens", "clear_cache_pool")
"""Of its `NGRAMWorker`, which ours adds to."""


def register() -> None:
    """Called by SGLang in each of its processes (`sglang.srt.plugins`). Never raises."""
    try:
        missing = _missing()
        if missing:
            has = f"SGLang {version('sglang')} has no {' and no '.join(missing)}; version {NEEDED} has"
            _log.warning("draftwood-sglang: %s. The algorithm %s is not offered", has, ALGORITHM)
            return
        from sglang.srt.speculative.spec_info import SpeculativeAlgorithm
        from sglang.srt.speculative.spec_registry import get_spec

        if get_spec(ALGORITHM) is not None:
            return
        made = SpeculativeAlgorithm.register(
            ALGORITHM, supports_overlap=True, validate_server_args=_validate, spec_class=_algorithm()
        )
        made(_worker_class)
    except Exception:
        _log.exception("draftwood-sglang cannot register the algorithm %s", ALGORITHM)


def _missing() -> list[str]:
    """What this version of SGLang has not. Its worker is read, not imported: that would take seconds."""
    from sglang.srt.speculative import spec_info, spec_registry

    missing = []
    if not hasattr(spec_info.SpeculativeAlgorithm, "register"):
        missing.append("SpeculativeAlgorithm.register")
    if not hasattr(getattr(spec_registry, "CustomSpecAlgo", None), "handle_server_args"):
        missing.append("CustomSpecAlgo.handle_server_args")
    spec = find_spec(_WORKER)
    source = "" if spec is None or spec.origin is None else Path(spec.origin).read_text(encoding="utf-8")
    classes = [one for one in ast.parse(source).body if isinstance(one, ast.ClassDef) and one.name == "NGRAMWorker"]
    methods = {one.name for found in classes for one in found.body if isinstance(one, ast.FunctionDef)}
    missing += [f"NGRAMWorker.{name}" for name in _METHODS if name not in methods]
    if "NgramCorpus(" not in source:
        missing.append("NgramCorpus in its n-gram worker")
    return missing


def _algorithm() -> type:
    from sglang.srt.speculative.spec_registry import CustomSpecAlgo

    class Draftwood(CustomSpecAlgo):  # type: ignore[misc]
        """SGLang's n-gram algorithm under another name."""

        def is_ngram(self) -> bool:
            return True

        def has_draft_kv(self) -> bool:
            return False

        def handle_server_args(self, server_args: Any) -> None:
            from sglang.srt.arg_groups.speculative_hook import _handle_ngram

            before = len(getattr(server_args, "_resolved_overrides", None) or ())
            _handle_ngram(server_args)
            # What it decided: SGLang takes from a plug-in what is written into fields.
            for _, fields in server_args._resolved_overrides[before:]:
                for name, value in fields.items():
                    setattr(server_args, name, value)

    return Draftwood


def _validate(server_args: Any) -> None:
    """Raises ValueError: these arguments do not go with these drafts."""
    if server_args.pp_size != 1:
        raise ValueError(f"{ALGORITHM} needs --pipeline-parallel-size 1, not {server_args.pp_size}")
    nodes = server_args.speculative_num_draft_tokens
    if nodes is not None and nodes < 2:
        raise ValueError(f"{ALGORITHM} needs --speculative-num-draft-tokens of at least 2, not {nodes}")
    if server_args.speculative_ngram_external_corpus_path is not None:
        raise ValueError(f"{ALGORITHM} takes no --speculative-ngram-external-corpus-path: use `draftwood memory warm`")


def _worker_class(server_args: Any) -> type:
    from sglang.srt.speculative.ngram_worker import NGRAMWorker

    return type("DraftwoodWorker", (_Drafting, NGRAMWorker), {})


class _Drafting:
    """What is added to `NGRAMWorker`."""

    ngram_corpus: Corpus
    draft_token_num: int
    max_trie_depth: int

    def __init__(self, server_args: Any, gpu_id: int, nccl_port: int, target_worker: Any) -> None:
        from sglang.srt.runtime_context import get_parallel, get_spec

        corpus = Corpus(int(get_spec().speculative_num_draft_tokens), SGLangRequest)
        with _replaced_corpus(corpus):
            super().__init__(server_args, gpu_id, nccl_port, target_worker)  # type: ignore[call-arg]
        # How many last tokens of each text it gives: no fewer than a step may write.
        self.max_trie_depth = max(self.max_trie_depth, self.draft_token_num + 1)
        self._group = get_parallel().tp_group if get_parallel().tp_size > 1 else None
        if self._group is None or self._group.rank_in_group == 0:
            self._open(server_args, target_worker)

    def _open(self, server_args: Any, target_worker: Any) -> None:
        """Opens the memory, in the rank that drafts."""
        from draftwood_memory.engines.drafts import Host
        from draftwood_strategies.draft_engine.engine import Verifies
        from draftwood_strategies.draft_engine.step_times import LatestStepTime
        from draftwood_tenants.engines import OpenedDrafts, ServedModel, show_failure

        try:
            config, tokenizer, corpus = target_worker.model_config, target_worker.tokenizer, self.ngram_corpus
            vocabulary = {} if tokenizer is None else dict(tokenizer.get_vocab())
            model = ServedModel.of(config.model_path, server_args.revision, vocabulary, int(config.vocab_size))
            nodes = self.draft_token_num - 1
            host = Host(Verifies.FIXED_TREES, nodes, corpus.is_live, LatestStepTime, corpus.output_of)
            corpus.drafts = OpenedDrafts("SGLang", os.environ, model, host).drafts
        except Exception as error:
            _log.error("SGLang goes on without drafts of Draftwood: %s: %s", type(error).__name__, error)
            show_failure(os.environ)

    def _prepare_draft_tokens(self, batch: Any) -> Any:
        """The trees of the first rank: ranks must not differ, and memories follow their store at their own pace."""
        self.ngram_corpus.requests = batch.reqs
        tokens, mask = super()._prepare_draft_tokens(batch)  # type: ignore[misc]
        self.ngram_corpus.requests = ()
        if self._group is not None:
            import torch

            first, group = self._group.ranks[0], self._group.cpu_group
            for array in (tokens, mask):
                torch.distributed.broadcast(torch.from_numpy(array), src=first, group=group)
        return tokens, mask


@contextmanager
def _replaced_corpus(corpus: Corpus) -> Iterator[None]:
    """While a worker is made: it makes its corpus itself, and would compile it and reserve gigabytes."""
    from sglang.srt.speculative import ngram_worker

    theirs = ngram_worker.NgramCorpus
    ngram_worker.NgramCorpus = lambda **options: corpus
    try:
        yield
    finally:
        ngram_worker.NgramCorpus = theirs


class SGLangRequest:
    """A `Request` of SGLang's `Req`.

    It keeps the object while it is in the batch, to see its end. One that waits for memory lives in SGLang's queue, and
    one that was aborted there is gone without an end.
    """

    def __init__(self, req: Any) -> None:
        self._weak = weakref.ref(req)
        self._req: Any = req
        self._output: Sequence[int] | None = None
        self.request_id: str = req.rid

    @property
    def _source(self) -> Any:
        return self._req if self._req is not None else self._weak()

    @property
    def prompt(self) -> Sequence[int]:
        return () if self._source.input_embeds is not None else self._source.origin_input_ids_unpadded

    @property
    def written(self) -> Sequence[int]:
        return self._source.output_ids  # type: ignore[no-any-return]

    @property
    def max_new_tokens(self) -> int:
        return int(self._source.sampling_params.max_new_tokens)

    @property
    def stop_token_ids(self) -> Collection[int]:
        req = self._source
        if req.sampling_params.ignore_eos:
            return ()
        stops = {*(req.sampling_params.stop_token_ids or ()), *(req.eos_token_ids or ())}
        if req.tokenizer is not None:
            stops |= {req.tokenizer.eos_token_id, *(req.tokenizer.additional_stop_token_ids or ())}
        return stops

    @property
    def options(self) -> Mapping[str, Any] | None:
        return self._source.sampling_params.custom_params  # type: ignore[no-any-return]

    @property
    def live(self) -> bool:
        req = self._source
        if self._output is None and req is not None and req.finished():
            self._output, self._req = req.output_ids[: req.finished_len], None
        return self._output is None and req is not None

    @property
    def output(self) -> Sequence[int] | None:
        return None if self.live else self._output

    def is_of(self, source: object) -> bool:
        return source is (self._req or self._weak())

    def keep_alive(self, in_batch: bool) -> None:
        if in_batch and self._req is not None:
            return
        live = self.live  # in either case: it keeps the output of one that has ended
        self._req = self._weak() if in_batch and live else None
