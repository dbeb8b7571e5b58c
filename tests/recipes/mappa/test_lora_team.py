"""A team on LoRA adapters of one model, and MARS on one, through the command line."""

from __future__ import annotations

import hashlib
import json
import shutil
from pathlib import Path

import pytest

from agentrl.models.lora import read_config

NAMES = ("reader", "answerer", "speaker")
KEYS = ("name=tiny-llama", "dtype=float32", "mode=lora", "lora={rank: 4, alpha: 8}")
TEAM = (
    *(f"policies.{name}.{key}" for name in NAMES for key in KEYS),
    *(f"agents.{name}.max_prompt_tokens=900" for name in NAMES),
    *("engine.deterministic=true", "launch.threads=1", "optim.mini_batch=2", "optim.lr=0.01"),
    *("data.eval.limit=3", "rollout.questions_per_step=2", "run.save_every=1"),
)
MARS = (
    *("model.name=tiny-llama", "model.dtype=float32", "model.mode=lora", "engine.deterministic=true"),
    *("launch.threads=1", "rollout.questions_per_step=4", "rollout.group_size=6", "data.eval.limit=2"),
    *("reward=parity_reward:parity", "run.save_every=1", "optim.lr=0.01", "mars.call_grammar=false"),
    *("mars.max_query_chars=120", "mars.max_purpose_chars=160", "mars.max_answer_chars=120"),
)
RULES = """
def by_length(view):
    return float(len(view.action) % 2) * 10, "odd or even"


def only_reader(view):
    return (by_length(view)[0] if view.agent == "reader" else 5.0), "the other agents' are all the same"
"""


@pytest.fixture
def rules(folder: Path) -> Path:
    """`coach.rules` that tell apart what random weights say."""
    (folder / "lora_rules.py").write_text(RULES)
    return folder


def adapter(run: Path, policy: str, step: int | None = None) -> str:
    name = "latest" if step is None else f"step_{step:06d}"
    return hashlib.sha256(
        (run / f"checkpoints/{name}/policies/{policy}/adapter_model.safetensors").read_bytes()
    ).hexdigest()


def metrics(run: Path) -> list[dict]:
    return [json.loads(line) for line in (run / "metrics.jsonl").read_text().splitlines()]


def test_a_lora_team_trains_resumes_evaluates_and_begins_again_from_its_adapters(cli, rules):
    folder, team = rules, (*TEAM, "coach.rules=lora_rules:by_length")
    done = cli("mappa", "train", "smoke/mappa", "--steps", "3", "--name", "run", sets=team)
    assert done.code == 0, done
    run = folder / "runs/run"
    for row in metrics(run):
        assert row["kl/mismatch"] <= 1e-4
        assert row["grad_norm"] > 0
    assert metrics(run)[0]["kl/ref"] == 0.0
    assert metrics(run)[2]["kl/ref"] > 0.0
    assert len({adapter(run, name) for name in NAMES}) == 3
    summary = json.loads((run / "summary.json").read_text())
    # as after a kill in step 3
    shutil.copytree(run, folder / "runs/broken", symlinks=True)
    broken = folder / "runs/broken"
    shutil.rmtree(broken / "checkpoints/step_000003")
    (broken / "checkpoints/latest").unlink()
    (broken / "checkpoints/latest").symlink_to("step_000002")
    again = cli("mappa", "train", "smoke/mappa", "--steps", "3", "--name", "broken", "--resume", sets=team)
    assert again.code == 0, again
    assert [adapter(broken, name) for name in NAMES] == [adapter(run, name) for name in NAMES]

    done = cli("mappa", "eval", "smoke/mappa", "--checkpoint", "run", "--name", "held", "--json", sets=team)
    assert done.code == 0, done
    assert done.json["eval"]["score"] == summary["eval_after"]["score"]
    frozen = tuple(f"policies.{n}.{k}" for n in NAMES for k in ("mode=frozen", "lora=null"))
    done = cli("mappa", "eval", "smoke/mappa", "--checkpoint", "run", "--json", sets=(*team, *frozen))
    assert done.json["eval"]["score"] == summary["eval_after"]["score"]

    starts = tuple(f"policies.{name}.checkpoint=run" for name in NAMES)
    done = cli("mappa", "train", "smoke/mappa", "--steps", "2", "--name", "more", sets=(*team, *starts))
    assert done.code == 0, done
    assert metrics(folder / "runs/more")[0]["kl/ref"] == 0.0  # its reference is a frozen copy of the adapter
    assert metrics(folder / "runs/more")[0]["kl/mismatch"] <= 1e-4
    full = (*team, *starts, "policies.reader.mode=full", "policies.reader.lora=null")
    cli("mappa", "train", "smoke/mappa", sets=full).two_lines(2, "holds an adapter, but the mode", "--merge")
    other = (*team, *starts, "policies.reader.name=tiny-qwen3")
    cli("mappa", "train", "smoke/mappa", sets=other).two_lines(2, "adapts tiny-llama, but the recipe names tiny-qwen3")
    wide = (*team, *starts, "policies.reader.lora={rank: 8, alpha: 8}")
    cli("mappa", "train", "smoke/mappa", sets=wide).two_lines(
        2, "lora.rank is 8, but the adapter in", "set lora.rank to 4"
    )


