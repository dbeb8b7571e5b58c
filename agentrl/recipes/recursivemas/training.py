"""Around the steps of link training: what a run holds, its checkpoints, its resume and its summary.

A checkpoint holds all links (`links/`, each file saying how it was trained) and the optimiser's state of the stage
that the run is in (`trainer/`); the frozen models are not in it, only their checksums.
"""

from __future__ import annotations

import shlex
import sys
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any

import torch

from agentrl.errors import ConfigError, RunFailedError
from agentrl.launch.devices import Plan
from agentrl.protocols import Reward
from agentrl.recipes.loop import checkpoint, evaluated, newest_checkpoint
from agentrl.recipes.recursivemas.decode import Decoder
from agentrl.recipes.recursivemas.held_out import HeldOut
from agentrl.recipes.recursivemas.link_folders import file_in, inner_name, outer_name
from agentrl.recipes.recursivemas.links import Links, save_links
from agentrl.recipes.recursivemas.losses import Reuse
from agentrl.recipes.recursivemas.recipe import RecursiveRecipe
from agentrl.recipes.recursivemas.setup import Loaded
from agentrl.recipes.recursivemas.starts import start_links
from agentrl.recipes.recursivemas.texts import Texts
from agentrl.recipes.recursivemas.train_config import Stage
from agentrl.recipes.registry import VerbOptions
from agentrl.run import Run
from agentrl.types import Task
from agentrl.update.link_files import load_link
from agentrl.update.link_header import read_metadata
from agentrl.update.link_trainer import LinkTrainer
from agentrl.update.links import checksum, mean_token_norm

History = Mapping[str, Any] | None
"""How a link was trained last, and under `before` by what stages and runs until then; None for random weights."""
INNER_NOTES = {
    "empty": "prompts of round 1 with empty slots; texts by agent",
    "text": "prompts of round 1 with the senders' known texts in the slots; texts by agent",
}


