"""The training losses on tiny models: their targets, where their gradient goes, and what they learn."""

from __future__ import annotations

import copy
import math

import pytest
import torch

from agentrl.recipes.recursivemas.losses import Reuse, RoundGradients, inner_loss, outer_loss
from agentrl.recipes.recursivemas.recursion import System
from agentrl.types import Prompt, Task
from agentrl.update.links import InnerLink, checksum

QUESTIONS = [
    Task(str(i), text) for i, text in enumerate(["How many apples are left?", "What is the capital of the north?"])
]
ANSWERS = [(11, 12, 13), (14, 15)]
PROMPTS = [Prompt.of((3, 4, 5, 6)), Prompt.of((7, 8))]
TEXTS = [(20, 21, 22, 23, 24), (30, 31)]


@pytest.fixture
def trained(make_system):
    """(config of 3 rounds, system whose outer links alone take gradients)."""
    recipe, loaded = make_system(rounds=3)
    before = {edge: copy.deepcopy(link.state_dict()) for edge, link in loaded.system.outer.items()}
    for link in loaded.system.outer.values():
        link.requires_grad_(True).zero_grad()
    yield recipe.recursivemas, loaded.system
    for edge, link in loaded.system.outer.items():  # other tests share the system
        link.load_state_dict(before[edge])
        link.requires_grad_(False).zero_grad()


def _parameters(system):
    return [p for link in system.outer.values() for p in link.parameters()]


@pytest.mark.parametrize("name", ["planner", "critic", "solver"])
def test_t18_inner_loss_is_zero_where_the_link_emits_the_next_tokens_embedding(make_system, name):
    _, loaded = make_system()
    backbone = loaded.system.agents[name].backbone
    ids = torch.tensor([i for text in TEXTS for i in text])
    oracle = torch.nn.Module()
    oracle.forward = lambda x: 3.0 * backbone.embeddings(ids)
    assert inner_loss(backbone, oracle, PROMPTS, TEXTS).item() == pytest.approx(0.0, abs=1e-6)
    exact = torch.nn.Module()
    exact.forward = lambda x: backbone.embeddings(ids)
    assert inner_loss(backbone, exact, PROMPTS, TEXTS, mse_weight=1.0).item() == pytest.approx(0.0, abs=1e-6)
    assert inner_loss(backbone, oracle, PROMPTS, TEXTS, mse_weight=1.0).item() > 1e-3


def test_t18_prompt_tokens_and_padding_are_no_targets(make_system):
    _, loaded = make_system()
    backbone = loaded.system.agents["critic"].backbone
    seen = []
    link = torch.nn.Module()
    link.forward = lambda x: (seen.append(x), x)[1]
    inner_loss(backbone, link, PROMPTS, TEXTS)
    assert seen[0].shape == (7, backbone.dim)  # five and two text tokens, from the state before each
    with torch.no_grad():
        out = backbone.decoder(inputs_embeds=backbone.embeddings(torch.tensor([[7, 8, 30]])), use_cache=False)
    torch.testing.assert_close(seen[0][5:], out.last_hidden_state[0, 1:3], atol=1e-5, rtol=1e-5)


def test_t18_known_texts_are_read_once_per_run_with_the_same_loss(make_system):
    _, loaded = make_system()
    agent, reuse = loaded.system.agents["critic"], Reuse.begin()
    plain = inner_loss(agent.backbone, agent.inner, PROMPTS, TEXTS)
    rows = []
    hook = agent.backbone.decoder.register_forward_pre_hook(
        lambda _m, _a, kw: rows.append(len(kw["inputs_embeds"])), with_kwargs=True
    )
    some = inner_loss(agent.backbone, agent.inner, PROMPTS[:1], TEXTS[:1], reuse=reuse)
    both = inner_loss(agent.backbone, agent.inner, PROMPTS, TEXTS, reuse=reuse)
    assert rows[-1] == 1  # the second question alone
    read = len(rows)
    again = inner_loss(agent.backbone, agent.inner, PROMPTS[::-1], TEXTS[::-1], reuse=reuse)
    hook.remove()
    assert len(rows) == read
    assert reuse.read_positions == sum(map(len, [*TEXTS, *(p.ids for p in PROMPTS)]))
    torch.testing.assert_close(both, plain, rtol=1e-5, atol=1e-6)
    torch.testing.assert_close(again, plain, rtol=1e-5, atol=1e-6)
    assert some.item() != pytest.approx(plain.item(), rel=1e-3)


