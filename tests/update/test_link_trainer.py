"""The optimiser step on links: schedule, clip, broken gradients, and a resume that changes nothing."""

from __future__ import annotations

import pytest
import torch

from agentrl.config.schema import OptimConfig
from agentrl.errors import DataError, DivergedError
from agentrl.update.link_trainer import LinkTrainer
from agentrl.update.links import InnerLink, OuterLink

OPTIM = OptimConfig(lr=1e-2, betas=(0.9, 0.95), weight_decay=0.1, warmup_steps=2, schedule="cosine")


def _links():
    torch.manual_seed(0)
    return {"inner-a": InnerLink(8), "outer-a-b": OuterLink(8, 12)}


def _train(links, trainer, steps):
    losses = []
    for _ in range(steps):
        x = torch.randn(5, 8, generator=torch.Generator().manual_seed(trainer.steps))
        loss = links["outer-a-b"](links["inner-a"](x)).sin().square().mean()
        losses.append(loss.item())
        loss.backward()
        trainer.step()
    return losses


def test_t30_a_resumed_run_is_the_unbroken_run(tmp_path):
    links = _links()
    whole = _train(links, LinkTrainer(links, OPTIM, 10), 10)
    first = _links()
    trainer = LinkTrainer(first, OPTIM, 10)
    begun = _train(first, trainer, 4)
    trainer.save(tmp_path)
    torch.manual_seed(9)
    later = {"inner-a": InnerLink(8), "outer-a-b": OuterLink(8, 12)}
    again = LinkTrainer(later, OPTIM, 10)
    again.load(tmp_path)
    assert again.steps == 4
    assert begun + _train(later, again, 6) == whole
    for name, link in links.items():
        for a, b in zip(link.parameters(), later[name].parameters(), strict=True):
            assert torch.equal(a, b)


def test_a_step_names_the_links_that_it_moved():
    links = _links()
    trainer = LinkTrainer(links, OPTIM, 10)
    links["inner-a"](torch.ones(1, 8)).sin().sum().backward()
    trainer.step()
    assert trainer.moved == {"inner-a"}
    (links["outer-a-b"](torch.ones(1, 8)).sum() * float("nan")).backward()
    trainer.step()
    assert trainer.moved == set()


def test_the_rate_follows_the_schedule_and_matrices_alone_decay():
    links = _links()
    trainer = LinkTrainer(links, OPTIM, 10)
    rates = []
    for _ in range(3):
        loss = links["inner-a"](torch.ones(1, 8)).sum() * 0.0
        loss.backward()
        rates.append(trainer.step().lr)
    assert rates == pytest.approx([5e-3, 1e-2, 1e-2])
    fresh = _links()
    moved = {
        n: not torch.equal(p, q)
        for (n, p), q in zip(links["inner-a"].named_parameters(), fresh["inner-a"].parameters(), strict=True)
    }
    assert moved == {n: n.startswith("proj") and n.endswith("weight") for n in moved}


def test_the_gradient_is_clipped_once_over_all_links():
    links = _links()
    trainer = LinkTrainer(links, OPTIM.model_copy(update={"max_grad_norm": 0.5}), 10)
    for parameter in trainer.parameters.values():
        parameter.grad = torch.full_like(parameter, 3.0)
    seen = {}
    trainer.optimizer.register_step_pre_hook(
        lambda *_: seen.update({n: p.grad.clone() for n, p in trainer.parameters.items()})
    )
    stats = trainer.step()
    count = sum(p.numel() for p in trainer.parameters.values())
    assert stats.grad_norm == pytest.approx(3.0 * count**0.5)
    assert torch.cat([g.flatten() for g in seen.values()]).norm().item() == pytest.approx(0.5, rel=1e-4)
    assert all(p.grad is None for p in trainer.parameters.values())


def test_a_gradient_that_is_not_finite_skips_the_step_by_name_and_ends_the_run_after_three():
    links = _links()
    trainer = LinkTrainer(links, OPTIM, 10)
    before = links["inner-a"].proj1.weight.clone()

    def broken_step():
        links["inner-a"].proj1.weight.grad = torch.full((8, 8), float("nan"))
        return trainer.step()

    assert broken_step().broken == "inner-a.proj1.weight"
    broken_step()
    assert torch.equal(links["inner-a"].proj1.weight, before)
    assert trainer.steps == 0
    with pytest.raises(DivergedError, match=r"link inner-a\.proj1\.weight"):
        broken_step()


def test_a_state_of_other_links_is_refused_with_name_and_sizes(tmp_path):
    LinkTrainer(_links(), OPTIM, 10).save(tmp_path)
    other = LinkTrainer({"inner-a": InnerLink(8), "outer-a-b": OuterLink(8, 16)}, OPTIM, 10)
    with pytest.raises(DataError, match=r"outer-a-b.ln_target.bias is \(12,\), this system has \(16,\)"):
        other.load(tmp_path)
    (tmp_path / "links_moments.safetensors").unlink()
    with pytest.raises(DataError, match="no whole training state"):
        other.load(tmp_path)


def test_links_in_bf16_are_not_trained():
    with pytest.raises(ValueError, match="trained in float32"):
        LinkTrainer({"inner-a": InnerLink(8).bfloat16()}, OPTIM, 10)