@pytest.mark.slow
@pytest.mark.timeout(1800)  # a loaded machine takes minutes to start the engine
def test_a_lora_team_trains_on_one_vllm_engine(cli, rules):
    pytest.importorskip("vllm", reason="vLLM is not installed")
    vllm = ("engine.kind=vllm", "engine.deterministic=false", "engine.kv_cache_gib=0.25", "launch.gpus=0")
    sets = (*TEAM, *vllm, "coach.rules=lora_rules:by_length")
    done = cli("mappa", "train", "smoke/mappa", "--steps", "3", "--name", "run", sets=sets)
    assert done.code == 0, done
    rows = metrics(rules / "runs/run")
    assert all(row["kl/mismatch"] <= 1e-4 and row["grad_norm"] > 0 for row in rows)
    assert rows[0]["kl/ref"] == 0.0
    assert rows[2]["kl/ref"] > 0.0
    assert len({adapter(rules / "runs/run", name) for name in NAMES}) == 3


def test_a_rate_of_zero_and_an_agent_that_learns_nothing_keep_every_bit(cli, rules):
    folder = rules
    none = ("mappa.kl_coef=0", "coach.rules=lora_rules:only_reader")
    done = cli("mappa", "train", "smoke/mappa", "--steps", "2", "--name", "one", sets=(*TEAM, *none))
    assert done.code == 0, done
    run = folder / "runs/one"
    assert adapter(run, "reader", 1) != adapter(run, "reader", 2)
    for name in ("answerer", "speaker"):
        assert adapter(run, name, 1) == adapter(run, name, 2)
    still = (*TEAM, "optim.lr=0", "coach.rules=lora_rules:only_reader")
    assert cli("mappa", "train", "smoke/mappa", "--steps", "2", "--name", "zero", sets=still).code == 0
    for name in NAMES:
        assert adapter(folder / "runs/zero", name, 1) == adapter(folder / "runs/zero", name, 2)


def test_mars_trains_one_adapter_in_both_roles(cli, folder):
    done = cli("mars", "train", "mars-embedded", "--smoke", "--name", "run", sets=MARS)
    assert done.code == 0, done
    run = folder / "runs/run"
    assert [m["policy_version"] for m in metrics(run)] == [1, 2]
    assert all(m["kl/mismatch"] <= 1e-4 for m in metrics(run))
    assert adapter(run, "policy", 1) != adapter(run, "policy", 2)
    lora, base = read_config(run / "checkpoints/latest/policies/policy")
    assert (lora.rank, lora.alpha, base) == (16, 32, "tiny-llama")
    assert cli("mars", "eval", "mars-embedded", "--smoke", "--checkpoint", "run", sets=MARS).code == 0