def test_states_of_known_texts_are_kept_in_bounded_memory(make_system):
    _, loaded = make_system()
    agent = loaded.system.agents["critic"]
    plain = inner_loss(agent.backbone, agent.inner, PROMPTS, TEXTS)
    first = len(TEXTS[0]) * agent.backbone.dim * 4
    reuse = Reuse.begin(room=first + 1)
    for _ in range(2):
        kept = inner_loss(agent.backbone, agent.inner, PROMPTS, TEXTS, reuse=reuse)
        torch.testing.assert_close(kept, plain, rtol=1e-5, atol=1e-6)
    assert (len(reuse.texts), reuse.room) == (1, 1)
    assert reuse.read_positions == 9 + 2 * 4  # the second text, for which there is no room, is read again


def test_t18_the_inner_loss_falls_by_a_third_in_200_steps(make_system):
    _, loaded = make_system()
    backbone = loaded.system.agents["solver"].backbone
    torch.manual_seed(0)
    link = InnerLink(backbone.dim)
    optimiser = torch.optim.AdamW(link.parameters(), lr=2e-3)
    first = None
    for _ in range(200):
        loss = inner_loss(backbone, link, PROMPTS, TEXTS)
        first = loss.item() if first is None else first
        optimiser.zero_grad()
        loss.backward()
        optimiser.step()
    assert loss.item() < 0.7 * first
    assert all(p.grad is None for p in backbone.model.parameters())


@pytest.mark.parametrize("form", ["rollout", "first_step"])
def test_t19_the_gradient_reaches_every_outer_link_in_every_round_that_uses_it(trained, form):
    config, system = trained
    gradients = RoundGradients()
    outer_loss(system, config, QUESTIONS, ANSWERS, form=form, gradients=gradients).loss.backward()
    norms = gradients.norms()
    assert set(norms) == {1, 2, 3}
    assert all(math.isfinite(n) and n > 0 for n in norms.values())
    used = {(r, edge) for r, edge, _ in gradients.grads}
    assert used == {(r, e) for r in (1, 2, 3) for e in ("planner-critic", "critic-solver")} | {
        (r, "solver-planner") for r in (1, 2)
    }
    for edge, link in system.outer.items():
        for name, parameter in link.named_parameters():
            parts = [g for (r, e, n), g in gradients.grads.items() if (e, n) == (edge.name, name)]
            torch.testing.assert_close(sum(parts), parameter.grad, atol=1e-6, rtol=1e-5)


def test_t19_the_recursions_gradient_agrees_with_finite_differences(trained):
    config, system = trained
    outer_loss(system, config, QUESTIONS, ANSWERS).loss.backward()
    parameters = _parameters(system)
    directions = [torch.sign(p.grad) for p in parameters]
    slope = sum(p.grad.abs().sum().item() for p in parameters)

    def at(step):
        with torch.no_grad():
            for p, d in zip(parameters, directions, strict=True):
                p.add_(d, alpha=step)
            value = outer_loss(system, config, QUESTIONS, ANSWERS).loss.double().item()
            for p, d in zip(parameters, directions, strict=True):
                p.sub_(d, alpha=step)
        return value

    eps = 2e-5
    assert (at(eps) - at(-eps)) / (2 * eps) == pytest.approx(slope, rel=1e-3)


def test_t20_recording_rounds_and_batching_leave_the_gradient_as_it_is(trained):
    config, system = trained

    def grads(loss):
        for p in _parameters(system):
            p.grad = None
        loss.backward()
        return torch.cat([p.grad.flatten() for p in _parameters(system)])

    plain = grads(outer_loss(system, config, QUESTIONS, ANSWERS).loss)
    recorded = grads(outer_loss(system, config, QUESTIONS, ANSWERS, gradients=RoundGradients()).loss)
    torch.testing.assert_close(recorded, plain, atol=1e-6, rtol=1e-5)
    rows = [outer_loss(system, config, [q], [a]).loss * len(a) / 5 for q, a in zip(QUESTIONS, ANSWERS, strict=True)]
    summed = grads(sum(rows))
    assert ((summed - plain).norm() / plain.norm()).item() < 1e-5


