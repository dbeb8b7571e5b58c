"""How much faster a cached latent rollout is than the published one, which re-runs the prefix at each step.

    python tests/bench/bench_latent.py [--threads N]

Same model (smollm2-135m, bf16), link, prompts, threads and process; each form is warmed up first. Goals: 10 x at batch
8 and 4 x at batch 1, at a 300-token prompt and 48 steps. Exits 1 when one is missed.
"""

from __future__ import annotations

import argparse
import json
import sys
import time

import torch

from agentrl.models import load_model, resolve
from agentrl.rollout.latent import Backbone, latent_rollout, latent_rollout_without_cache
from agentrl.types import Prompt
from agentrl.update.links import InnerLink, mean_token_norm

GOALS = {8: 10.0, 1: 4.0}


def measure(backbone: Backbone, link: InnerLink, batch: int, length: int, steps: int) -> dict[str, float]:
    """Seconds of both forms (the cached one: best of 3), their ratio, and how far apart their states point."""
    generator = torch.Generator().manual_seed(0)
    prompts = [Prompt.of(torch.randint(49_000, (length,), generator=generator).tolist()) for _ in range(batch)]
    latent_rollout(backbone, prompts, link, 4)
    latent_rollout_without_cache(backbone, prompts, link, 2)
    times = []
    for _ in range(3):
        start = time.perf_counter()
        cached = latent_rollout(backbone, prompts, link, steps)
        times.append(time.perf_counter() - start)
    start = time.perf_counter()
    whole = latent_rollout_without_cache(backbone, prompts, link, steps)
    slow = time.perf_counter() - start
    cosine = torch.cosine_similarity(cached.states_BmD.float(), whole.states_BmD.float(), dim=-1)
    return {
        "batch": batch,
        "prompt": length,
        "steps": steps,
        "threads": torch.get_num_threads(),
        "cached_s": round(min(times), 3),
        "cacheless_s": round(slow, 3),
        "ratio": round(slow / min(times), 2),
        "goal": GOALS[batch],
        "positions_cached": cached.computed[0],
        "positions_cacheless": whole.computed[0],
        "first_step_cosine": round(float(cosine[:, 0].min()), 5),
        "lowest_cosine": round(float(cosine.min()), 5),
    }


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--threads", type=int, default=torch.get_num_threads())
    parser.add_argument("--prompt", type=int, default=300)
    parser.add_argument("--steps", type=int, default=48)
    args = parser.parse_args()
    torch.set_num_threads(args.threads)
    torch.manual_seed(0)
    backbone = Backbone("smollm2-135m", load_model(resolve("smollm2-135m"), "bfloat16"))
    link = InnerLink(backbone.dim, target_norm=mean_token_norm(backbone.embeddings))
    rows = [measure(backbone, link, batch, args.prompt, args.steps) for batch in GOALS]
    for row in rows:
        sys.stdout.write(json.dumps(row) + "\n")
    return 0 if all(row["ratio"] >= row["goal"] for row in rows) else 1


if __name__ == "__main__":
    sys.exit(main())
