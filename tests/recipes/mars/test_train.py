"""Two real steps on a tiny model: one weight set for both roles, metrics, frozen roles (spec R1, C2, E4; FIELD 72)."""

from __future__ import annotations

import hashlib
import json
import sys
from pathlib import Path
from types import ModuleType

import pytest
import torch

from agentrl.chat.tool_calls import call_grammar
from agentrl.errors import RunFailedError
from agentrl.protocols import ToolItem, ToolResult
from agentrl.recipes import session
from agentrl.recipes.mars.config import MarsRecipe
from agentrl.recipes.mars.train import train
from agentrl.recipes.mars.workflow import MarsWorkflow
from agentrl.recipes.registry import Silence, VerbOptions
from agentrl.types import Score

PLUGINS = "mars_train_test_plugins"
METRICS = (
    *("step", "policy_version", "reward/mean", "reward/std", "reward/missing", "groups/zero_variance"),
    *("groups/skipped", "rollouts/ok", "rollouts/failed", "tokens/generated", "tokens/trained", "tokens/computed"),
    *("pack/fill", "loss", "grad_norm", "clip_fraction", "kl/ref", "kl/mismatch"),
    *("time/total", "time/rollout", "time/grade", "time/update", "time/sync"),
    *("mars/zero_variance_s1", "mars/s1_samples", "mars/s2_samples"),
    *("mars/s1_over_g", "mars/s1_over_g_min", "mars/s1_over_g_max"),
    *("mars/clip_fraction_s1", "mars/clip_fraction_s2", "mars/loss_s1", "mars/loss_s2"),
    *("mars/grad_norm_s1", "mars/grad_norm_s2", "mars/grad_cosine"),
    *("mars/bin_fill", "mars/truncated_tokens", "mars/merge_cap_hits", "mars/bins_per_call"),
    *("mars/bins_per_trajectory", "mars/tools_per_question", "mars/tool_calls", "mars/malformed_calls"),
    *("mars/response_tokens_s1", "mars/response_tokens_s2"),
    *(f"tokens/masked/{r}" for r in ("forced", "constrained", "reward_missing", "truncated", "frozen", "failed")),
)


class Parity:
    """Rewards half of the rollouts, whatever they said; with `lost`, none."""

    lost = False

    async def score(self, task, trajectory):
        return Score(None, "lost") if self.lost else Score(float(trajectory.g % 2))


class Lost(Parity):
    lost = True


class Notes(Silence):
    def __init__(self):
        self.notes: list[str] = []

    def note(self, text: str) -> None:
        self.notes.append(text)


@pytest.fixture
def plugins(lab, monkeypatch) -> str:
    module = ModuleType(PLUGINS)
    pages = (ToolItem("a", "the river is in the north"), ToolItem("b", "page " * 20))
    module.search = lambda: lab.tool(lambda _: ToolResult(pages))
    module.parity, module.lost = Parity, Lost
    monkeypatch.setitem(sys.modules, PLUGINS, module)
    return PLUGINS


@pytest.fixture
def run(tiny, plugins, monkeypatch, tmp_path):
    """Train on tiny models and return (the run's folder, its metrics by step, notes)."""
    monkeypatch.setenv("AGENTRL_HOME", str(tiny.parent.parent))

    def forced(self, tools):
        """Random weights would answer at once: here every turn but the last one calls."""
        return call_grammar("tag", self.schemas if tools else {}, not tools, True, 3, 3, 3)

    monkeypatch.setattr(MarsWorkflow, "grammar", forced)

    def go(reward: str = "parity", **sections):
        tasks = tmp_path / "tasks.jsonl"
        lines = [{"id": f"q{i}", "question": f"Where is {i}?", "answer": "north"} for i in range(4)]
        tasks.write_text("".join(json.dumps(line) + "\n" for line in lines))
        system1 = {"prompt": "Distil.", "max_prompt_tokens": 200, "max_response_tokens": 6}
        system2 = {"prompt": "Search.", "max_prompt_tokens": 200, "max_response_tokens": 200, "max_turns": 2}
        base = {
            "method": "mars",
            "model": {"name": "tiny-llama", "dtype": "float32"},
            "engine": {"kind": "hf", "deterministic": True},
            "data": {"path": str(tasks)},
            "tools": {"custom": {"search": f"{plugins}:search"}},
            "reward": f"{plugins}:{reward}",
            "mars": {
                **{"call_syntax": "tag", "call_grammar": True, "max_query_chars": 3, "max_purpose_chars": 3},
                **{"max_answer_chars": 3, "answer_reserve": 20, "answer_now": ""},
            },
            "optim": {"lr": 1e-3, "part_stats_every": 1},
            "rollout": {"questions_per_step": 2, "group_size": 4},
            "launch": {"threads": 1},
            "run": {"steps": 2, "dir": str(tmp_path), "name": "run", "save_every": 1},
        }
        system2["sampling"], system1["sampling"] = {"max_tokens": 40}, {"max_tokens": 6}
        agents = {"system2": system2, "system1": system1}
        for name, more in sections.pop("agents", {}).items():
            agents[name] |= more
        merged = {**base, "agents": agents}
        for key, value in sections.items():
            known = isinstance(value, dict) and isinstance(merged.get(key), dict)
            merged[key] = {**merged[key], **value} if known else value
        notes = go.notes = Notes()
        result = train(MarsRecipe.model_validate(merged), VerbOptions(progress=notes))
        folder = Path(result["run"])
        metrics = [json.loads(line) for line in (folder / "metrics.jsonl").read_text().splitlines()]
        return folder, metrics, notes.notes

    return go