@dataclass(slots=True)
class LinkTraining:
    """Everything one training run holds while it runs. `texts` are those of both sets, by task; `started` names the
    links that were new; `earlier` says how links were trained before the stage that the run is in; `evals` and
    `losses` map a step to what it measured on the held-out set."""

    recipe: RecursiveRecipe
    options: VerbOptions
    run: Run
    placed: Plan
    loaded: Loaded
    decoder: Decoder
    reward: Reward
    tasks: Sequence[Task]
    held_out: Sequence[Task]
    texts: Texts
    held_out_texts: Texts
    token_norms: Mapping[str, float]
    sums: Mapping[str, str]
    links: Links
    reuse: Reuse | None = None
    trainer: LinkTrainer | None = None
    stage: Stage | None = None
    updates: int = 0
    started: tuple[str, ...] = ()
    earlier: Mapping[str, History] = field(default_factory=dict)
    evals: dict[int, dict[str, float | None]] = field(default_factory=dict)
    losses: dict[int, dict[str, float | None]] = field(default_factory=dict)

    def trainer_of(self, step: int) -> LinkTrainer:
        """The optimiser of the stage that `step` belongs to; a stage begins with a new one."""
        stage = self.recipe.recursivemas.train.stage_of(step)
        if self.trainer is None or self.stage != stage:
            for link in self.links.by_name.values():
                link.requires_grad_(False)
            names = trained_names(self.recipe, self.links, stage)
            links = {name: self.links.by_name[name] for name in names}
            self.trainer = LinkTrainer(links, self.recipe.optim, self._steps_of(stage))
            self.stage = stage
            self.earlier = dict(self.links.training)
            # Frozen from here on: what their states depend on. They are rounded by who thought together, so the
            # deterministic mode computes them anew, lest a resumed run differ in the last bit.
            self.reuse = None if self.recipe.engine.deterministic else Reuse.begin()
        return self.trainer

    def measured(self, step: int, found: HeldOut) -> None:
        self.evals[step], self.losses[step] = dict(found.items), dict(found.losses)

    async def restore(self) -> int:
        """Raises `DataError` for other training data than the checkpoint's, `ConfigError` for other frozen models."""
        found = newest_checkpoint(self)
        train = self.recipe.recursivemas.train
        if found is None:
            start_links(self.links, self.loaded.system, train.start)
            self.started = self.links.untrained
            return 1
        state = found.state
        if state["backbones"] != dict(self.sums):
            odd = sorted(n for n in self.sums if self.sums[n] != state["backbones"].get(n))
            raise ConfigError(
                f"policies: the weights of {', '.join(odd)} are not those that this run began with",
                "resume with the same models",
            )
        _load_links(self, found.folder / "links")
        if state["stage"] == train.stage_of(found.step + 1) or found.step >= self.recipe.run.steps:
            self.trainer_of(found.step).load(found.folder / "trainer")
            self.earlier = dict(state.get("earlier", {}))
        self.updates, self.started = state["updates"], tuple(state.get("started", ()))
        self.losses = {int(k): dict(v) for k, v in state["losses"].items()}
        self.options.progress.note(f"resumed after step {found.step}: links, optimiser, data order and evaluations")
        return found.step + 1

    def save(self, step: int) -> None:
        """A checkpoint of all links, of the optimiser's state and of what was measured."""
        assert self.trainer is not None
        state = {
            "updates": self.updates,
            "stage": self.stage,
            "started": list(self.started),
            "earlier": {name: None if how is None else dict(how) for name, how in self.earlier.items()},
            "backbones": dict(self.sums),
            "losses": {str(k): v for k, v in self.losses.items()},
        }
        with checkpoint(self, step, state) as folder:
            save_links(self.links, folder / "links")
            (folder / "trainer").mkdir()
            self.trainer.save(folder / "trainer")

    def summarise(self, step: int, status: str) -> dict[str, Any]:
        """Write `summary.json` and return it with the run's folder. Raises `RunFailedError` if a frozen model
        changed."""
        result = summary(self, step, status)
        self.run.write_summary(result)
        changed = [name for name, sums in result["backbones"].items() if sums["before"] != sums["after"]]
        if changed:
            raise RunFailedError(
                f"the weights of {', '.join(sorted(changed))} changed while only links were trained",
                "this is a fault of agentrl; keep the run folder and report it",
            )
        return {"run": str(self.run.path), **result}

    def _steps_of(self, stage: Stage) -> int:
        steps, train = self.recipe.run.steps, self.recipe.recursivemas.train
        if train.stage != "both":
            return steps
        inner = min(steps, train.inner_steps or 0)
        return inner if stage == "inner" else steps - inner


def trained_names(recipe: RecursiveRecipe, links: Links, stage: Stage) -> tuple[str, ...]:
    """Which links take gradients in a stage."""
    inner = tuple(map(inner_name, links.inner))
    if stage == "inner":
        return inner
    outer = tuple(map(outer_name, links.outer))
    return (*inner, *outer) if recipe.recursivemas.train.inner_too else outer


def frozen_sums(loaded: Loaded) -> dict[str, str]:
    """Backbone -> checksum of every weight and buffer."""
    return {a.backbone.name: checksum(a.backbone.model) for a in loaded.system.agents.values()}


def token_norms(loaded: Loaded) -> dict[str, float]:
    """Agent -> mean length of its model's token embeddings."""
    by_model: dict[str, float] = {}
    for agent in loaded.system.agents.values():
        if agent.backbone.name not in by_model:
            by_model[agent.backbone.name] = mean_token_norm(agent.backbone.embeddings)
    return {name: by_model[agent.backbone.name] for name, agent in loaded.system.agents.items()}


@torch.no_grad()
def _load_links(t: LinkTraining, folder: Path) -> None:
    """Weights into the links that are in use, and what their files say of their training."""
    specs = {inner_name(a): s for a, s in t.links.inner_specs.items()}
    specs |= {outer_name(e): s for e, s in t.links.outer_specs.items()}
    for name, link in t.links.by_name.items():
        link.load_state_dict(load_link(file_in(folder, name), specs[name]).state_dict())
    training = {name: read_metadata(file_in(folder, name))["training"] for name in specs}
    t.links = replace(t.links, training=training)


