"""What a run stands on, opened once: device plan, model folders, engine, tools, chats. Shared by all methods."""

from __future__ import annotations

from collections.abc import AsyncIterator, Mapping, Sequence
from contextlib import asynccontextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from agentrl.chat.context import Chat
from agentrl.chat.format import ChatFormat
from agentrl.config.load import dump_yaml
from agentrl.config.schema import BaseRecipe, ModelConfig
from agentrl.data import embedded_corpus
from agentrl.errors import MissingError
from agentrl.launch.devices import Plan, detect, plan
from agentrl.models import resolve
from agentrl.protocols import Engine, Tool
from agentrl.recipes.plugins import plugin
from agentrl.recipes.quiet import quiet_libraries
from agentrl.rollout.gate import Gate
from agentrl.run import Run, latest_checkpoint


class NoSuchPolicyError(MissingError):
    """A checkpoint that holds other policies than the one asked for."""


@dataclass(frozen=True, slots=True)
class Session:
    """`folders`: policy -> model folder (a checkpoint's where one is named)."""

    plan: Plan
    folders: Mapping[str, Path]
    engine: Engine
    gate: Gate
    tools: Mapping[str, Tool]
    formats: Mapping[str, ChatFormat]

    def chat(self, policy: str, enable_thinking: bool | None = None) -> Chat:
        return Chat(self.formats[policy], enable_thinking=enable_thinking)


@asynccontextmanager
async def open_session(recipe: BaseRecipe, *, seed: int, window: int | None = None) -> AsyncIterator[Session]:
    """Open everything, and close the engine in every way the body can end.

    `window` is the engine's length where `engine.max_model_len` is not set. Raises `MissingError` for what this
    machine lacks, and `ConfigError` for what does not fit together.
    """
    import torch

    placed = plan(recipe.launch, detect())
    torch.set_num_threads(placed.threads)
    folders = {name: model_folder(model, name, recipe.run.dir) for name, model in recipe.policy_models.items()}
    gate = Gate()
    tools = make_tools(recipe)
    await _refuse_open_sandbox(tools)
    dtype = next(iter(recipe.policy_models.values())).dtype
    with quiet_libraries():
        engine = await start_engine(recipe, folders, gate, dtype=dtype, seed=seed, window=window)
        try:
            formats = {name: ChatFormat.from_folder(folder) for name, folder in folders.items()}
            yield Session(placed, folders, engine, gate, tools, formats)
        finally:
            await engine.close()


async def _refuse_open_sandbox(tools: Mapping[str, Tool]) -> None:
    """Before a run, not as the observation of each call: raises `MissingError` where programs cannot be isolated."""
    if "python" in tools:
        from agentrl.rollout.tools.python import PythonTool

        tool = tools["python"]
        if isinstance(tool, PythonTool):
            await tool.sandbox.probe()


async def start_engine(
    recipe: BaseRecipe, folders: Mapping[str, Path], gate: Gate, *, dtype: str, seed: int, window: int | None
) -> Engine:
    """The engine of `recipe.engine`; `dtype` and `window` hold where its own keys are not set."""
    from agentrl.rollout.engine import make_engine

    if recipe.engine.kind != "vllm":
        return make_engine(recipe.engine, folders, dtype=dtype, seed=seed, gate=gate, max_model_len=window)
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
    )


def model_folder(model: ModelConfig, policy: str, runs: str) -> Path:
    """A policy's folder: the model's own, or that of `model.checkpoint`. A run saves what it trained, so a frozen
    policy that a checkpoint lacks is the model's own. Raises `MissingError` when it is not there."""
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
        if (run / "config.json").is_file():
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
