"""How much memory training the links adds, against full fine-tuning and LoRA of the same ring through the same loss.

    python tests/bench/bench_link_memory.py [--batch 4] [--latent-steps 16] [--rounds 3] [--threads 2]

Three agents share the frozen smollm2-135m in bf16, and each case runs one optimiser step in a process of its own, with
the optimiser's moments already there (a first step on zero gradients makes them). The loss and its graph are the same:
cross-entropy of the answer after all rounds, with the gradient through every latent step, checkpointed per agent
rollout. What is trained differs: `links` the outer links (fp32, AdamW); `full` every weight of the backbone (bf16
compute, fp32 master weights and gradients, AdamW); `lora` adapters of rank 16 on every linear layer of the backbone
(peft, AdamW). Added memory is the peak resident size above that of the loaded models.

Goal: links at no more than 0.40 x full fine-tuning. Exits 1 when it is missed.
"""

from __future__ import annotations

import argparse
import json
import os
import subprocess
import sys
import time
from collections.abc import Callable
from pathlib import Path

GOAL = 0.40
CASES = ("links", "full", "lora")
ANSWER = " The answer is the seventh word of the list, which is river."
TEXT = "seven apples lie under the old bridge while nine boats wait for the river to rise again this spring"


def added_memory(case: str, batch: int, steps: int, rounds: int) -> dict[str, float]:
    """One optimiser step of one case: MiB added at the peak, trained parameters, seconds."""
    from agentrl.recipes.recursivemas.losses import outer_loss
    from agentrl.recipes.recursivemas.recipe import RecursiveRecipe
    from agentrl.recipes.recursivemas.setup import load_system
    from agentrl.types import Task

    data = {
        "method": "recursivemas",
        "model": {"name": "smollm2-135m", "mode": "frozen"},
        "recursivemas": {"rounds": rounds, "latent_steps": steps, "allow_untrained": True, "match_norm": True},
    }
    recipe = RecursiveRecipe.model_validate_json(json.dumps(data), strict=True)
    loaded = load_system(recipe)
    system, config = loaded.system, recipe.recursivemas
    model = system.agents["solver"].backbone.model
    words = TEXT.split()
    tasks = [Task(str(i), " ".join(words[i:] + words[:i])) for i in range(batch)]
    format = system.agents["solver"].chat.format
    answers = [format.encode_trusted(ANSWER, continues=True)] * batch
    sum(float(p.float().sum()) for p in model.parameters())  # every page of the weights is resident
    base = _resident("VmRSS")
    Path("/proc/self/clear_refs").write_text("5")  # the peak begins here

    trained, optimizer_step = PREPARE[case](system, model)
    start = time.perf_counter()
    outer_loss(system, config, tasks, answers).loss.backward()
    optimizer_step()
    seconds = time.perf_counter() - start
    return {"added_mib": _resident("VmHWM") - base, "loaded_mib": base, "trained": trained, "step_s": seconds}


def _links(system, model) -> tuple[int, Callable[[], None]]:
    import torch

    from agentrl.config.schema import OptimConfig
    from agentrl.update.link_trainer import LinkTrainer

    links = {f"outer-{edge.name}": link for edge, link in system.outer.items()}
    trainer = LinkTrainer(links, OptimConfig(lr=1e-4), total_steps=2)
    for parameter in trainer.parameters.values():
        parameter.grad = torch.zeros_like(parameter)
    trainer.step()
    return sum(p.numel() for p in trainer.parameters.values()), lambda: _applied(trainer.step())


def _applied(stats) -> None:
    assert stats.applied
    assert stats.grad_norm > 0


def _full(system, model) -> tuple[int, Callable[[], None]]:
    import torch

    _through_every_rollout(system)
    model.requires_grad_(True)
    compute = list(model.parameters())
    masters = [p.detach().float() for p in compute]
    for master, parameter in zip(masters, compute, strict=True):
        master.grad = torch.zeros_like(master)
        parameter.register_post_accumulate_grad_hook(lambda p, m=master: _collect(p, m))
    optimizer = torch.optim.AdamW(masters, lr=1e-6)
    optimizer.step()

    def step() -> None:
        assert all(bool(m.grad.any()) for m in masters[1:])
        optimizer.step()
        with torch.no_grad():
            for master, parameter in zip(masters, compute, strict=True):
                parameter.copy_(master)
                master.grad.zero_()

    return sum(p.numel() for p in compute), step


def _collect(parameter, master) -> None:
    master.grad.add_(parameter.grad.float())
    parameter.grad = None


def _lora(system, model) -> tuple[int, Callable[[], None]]:
    import torch
    from peft import LoraConfig, get_peft_model

    _through_every_rollout(system)
    get_peft_model(model, LoraConfig(r=16, target_modules="all-linear", task_type="CAUSAL_LM"))
    trained = [p for p in model.parameters() if p.requires_grad]
    optimizer = torch.optim.AdamW(trained, lr=1e-4)
    for parameter in trained:
        parameter.grad = torch.zeros_like(parameter)
    optimizer.step()
    optimizer.zero_grad()

    def step() -> None:
        assert any(bool(p.grad.any()) for p in trained)
        optimizer.step()
        optimizer.zero_grad()

    return sum(p.numel() for p in trained), step


def _through_every_rollout(system) -> None:
    """The first agent's rollouts hold nothing trainable but its backbone: a gradient of its inner link keeps them in
    the graph."""
    for agent in system.agents.values():
        agent.inner.requires_grad_(True)


PREPARE = {"links": _links, "full": _full, "lora": _lora}


def _resident(field: str) -> float:
    """MiB of this process now (VmRSS) or at its peak (VmHWM)."""
    lines = Path("/proc/self/status").read_text().splitlines()
    return next(int(line.split()[1]) / 1024 for line in lines if line.startswith(f"{field}:"))


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--batch", type=int, default=4)
    parser.add_argument("--latent-steps", type=int, default=16)
    parser.add_argument("--rounds", type=int, default=3)
    parser.add_argument("--threads", type=int, default=2)
    parser.add_argument("--case", choices=CASES)
    args = parser.parse_args()
    if args.case:
        import torch

        torch.set_num_threads(args.threads)
        torch.manual_seed(0)
        row = added_memory(args.case, args.batch, args.latent_steps, args.rounds)
        sys.stdout.write(json.dumps(row) + "\n")
        return 0
    environment = {**os.environ, "CUDA_VISIBLE_DEVICES": ""}
    rows = {}
    for case in CASES:
        command = [sys.executable, __file__, *sys.argv[1:], "--case", case]
        done = subprocess.run(command, capture_output=True, text=True, check=False, env=environment)
        if done.returncode:
            sys.stderr.write(done.stderr)
            return 1
        rows[case] = json.loads(done.stdout.splitlines()[-1])
    say = sys.stdout.write
    say(f"rounds {args.rounds}, latent steps {args.latent_steps}, batch {args.batch}, threads {args.threads}\n")
    say(f"{'case':<6} {'trained':>12} {'added MiB':>10} {'of full':>8} {'s/step':>7}\n")
    for case, row in rows.items():
        ratio = row["added_mib"] / rows["full"]["added_mib"]
        say(f"{case:<6} {row['trained']:>12,} {row['added_mib']:>10.0f} {ratio:>8.2f} {row['step_s']:>7.1f}\n")
    links, full, lora = (rows[case]["added_mib"] for case in CASES)
    say(f"links / full {links / full:.3f} (goal {GOAL}), links / lora {links / lora:.3f}\n")
    return 0 if links / full <= GOAL else 1


if __name__ == "__main__":
    sys.exit(main())