def test_t20_what_no_link_changes_is_reused_without_a_change_to_the_gradient(trained):
    config, system = trained
    parameters = _parameters(system)
    plain = outer_loss(system, config, QUESTIONS, ANSWERS)
    wanted = torch.autograd.grad(plain.loss, parameters)
    reuse = Reuse.begin()
    for again in (False, True):
        out = outer_loss(system, config, QUESTIONS, ANSWERS, reuse=reuse, checkpointed=False)
        torch.testing.assert_close(out.loss, plain.loss, rtol=1e-5, atol=1e-6)
        for got, want in zip(torch.autograd.grad(out.loss, parameters), wanted, strict=True):
            assert ((got - want).norm() / want.norm()).item() < 1e-5
        first = out.stages[0]
        assert (first.round, first.agent) == (1, "planner")
        assert all((action.positions == 0) == again for action in first.actions)
    assert len(reuse.states) == len(QUESTIONS)


def test_t17_stage_2_trains_outer_links_only(trained):
    config, system = trained
    frozen = [*(a.backbone.model for a in system.agents.values()), *(a.inner for a in system.agents.values())]
    before = [checksum(m) for m in frozen]
    optimiser = torch.optim.SGD(_parameters(system), lr=1e-6)
    outer_loss(system, config, QUESTIONS, ANSWERS).loss.backward()
    optimiser.step()
    assert [checksum(m) for m in frozen] == before
    assert not any(p.grad is not None for m in frozen for p in m.parameters())
    assert all(p.grad is not None for p in _parameters(system))


def test_round_weights_add_the_answers_loss_from_earlier_rounds(trained):
    config, system = trained
    last = outer_loss(system, config, QUESTIONS, ANSWERS)
    assert last.by_round[:2] == (None, None)
    assert last.loss.item() == pytest.approx(last.by_round[2].item())
    both = outer_loss(system, config, QUESTIONS, ANSWERS, round_weights=(0.5, 0.0, 1.0))
    assert both.by_round[1] is None
    assert both.loss.item() == pytest.approx(0.5 * both.by_round[0].item() + both.by_round[2].item(), rel=1e-5)
    assert both.by_round[2].item() == pytest.approx(last.loss.item(), rel=1e-5)


def test_the_official_form_sends_the_states_at_known_texts(trained):
    config, system = trained
    texts = {"planner": [TEXTS[0]], "critic": [tuple(range(40, 130))]}
    sent = {}
    hooks = [
        link.register_forward_hook(lambda _m, _i, out, e=edge: sent.setdefault(e.name, []).append(out.shape))
        for edge, link in system.outer.items()
    ]
    out = outer_loss(system, config, QUESTIONS[:1], ANSWERS[:1], form="teacher_forced", texts=texts)
    for hook in hooks:
        hook.remove()
    lengths = {name: [shape[1] for shape in shapes] for name, shapes in sent.items()}
    assert lengths == {"planner-critic": [5] * 3, "critic-solver": [80] * 3, "solver-planner": [3] * 2}
    out.loss.backward()
    assert all(p.grad is not None and p.grad.abs().sum() > 0 for p in _parameters(system) if p.dim() > 1)


def test_forms_share_the_states_and_so_the_loss(trained):
    config, system = trained
    losses = [outer_loss(system, config, QUESTIONS, ANSWERS, form=f).loss.item() for f in ("rollout", "first_step")]
    assert losses[0] == pytest.approx(losses[1], rel=1e-5)


def test_inner_links_may_be_trained_through_the_recursion_too(make_system):
    recipe, loaded = make_system("distillation", rounds=1)
    system: System = loaded.system
    inner = system.agents["expert"].inner.requires_grad_(True)
    outer_loss(system, recipe.recursivemas, QUESTIONS, ANSWERS).loss.backward()
    assert all(p.grad is not None for p in inner.parameters())
    inner.requires_grad_(False).zero_grad()
