"""What a run stands on, opened once: device plan, model folders, engine, tools, chats. Shared by all methods."""

from __future__ import annotations

from collections.abc import AsyncIterator, Iterator, Mapping, Sequence
from contextlib import asynccontextmanager, contextmanager
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, Literal

from agentrl.chat.context import Chat
from agentrl.chat.format import ChatFormat
from agentrl.config.load import dump_yaml
from agentrl.config.schema import BaseRecipe, ModelConfig
from agentrl.data import embedded_corpus
from agentrl.errors import ConfigError, MissingError
from agentrl.launch.devices import Plan, detect, plan
from agentrl.models import resolve
from agentrl.models.lora import NO_ADAPTERS, Adapter, is_adapter, read_config, refuse_other_settings
from agentrl.protocols import Engine, Tool
from agentrl.recipes.interrupt import Interrupt, interruptible
from agentrl.recipes.plugins import plugin
from agentrl.recipes.quiet import quiet_libraries
from agentrl.recipes.registry import VerbOptions
from agentrl.recipes.resuming import approve
from agentrl.rollout.gate import Gate
from agentrl.run import Run, latest_checkpoint


class NoSuchPolicyError(MissingError):
    """A checkpoint that holds other policies than the one asked for."""


@dataclass(frozen=True, slots=True)
class Session:
    """`folders`: policy -> model folder (a checkpoint's where one is named). `adapters`: those policies that share the
    model of their folder with others, and how."""

    plan: Plan
    folders: Mapping[str, Path]
    engine: Engine
    gate: Gate
    tools: Mapping[str, Tool]
    formats: Mapping[str, ChatFormat]
    adapters: Mapping[str, Adapter] = field(default_factory=dict)

    def chat(self, policy: str, enable_thinking: bool | None = None) -> Chat:
        return Chat(self.formats[policy], enable_thinking=enable_thinking)


@asynccontextmanager
async def open_session(
    recipe: BaseRecipe, *, seed: int, window: int | None = None, trains: bool = False
) -> AsyncIterator[Session]:
    """Open everything, and close the engine in every way the body can end.

    `window` is the engine's length where `engine.max_model_len` is not set; with `trains` the plan holds the trainer
    ranks, which other verbs do not start. Raises `MissingError` for what this machine lacks, and `ConfigError` for what
    does not fit together.
    """
    import torch

    placed = plan(recipe.launch, detect(), trains=trains)
    torch.set_num_threads(placed.threads)
    folders = {name: model_folder(model, name, recipe.run.dir) for name, model in recipe.policy_models.items()}
    adapters = shared_models(recipe, folders)
    gate = Gate()
    tools = make_tools(recipe)
    await refuse_open_sandbox(tools)
    dtype = next(iter(recipe.policy_models.values())).dtype
    with quiet_libraries():
        engine = await start_engine(
            recipe, folders, gate, dtype=dtype, seed=seed, window=window, device=placed.device, adapters=adapters
        )
        try:
            by_folder = {folder: ChatFormat.from_folder(folder) for folder in dict.fromkeys(folders.values())}
            formats = {name: by_folder[folder] for name, folder in folders.items()}
            yield Session(placed, folders, engine, gate, tools, formats, adapters)
        finally:
            await engine.close()


async def refuse_open_sandbox(tools: Mapping[str, Tool]) -> None:
    """Before a run, not as the observation of each call: raises `MissingError` where programs cannot be isolated."""
    if "python" in tools:
        from agentrl.rollout.tools.python import PythonTool

        tool = tools["python"]
        if isinstance(tool, PythonTool):
            await tool.sandbox.probe()


