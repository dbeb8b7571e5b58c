"""What the links are trained on. Stage 1: inner links alone. Stage 2: outer links through the whole recursion.

Three forms of stage 2, named in every result (specs 5.2 and 5.3):
    rollout         the recursion as it is used: gradient through every latent step of every agent and round
    first_step      the same states, gradient through each rollout's first state only (cheap)
    teacher_forced  the released code's: no rollout; an agent reads its known text, and its states there are sent on.
                    In earlier rounds the decoder reads the true answer, which its states may leak into the last one.

Source: "Recursive Multi-Agent Systems", arXiv 2604.25917, equations 5 and 6, and its released code.
Shapes: B questions, T text tokens, m latent steps, D hidden size.
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any, Literal

import torch
from torch import Tensor, nn
from torch.func import functional_call

from agentrl.recipes.recursivemas.config import RecursiveConfig
from agentrl.recipes.recursivemas.graph import Edge
from agentrl.recipes.recursivemas.recursion import Agent, Send, Stage, System, Think, run_rounds
from agentrl.recipes.recursivemas.train_config import OuterForm
from agentrl.rollout.latent import Rollout, latent_rollout, latent_rollout_with_grad
from agentrl.rollout.latent_answer import text_logprobs, text_loss, text_states
from agentrl.rollout.latent_backbone import Backbone
from agentrl.rollout.latent_lead import LeadMemory
from agentrl.types import Embeddings, Prompt, Task

Ids = Sequence[int]
ROOM = 1 << 30  # bytes of states that a run keeps, at most
MAX_BLOCK = 80  # teacher-forced states that are sent on, at most (the released `max_latent_tokens`)


def inner_loss(
    backbone: Backbone,
    link: nn.Module,
    prompts: Sequence[Prompt],
    texts: Sequence[Ids],
    mse_weight: float = 0.0,
    reuse: Reuse | None = None,
) -> Tensor:
    """Equation 5: the mean over text tokens of 1 - cos(link(h_t), Emb(y_{t+1})), plus `mse_weight` times the MSE.

    h_t are the frozen model's states (after the final norm) when it reads the prompt and the text, teacher-forced;
    only positions whose next token belongs to the text count. With `reuse` a prompt and text are read once per run.
    """
    states_ND, ids_N = (reuse or Reuse()).read(backbone, prompts, texts)
    with torch.no_grad():
        target_ND = backbone.embeddings(ids_N).float()
    predicted_ND = link(states_ND).float()
    loss = (1.0 - nn.functional.cosine_similarity(predicted_ND, target_ND, dim=-1)).mean()
    if mse_weight:
        loss = loss + mse_weight * nn.functional.mse_loss(predicted_ND, target_ND)
    return loss


@dataclass(slots=True)
class RoundGradients:
    """The gradients that each round's use of the outer links adds, kept apart until they are read."""

    grads: dict[tuple[int, str, str], Tensor] = field(default_factory=dict)

    def tap(self, link: nn.Module, edge: Edge, round_number: int) -> dict[str, Tensor]:
        """Aliases of the link's parameters for one round, whose gradients are recorded on the way to the parameters."""
        aliases = {}
        for name, parameter in link.named_parameters():
            alias = parameter.view_as(parameter)
            if alias.requires_grad:
                alias.register_hook(self._record((round_number, edge.name, name)))
            aliases[name] = alias
        return aliases

    def norms(self) -> dict[int, float]:
        """Round -> 2-norm over all outer links."""
        squares: dict[int, float] = {}
        for (round_number, _, _), grad in self.grads.items():
            squares[round_number] = squares.get(round_number, 0.0) + grad.double().square().sum().item()
        return {r: s**0.5 for r, s in sorted(squares.items())}

    def _record(self, key: tuple[int, str, str]) -> Callable[[Tensor], None]:
        def record(grad: Tensor) -> None:
            self.grads[key] = self.grads[key] + grad if key in self.grads else grad.detach().clone()

        return record


