"""`agentrl recursivemas train`: links alone learn, inner ones by regression on text, outer ones by the final answer."""

from __future__ import annotations

import asyncio
import time
from collections.abc import Mapping
from dataclasses import dataclass, field
from functools import partial
from typing import Any

import torch

from agentrl.config.load import dump_yaml
from agentrl.data import load_tasks, order, overlap
from agentrl.errors import ConfigError, DataError
from agentrl.launch.devices import detect, plan
from agentrl.recipes.interrupt import Interrupt, interruptible
from agentrl.recipes.loop import evaluates, mean, run_steps
from agentrl.recipes.quiet import quiet_libraries
from agentrl.recipes.recursivemas.decode import Decoder, open_decoder
from agentrl.recipes.recursivemas.evaluate import benchmark_of, held_out_tasks
from agentrl.recipes.recursivemas.held_out import (
    answered_held_out,
    inner_held_out,
    inner_prompts,
)
from agentrl.recipes.recursivemas.link_folders import links_folder
from agentrl.recipes.recursivemas.losses import Reuse, RoundGradients, inner_loss, outer_loss
from agentrl.recipes.recursivemas.recipe import RecursiveRecipe
from agentrl.recipes.recursivemas.setup import Loaded, load_system
from agentrl.recipes.recursivemas.texts import (
    held_out_sources,
    read_held_out_texts,
    read_texts,
    target_sources,
    with_random_answers,
)
from agentrl.recipes.recursivemas.training import LinkTraining, frozen_sums, mark_trained, token_norms
from agentrl.recipes.recursivemas.windows import refuse_long_tasks
from agentrl.recipes.registry import VerbOptions
from agentrl.recipes.resuming import approve
from agentrl.recipes.rewards import open_reward
from agentrl.recipes.session import refuse_missing_checkpoints
from agentrl.run import Run
from agentrl.types import Task
from agentrl.update.link_header import read_metadata
from agentrl.update.policy import StepStats


def train(recipe: RecursiveRecipe, options: VerbOptions) -> dict[str, Any]:
    """Train the links and return the summary. Raises `KeyboardInterrupt` after an interrupted run was saved."""
    tasks, held_out = _tasks(recipe)
    _refuse_nothing_to_train(recipe, options)
    refuse_missing_checkpoints(recipe)
    _refuse_idle_start(recipe)
    with (
        Run.create(
            recipe.run.dir,
            recipe.run.name,
            dump_yaml(recipe),
            options.resume,
            recipe.run.seed,
            stem="recursivemas",
            keep_last=recipe.run.keep_last,
            keep_best=recipe.run.keep_best,
            approve=approve(recipe, options.progress),
        ) as run,
        interruptible(options.progress.note, finish_step=True) as interrupt,
        quiet_libraries(),
    ):
        return asyncio.run(_train(recipe, options, run, interrupt, tasks, held_out))


async def train_step(t: LinkTraining, step: int) -> None:
    """One step: its questions, the loss of its stage through links alone, one clipped update, records."""
    started = time.monotonic()
    train = t.recipe.recursivemas.train
    tasks = order(t.tasks, t.recipe.run.seed, step, train.batch, shuffle=t.recipe.data.shuffle)
    trainer = t.trainer_of(step)
    done = (inner_step if t.stage == "inner" else outer_step)(t, tasks, step)
    stats = trainer.step()
    t.updates += stats.applied
    mark_trained(t, step)
    updated = time.monotonic()
    if evaluates(t.recipe.run, step):
        await evaluate_held_out(t, step)
    times = {"time/update": updated - started, "time/total": time.monotonic() - started}
    record(t, step, done, stats, times)


@dataclass(slots=True)
class Done:
    """What a step computed before its update. `loss`: in stage 2 the answer's; `losses`: by agent, of its inner link or
    of its hop. `ratios`: by link, output norm over the receiver's mean token norm."""

    loss: float = 0.0
    text_tokens: int = 0
    latent_steps: int = 0
    positions: int = 0
    norms: dict[int, float] = field(default_factory=dict)
    ratios: dict[str, list[float]] = field(default_factory=dict)
    losses: dict[str, float] = field(default_factory=dict)


def inner_step(t: LinkTraining, tasks: list[Task], step: int) -> Done:
    """Equation 5 for every agent: its link maps states at its known text to the next token's embedding."""
    system, train = t.loaded.system, t.recipe.recursivemas.train
    done, reuse = Done(), t.reuse or Reuse()
    before = reuse.read_positions
    for name, agent in system.agents.items():
        total = sum(map(len, t.texts.of(name, tasks)))
        norms: list[float] = []
        hook = agent.inner.register_forward_hook(partial(_note_norm, norms))
        for batch in _micro(t, tasks):
            prompts, texts = inner_prompts(system, t.recipe, name, batch, t.texts), t.texts.of(name, batch)
            tokens = sum(map(len, texts))
            mean_loss = inner_loss(agent.backbone, agent.inner, prompts, texts, train.mse_weight, reuse)
            loss = mean_loss * (tokens / total)
            loss.backward()
            done.losses[name] = done.losses.get(name, 0.0) + loss.item()
            done.text_tokens += tokens
        hook.remove()
        done.ratios[f"inner-{name}"] = [norm / t.token_norms[name] for norm in norms]
    done.positions = reuse.read_positions - before
    done.loss = sum(done.losses.values()) / len(done.losses)
    return done