def fingerprint(model: torch.nn.Module) -> str:
    digest = hashlib.blake2b()
    for name, value in sorted(model.state_dict().items()):
        digest.update(name.encode() + value.numpy().tobytes())
    return digest.hexdigest()


def test_r1_both_roles_are_sampled_from_one_weight_set_at_every_step(run, monkeypatch):
    seen: dict[tuple[int, int], set[str]] = {}
    start = session.start_engine

    async def watched(*args, **kwargs):
        engine = await start(*args, **kwargs)
        generate = engine._generate

        def look(name, rows):
            for key in {(row.request.key.step, row.request.key.agent) for row in rows}:
                seen.setdefault(key, set()).add(fingerprint(engine._policies[name].model))
            return generate(name, rows)

        engine._generate = look
        return engine

    monkeypatch.setattr(session, "start_engine", watched)
    _, metrics, _ = run()
    assert set(seen) == {(1, 0), (1, 1), (2, 0), (2, 1)}
    assert all(len(prints) == 1 for prints in seen.values())
    assert seen[1, 0] == seen[1, 1]
    assert seen[2, 0] == seen[2, 1]
    assert seen[1, 0] != seen[2, 0]
    assert [m["policy_version"] for m in metrics] == [1, 2]


def test_c2_every_step_logs_the_metrics_of_the_method(run):
    folder, metrics, notes = run()
    assert notes == []
    for one in metrics:
        assert [key for key in METRICS if key not in one] == []
        assert one["reward/mean"] == 0.5
        assert one["mars/s2_samples"] == 8
        assert one["mars/s1_samples"] == one["mars/bins_per_trajectory"] * 8 == 16
        assert one["mars/s1_over_g"] == 2.0
        assert one["mars/grad_norm_s1"] > 0
        assert one["mars/grad_norm_s2"] > 0
        assert -1 <= one["mars/grad_cosine"] <= 1
        assert one["loss"] == pytest.approx(one["mars/loss_s1"] + one["mars/loss_s2"], abs=1e-6)
        assert one["mars/bins_per_call"] >= 1
        assert 0 < one["mars/bin_fill"] <= 1
        assert 0 < one["pack/fill"] <= 1
        assert one["tokens/masked/forced"] > 0
    lines = [json.loads(x) for x in (folder / "trajectories" / "step_000001.jsonl").read_text().splitlines()]
    masked = sum(m is False for t in lines for turn in t["turns"] for m in turn["loss_mask"])
    assert masked == sum(v for k, v in metrics[0].items() if k.startswith("tokens/masked/"))
    for one in metrics:  # every sampled token is in one of three: trained, in the mask without effect, masked
        masked = sum(v for k, v in one.items() if k.startswith("tokens/masked/"))
        assert one["tokens/no_advantage"] > 0  # of 16 System 1 samples, 8 copies are drawn
        assert one["tokens/trained"] + one["tokens/no_advantage"] + masked == one["tokens/generated"]


def test_e4_separate_checkpoints_with_one_role_frozen_train_the_other_alone(run):
    policies = {
        "reader": {"name": "tiny-llama-s3", "dtype": "float32"},
        "thinker": {"name": "tiny-llama", "dtype": "float32", "mode": "frozen"},
    }
    agents = {"system2": {"policy": "thinker"}, "system1": {"policy": "reader"}}
    folder, metrics, _ = run(model=None, policies=policies, agents=agents)
    saved = sorted(p.name for p in (folder / "checkpoints" / "step_000002" / "policies").iterdir())
    assert saved == ["reader"]
    for one in metrics:
        assert one["mars/grad_norm_s1"] > 0
        assert one["mars/loss_s2"] == 0.0
        assert one["tokens/masked/frozen"] > 0
        assert one["tokens/trained"] > 0
    assert metrics[-1]["policy_version"] == 2


def test_e4_two_trained_checkpoints_each_learn_from_their_own_role(run):
    policies = {n: {"name": f"tiny-llama-s{i}", "dtype": "float32"} for i, n in enumerate(("reader", "thinker"))}
    agents = {"system2": {"policy": "thinker"}, "system1": {"policy": "reader"}}
    folder, metrics, _ = run(model=None, policies=policies, agents=agents)
    assert sorted(p.name for p in (folder / "checkpoints" / "step_000002" / "policies").iterdir()) == [
        "reader",
        "thinker",
    ]
    assert metrics[0]["mars/grad_norm_s1"] > 0
    assert metrics[0]["mars/grad_norm_s2"] > 0
    assert "mars/grad_cosine" not in metrics[0]


def test_f72_a_step_without_trained_tokens_is_reported_with_its_reasons_and_a_reward_that_grades_nothing_ends_it(
    run, tmp_path
):
    with pytest.raises(RunFailedError, match="reward: every reward of step 1 is missing: lost"):
        run("lost", run={"steps": 2})
    notes = run.notes.notes
    metrics = [json.loads(line) for line in (tmp_path / "run" / "metrics.jsonl").read_text().splitlines()]
    assert len(metrics) == 1
    assert len((tmp_path / "run" / "trajectories" / "step_000001.jsonl").read_text().splitlines()) == 8
    generated = metrics[0]["tokens/generated"]
    assert metrics[0]["tokens/trained"] == 0
    assert metrics[0]["tokens/masked/reward_missing"] == generated
    assert metrics[0]["policy_version"] == 0
    assert f"step 1 trained nothing: tokens: reward_missing {generated}; rewards differ in 0 of 2 questions" in notes
    assert any("100% of the rewards are missing" in note for note in notes)
