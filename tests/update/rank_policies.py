"""What the trainer ranks of `test_ranks.py` hold: made by name in a spawned process."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import torch

from agentrl.config.schema import ModelConfig, OptimConfig
from agentrl.update.policy import Policy
from agentrl.update.scorer import Scorer


def make(folder: Path, dtype: str, mode: str, **options: Any) -> Policy:
    return Policy(
        "policy",
        folder,
        ModelConfig.model_validate({"name": folder.name, "dtype": dtype, "mode": mode}),
        OptimConfig(lr=3e-5, max_grad_norm=0.05, max_tokens_per_row=256),
        total_steps=10,
        train_under_grammar=True,
        **options,
    )


def build(folder: Path, dtype: str) -> tuple[dict[str, Policy], dict[str, Scorer]]:
    torch.set_num_threads(1)
    return {"policy": make(folder, dtype, "full", follower=True)}, {"policy": make(folder, dtype, "frozen").scorer}