def outer_step(t: LinkTraining, tasks: list[Task], step: int) -> Done:
    """Equation 6: cross-entropy of the answers after all rounds; the batch's mean over tokens, in parts."""
    system, config, train = t.loaded.system, t.recipe.recursivemas, t.recipe.recursivemas.train
    config = config.model_copy(update={"rounds": train.rounds_of(step, config.rounds)})
    total = sum(map(len, t.texts.answers_of(tasks)))
    every = t.recipe.optim.part_stats_every
    gradients = RoundGradients() if every and step % every == 0 else None
    done = Done()
    for batch in _micro(t, tasks):
        answers = t.texts.answers_of(batch)
        known = {name: t.texts.of(name, batch) for name in system.agents}
        hops = t.texts.hops_of(batch) if train.hops_at(step) else {}
        out = outer_loss(
            system,
            config,
            batch,
            answers,
            form=train.form,
            texts=known,
            round_weights=train.round_weights,
            gradients=gradients,
            reuse=t.reuse,
            checkpointed=train.checkpointed,
            hops=hops,
        )
        loss = out.loss * (sum(map(len, answers)) / total)
        done.loss += loss.item()
        for name, hop in out.hops.items():
            tokens = sum(map(len, hops[name]))
            share = hop * (tokens / sum(map(len, t.texts.hops_of(tasks)[name])))
            done.losses[name] = done.losses.get(name, 0.0) + share.item()
            done.text_tokens += tokens
            loss = loss + share
        loss.backward()
        done.text_tokens += sum(map(len, answers))
        done.positions += out.read
        for stage in out.stages:
            done.latent_steps += sum(a.steps for a in stage.actions) if train.form != "teacher_forced" else 0
            done.positions += sum(a.positions for a in stage.actions)
            for edge, norm in stage.sent_norm.items():
                receiver = edge.rpartition("-")[2]
                done.ratios.setdefault(f"outer-{edge}", []).append(norm / t.token_norms[receiver])
    done.norms = {} if gradients is None else gradients.norms()
    return done


def record(t: LinkTraining, step: int, done: Done, stats: StepStats, times: Mapping[str, float]) -> None:
    """The step's metrics; a skipped step is told."""
    if not stats.applied:
        t.options.progress.note(f"step {step} trained nothing: the gradient of {stats.broken} is not finite")
    own = {
        "stage": t.stage,
        **({"form": t.recipe.recursivemas.train.form} if t.stage == "outer" else {}),
        "latent_steps": done.latent_steps,
        "text_tokens": done.text_tokens,
        "positions": done.positions,
        "link_norm_ratio": _mean([r for ratios in done.ratios.values() for r in ratios]),
        **{f"link_norm_ratio/{name}": _mean(ratios) for name, ratios in done.ratios.items()},
        **{f"grad_norm_round_{number}": norm for number, norm in done.norms.items()},
        **{f"{name}/loss": loss for name, loss in done.losses.items()},
    }
    metrics: dict[str, Any] = {
        "step": step,
        "policy_version": t.updates,
        "loss": done.loss,
        "grad_norm": stats.grad_norm,
        "lr": stats.lr,
        "tokens/trained": done.text_tokens if stats.applied else 0,
        "tokens/computed": done.positions,
        **times,
        **{f"recursivemas/{key}": value for key, value in own.items()},
    }
    if step in t.evals:
        metrics["eval/score"] = mean(t.evals[step])
        metrics |= {f"eval/loss_{kind}": loss for kind, loss in t.losses[step].items()}
    t.run.log_metrics(metrics)
    t.options.progress.log(step, metrics)


async def evaluate_held_out(t: LinkTraining, step: int) -> None:
    """Nothing where the recipe names no held-out set."""
    if not t.held_out:
        return
    if t.recipe.recursivemas.train.stage == "inner":
        t.measured(step, inner_held_out(t.recipe, t.loaded.system, t.held_out, t.held_out_texts))
        return
    found = await answered_held_out(
        t.recipe, t.loaded, t.decoder, t.reward, t.held_out, t.held_out_texts, t.run, step, t.options.progress
    )
    t.measured(step, found)


