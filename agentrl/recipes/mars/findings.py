"""What `check` says about a MARS recipe beyond its schema: prompts that fill their budget, a reward that is none."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path

from agentrl.chat.context import Chat
from agentrl.chat.format import ChatFormat
from agentrl.errors import AgentRLError
from agentrl.models import find
from agentrl.preflight.check import missing_callable
from agentrl.protocols import Tool
from agentrl.recipes.canned import canned_tools
from agentrl.recipes.mars.config import MarsRecipe
from agentrl.recipes.mars.prompts import system1_messages, system2_messages
from agentrl.recipes.mars.roles import SYSTEM1, SYSTEM2
from agentrl.recipes.mars.workflow import MIN_CAPACITY

Remark = tuple[str, str, str]
REWARDS = ("exact_match", "f1", "judge")


def findings(recipe: MarsRecipe) -> Iterator[Remark]:
    """(level, key, "cause; fix") of every remark. A model that is not on this machine is not looked into."""
    if recipe.reward not in REWARDS and (why := missing_callable(recipe.reward)):
        cause = f"{recipe.reward!r} is neither {', '.join(REWARDS)} nor a function: {why}"
        yield "error", "reward", f"{cause}; name one of them, or module:function (the current folder is searched too)"
    yield from _without_effect(recipe)
    try:
        tools = canned_tools(recipe)
    except AgentRLError:
        return  # a tool that cannot be had is told of elsewhere
    formats: dict[Path, ChatFormat] = {}
    for name in (SYSTEM2, SYSTEM1):
        yield from _opening(recipe, name, tools, formats)


def _without_effect(recipe: MarsRecipe) -> Iterator[Remark]:
    """Settings that change nothing in this recipe, where another command or recipe may want them."""
    if not recipe.trained_roles:
        cause = "no role is trained: policies are frozen or left out by mars.train, so `agentrl mars train` refuses it"
        yield "warning", "model.mode" if recipe.model else "policies", f"{cause}; set mode: full to train"
    for key in ("clip_eps_low", "clip_eps_high"):
        if recipe.algorithm.turned(key):
            cause = "cannot act: MARS takes one optimiser step per batch, where every ratio is 1"
            yield "warning", f"algorithm.{key}", f"{cause}; leave it at its default"
    if recipe.optim.warmup_steps > recipe.run.steps:
        cause = (
            f"{recipe.optim.warmup_steps} is more than run.steps ({recipe.run.steps}): the rate never reaches optim.lr"
        )
        yield "warning", "optim.warmup_steps", f"{cause}; set it to {recipe.run.steps} or less"


def _opening(
    recipe: MarsRecipe, name: str, tools: dict[str, Tool], formats: dict[Path, ChatFormat]
) -> Iterator[Remark]:
    """A role's prompt without question, purpose and results must leave room for them. `formats` are those read."""
    agent = recipe.agents[name]
    key = f"agents.{name}.max_prompt_tokens"
    try:
        folder = find(recipe.policy_models[agent.policy].name)
        if folder is None:
            return
        if folder not in formats:
            formats[folder] = ChatFormat.from_folder(folder)
        if name == SYSTEM2:
            mine = {tool: tools[tool] for tool in recipe.system2_tools}
            messages = system2_messages(agent, mine, recipe.mars.call_syntax, "")
            chat = Chat(formats[folder], enable_thinking=recipe.mars.enable_thinking)
        else:
            messages = system1_messages(agent, recipe.mars.distil_template, [""], "", "")
            chat = Chat(formats[folder], enable_thinking=False)
        used = len(chat.start(messages))
    except AgentRLError as error:
        yield "error", key, f"{error.cause}; {error.fix}"
        return
    if used + MIN_CAPACITY > agent.max_prompt_tokens:
        cause = f"{agent.max_prompt_tokens}, but prompt and examples alone take {used} tokens of this model"
        yield "error", key, f"{cause}; set it to {2 * used} or so, or shorten the prompt"
