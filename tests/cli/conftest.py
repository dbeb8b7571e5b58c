"""A toy method, registered for the tests of the command line, in process and in child processes."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import pytest

TOY = """
import os, sys
from typing import Any, ClassVar, Literal
from agentrl.config.schema import BaseRecipe, Endpoint, Section
from agentrl.errors import DivergedError, EngineError
from agentrl.recipes import registry
from agentrl.types import MaskReason


class ToyConfig(Section):
    fail: str = ""
    url: str | None = None
    key_env: str | None = None
    word: str = "yes"


class ToyRecipe(BaseRecipe):
    method: Literal["toy"]
    toy: ToyConfig = ToyConfig()

    @classmethod
    def smoke(cls):
        return {"run.steps": 1, "model.name": "tiny-llama"}

    def endpoints(self):
        return () if self.toy.url is None else (Endpoint("toy.url", self.toy.url, self.toy.key_env),)

    def findings(self):
        return [("error", "toy.word", "no is refused; write yes")] if self.toy.word == "no" else []


def train(recipe, options):
    print("a library prints")
    os.system("echo a child prints")
    fault = recipe.toy.fail
    if fault == "diverged":
        raise DivergedError("the loss is NaN at step 1", "lower optim.lr")
    if fault == "engine":
        raise EngineError("the engine died", "look into logs/")
    if fault == "bug":
        raise KeyError("boom\\nsecond line")
    if fault == "interrupt":
        raise KeyboardInterrupt
    options.progress.begin(recipe.run.steps)
    for step in range(1, recipe.run.steps + 1):
        options.progress.phase("rollout", 1, 2)
        options.progress.log(step, {"loss": 0.5 / step, "reward/mean": 1.0})
    options.progress.note("saved")
    return {
        "steps": recipe.run.steps, "seed": recipe.run.seed, "name": recipe.run.name, "dir": recipe.run.dir,
        "resume": options.resume, "rise": {"value": 0.25, "items": {"a": 1}}, "origin": options.origins["run.seed"],
        "checkpoint": recipe.model.checkpoint,
    }


def infer(recipe, options):
    return {"answers": [{"question": options.question, "answer": "42 \\x1b[31mred"}]}


def preview(recipe, options):
    parts = (("You are", MaskReason.PROMPT), ("hello", None), ("page", MaskReason.WORLD))
    return {"samples": [registry.Preview("System 2", parts)]}


def register():
    verbs = {"train": "toymethod:train", "eval": "toymethod:train", "rollout": "toymethod:train",
             "infer": "toymethod:infer", "preview": "toymethod:preview"}
    return {**registry.METHODS, "toy": registry.Method("toy", "toymethod:ToyRecipe", verbs)}
"""

DRIVER = """
import sys
sys.path.insert(0, {folder!r})
import toymethod
from agentrl.recipes import registry
registry.METHODS = toymethod.register()
import agentrl.cli
from agentrl.cli.method import method_app
agentrl.cli.app.add_typer(method_app("toy", "A toy."))
try:
    agentrl.cli.app()
finally:
    if {modules!r}:
        sys.stderr.write("MODULES " + " ".join(sys.modules))
"""

RECIPE = """\
method: toy
model:
  name: tiny-llama
engine:
  kind: hf
agents:
  solver:
    max_prompt_tokens: 100
    max_response_tokens: 100
    sampling:
      max_tokens: 50
data:
  path: tasks.jsonl
rollout:
  questions_per_step: 2
  group_size: 2
launch:
  gpus: 0
run:
  steps: 2
"""


@dataclass(frozen=True, slots=True)
class Done:
    code: int
    out: str
    err: str

    @property
    def json(self) -> Any:
        return json.loads(self.out)


@pytest.fixture
def folder(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """A user's folder with a recipe `toy.yaml` and its data; the models' cache is a folder of its own."""
    monkeypatch.chdir(tmp_path)
    monkeypatch.setenv("AGENTRL_HOME", str(tmp_path / "home"))
    monkeypatch.setenv("CUDA_VISIBLE_DEVICES", "")
    (tmp_path / "toymethod.py").write_text(TOY)
    (tmp_path / "toy.yaml").write_text(RECIPE)
    rows = [{"id": str(i), "question": f"How much is {i} + 1?", "answer": str(i + 1)} for i in range(4)]
    (tmp_path / "tasks.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows))
    return tmp_path


@pytest.fixture
def driver(folder: Path) -> str:
    """The program text of the command line with the toy method."""
    return DRIVER.format(folder=str(folder), modules=False)


@pytest.fixture
def agentrl(folder: Path) -> Callable[..., Done]:
    """Runs the command line in a child process, with the toy method as `agentrl toy`."""

    def run(*args: str, modules: bool = False, **env: str) -> Done:
        command = [sys.executable, "-c", DRIVER.format(folder=str(folder), modules=modules), *args]
        done = subprocess.run(
            command, cwd=folder, capture_output=True, text=True, timeout=60, env={**os.environ, **env}, check=False
        )
        return Done(done.returncode, done.stdout, done.stderr)

    return run
