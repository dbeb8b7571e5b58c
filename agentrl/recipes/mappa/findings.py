"""What `check` says about a MAPPA recipe beyond its schema: functions that are not there, prompts without room."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path

from agentrl.chat.context import Chat
from agentrl.chat.format import ChatFormat
from agentrl.errors import AgentRLError
from agentrl.models import find
from agentrl.preflight.check import missing_callable
from agentrl.recipes.mappa.config import MappaRecipe
from agentrl.recipes.mappa.prompts import opening
from agentrl.recipes.session import tool_forms
from agentrl.scoring.rules import RULES

Remark = tuple[str, str, str]
REWARDS = ("exact_match", "f1", "math", "choice", "code", "table")
MIN_ROOM = 16


def findings(recipe: MappaRecipe) -> Iterator[Remark]:
    """(level, key, "cause; fix") of every remark. A model that is not on this machine is not looked into."""
    named = (("reward", recipe.reward, REWARDS), ("coach.rules", recipe.coach.rules, tuple(RULES)))
    for key, target, known in named:
        if target is not None and target not in known and (why := missing_callable(target)):
            cause = f"{target!r} is neither {', '.join(known)} nor a function: {why}"
            yield "error", key, f"{cause}; name one of them, or module:function (the current folder is searched too)"
    credit = recipe.mappa.credit
    if credit != "process" and recipe.coach.kind in ("endpoint", "local"):
        cause = f"scores every action of training, though mappa.credit: {credit} takes nothing from its scores"
        yield "warning", "coach", f"{cause}; coach.kind: rules, with coach.rules: evidence, spares its calls"
    try:
        forms = tool_forms(recipe)
    except AgentRLError:
        return  # a tool that cannot be had is told of elsewhere
    formats: dict[Path, ChatFormat] = {}
    for name, agent in recipe.agents.items():
        key = f"agents.{name}.max_prompt_tokens"
        try:
            folder = find(recipe.policy_models[agent.policy].name)
            if folder is None:
                continue
            if folder not in formats:
                formats[folder] = ChatFormat.from_folder(folder)
            tools = {tool: forms[tool][1] for tool in agent.tools}
            empty = dict.fromkeys(recipe.received_names(name), "")
            said = opening(recipe, name, tools, question="", received=empty, files="", loop_round=1)
            used = len(Chat(formats[folder]).start(said))
        except AgentRLError as error:
            yield "error", key, f"{error.cause}; {error.fix}"
            continue
        if used + MIN_ROOM > agent.max_prompt_tokens:
            cause = f"{agent.max_prompt_tokens}, but prompt and examples alone take {used} tokens of this model"
            yield "error", key, f"{cause}; set it to {2 * used} or so, or shorten the prompt"