@dataclass(slots=True)
class Reuse:
    """What training links cannot change, kept over a run: the text before each prompt's first block; the states at
    known text after prompts without blocks (stage 1); and, with frozen inner links, the states of an agent whose
    prompt holds no block (the first one in round 1), which are thought once.

    States are kept in the model's dtype, m vectors per question and one per text token; once `room` bytes are taken,
    what is new is computed each time. `read_positions` went through models for known texts so far.
    """

    leads: LeadMemory | None = None
    states: dict[tuple[str, int, tuple[int, ...]], Tensor] | None = None
    texts: dict[tuple[Backbone, tuple[int, ...], tuple[int, ...]], Tensor] | None = None
    room: int = ROOM
    read_positions: int = 0

    @classmethod
    def begin(cls, room: int = ROOM) -> Reuse:
        return cls(LeadMemory(), {}, {}, room)

    @torch.no_grad()
    def read(self, backbone: Backbone, prompts: Sequence[Prompt], texts: Sequence[Ids]) -> tuple[Tensor, Tensor]:
        """The state before every text token (N, D), row after row, and the tokens (N,)."""
        known = dict[tuple[Backbone, Ids, Ids], Tensor]() if self.texts is None else self.texts
        keys = [(backbone, prompt.ids, tuple(text)) for prompt, text in zip(prompts, texts, strict=True)]
        new = {key: row for row, key in enumerate(keys) if key not in known}
        found = {key: known[key] for key in keys if key in known}
        if new:
            rows = list(new.values())
            states = text_states(backbone, [prompts[r] for r in rows], [texts[r] for r in rows], leads=self.leads)
            self.read_positions += states.computed
            for key, before_TD, mask_T in zip(new, states.before_BTD, states.mask_BT, strict=True):
                found[key] = before_TD[mask_T].clone()
                self._keep(known, key, found[key])
        ids_N = torch.tensor([i for text in texts for i in text], device=backbone.device)
        return torch.cat([found[key] for key in keys]), ids_N

    def rollout(self, agent: Agent, prompts: Sequence[Prompt], steps: int) -> Rollout:
        """Without gradients, and only for prompts that were not thought about before."""
        texts = [p.ids for p in prompts if not _hold_blocks([p])]
        if self.states is None or steps == 0 or len(texts) < len(prompts):
            return latent_rollout(agent.backbone, prompts, agent.inner, steps)
        keys = [(agent.name, steps, ids) for ids in texts]
        new = {key: prompt for key, prompt in zip(keys, prompts, strict=True) if key not in self.states}
        found = {key: self.states[key] for key in keys if key in self.states}
        computed = {}
        if new:
            with torch.no_grad():
                out = latent_rollout_with_grad(
                    agent.backbone, list(new.values()), agent.inner, steps, checkpointed=False, leads=self.leads
                )
            for key, states_mD, positions in zip(new, out.states_BmD, out.computed, strict=True):
                found[key], computed[key] = states_mD.clone(), positions
                self._keep(self.states, key, found[key])
        states_BmD = torch.stack([found[key] for key in keys])
        lengths = tuple(map(len, texts))
        kept = tuple(0 if key in computed else length for key, length in zip(keys, lengths, strict=True))
        return Rollout(
            states_BmD,
            states_BmD.float().norm(dim=-1),
            lengths,
            kept,
            tuple(computed.get(key, 0) for key in keys),
        )

    def _keep(self, known: dict[Any, Tensor], key: tuple[object, ...], states: Tensor) -> None:
        size = states.numel() * states.element_size()
        if size <= self.room:
            self.room -= size
            known[key] = states


@dataclass(frozen=True, slots=True)
class OuterLoss:
    """`loss` to differentiate; `by_round[r - 1]` the answer's mean cross-entropy from the decoder's prompt of round r,
    None where it was not asked for; `hops` that of each hearing agent's own text, to differentiate as well, where it
    was. `stages`: what was thought on the way; `read` the positions that the forwards over prompt and text computed,
    all questions together."""

    loss: Tensor
    by_round: tuple[Tensor | None, ...]
    stages: tuple[Stage, ...] = ()
    read: int = 0
    hops: Mapping[str, Tensor] = field(default_factory=dict)


