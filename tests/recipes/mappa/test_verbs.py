"""train, eval, infer, rollout and check of MAPPA, through the command line."""

from __future__ import annotations

import json
import re

TINY = (
    *(f"policies.{name}.name=tiny-llama" for name in ("reader", "answerer", "speaker")),
    *(f"policies.{name}.dtype=float32" for name in ("reader", "answerer", "speaker")),
    *("engine.deterministic=true", "launch.threads=1", "optim.mini_batch=2"),
)


def test_the_smoke_recipe_trains_evaluates_answers_and_rolls_out(cli, folder):
    short = (*TINY, "data.eval.limit=3", "rollout.questions_per_step=2", "agents.reader.max_prompt_tokens=900")
    short = (*short, "agents.answerer.max_prompt_tokens=900", "agents.speaker.max_prompt_tokens=900")
    done = cli("mappa", "train", "smoke/mappa", "--steps", "2", "--name", "run", sets=short)
    assert done.code == 0, done
    before = r"\nheld-out before: \d\.\d{3} \((?:\d/3|n 3), 95% interval .*"
    assert re.search(before + r"\nheld-out after: .*\nrise: ", done.out)
    summary = json.loads((folder / "runs/run/summary.json").read_text())
    assert set(summary["policy_version"]) == {"reader", "answerer", "speaker"}
    metrics = [json.loads(line) for line in (folder / "runs/run/metrics.jsonl").read_text().splitlines()]
    assert "mappa/reader/coach_mean" in metrics[0]

    done = cli("mappa", "eval", "smoke/mappa", "--checkpoint", "run", "--name", "held", "--json", sets=short)
    assert done.code == 0, done
    assert done.json["eval"]["score"] == summary["eval_after"]["score"]

    done = cli("mappa", "infer", "smoke/mappa", "--question", "The fox eats soup.\nWhat does it eat?", sets=short)
    assert done.code == 0, done
    for agent in ("reader", "answerer", "speaker"):
        assert f"\n  {agent}: " in done.out

    done = cli("mappa", "rollout", "smoke/mappa", "--json", sets=short)
    assert done.code == 0, done
    assert done.json["rollouts"]["rollouts/ok"] == 4


def test_smoke_cuts_any_team_down_to_what_runs_offline(cli, folder):
    (folder / "mine.yaml").write_text(
        """\
method: mappa
policies: {big: {name: nobody/big}, partner: {name: nobody/small, mode: frozen}}
agents:
  solver: {policy: big, role: solves, tools: [python], max_turns: 2}
  critic: {policy: partner, role: criticises}
tools: {python: {}}
engine: {kind: vllm, gpu_memory_utilization: 0.5}
data: {path: train.csv, columns: {question: q}, eval: {path: held.csv}}
coach: {kind: endpoint, model: judge, base_url: "http://127.0.0.1:1/v1", ground_truth: [critic]}
reward: math
mappa: {eval_trials: 4}
launch: {gpus: 8}
run: {steps: 500, eval_temperature: 0.6, seed: 9}
"""
    )
    tiny = tuple(f"policies.{n}.{k}" for n in ("big", "partner") for k in ("name=tiny-llama", "dtype=float32"))
    done = cli("check", "mine.yaml", "--smoke")
    assert done.code == 0, done
    done = cli("mappa", "train", "mine.yaml", "--smoke", "--name", "mine", "--json", sets=(*tiny, "launch.threads=1"))
    assert done.code == 0, done
    assert done.json["policy_version"]["partner"] == 0


def test_check_names_a_rule_that_is_not_there_and_a_prompt_without_room(cli):
    cli("check", "smoke/mappa", sets=("coach.rules=nowhere:rule",)).two_lines(
        2, "coach.rules: 'nowhere:rule' is neither"
    )
    wrong = cli("check", "smoke/mappa", sets=("agents.reader.max_prompt_tokens=40",))
    wrong.two_lines(
        2, "agents.reader.max_prompt_tokens: 40, but prompt and examples alone take", "or shorten the prompt"
    )


def test_m16_check_shows_each_agents_context_and_what_is_trained_in_it(cli, folder):
    (folder / "team.yaml").write_text(
        """\
method: mappa
policies: {one: {name: tiny-llama}, two: {name: tiny-llama, mode: frozen}}
agents:
  solver: {policy: one, role: solves, tools: [python], max_turns: 2, max_prompt_tokens: 900, max_response_tokens: 900}
  critic: {policy: two, role: criticises, max_prompt_tokens: 900, max_response_tokens: 900}
tools: {python: {}}
engine: {kind: hf}
data: {path: invented-pages}
coach: {kind: rules, rules: evidence}
launch: {gpus: 0}
run: {steps: 1}
"""
    )
    done = cli("check", "team.yaml", "--show-sample")
    assert done.code == 0, done
    assert "solver on policy one" in done.out
    assert '[trained] <tool_call>{"name": "python", "arguments": {"code": "key words"}}</tool_call>' in done.out
    assert "The text of the second result." in done.out
    assert "[trained] What solver has to say." in done.out
    assert "From solver:" in done.out
    assert "[frozen] <answer>ANSWER</answer>" in done.out


def test_m22_a_machine_that_cannot_isolate_programs_ends_the_run_before_it_starts(cli, folder, monkeypatch):
    monkeypatch.setattr("agentrl.sandbox.sandbox.shutil.which", lambda name: None)
    sets = (*TINY, "tools.python={}", "agents.reader.tools=[python]", "agents.reader.max_prompt_tokens=900")
    cli("mappa", "infer", "smoke/mappa", "--question", "What?", sets=sets).two_lines(3, "bubblewrap", "apt-get install")
