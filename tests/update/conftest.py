"""Tiny policies, and samples made of ids, for the update core."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from pathlib import Path
from types import ModuleType

import pytest
import torch

from agentrl.config.schema import ModelConfig, OptimConfig
from agentrl.models import prepare
from agentrl.types import CreditedSample, Grammar, MaskReason, Sample, Score, ScoredSample, Span
from agentrl.update.policy import Policy

ARCHITECTURES = ("llama", "qwen3", "gemma3", "gpt2")


@pytest.fixture(autouse=True)
def _one_thread():
    before = torch.get_num_threads()
    torch.set_num_threads(1)
    yield
    torch.set_num_threads(before)


@pytest.fixture(scope="session")
def tiny_folder(tmp_path_factory) -> dict[str, Path]:
    with pytest.MonkeyPatch.context() as patch:
        patch.setenv("AGENTRL_HOME", str(tmp_path_factory.mktemp("home")))
        return {arch: prepare(f"tiny-{arch}") for arch in ARCHITECTURES}


@pytest.fixture
def make_policy(tiny_folder):
    def make(arch: str = "llama", *, dtype: str = "float32", mode: str = "full", folder=None, **optim) -> Policy:
        return Policy(
            "policy",
            folder or tiny_folder[arch],
            ModelConfig(name=f"tiny-{arch}", dtype=dtype, mode=mode),
            OptimConfig(**{"lr": 0.0, "max_grad_norm": None, "max_tokens_per_row": 256, **optim}),
            total_steps=10,
            train_under_grammar=True,
        )

    return make


@pytest.fixture(scope="module")
def made() -> Iterator[ModuleType]:
    """`rank_policies`, which a spawned process finds by the same path."""
    with pytest.MonkeyPatch.context() as patch:
        patch.syspath_prepend(str(Path(__file__).parent))
        import rank_policies

        yield rank_policies


@pytest.fixture
def make_credited():
    """A credited sample whose `spans` of `ids` are sampled; all else is prompt or world. Weight: a sequence mean."""

    def make(
        ids: Sequence[int],
        spans: Sequence[tuple[int, int]],
        *,
        name: str = "s",
        part: str = "a",
        advantage: float = 1.0,
        weight: float = 1.0,
        temperature: float = 1.0,
        grammar: Grammar | None = None,
        masked: Sequence[int] = (),
        **scored,
    ) -> CreditedSample:
        reasons: list[MaskReason | None] = [MaskReason.PROMPT] * len(ids)
        for start, stop in spans:
            reasons[start:stop] = [None] * (stop - start)
        for t in masked:
            reasons[t] = MaskReason.FORCED
        trained = [r is None for r in reasons]
        each = weight / max(1, sum(trained))
        sample = Sample(
            id=name,
            trajectory_id=name,
            group="q",
            agent=part,
            part=part,
            policy="policy",
            policy_version=0,
            ids=tuple(ids),
            reasons=tuple(reasons),
            behaviour=(0.0,) * len(ids),
            constrained=tuple(t and grammar is not None for t in trained),
            spans=tuple(Span(a, b, i, temperature, grammar) for i, (a, b) in enumerate(spans)),
            score=Score(1.0),
        )
        return CreditedSample(
            ScoredSample(sample, **scored),
            tuple(advantage if t else 0.0 for t in trained),
            tuple(each if t else 0.0 for t in trained),
        )

    return make


@pytest.fixture
def family(make_credited):
    """Samples of two parts that share stems, questions and some whole completions, with several sampled turns."""

    def make(count: int, *, seed: int = 0, low: int = 3, high: int = 262, temperature: float = 1.0):
        generator = torch.Generator().manual_seed(seed)

        def ids(n: int) -> list[int]:
            return torch.randint(low, high, (n,), generator=generator).tolist()

        stems = {"a": ids(7), "b": ids(5)}
        questions = [ids(3), ids(4)]
        calls = [ids(4), ids(2), ids(3)]
        out = []
        for i in range(count):
            part = "ab"[i % 3 == 2]
            first = stems[part] + questions[i % 2]
            call, seen, answer = calls[i % 3], ids(2 + i % 3), ids(1 + i % 4)
            whole = first + call + seen + answer
            spans = [(len(first), len(first) + len(call)), (len(whole) - len(answer), len(whole))]
            sign = (-1.0, 0.5, 1.25)[i % 3 if part == "a" else i % 2]
            out.append(
                make_credited(
                    whole, spans, name=f"s{i}", part=part, advantage=sign, weight=1 / count, temperature=temperature
                )
            )
        return out

    return make