@pytest.mark.parametrize(
    ("sets", "cause"),
    [
        (("model.lora={rank: 4}",), "lora: has no effect with mode: full"),
        (("model.mode=frozen", "model.lora={rank: 4}"), "lora: has no effect with mode: frozen"),
        (("model.mode=lora", "model.lora={rank: 0}"), "rank"),
        (("model.mode=lora", "model.lora={dropout: 0.1}"), "dropout"),
        (("model.mode=lora", "model.lora={target_modules: []}"), "target_modules"),
        (("model.mode=lora", "model.lora={target_modules: [lm_head]}"), "'lm_head' is no linear layer of tiny-llama"),
    ],
)
def test_an_adapter_without_effect_or_of_no_size_is_refused(cli, sets, cause):
    done = cli("check", "mars-embedded", sets=("model.name=tiny-llama", *sets))
    assert done.code == 2
    assert cause in done.err


def test_an_adapter_is_exported_as_it_is_or_merged_into_a_whole_model(cli, folder):
    import peft
    import torch
    from safetensors.torch import load_file
    from transformers import AutoModelForCausalLM

    assert cli("mars", "train", "mars-embedded", "--smoke", "--name", "run", sets=MARS).code == 0
    assert cli("export", "run", "adapter").code == 0
    assert cli("export", "run", "whole", "--merge").code == 0
    assert cli("export", "run", "half", "--merge", "--dtype", "bfloat16").code == 0
    assert {path.name for path in (folder / "adapter").iterdir()} == {
        "adapter_config.json",
        "adapter_model.safetensors",
    }
    base = Path(json.loads((folder / "adapter/adapter_config.json").read_text())["base_model_name_or_path"])
    ids = torch.arange(40, 64)[None]
    with torch.inference_mode():
        bare = AutoModelForCausalLM.from_pretrained(base, dtype=torch.float32)
        plain = bare(ids).logits
        adapted = peft.PeftModel.from_pretrained(bare, str(folder / "adapter"))(ids).logits
        whole = AutoModelForCausalLM.from_pretrained(folder / "whole", dtype=torch.float32)(ids).logits
    assert torch.allclose(adapted, whole, atol=1e-5)
    assert not torch.allclose(plain, whole, atol=1e-3)
    assert {t.dtype for t in load_file(folder / "half/model.safetensors").values()} == {torch.bfloat16}
    assert json.loads((folder / "half/config.json").read_text())["dtype"] == "bfloat16"
    for name in ("config.json", "tokenizer.json", "model.safetensors"):
        assert (folder / "whole" / name).stat().st_mode & 0o777 == 0o644
    swap = ("model.name=whole", "model.mode=full")
    done = cli("mars", "eval", "mars-embedded", "--smoke", "--json", sets=(*MARS, *swap))
    own = cli("mars", "eval", "mars-embedded", "--smoke", "--checkpoint", "run", "--json", sets=MARS)
    assert done.json["eval"] == own.json["eval"]
    cli("export", "run", "adapter").two_lines(2, "adapter holds files")
    assert cli("mars", "train", "mars-embedded", "--smoke", "--name", "full", sets=(*MARS, "model.mode=full")).code == 0
    cli("export", "full", "new", "--merge").two_lines(2, "--merge: this policy is whole weights", "leave --merge out")
    assert not (folder / "new").exists()


@pytest.mark.slow
def test_adapters_train_on_two_ranks_as_on_one(cli, rules):
    from safetensors.torch import load_file

    rounding = ("optim.lr=0.00001", "optim.mini_batch=4", "rollout.questions_per_step=4", "mappa.kl_coef=0.1")
    for name, ranks in (("one", 1), ("two", 2)):
        sets = (*TEAM, *rounding, "coach.rules=lora_rules:by_length", f"launch.ranks={ranks}")
        done = cli("mappa", "train", "smoke/mappa", "--steps", "2", "--name", name, sets=sets)
        assert done.code == 0, done
    for policy in NAMES:
        place = f"checkpoints/latest/policies/{policy}/adapter_model.safetensors"
        one, two = (load_file(rules / "runs" / name / place) for name in ("one", "two"))
        assert max(float((one[n] - two[n]).abs().max()) for n in one) < 1e-6
        assert max(float(t.abs().max()) for n, t in one.items() if "lora_B" in n) > 1e-5