async def start_engine(
    recipe: BaseRecipe,
    folders: Mapping[str, Path],
    gate: Gate,
    *,
    dtype: Literal["float32", "bfloat16"],
    seed: int,
    window: int | None,
    device: Literal["cpu", "cuda"],
    adapters: Mapping[str, Adapter] = NO_ADAPTERS,
) -> Engine:
    """The engine of `recipe.engine`, hf on `device`; `dtype` and `window` hold where its own keys are not set."""
    from agentrl.rollout.engine import make_engine

    if recipe.engine.kind != "vllm":
        return make_engine(
            recipe.engine,
            folders,
            dtype=dtype,
            seed=seed,
            gate=gate,
            max_model_len=window,
            adapters=adapters,
            device=device,
        )
    from agentrl.rollout.vllm import VLLMEngine

    return await VLLMEngine.start(
        recipe.engine,
        folders,
        dtype=recipe.engine.dtype or dtype,
        seed=seed,
        threads=recipe.launch.threads,
        gpus=recipe.launch.gpus,
        max_model_len=recipe.engine.max_model_len or window,
        address=recipe.launch.address,
        adapters=adapters,
    )


def shared_models(recipe: BaseRecipe, folders: Mapping[str, Path]) -> dict[str, Adapter]:
    """The policies that share one model with others of their folder: LoRA policies, frozen ones that a checkpoint gives
    an adapter, and frozen ones whose model is there for those anyway.

    Raises `ConfigError` for a checkpoint's adapter of another size or scale than the recipe's.
    """
    found = {}
    for name, model in recipe.policy_models.items():
        given = weights_folder(model, name, recipe.run.dir)
        start = given if is_adapter(given) else None
        if model.adapter is not None and start is not None:
            refuse_other_settings(start, model.adapter)
        if model.mode == "lora" or start is not None:
            found[name] = Adapter(model.adapter or read_config(given)[0], start)
    shared = {folders[name] for name in found}
    frozen = [n for n, m in recipe.policy_models.items() if m.mode == "frozen" and n not in found]
    return found | {name: Adapter() for name in frozen if folders[name] in shared}


def model_folder(model: ModelConfig, policy: str, runs: str) -> Path:
    """A policy's folder: the model's own, that of `model.checkpoint`, or of the model that the adapter there adapts.

    Raises `MissingError` when it is not there, and `ConfigError` for an adapter of another model, or one that full
    weights were to begin with.
    """
    folder = weights_folder(model, policy, runs)
    if not is_adapter(folder):
        return folder
    if model.mode == "full":
        raise ConfigError(
            f"{folder} holds an adapter, but the mode of policy {policy!r} is full",
            "set mode: lora, or merge it first: agentrl export RUN DEST --merge",
        )
    base = read_config(folder)[1]
    if base != model.name and Path(base).is_absolute():  # an adapter on the full weights of another checkpoint
        if not Path(base).is_dir():
            raise MissingError(f"{folder} adapts {base}, which is gone", "name an adapter whose model is here")
        return Path(base)
    if base not in ("", model.name) and not Path(model.name).expanduser().is_dir():
        raise ConfigError(f"{folder} adapts {base}, but the recipe names {model.name}", f"set the name to {base}")
    return resolve(model.name)


def weights_folder(model: ModelConfig, policy: str, runs: str) -> Path:
    """Where a policy's weights or its adapter lie. A run saves what it trained, so a frozen policy that a checkpoint
    lacks is the model's own. Raises `MissingError` when it is not there."""
    if model.checkpoint is None:
        return resolve(model.name)
    try:
        return checkpoint_folder(model.checkpoint, policy, runs)
    except NoSuchPolicyError:
        if model.mode != "frozen":
            raise
        return resolve(model.name)


def refuse_missing_checkpoints(recipe: BaseRecipe) -> None:
    """Before a run folder is made: raises `MissingError` where a policy's `checkpoint` is not there."""
    for name, model in recipe.policy_models.items():
        if model.checkpoint is not None:
            model_folder(model, name, recipe.run.dir)


