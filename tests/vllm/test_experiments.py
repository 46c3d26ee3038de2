"""One experiment on a fleet of both kinds of engines, and a tenants file: `make test-vllm`."""

from __future__ import annotations

from pathlib import Path

import pytest

from draftwood_benchmarks.harness.servers import running_server
from draftwood_client import AdminClient, Client, DraftConfig, Experiment, ExperimentArm
from draftwood_tenants.experiments.assignment import Split
from tests.memory.servers import Valkey, wait_for
from tests.vllm.engine import request, running_engine

pytestmark = [pytest.mark.vllm, pytest.mark.timeout(900)]
PROMPT = [1, *range(200, 240)]
ARMS = [ExperimentArm(id=name, drafting=DraftConfig(strategy=of)) for name, of in (("off", "none"), ("trie", "trie"))]
SESSIONS = [f"session {number}" for number in range(24)]


def test_a_report_shows_the_requests_of_vllm_and_of_our_server() -> None:
    with (
        Valkey() as store,
        running_server("--store", store.url, "--dtype", "float32") as target,
        AdminClient(target) as admin,
        Client(target, tenant="acme") as client,
    ):
        admin.experiments.create("x", Experiment(arms=ARMS, unit="EXPERIMENT_UNIT_SESSION", tenants=("acme",)))
        split = Split(bytes.fromhex(admin.experiments.start("x").salt), ("off", "trie"), (1.0, 1.0))
        assigned = [split.assign("acme", session) for session in SESSIONS]
        expected = ["" if one is None else split.arms[one.arm] for one in assigned]
        arms = [client.generate(PROMPT, max_tokens=24, ignore_eos=True, session=one).arm for one in SESSIONS]
        assert arms == expected
        with running_engine(DRAFTWOOD_STORE=store.url) as engine:
            of_acme = {"draftwood_tenant": "acme"}
            asked = [
                request(str(at), PROMPT, 2 * at, 24, draftwood_session=session, **of_acme)
                for at, session in enumerate(SESSIONS)
            ]
            chooses = request("chooses", PROMPT, 9, 24, draftwood_session=SESSIONS[0], draftwood_learn=0, **of_acme)
            chooses["params"]["extra_args"]["draftwood_max_nodes"] = 8
            run = engine.run(*asked, chooses, request("no session", PROMPT, 9, 24, **of_acme))
            engine.state()
            drafted = {arm for at, arm in enumerate(expected) if run["drafted"].get(str(at))}
            assert drafted == {"trie"}
            assert len({tuple(tokens[0]) for name, tokens in run["outputs"].items() if name.isdecimal()}) == 1
            counts = [2 * expected.count("off"), 2 * expected.count("trie")]
            wait_for(lambda: [row.requests for row in admin.experiments.report("x").arms] == counts, f"{counts}", 10.0)
        report = admin.experiments.report("x")
        assert (report.servers, [row.errors for row in report.arms]) == (2, [0, 0])
        assert report.arms[0].metrics["tokens_per_step"] == pytest.approx(1.0)
        assert report.arms[1].metrics["tokens_per_step"] > 1.3
        assert all(row.metrics["decode_seconds_per_token"] > 0 for row in report.arms)
        assert not report.sample_ratio_mismatch


def test_a_tenants_file_decides_in_vllm(tmp_path: Path) -> None:
    path = tmp_path / "tenants.yaml"
    path.write_text(
        "tenants:\n- {name: tenants/off, drafting: {strategy: none}, allowDraftOverride: false}\n"
        "- {name: tenants/secret, learning: {scope: LEARNING_SCOPE_NOTHING}}\n"
    )
    with running_engine(DRAFTWOOD_TENANTS_FILE=str(path)) as engine:
        for number in range(2):
            for tenant in ("off", "secret", "plain"):
                extra = {"draftwood_tenant": tenant, "draftwood_strategy": "trie"}
                run = engine.run(request(f"{tenant} {number}", PROMPT, 0, 40, **extra))
                engine.state()
                if number and tenant == "plain":
                    assert run["drafted"]["plain 1"] > 15
                elif tenant == "off":
                    assert not run["drafted"].get(f"off {number}")
        assert engine.state()["learned"] == 2  # of the tenant that nothing says anything about