def outer_loss(
    system: System,
    config: RecursiveConfig,
    tasks: Sequence[Task],
    answers: Sequence[Ids],
    *,
    form: OuterForm = "rollout",
    texts: Mapping[str, Sequence[Ids]] | None = None,
    round_weights: Sequence[float] | None = None,
    gradients: RoundGradients | None = None,
    reuse: Reuse | None = None,
    checkpointed: bool = True,
    scored: Sequence[Ids] | None = None,
    hops: Mapping[str, Sequence[Ids]] | None = None,
) -> OuterLoss:
    """Equation 6: cross-entropy on the answers' tokens after all rounds, with the graph kept across rounds.

    `texts` are the role targets of `teacher_forced` (agent -> one text per question; one question at a time). `hops`
    are texts likewise, for agents but the decoder to say after their prompts with blocks: the mean over rounds.
    `round_weights` weigh the answer's loss from the decoder's prompt in each round; by default only the last counts.
    `reuse` keeps over a whole run what no trained link can change. `checkpointed` keeps only each forward's inputs
    until the backward pass, which computes it again: less memory for a third more time. Neither changes the gradient.
    `scored` are the answers that the loss is taken on, where they are not those that are read (leak probe).
    """
    asked_for = answers if scored is None else scored
    weights = [0.0] * (config.rounds - 1) + [1.0] if round_weights is None else list(round_weights)
    assert len(weights) == config.rounds, f"{len(weights)} round weights for {config.rounds} rounds"
    decoder = system.graph.decoder
    heard: dict[str, list[Sequence[Prompt]]] = defaultdict(list)
    if form == "teacher_forced":
        assert len(tasks) == 1, "teacher-forced blocks differ in length: one question at a time"
        known = {**(texts or {}), decoder: answers}
        inner_think = _reader(known)
    else:
        inner_think = _grad_thinker(
            config.latent_steps, "full" if form == "rollout" else "first", reuse or Reuse(), checkpointed
        )

    def think(agent: Agent, prompts: Sequence[Prompt]) -> Rollout:
        heard[agent.name].append(prompts)
        return inner_think(agent, prompts)

    out = run_rounds(system, config, tasks, think, sender_with_grad(system, gradients))
    heard[decoder].append(out.prompts)
    by_round: list[Tensor | None] = []
    total, read = torch.zeros((), device=system.agents[decoder].backbone.device), 0

    def said(name: str, prompts: Sequence[Prompt], scored: Sequence[Ids]) -> Tensor:
        nonlocal read
        backbone, leads = system.agents[name].backbone, None if reuse is None else reuse.leads
        states = text_states(backbone, prompts, scored, checkpointed=checkpointed, leads=leads)
        read += states.computed
        return text_loss(text_logprobs(backbone, states), states)

    for weight, prompts in zip(weights, heard.pop(decoder), strict=True):
        by_round.append(said(decoder, prompts, asked_for) if weight else None)
        total = total if by_round[-1] is None else total + weight * by_round[-1]
    found = {}
    for name, texts_of in (hops or {}).items():
        found[name] = [said(name, prompts, texts_of) for prompts in heard[name] if _hold_blocks(prompts)]
    by_agent = {name: torch.stack(losses).mean() for name, losses in found.items() if losses}
    return OuterLoss(total, tuple(by_round), out.stages, read, by_agent)


def sender_with_grad(system: System, gradients: RoundGradients | None = None) -> Send:
    """Over an edge by its links, keeping the graph; with `gradients` each round's share is recorded."""

    def send(edge: Edge, round_number: int, states_BmD: Tensor) -> Tensor:
        middle = system.agents[edge.source].inner(states_BmD)
        link = system.outer[edge]
        if gradients is None:
            block: Tensor = link(middle)
        else:
            block = functional_call(link, gradients.tap(link, edge, round_number), (middle,))
        return block.to(system.agents[edge.target].backbone.dtype)

    return send


def _grad_thinker(steps: int, gradient: Literal["full", "first"], reuse: Reuse, checkpointed: bool) -> Think:
    def think(agent: Agent, prompts: Sequence[Prompt]) -> Rollout:
        if not (_needs_grad(prompts) or any(p.requires_grad for p in agent.inner.parameters())):
            return reuse.rollout(agent, prompts, steps)
        return latent_rollout_with_grad(
            agent.backbone,
            prompts,
            agent.inner,
            steps,
            gradient=gradient,
            checkpointed=checkpointed,
            leads=reuse.leads,
        )

    return think


def _reader(texts: Mapping[str, Sequence[Ids]]) -> Think:
    """Instead of a rollout: the states at the agent's known text, at most `MAX_BLOCK` of them."""

    def think(agent: Agent, prompts: Sequence[Prompt]) -> Rollout:
        read = [text[:MAX_BLOCK] for text in texts[agent.name]]
        states_BTD = text_states(agent.backbone, prompts, read, checkpointed=True).at_BTD
        lengths = tuple(len(prompt) for prompt in prompts)
        computed = tuple(length + len(text) for length, text in zip(lengths, read, strict=True))
        norms = states_BTD.detach().float().norm(dim=-1)
        return Rollout(states_BTD, norms, lengths, (0,) * len(lengths), computed)

    return think


def _hold_blocks(prompts: Sequence[Prompt]) -> bool:
    return any(isinstance(s, Embeddings) for prompt in prompts for s in prompt.segments)


def _needs_grad(prompts: Sequence[Prompt]) -> bool:
    blocks = [s.handle for prompt in prompts for s in prompt.segments if isinstance(s, Embeddings)]
    return any(isinstance(block, Tensor) and block.requires_grad for block in blocks)
