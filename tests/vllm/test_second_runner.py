"""vLLM's second model runner takes our drafts, or nothing is changed: with files in the place of vLLM's.

`test_versions` has vLLM's own.
"""

from __future__ import annotations

import re
import sys
from collections.abc import Callable, Iterator
from importlib import import_module
from pathlib import Path
from types import ModuleType, SimpleNamespace
from typing import Any, TypeAlias

import pytest

from draftwood_vllm import device_support, second_runner
from tests.vllm.fake_trie import DeviceSizes, DeviceTrie

CONFIG, FACTORY = "vllm.config.vllm", "vllm.v1.worker.gpu.spec_decode"
FILES = {
    CONFIG: """
from typing import Literal, get_args
NgramGPUTypes = Literal["ngram_gpu"]
class VllmConfig:
    def __init__(self, **fields):
        self.__dict__.update(fields)
        self.__post_init__()
    def __post_init__(self):
        self.asynchronous = self.speculative_config.method in get_args(NgramGPUTypes)
    @property
    def use_v2_model_runner(self):
        return not self._get_v2_model_runner_unsupported_features()
    def _get_v2_model_runner_unsupported_features(self):
        method = self.speculative_config.method
        found = [f"speculative method '{method}'"] if method in ("suffix", "custom_class") else []
        return [*found, *self.others]
""",
    FACTORY: """
def init_speculator(vllm_config, device, req_states):
    return "vLLM's"
""",
    f"{FACTORY}.speculator": """
class BaseSpeculator:
    @abstractmethod
    def init_cudagraph_manager(self, cudagraph_mode): ...
    @abstractmethod
    def capture(self): ...
    @abstractmethod
    def propose(self, input_batch, num_sampled, num_rejected, last_sampled, dummy_run=False): ...
""",
    "vllm.v1.worker.gpu.model_runner": """
class GPUModelRunner:
    def __init__(self):
        self.req_states = self.speculator = None
    def load_model(self): ...
    def add_requests(self, scheduler_output): ...
    def finish_requests(self, scheduler_output): ...
    def sample_tokens(self):
        self.postprocess_sampled()
        draft_tokens = self.speculator.propose()
""",
}
_FIELDS = {
    "vllm.v1.worker.gpu.states": {"RequestState": "all_token_ids total_len req_id_to_index max_seq_len"},
    "vllm.v1.worker.gpu.input_batch": {"InputBatch": "req_ids num_reqs idx_mapping"},
    "vllm.v1.core.sched.output": {
        "NewRequestData": "req_id prompt_token_ids prefill_token_ids prompt_embeds sampling_params",
        "SchedulerOutput": "scheduled_new_reqs finished_req_ids preempted_req_ids",
    },
}
for _module, _classes in _FIELDS.items():
    _texts = [f"class {name}:\n    {': object; '.join(fields.split())}: object\n" for name, fields in _classes.items()]
    FILES[_module] = "".join(_texts)


