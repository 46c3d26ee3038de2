"""Settings from flags, environment and YAML: their precedence, and the one line of text when one is wrong."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st
from safetensors.numpy import save_file

from draftwood_client import environment
from draftwood_model_runner.engine_config import Abilities
from draftwood_model_runner.request import MAX_LOGPROBS, GrammarKind
from draftwood_service.config import ENV_PREFIX, SettingsError, flag, read_settings
from draftwood_service.settings import Settings, default_shown

ANYTHING: st.SearchStrategy[Any] = st.recursive(
    st.none() | st.booleans() | st.integers() | st.floats() | st.text(st.characters(exclude_categories=()), max_size=9),
    lambda values: st.lists(values, max_size=3) | st.dictionaries(st.text(max_size=9), values, max_size=3),
    max_leaves=5,
)


def error_of(args: list[str], environ: dict[str, str] | None = None) -> SettingsError:
    with pytest.raises(SettingsError) as error:
        read_settings(args, environ or {})
    assert "\n" not in str(error.value)
    return error.value


def test_flags_win_over_environment_over_yaml_over_defaults(tmp_path: Path) -> None:
    yaml_file = tmp_path / "settings.yaml"
    yaml_file.write_text("port: 1001\nmax_running: 11\nmodel: from-yaml\nthreads: null\n")
    environ = {"DRAFTWOOD_PORT": "1002", "DRAFTWOOD_MAX_RUNNING": "12", "DRAFTWOOD_HOST": "", "HOME": "/"}
    settings = read_settings(["--config", str(yaml_file), "--port", "1003"], environ)
    assert (settings.port, settings.max_running, settings.model) == (1003, 12, "from-yaml")
    assert (settings.threads, settings.host) == (None, Settings().host)
    assert read_settings([], {"DRAFTWOOD_CONFIG": str(yaml_file)}).port == 1001


def test_a_mapping_comes_from_any_source(tmp_path: Path) -> None:
    path, text = tmp_path / "settings.yaml", "acme=2, a=b=0.5"
    path.write_text("tenant_weights: {acme: 2, 'a=b': 0.5}\n")
    flags, variables = ["--tenant-weights", text], {"DRAFTWOOD_TENANT_WEIGHTS": text}
    for args, environ in ((["--config", str(path)], {}), (flags, {}), ([], variables)):
        assert read_settings(args, environ).tenant_weights == {"acme": 2.0, "a=b": 0.5}


def test_sizes_may_have_a_suffix(tmp_path: Path) -> None:
    path = tmp_path / "sizes.yaml"
    path.write_text("store_bytes: 64M\nmemory_bytes: 128k\nmax_message_bytes: 2048\n")
    settings = read_settings(["--config", str(path), "--memory-max-bytes", "2G"], {})
    assert (settings.store_bytes, settings.memory_bytes, settings.max_message_bytes) == (64 << 20, 128 << 10, 2048)
    assert (settings.memory_max_bytes, settings.memory_budget) == (2 << 30, 2 << 30)
    assert Settings().memory_budget > 0
    for text in ("2T", "G", "1.5G"):
        assert error_of(["--memory-max-bytes", text]).field == "memory_max_bytes"
    assert "greater than" in str(error_of(["--memory-max-bytes", "1M"]))


def test_variables_of_the_client_are_left_alone() -> None:
    assert read_settings([], dict.fromkeys(environment.ALL, "x")) == Settings()


JWT = "--jwt-issuer i --jwt-audience a"
BAD: dict[str, tuple[str, str, str, str]] = {
    # variables and flags; then the error's field, allowed and source
    "flag": ("--port 70000", "port", "less than or equal to 65535", "--port"),
    "flag with an equals sign": ("--port=many", "port", "an integer", "--port"),
    "environment": ("DRAFTWOOD_MAX_RUNNING=0", "max_running", "at least 1", "MAX_RUNNING"),
    "device": ("--device gpu", "device", "auto, cpu, cuda or cuda:N", "--device"),
    "quantized by torch": ("--weights int8 --runner torch", "weights", "needs runner openvino", "--weights"),
    "exact by OpenVINO": ("--exact true --runner openvino", "exact", "use runner torch", "--exact"),
    "choice": ("--dtype int8", "dtype", "'auto', 'float32', 'bfloat16' or 'float16'", "--dtype"),
    "a strategy without its head": ("--strategy head", "strategy", "trie; head is there if `draftwood", "--strategy"),
    "a strategy without its model": ("--strategy draft_model", "strategy", "has --draft-model", "--strategy"),
    "a head for two GPUs": ("--draft-head h --tensor-parallel 2", "draft_head", "needs 1", "--draft-head"),
    "a model for two GPUs": ("--draft-model m --tensor-parallel 2", "draft_model", "must be unset", "--draft-model"),
    "a model for vLLM": ("--draft-model m --engine vllm", "draft_model", "is not a setting of engine", "--draft-model"),
    "a head for vLLM": ("--draft-head h --engine vllm", "draft_head", "is not a setting of engine", "--draft-head"),
    "nan": ("--stall-timeout nan", "stall_timeout", "greater than 0", "--stall-timeout"),
    "a flag like no other": ("--listen 1.2.3.4", "--listen", "see draftwood serve --help", "command line"),
    "flag without a value": ("--port", "arguments", "see draftwood serve --help", "command line"),
    "timeouts": ("--max-timeout 5", "default_timeout", "at most max_timeout = 5", ""),
    "clients' authorities alone": ("--tls-client-ca a.pem", "tls_cert", "since tls_client_ca is", ""),
    "both kinds of keys": ("--store-keys a --store-key-file b", "store_key_file", "store_keys", "--store"),
    "weights": ("--tenant-weights acme", "tenant_weights", "acme=2,beta=0.5", "--tenant-weights"),
    "weight": ("--tenant-weights acme=x", "tenant_weights", "a number", "--tenant-weights"),
    "open with keys": ("--auth open --auth-file x", "auth", "combined with auth_file", "--auth"),
    "open with tokens": (f"--auth open --jwt-jwks x {JWT}", "auth", "combined with jwt_jwks", "--auth"),
    "cadence": ("--delta-cadence 0.001", "delta_cadence", "from 0.01 to 60 seconds", "--delta-cadence"),
    "rounding": ("--delta-rounding 4", "delta_rounding", "1 without a cadence", "--delta-rounding"),
    "a collector without a host": ("--otlp-endpoint http://", "otlp_endpoint", "http://HOST:PORT", "--otlp-endpoint"),
    "a collector's port": ("--otlp-endpoint http://h:p", "otlp_endpoint", "http://HOST:PORT", "--otlp-endpoint"),
    "one port for both": ("--port 5001 --health-port 5001", "health_port", "each needs its own", "--health-port"),
    "size": ("--store-bytes 1T", "store_bytes", "the suffix K, M or G", "--store-bytes"),
    "tokens for anyone": ("--jwt-jwks x --jwt-issuer i", "jwt_audience", "since jwt_jwks is", ""),
    "audience without keys": ("--jwt-audience a", "jwt_jwks", "must be set", ""),
    "keys in clear text": (f"--jwt-jwks http://x/jwks {JWT}", "jwt_jwks", "https URL", "--jwt-jwks"),
    "symmetric signatures": ("--jwt-algorithms RS256,HS256", "jwt_algorithms", "'EdDSA'", "--jwt-algorithms"),
    "missing file": ("--config /no/such.yaml", "config", "no such file", ""),
}


@pytest.mark.parametrize("name", BAD)
def test_refused(name: str) -> None:
    given, field, allowed, source = BAD[name]
    variables = [word for word in given.split() if word.startswith(ENV_PREFIX)]
    args = [word for word in given.split() if word not in variables]
    error = error_of(args, dict(word.split("=") for word in variables))
    assert error.field == field
    assert allowed in error.allowed
    assert source in error.source
    assert error.source in str(error)


def test_strategies_are_known_by_the_models_that_are_to_be_loaded(tmp_path: Path) -> None:
    for flags, strategies in (
        ("", []),
        ("--draft-head none --draft-model m --strategy draft_model", ["draft_model"]),
        ("--model m.gguf --strategy head", ["head"]),  # whose model it is, is known once it is read
        ("--model m.gguf --runner torch", ["head"]),
        ("--engine vllm --draft-head none", []),
    ):
        assert read_settings(flags.split(), {}).model_strategies == strategies
    save_file({"mtp.fc.weight": np.zeros((2, 4), np.float32)}, tmp_path / "model.safetensors")
    assert read_settings(["--model", str(tmp_path), "--strategy", "head"], {}).model_strategies == ["head"]
    assert read_settings(["--model", str(tmp_path), "--draft-head", "none"], {}).model_strategies == []
    text = str(error_of(["--draft-model", "m", "--strategy", "tri"]))
    assert text.startswith("--strategy: 'tri' is not allowed; it must be one of hybrid, ")


BAD_YAML = {
    "bad value": ("port: [1]\n", "port", "an integer"),
    "unknown key": ("max-running: 3\n", "max-running", "did you mean max_running?"),
    "key that is no string": ("1: 2\n", "1", "no such setting"),
    "not a mapping": ("- port\n", "config", "one mapping"),
    "not YAML": ("port: [1\n", "config", "not valid YAML"),
}


@pytest.mark.parametrize("name", BAD_YAML)
def test_refused_in_yaml(name: str, tmp_path: Path) -> None:
    content, field, allowed = BAD_YAML[name]
    path = tmp_path / "bad.yaml"
    path.write_text(content)
    error = error_of(["--config", str(path)])
    assert error.field == field
    assert allowed in error.allowed
    assert str(path) in str(error)


@pytest.mark.parametrize(
    ("args", "environ", "content", "text"),
    [
        (["--tls-cert", "c"], {}, "", "--tls-key: must be set, since --tls-cert is set"),
        ([], {"DRAFTWOOD_TLS_CERT": "c"}, "", "DRAFTWOOD_TLS_KEY: must be set, since DRAFTWOOD_TLS_CERT is set"),
        ([], {}, "tls_cert: c", "tls_key: must be set, since tls_cert is set (from {file})"),
        (["--auth-file", "/no"], {}, "", "--auth-file /no: no such file"),
        ([], {}, "max_running: 0", "max_running: 0 is not allowed; it must be at least 1 (from {file})"),
        (["--tenant-weights", "a=0"], {}, "", "--tenant-weights['a']: 0.0 is not allowed; it must be above 0"),
        (
            ["--host", "::"],
            {},
            "",
            "--host ::: is not a loopback address, and without authentication anyone could call: set --auth-file (API"
            " keys, made by `draftwood key create`, or client certificates) or --jwt-jwks (tokens), or ask for it with"
            " --auth open",
        ),
    ],
)
def test_settings_are_named_as_they_were_given(
    args: list[str], environ: dict[str, str], content: str, text: str, tmp_path: Path
) -> None:
    path = tmp_path / "settings.yaml"
    path.write_text(content)
    assert str(error_of(["--config", str(path), *args], environ)) == text.format(file=path)


def test_the_network_is_let_in_with_credentials_or_when_asked_for(tmp_path: Path) -> None:
    keys = tmp_path / "auth.yaml"
    keys.touch()
    assert read_settings(["--host", "0.0.0.0", "--auth-file", str(keys)], {}).has_credentials
    assert not read_settings(["--host", "0.0.0.0", "--auth", "open"], {}).has_credentials
    for host in ("localhost", "127.0.0.2", "::1"):
        assert not read_settings(["--host", host], {}).has_credentials


def test_help_has_every_setting(capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("COLUMNS", "1000")
    with pytest.raises(SystemExit) as stopped:
        read_settings(["--help"], {})
    assert stopped.value.code == 0
    shown = capsys.readouterr().out
    for key, field in Settings.model_fields.items():
        described = f"{field.description} (default {default_shown(key)}; env {ENV_PREFIX}{key.upper()})"
        assert flag(key) in shown
        assert described in shown
    assert "--exact true|false" in shown
    assert "--prefix-cache true|false" in shown
    assert "(default True" not in shown


@pytest.mark.parametrize(
    ("args", "text"),
    [
        (["--exact", "true"], "--exact True: is not a setting of engine vllm: vLLM has no exact mode"),
        (["--runner", "torch"], "--runner torch: is not a setting of engine vllm"),
        (["--engine-args", '{"max_num_seqs": 3}'], "--engine-args[max_num_seqs]: is set by --max-running"),
        (["--engine-args", "{x"], "--engine-args {x: must be a JSON object"),
        (["--engine-args", '{"nnodes": 2}'], "--engine-args[nnodes]: is set by --nodes"),
        (["--nodes", "2"], "--nodes 2: must divide --tensor-parallel * --pipeline-parallel, which is 1"),
        (["--nodes", "2", "--tensor-parallel", "2"], "--leader: must be set, since nodes is above 1"),
        (["--node-rank", "1"], "--node-rank 1: must be below nodes, which is 1"),
        (
            [
                *("--nodes", "2", "--pipeline-parallel", "2", "--leader", "a"),
                *("--engine-args", '{"distributed_executor_backend": "ray"}'),
            ],
            "--engine-args[distributed_executor_backend]: must be mp with nodes above 1, and is ray",
        ),
    ],
)
def test_settings_that_vllm_does_not_have(args: list[str], text: str) -> None:
    assert str(error_of(["--engine", "vllm", *args])).startswith(text)


def test_settings_of_vllm(tmp_path: Path) -> None:
    settings = read_settings(["--engine", "vllm", "--engine-args", '{"quantization": "fp8"}'], {})
    assert settings.engine_args == {"quantization": "fp8"}
    path = tmp_path / "settings.yaml"
    path.write_text("engine: vllm\nengine_args: {quantization: fp8}\n")
    assert read_settings(["--config", str(path)], {}) == settings
    assert settings.strategy == "trie"
    assert read_settings(["--engine", "vllm", "--strategy", "hybrid"], {}).strategy == "hybrid"
    assert "set --engine vllm" in str(error_of(["--engine-args", '{"quantization": "fp8"}']))
    for name in ("--pipeline-parallel", "--nodes"):
        assert str(error_of([name, "2"])) == f"{name} 2: must be 1 with engine draftwood; set --engine vllm"


def test_the_engine_can_do_what_its_requests_may_ask_for() -> None:
    assert (Abilities().max_logprobs, [*Abilities().formats]) == (MAX_LOGPROBS, [one.value for one in GrammarKind])


def check_settings(args: list[str], environ: dict[str, str]) -> None:
    """They are settings, or the reason why not is a line that can be shown for each of them."""
    problem = "none"
    try:
        assert isinstance(read_settings(args, environ), Settings)
    except SettingsError as error:
        problem = str(error)
    assert all(line.strip() and line.isprintable() for line in problem.split("\n"))


@pytest.mark.parametrize("name", sorted(Settings.model_fields))
def test_a_value_that_is_no_text_is_a_setting_or_one_error(name: str) -> None:
    """As Python reads a variable with a byte that is not UTF-8."""
    check_settings([], {ENV_PREFIX + name.upper(): "a\udcff"})


@given(st.dictionaries(st.sampled_from(sorted(Settings.model_fields)), st.text(max_size=9) | st.integers().map(str)))
def test_any_variables_are_settings_or_one_error(values: dict[str, str]) -> None:
    check_settings([], {ENV_PREFIX + name.upper(): value for name, value in values.items()})


@given(st.binary(max_size=20) | st.dictionaries(st.sampled_from(sorted(Settings.model_fields)), ANYTHING))
def test_any_file_is_settings_or_one_error(tmp_path_factory: pytest.TempPathFactory, content: object) -> None:
    path = tmp_path_factory.getbasetemp() / "any.yaml"
    path.write_bytes(content if isinstance(content, bytes) else json.dumps(content).encode())
    check_settings(["--config", str(path)], {})
