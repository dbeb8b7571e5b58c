"""How much less a policy update computes when samples share their beginnings in a row (tree) than when each stands in
a padded line.

    python tests/bench/bench_update.py [--model smollm2-135m] [--questions 4] [--group 8] [--threads N] [--repeats 1]

Same model, samples, optimiser, threads and process; each layout is warmed up, then they take turns. The samples are
like those of recipes/mars-embedded.yaml: two roles, 8 rollouts a question, 240 to 290 tokens each, most of them a stem
with worked examples that all share, 10 to 30 of them sampled. Prints a table and one line of JSON.
"""

from __future__ import annotations

import argparse
import json
import random
import time
from dataclasses import dataclass

import torch

from agentrl.config.schema import AlgorithmConfig, ModelConfig, OptimConfig
from agentrl.models import resolve
from agentrl.types import CreditedSample, MaskReason, Sample, Score, ScoredSample, Span
from agentrl.update.batch import Layout
from agentrl.update.policy import Policy
from agentrl.update.step import update_policy

LAYOUTS: tuple[Layout, ...] = ("tree", "padded")


@dataclass(frozen=True, slots=True)
class Role:
    """Tokens of a role's samples: shared stem, question, sampled call, observation, sampled answer."""

    name: str
    stem: int
    question: int
    call: int
    observation: int
    answer: int


ROLES = (Role("system2", 200, 14, 13, 20, 9), Role("system1", 230, 45, 10, 0, 0))


def workload(vocab: int, questions: int, group: int, roles: tuple[Role, ...] = ROLES) -> list[CreditedSample]:
    """Samples of random ids. Of the rollouts of a question half make the same call, as those of a trained policy do."""
    rng = random.Random(0)

    def ids(n: int) -> list[int]:
        return [rng.randrange(3, vocab) for _ in range(n)]

    out = []
    for role in roles:
        stem = ids(role.stem)
        for question in range(questions):
            start = stem + ids(role.question)
            calls = [ids(role.call) for _ in range(4)]
            for g in range(group):
                whole = start + calls[min(rng.randrange(6), 3)]
                spans = [(len(start), len(whole))]
                if role.answer:
                    whole = whole + ids(role.observation)
                    spans.append((len(whole), len(whole) + role.answer))
                    whole = whole + ids(role.answer)
                name = f"{role.name}-{question}-{g}"
                out.append(
                    _credited(name, role.name, whole, spans, rng.choice((-0.5, 0.5, 1.2)), 1 / questions / group)
                )
    return out


def _credited(
    name: str, part: str, ids: list[int], spans: list[tuple[int, int]], advantage: float, weight: float
) -> CreditedSample:
    reasons: list[MaskReason | None] = [MaskReason.PROMPT] * len(ids)
    for start, stop in spans:
        reasons[start:stop] = [None] * (stop - start)
    sample = Sample(
        id=name,
        trajectory_id=name,
        group=name,
        agent=part,
        part=part,
        policy="policy",
        policy_version=0,
        ids=tuple(ids),
        reasons=tuple(reasons),
        behaviour=(0.0,) * len(ids),
        constrained=(False,) * len(ids),
        spans=tuple(Span(a, b, 0, 0.7) for a, b in spans),
        score=Score(1.0),
    )
    each = weight / sample.num_trained
    return CreditedSample(
        ScoredSample(sample),
        tuple(advantage if r is None else 0.0 for r in reasons),
        tuple(each if r is None else 0.0 for r in reasons),
    )


def measure(policy: Policy, credited: list[CreditedSample], repeats: int) -> list[dict[str, float | str]]:
    """Per layout: tokens computed, and the best seconds (wall and CPU) of a whole update."""
    best: dict[str, dict[str, float | str]] = {}
    for turn in range(repeats + 1):
        for layout in LAYOUTS:
            policy.scorer.layout = layout
            wall, cpu = time.perf_counter(), time.process_time()
            metrics = update_policy(policy, credited, AlgorithmConfig()).metrics
            wall, cpu = time.perf_counter() - wall, time.process_time() - cpu
            row = best.setdefault(layout, {"layout": layout, "wall_s": float("inf"), "cpu_s": float("inf")})
            row["tokens_computed"] = float(metrics["tokens/computed"] or 0)
            row["grad_norm"] = float(metrics["grad_norm"] or 0)
            if turn:
                row["wall_s"], row["cpu_s"] = min(float(row["wall_s"]), wall), min(float(row["cpu_s"]), cpu)
    rows = [best[layout] for layout in LAYOUTS]
    padded = best["padded"]
    for row in rows:
        row["tokens_ratio"] = float(padded["tokens_computed"]) / float(row["tokens_computed"])
        row["wall_ratio"] = float(padded["wall_s"]) / float(row["wall_s"])
    return rows


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--model", default="smollm2-135m")
    parser.add_argument("--dtype", default="bfloat16", choices=["float32", "bfloat16"])
    parser.add_argument("--questions", type=int, default=4)
    parser.add_argument("--group", type=int, default=8)
    parser.add_argument("--capacity", type=int, default=1024)
    parser.add_argument("--threads", type=int, default=torch.get_num_threads())
    parser.add_argument("--repeats", type=int, default=1)
    args = parser.parse_args()
    torch.set_num_threads(args.threads)
    policy = Policy(
        "policy",
        resolve(args.model),
        ModelConfig(name=args.model, dtype=args.dtype),
        OptimConfig(lr=0.0, max_tokens_per_row=args.capacity),
        total_steps=1,
        train_under_grammar=False,
    )
    credited = workload(policy.scorer.head.weight_VD.shape[0], args.questions, args.group)
    rows = measure(policy, credited, args.repeats)
    tokens = sum(len(c.sample.ids) for c in credited)
    trained = sum(c.sample.num_trained for c in credited)
    print(f"{args.model} {args.dtype}: {len(credited)} samples, {tokens} tokens, {trained} trained")
    print(f"{'layout':8} {'computed':>9} {'wall s':>8} {'cpu s':>8} {'fewer tokens':>13} {'faster':>7}")
    for r in rows:
        print(
            f"{r['layout']:8} {r['tokens_computed']:9.0f} {r['wall_s']:8.2f} {r['cpu_s']:8.2f} "
            f"{r['tokens_ratio']:12.1f}x {r['wall_ratio']:6.1f}x"
        )
    print(json.dumps({**vars(args), "samples": len(credited), "tokens": tokens, "trained": trained, "rows": rows}))


if __name__ == "__main__":
    main()