@contextmanager
def open_training(recipe: BaseRecipe, options: VerbOptions) -> Iterator[tuple[Run, Interrupt]]:
    """The run folder of a training, new or to be resumed; within the block the first Ctrl-C lets the step finish.

    Raises as `Run.create` and `approve`, and for a checkpoint that is missing.
    """
    refuse_missing_checkpoints(recipe)
    with (
        Run.create(
            recipe.run.dir,
            recipe.run.name,
            dump_yaml(recipe),
            options.resume,
            recipe.run.seed,
            stem=recipe.method,
            keep_last=recipe.run.keep_last,
            keep_best=recipe.run.keep_best,
            approve=approve(recipe, options.progress),
        ) as run,
        interruptible(options.progress.note, finish_step=True) as interrupt,
    ):
        yield run, interrupt


def open_run(recipe: BaseRecipe, verb: str) -> Run:
    """The new run folder of a verb that does not train. Raises as `Run.create` and for a checkpoint that is missing."""
    refuse_missing_checkpoints(recipe)
    config, stem = dump_yaml(recipe), f"{recipe.method}-{verb}"
    return Run.create(recipe.run.dir, recipe.run.name, config, seed=recipe.run.seed, stem=stem, can_resume=False)


def checkpoint_folder(spec: str, policy: str, runs: str) -> Path:
    """RUN, RUN@step or a model folder -> the policy's folder in it. A run is named by path or by name, and one that is
    literally called RUN@step comes first."""
    name, _, step = spec.rpartition("@")
    named: list[tuple[str, int | None]] = [(spec, None)]
    if name and step.isdecimal():
        named.append((name, int(step)))
    for run, number in ((place / base, at) for base, at in named for place in (Path(), Path(runs))):
        run = run.expanduser()
        if (run / "config.json").is_file() or is_adapter(run):
            return run
        if (run / "checkpoints").is_dir():
            found = latest_checkpoint(run, number)
            if found is None:
                wanted = "checkpoint" if number is None else f"checkpoint of step {number}"
                raise MissingError(f"{run} has no whole {wanted}", "name another step, or train first")
            return _policy_in(found, policy)
    raise MissingError(f"there is no run or model folder {spec!r}", "name a run (RUN or RUN@step) or a model folder")


def _policy_in(checkpoint: Path, policy: str) -> Path:
    folder = checkpoint / "policies" / policy
    if not folder.is_dir():
        have = sorted(p.name for p in (checkpoint / "policies").glob("*"))
        raise NoSuchPolicyError(f"{checkpoint} has no policy {policy!r}", f"it has {', '.join(have) or 'none'}")
    return folder


def make_tools(recipe: BaseRecipe) -> dict[str, Tool]:
    """The tools that the recipe sets up, by name. Raises `MissingError` for one that this version does not have."""
    tools: dict[str, Tool] = {}
    for name in ("web", "scholar"):
        if getattr(recipe.tools, name) is not None:
            raise MissingError(f"tools.{name}: this version has no such tool", "use tools.search, or --smoke")
    if recipe.tools.search is not None:
        from agentrl.rollout.tools.search import SearchTool

        tools["search"] = SearchTool(recipe.tools.search, resolve=embedded_corpus)
    if recipe.tools.python is not None:
        from agentrl.rollout.tools.python import PythonTool

        tools["python"] = PythonTool(recipe.tools.python)
    for name, target in recipe.tools.custom.items():
        tools[name] = plugin(f"tools.custom.{name}", target)
    return tools


def tool_forms(recipe: BaseRecipe) -> dict[str, tuple[str, Mapping[str, Any]]]:
    """Name -> (description, parameters) of the recipe's tools. No index is built. Raises as `make_tools` does."""
    from agentrl.rollout.tools.search import SearchTool

    others = make_tools(recipe.model_copy(update={"tools": recipe.tools.model_copy(update={"search": None})}))
    forms = {name: (tool.description, tool.parameters) for name, tool in others.items()}
    if recipe.tools.search is not None:
        forms["search"] = (SearchTool.description, SearchTool.parameters)
    return forms


def chosen(tools: Mapping[str, Tool], names: Sequence[str]) -> dict[str, Tool]:
    """The named tools, in the order of the names."""
    return {name: tools[name] for name in names}