def mark_trained(t: LinkTraining, step: int) -> None:
    """Let the links that a step moved say how they were trained so far. A link that no round goes through stays new."""
    assert t.stage is not None
    assert t.trainer is not None
    how, start = _how(t.recipe, t.stage, step), t.recipe.recursivemas.train.start
    for name in t.trainer.moved:
        before = history(t.earlier.get(name))
        new = {"start": start} if start != "random" and name in t.started and not before else {}
        t.links = t.links.after([name], {**how, **new, **({"before": before} if before else {})})


def history(how: History) -> list[dict[str, Any]]:
    """Every stage that trained a link, the first one first; none for random weights. Each is told as it ended."""
    if how is None:
        return []
    return [*how.get("before", []), {key: value for key, value in how.items() if key != "before"}]


def _how(recipe: RecursiveRecipe, stage: Stage, step: int) -> dict[str, Any]:
    """What link files say about their training."""
    config = recipe.recursivemas
    how: dict[str, Any] = {"stage": stage, "steps": step, "seed": recipe.run.seed}
    if stage == "outer":
        how |= {"form": config.train.form, "rounds": config.rounds, "latent_steps": config.latent_steps}
        how |= {"one_round_steps": config.train.one_round_steps} if config.train.one_round_steps else {}
        how |= {"hop_steps": config.train.hop_steps} if config.train.hop_steps else {}
        how |= {"leak_probe": True} if config.train.leak_probe else {}
    return how


def summary(t: LinkTraining, step: int, status: str) -> dict[str, Any]:
    """What a run says of itself after a step."""
    after = frozen_sums(t.loaded)
    train = t.recipe.recursivemas.train
    return {
        "method": "recursivemas",
        "status": status,
        "command": shlex.join(["agentrl", *sys.argv[1:]]),
        "steps": step,
        "policy_version": t.updates,
        "style": t.recipe.recursivemas.style,
        "rounds": t.recipe.recursivemas.rounds,
        "latent_steps": t.recipe.recursivemas.latent_steps,
        "stage": train.stage,
        **({"start": train.start, "started": list(t.started)} if t.started else {}),
        **({} if train.stage == "inner" else {"form": train.form}),
        **(
            {}
            if train.stage == "outer"
            else {"inner": {"trained_on": INNER_NOTES[train.inner_slots], "texts": dict(t.texts.sources)}}
        ),
        "held_out_without_answer": sum(not task.references for task in t.held_out),
        "texts_cut": t.texts.num_cut + t.held_out_texts.num_cut,
        "links": {
            "trained": t.links.trained,
            "parameters": t.links.num_parameters,
            "by_link": t.links.parameter_counts,
            "training": {name: None if how is None else dict(how) for name, how in t.links.training.items()},
        },
        "backbones": {name: {"before": t.sums[name], "after": after[name]} for name in after},
        "frozen": after == dict(t.sums),
        "device": {"kind": t.placed.device, "gpus": len(t.placed.gpus), "threads": t.placed.threads},
        **evaluated(t, step),
        **_losses(t, step),
        **_leak(t, step),
    }


def _losses(t: LinkTraining, step: int) -> dict[str, Any]:
    out: dict[str, Any] = {}
    named = {"before": 0, "after": step}
    for kind in ("as_used", "as_trained"):
        found = {word: t.losses[at][kind] for word, at in named.items() if kind in t.losses.get(at, {})}
        if found:
            out[f"held_out_loss_{kind}"] = found
    return out


def _leak(t: LinkTraining, step: int) -> dict[str, Any]:
    """What the leak probe found: after training, is a question's own random answer likelier than another's?"""
    told = t.losses.get(step, {})
    if "gap" not in told:
        return {}
    form = t.recipe.recursivemas.train.form
    keys = ("as_trained", "other", "gap", "gap_low", "gap_high", "pairs")
    low = told["gap_low"]
    return {
        "leak_probe": {"form": form, **{key: told[key] for key in keys}, "leaks": None if low is None else low > 0.0}
    }