async def _train(
    recipe: RecursiveRecipe,
    options: VerbOptions,
    run: Run,
    interrupt: Interrupt,
    tasks: list[Task],
    held_out: list[Task],
) -> dict[str, Any]:
    placed = plan(recipe.launch, detect())
    torch.set_num_threads(placed.threads)
    loaded = load_system(recipe, allow_untrained=True)
    options.progress.note(
        f"{loaded.links.num_parameters:,} parameters in {len(loaded.links.by_name)} links, "
        + (f"{len(loaded.links.untrained)} of them new" if loaded.links.untrained else "all trained before")
    )
    lacking = sum(not task.references for task in held_out)
    if lacking:
        options.progress.note(
            f"{lacking} of {len(held_out)} held-out questions have no answer as text: no loss of them"
        )
    async with open_reward(recipe.grader) as reward, open_decoder(recipe, loaded) as decoder:
        t = _open(recipe, options, run, loaded, decoder, reward, tasks, held_out)
        refuse_long_tasks(recipe, loaded.system, tasks, t.texts, held_out=False)
        refuse_long_tasks(recipe, loaded.system, held_out, t.held_out_texts, held_out=True)
        return await run_steps(t, train_step, evaluate_held_out, interrupt)


def _open(
    recipe: RecursiveRecipe,
    options: VerbOptions,
    run: Run,
    loaded: Loaded,
    decoder: Decoder,
    reward: Any,
    tasks: list[Task],
    held_out: list[Task],
) -> LinkTraining:
    return LinkTraining(
        recipe=recipe,
        options=options,
        run=run,
        placed=plan(recipe.launch, detect()),
        loaded=loaded,
        decoder=decoder,
        reward=reward,
        tasks=tasks,
        held_out=held_out,
        texts=read_texts(recipe, loaded.system, tasks),
        held_out_texts=read_held_out_texts(recipe, loaded.system, held_out),
        token_norms=token_norms(loaded),
        sums=frozen_sums(loaded),
        links=loaded.links,
    )


def _tasks(recipe: RecursiveRecipe) -> tuple[list[Task], list[Task]]:
    """Training and held-out tasks; for the leak probe with answers drawn at random from the training ones."""
    config = recipe.recursivemas
    if recipe.data.path is None:
        raise DataError("data.path: no data set is named", "set it to a file or an embedded set (agentrl data list)")
    tasks = load_tasks(recipe.data, seed=recipe.run.seed) if benchmark_of(recipe.data) else load_tasks(recipe.data)
    held_out = held_out_tasks(recipe) if recipe.data.eval.path else []
    shared = overlap(tasks, held_out)
    if shared:
        which = f"{len(shared)} of its {len(held_out)} questions are trained on too, {shared[0][1]!r} first"
        raise DataError(
            f"data.eval.path: {which}",
            "name a held-out set without them",
        )
    target_sources(config, tasks)
    held_out_sources(config, held_out)
    if config.train.leak_probe:
        if not held_out:
            raise DataError("data.eval.path: the leak probe measures on a held-out set, and none is named", "name one")
        seed = recipe.run.seed
        return (
            with_random_answers(tasks, tasks, f"{seed}-train"),
            with_random_answers(held_out, tasks, f"{seed}-eval"),
        )
    return tasks, held_out


def _refuse_nothing_to_train(recipe: RecursiveRecipe, options: VerbOptions) -> None:
    """Raises `ConfigError` for a run whose steps would change nothing, or not what was asked for."""
    config, steps = recipe.recursivemas, recipe.run.steps
    if options.from_rollouts is not None:
        raise ConfigError("--from-rollouts: latent rollouts are recomputed, never recorded", "leave it out")
    if steps == 0:
        raise ConfigError("run.steps: 0, so nothing would be trained", "give --steps N")
    if config.train.stage == "both" and steps <= (config.train.inner_steps or 0):
        raise ConfigError(
            f"run.steps: {steps}, and all of them are among the {config.train.inner_steps} inner ones",
            "give more --steps, or lower recursivemas.train.inner_steps",
        )
    outer = config.train.stage != "inner"
    if outer and config.train.form != "teacher_forced" and config.latent_steps == 0:
        raise ConfigError("recursivemas.latent_steps: 0, so no gradient reaches an outer link", "give --latent-steps N")


def _refuse_idle_start(recipe: RecursiveRecipe) -> None:
    """Raises `ConfigError` for a start where all links are trained already, and `MissingError` for links that are not
    there."""
    config = recipe.recursivemas
    new = config.official is None
    if config.links is not None:
        folder = links_folder(config.links, recipe.run.dir)
        new = any(read_metadata(path)["training"] is None for path in folder.glob("*.safetensors"))
    if config.train.start != "random" and not new:
        given = "recursivemas.official" if config.links is None else f"recursivemas.links {config.links}"
        raise ConfigError(
            f"recursivemas.train.start: {config.train.start} has no effect: every link of {given} is trained already",
            "leave it out, or begin with new links",
        )


def _micro(t: LinkTraining, tasks: list[Task]) -> list[list[Task]]:
    train = t.recipe.recursivemas.train
    one = t.stage == "outer" and train.form == "teacher_forced"
    size = 1 if one else train.micro_batch or len(tasks)
    return [tasks[at : at + size] for at in range(0, len(tasks), size)]


def _note_norm(norms: list[float], _link: Any, _inputs: Any, output: torch.Tensor) -> None:
    norms.append(output.detach().norm(dim=-1).mean().item())


def _mean(values: list[float]) -> float | None:
    return sum(values) / len(values) if values else None