@pytest.fixture
def vllm(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[Path]:
    """A folder with files in the place of vLLM's, which are imported from there."""
    for module, text in FILES.items():
        file = tmp_path.joinpath(*module.split("."), "__init__.py")
        file.parent.mkdir(parents=True, exist_ok=True)
        file.write_text(text)
    platforms: Any = ModuleType("vllm.platforms")
    platforms.current_platform = SimpleNamespace(is_cuda=lambda: True, get_device_total_memory=lambda: 1 << 30)
    monkeypatch.syspath_prepend(tmp_path)
    monkeypatch.setitem(sys.modules, "vllm.platforms", platforms)
    monkeypatch.setattr(device_support, "load", lambda: device_support.DeviceModule(DeviceSizes, DeviceTrie))
    monkeypatch.setenv("DRAFTWOOD_FIRST_RUNNER", "")
    second_runner.lacking.cache_clear()
    yield tmp_path
    second_runner.lacking.cache_clear()
    for name in [name for name in sys.modules if name == "vllm" or name.startswith("vllm.")]:
        sys.modules.pop(name)


def configured(method: str = "custom_class", model: str = "draftwood_vllm.Proposer", **fields: Any) -> Any:
    """A `VllmConfig`. Fields are of its parts, by the names of both joined, as `model_is_hybrid`."""
    parts: dict[str, dict[str, Any]] = {
        "speculative": {
            "method": method,
            "model": model,
            "num_speculative_tokens": 8,
            "num_speculative_tokens_per_batch_size": None,
            "target_model_config": "the model's",
            "draft_model_config": "the drafter's",
        },
        "model": {"max_model_len": 256, "is_hybrid": False},
        "parallel": {"pipeline_parallel_size": 1, "distributed_executor_backend": "mp", "world_size": 2},
        "scheduler": {"max_num_seqs": 8},
    }
    others, additional = fields.pop("others", []), fields.pop("additional", {})
    for name, value in fields.items():
        part, _, field = name.partition("_")
        parts[part][field] = value
    configs = {f"{part}_config": SimpleNamespace(**values) for part, values in parts.items()}
    return import_module(CONFIG).VllmConfig(others=others, additional_config=additional, **configs)


Configure: TypeAlias = Callable[..., Any]
BESIDE = {"draftwood": True}


@pytest.fixture
def configure(vllm: Path, monkeypatch: pytest.MonkeyPatch) -> Configure:
    """As `configured`, of a vLLM that was enabled twice. Fields in capitals are variables of the environment."""
    monkeypatch.setenv("DRAFTWOOD_MEMORY_TOKENS", "1024")
    second_runner.enable()
    second_runner.enable()

    def configure(*method: str, **fields: Any) -> Any:
        for name in filter(str.isupper, fields):
            monkeypatch.setenv(name, fields[name])
        return configured(*method, **{name: value for name, value in fields.items() if not name.isupper()})

    return configure


@pytest.mark.parametrize("hybrid", [False, True])
def test_the_second_runner_takes_our_drafts(
    hybrid: bool, configure: Configure, caplog: pytest.LogCaptureFixture
) -> None:
    """Of recurrent models too, if each row has a draft in each step."""
    config = configure(model_is_hybrid=hybrid)
    assert (config.use_v2_model_runner, config.asynchronous) == (True, True)
    assert caplog.records == []


@pytest.mark.parametrize(("method", "model"), [("suffix", "suffix"), ("custom_class", "another.Proposer")])
def test_other_methods_are_as_they_were(
    method: str, model: str, configure: Configure, caplog: pytest.LogCaptureFixture
) -> None:
    config = configure(method, model)
    assert (config.use_v2_model_runner, config.asynchronous) == (False, False)
    assert import_module(FACTORY).init_speculator(config, "cpu", None) == "vLLM's"
    assert caplog.records == []


@pytest.mark.parametrize("method", ["eagle", "eagle3", "mtp", "draft_model"])
def test_beside_a_drafter_vllm_makes_its_own_speculator_and_we_wrap_it(
    method: str, configure: Configure, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    wrapped: list[Any] = []
    module: Any = ModuleType("draftwood_vllm.beside")
    module.Beside = lambda *given: wrapped.append(given)
    monkeypatch.setitem(sys.modules, module.__name__, module)
    for additional, times in (({}, 0), ({"draftwood": False}, 0), (BESIDE, 1)):
        config = configure(method, "a drafter", additional=additional)
        assert import_module(FACTORY).init_speculator(config, "cpu", None) == "vLLM's"
        assert wrapped == [(config, "cpu", "vLLM's")] * times
    assert caplog.records == []


@pytest.mark.parametrize(
    ("method", "fields", "reason"),
    [
        *(
            (method, {}, f"speculative_config.method={method!r}: allowed are draft_model, eagle, eagle3 and mtp")
            for method in ("custom_class", "suffix", "ngram_gpu", "dflash", "extract_hidden_states")
        ),
        ("eagle3", {"others": ["two batches"]}, "vLLM takes its first model runner, and this needs the second one"),
        ("eagle3", {"speculative_enable_adaptive_verification": True}, "it would judge their drafts by ours"),
        ("eagle3", {"parallel_pipeline_parallel_size": 2}, "pipeline_parallel_size=2: tried with 1 only"),
        ("eagle3", {"scheduler_max_num_seqs": 1 << 20}, "more than 10% of its 1024 MiB"),
        ("eagle3", {"DRAFTWOOD_STRATEGY": "hybrid"}, "DRAFTWOOD_STRATEGY=hybrid: only trie drafts on devices"),
        *(
            ("eagle3", {"additional": {"draftwood": value}}, f"draftwood={value!r}: allowed are true and false")
            for value in (1, "on", None, {"beside": True})
        ),
    ],
)
def test_beside_what_it_does_not_work_with_vllm_does_not_start(
    method: str, fields: dict[str, Any], reason: str, configure: Configure, caplog: pytest.LogCaptureFixture
) -> None:
    with pytest.raises(ValueError, match=r"^additional_config.draftwood=.*: .*") as error:
        configure(method, "a drafter", **{"additional": BESIDE, **fields})
    assert reason in str(error.value)
    assert "\n" not in str(error.value)
    configure(method, "a drafter", **{**fields, "additional": {}})  # without us
    assert "draftwood" not in caplog.text


def test_a_drafters_own_configuration_is_not_checked_again(configure: Configure) -> None:
    config = configure("eagle3", "a drafter", additional=BESIDE)
    config.others = ["something that the drafter has"]
    with pytest.raises(ValueError, match="vLLM takes its first model runner"):
        config.__post_init__()
    config.model_config = config.speculative_config.draft_model_config
    config.__post_init__()


def test_recurrent_models_have_both_as_vllm_has_its_own(configure: Configure) -> None:
    varying = {"speculative_num_speculative_tokens_per_batch_size": [(1, 8, 0)]}
    assert configure("mtp", "a drafter", additional=BESIDE, model_is_hybrid=True, **varying).use_v2_model_runner


def test_without_speculation_there_is_nothing_to_be_beside() -> None:
    config: Any = SimpleNamespace(speculative_config=None)
    assert second_runner._unfit_beside(config).startswith("there is no speculative_config; it goes with")


def test_what_else_the_runner_cannot_do_stays_listed(configure: Configure, caplog: pytest.LogCaptureFixture) -> None:
    config = configure(others=["elastic expert parallelism"])
    listed = ["speculative method 'custom_class'", "elastic expert parallelism"]
    assert config._get_v2_model_runner_unsupported_features() == listed
    assert caplog.records == []


@pytest.mark.parametrize(
    ("fields", "reason"),
    [
        ({"parallel_pipeline_parallel_size": 2}, "pipeline_parallel_size=2: tried with 1 only"),
        ({"parallel_distributed_executor_backend": "external_launcher"}, "each rank would learn by itself"),
        ({"model_enable_sleep_mode": True}, "what is learned on the device would be lost in a sleep"),
        (
            {"model_is_hybrid": True, "speculative_num_speculative_tokens_per_batch_size": [(1, 8, 0)]},
            "a recurrent model, whose states are wrong after steps that verify no drafts (vLLM issue 39273)",
        ),
        ({"model_is_hybrid": True, "speculative_enable_adaptive_verification": True}, "a recurrent model"),
        (
            {"scheduler_max_num_seqs": 1 << 20},
            "drafts for 1048576 rows of 256 tokens and 17 tenants of 1024 tokens (max_num_seqs, DRAFTWOOD_MAX_TENANTS,"
            " DRAFTWOOD_MEMORY_TOKENS) take 1024 MiB of the device, more than 10% of its 1024 MiB",
        ),
        ({"DRAFTWOOD_STRATEGY": "hybrid"}, "DRAFTWOOD_STRATEGY=hybrid: only trie drafts on devices"),
        ({"DRAFTWOOD_MEMORY_TOKENS": "many"}, "memory_tokens"),
    ],
)
def test_what_is_not_drafted_for_on_the_device_takes_the_first_runner(
    fields: dict[str, Any], reason: str, configure: Configure, caplog: pytest.LogCaptureFixture
) -> None:
    for _ in range(2):
        config = configure(**fields)
        assert (config.use_v2_model_runner, config.asynchronous) == (False, False)
    [line] = [record.getMessage() for record in caplog.records]
    assert line.startswith("drafts are made on the host, by vLLM's first model runner: ")
    assert reason in line


def test_without_cuda_or_drafts_for_it_the_first_runner_stays(
    configure: Configure, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    monkeypatch.setattr(device_support, "load", lambda: import_module("draftwood_strategies.no_device"))
    assert not configure().use_v2_model_runner
    monkeypatch.setattr(sys.modules["vllm.platforms"].current_platform, "is_cuda", lambda: False)
    assert not configure().use_v2_model_runner
    assert "there are no drafts for devices: No module named" in caplog.text
    assert "there is no CUDA device" in caplog.text


@pytest.mark.parametrize(
    ("module", "old", "new", "reason"),
    [
        (CONFIG, "_get_v2_model_runner_unsupported_features", "_unsupported", "VllmConfig has no _get_v2_model_runner"),
        (FACTORY, "vllm_config, device", "config", "init_speculator takes no vllm_config and no device"),
        (f"{FACTORY}.speculator", "last_sampled, ", "", "propose takes no last_sampled"),
        (f"{FACTORY}.speculator", "def capture", "def record", "BaseSpeculator has no capture"),
        (
            f"{FACTORY}.speculator",
            "    def capture",
            "    def prepare(self): ...\n    @abstractmethod\n    def capture",
            "BaseSpeculator has prepare, which we do not know",
        ),
        ("vllm.v1.worker.gpu.model_runner", "def add_requests", "def join", "GPUModelRunner has no add_requests"),
        (
            "vllm.v1.worker.gpu.model_runner",
            "        self.postprocess_sampled()\n        draft_tokens = self.speculator.propose()",
            "        self.speculator.propose()\n        self.postprocess_sampled()",
            "sample_tokens does not note what was sampled before it asks for drafts",
        ),
        ("vllm.v1.worker.gpu.states", "total_len", "length", "RequestState has no total_len"),
        ("vllm.v1.worker.gpu.input_batch", "idx_mapping", "slots", "InputBatch has no idx_mapping"),
        ("vllm.v1.core.sched.output", "prefill_token_ids", "tokens", "NewRequestData has no prefill_token_ids"),
        ("vllm.v1.core.sched.output", "class", "class:", "vLLM's files cannot be read"),
    ],
)
def test_if_something_is_missing_nothing_is_changed(vllm: Path, module: str, old: str, new: str, reason: str) -> None:
    file = vllm.joinpath(*module.split("."), "__init__.py")
    file.write_text(file.read_text().replace(old, new))
    second_runner.enable()
    assert reason in second_runner.lacking()
    if module == CONFIG or "read" in reason:
        return
    config = configured()
    assert (config.use_v2_model_runner, config.asynchronous) == (False, False)
    assert not hasattr(import_module(FACTORY).init_speculator, "__wrapped__")
    with pytest.raises(ValueError, match=f"additional_config.draftwood=True: .*{re.escape(reason)}"):
        configured("eagle3", "a drafter", additional=BESIDE)


def test_another_vllm_has_no_second_runner(tmp_path: Path) -> None:
    assert second_runner.missing(tmp_path) == f"vLLM has no {CONFIG}"
    assert second_runner.lacking() in ("vLLM is not installed", "")


def test_a_runner_that_was_imported_before_gets_the_factory_too(vllm: Path) -> None:
    runner: Any = import_module("vllm.v1.worker.gpu.model_runner")
    runner.init_speculator = import_module(FACTORY).init_speculator
    second_runner.enable()
    assert hasattr(runner.init_speculator, "__wrapped__")
