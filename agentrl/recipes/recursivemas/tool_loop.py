"""Tool calls inside the decoder's answer: it writes <python>CODE</python> or <search>QUERY</search> and reads on.

    while a closing tag ends the text, calls are left and tokens are left:
        run the tool; append <result> what it said </result> to the prompt, the latents and the text so far

Each answer goes its own way: one that waits for a tool holds up no other. The token budget is the whole answer's,
results do not count in it. A result is text from the world: it writes no control token and closes no result. Latent
rollouts call nothing, and thinking calls nothing.

Source: "Recursive Multi-Agent Systems", arXiv 2604.25917, and its released code, in which a call stops the whole batch
and Python runs without a sandbox.
"""

from __future__ import annotations

import re
from collections.abc import Awaitable, Callable, Mapping, Sequence
from dataclasses import dataclass, replace

from agentrl.chat.format import ChatFormat
from agentrl.protocols import Tool, ToolResult
from agentrl.recipes.recursivemas.config import ToolLoopConfig
from agentrl.types import Action, Completion, Observation, Prompt, Request

Generate = Callable[[Request], Awaitable[Completion]]
_ARGUMENTS = {"python": "code", "search": "query"}
_FENCE = re.compile(r"\A\s*```(?:python|py)?[ \t]*\n(.*?)\n?```\s*\Z", re.DOTALL)
_THINK, _THINK_ENDS = "<think>", "</think>"


@dataclass(frozen=True, slots=True)
class Said:
    """What the decoder wrote on a question: its actions in order, and what followed each but the last. A reply of None
    is a tag in its thinking, which calls nothing. `open_call`: the last call was not run, for want of tokens."""

    actions: tuple[Action, ...]
    replies: tuple[Observation | None, ...] = ()
    open_call: bool = False

    @property
    def text(self) -> str:
        """All that it wrote itself."""
        return "".join(action.text for action in self.actions)

    @property
    def calls(self) -> tuple[Observation, ...]:
        return tuple(reply for reply in self.replies if reply is not None)

    @property
    def ended(self) -> bool:
        """Whether it came to its end, and was not cut by its budget or the window after a call."""
        return self.actions[-1].completion.finish_reason == "stop" and not self.open_call

    @property
    def num_tokens(self) -> int:
        return sum(len(action.completion.ids) for action in self.actions)


@dataclass(frozen=True, slots=True)
class _Call:
    """A tool's name and its argument; without an argument, what is wrong with the call."""

    tool: str
    argument: str | None


class ToolLoop:
    """Answers with tool calls. `tools` by the name of their tags; `window` is the model's, in positions."""

    def __init__(self, tools: Mapping[str, Tool], config: ToolLoopConfig, format_: ChatFormat, window: int) -> None:
        self._tools, self._config, self._format, self._window = tools, config, format_, window
        self._opening = format_.encode_trusted("\n<result>\n", continues=True)
        self._closing = format_.encode_trusted("\n</result>\n", continues=True)

    async def answer(self, generate: Generate, agent: str, request: Request) -> Said:
        """One answer. Raises `MissingError` where this machine cannot isolate Python, and what `generate` raises."""
        actions: list[Action] = []
        replies: list[Observation | None] = []
        prompt, left, calls = request.prompt, request.sampling.max_tokens, 0
        thinks = self._thinks(request.prompt)
        while True:
            stops = self._stops if calls < self._config.max_calls else ()
            asked = replace(
                request,
                prompt=prompt,
                sampling=replace(request.sampling, max_tokens=left, stop=(*request.sampling.stop, *stops)),
                key=replace(request.key, call=len(actions)),
            )
            completion = await generate(asked)
            actions.append(Action(agent, asked, completion, self._format.decode_completion(completion.ids)))
            left -= len(completion.ids)
            thinks = _still_thinks(thinks, actions[-1].text)
            call = _call_in(actions[-1].text, self._tools) if stops else None
            room = self._window - len(prompt) - len(completion.ids) - len(self._opening) - len(self._closing)
            if call is None or left <= 0 or room < 2:
                return Said(tuple(actions), tuple(replies), open_call=call is not None)
            ids = completion.ids
            if thinks:
                replies.append(None)
            else:
                calls += 1
                reply, result = await self._reply(call, room - min(left, room // 2))
                replies.append(reply)
                ids = (*ids, *self._opening, *result, *self._closing)
            prompt = Prompt((*prompt.segments, ids))

    @property
    def _stops(self) -> tuple[str, ...]:
        return tuple(f"</{name}>" for name in self._tools)

    def _thinks(self, prompt: Prompt) -> bool:
        """Whether the generation prompt has opened the model's thinking."""
        last = prompt.segments[-1]
        return isinstance(last, tuple) and _still_thinks(False, self._format.decode(last[-16:]))

    async def _reply(self, call: _Call, limit: int) -> tuple[Observation, tuple[int, ...]]:
        """What the call brings, in words and in at most `limit` ids."""
        if call.argument is None:
            result = ToolResult(error="malformed")
            text = f"error: there is no <{call.tool}> before </{call.tool}>"
        else:
            result = await self._tools[call.tool].call({_ARGUMENTS[call.tool]: call.argument})
            text = _told(result) or "(nothing found)"
        text, cut = _cut(text.replace("</result", "< /result"), self._config.max_result_chars)
        ids = self._format.encode_world(text)
        shown = ids[:limit]
        info = {"cut_characters": cut, "tokens": len(shown) + len(self._opening) + len(self._closing)}
        told = text if len(shown) == len(ids) else self._format.decode(shown)
        reply = Observation(
            told,
            tool=call.tool,
            error=result.error,
            items=len(result.items),
            truncated_tokens=len(ids) - len(shown),
            info=info,
        )
        return reply, shown


def _call_in(text: str, tools: Mapping[str, Tool]) -> _Call | None:
    """The call that the text ends with: generation stops at the first closing tag."""
    ends = [(text.find(f"</{name}>"), name) for name in tools]
    found = sorted(end for end in ends if end[0] >= 0)
    if not found:
        return None
    end, name = found[0]
    start = text.rfind(f"<{name}>", 0, end)
    if start < 0:
        return _Call(name, None)
    argument = text[start + len(name) + 2 : end]
    fenced = _FENCE.match(argument) if name == "python" else None
    return _Call(name, fenced[1] if fenced else argument.strip())


def _still_thinks(before: bool, text: str) -> bool:
    opened, closed = text.rfind(_THINK), text.rfind(_THINK_ENDS)
    return before if opened == closed else opened > closed


def _told(result: ToolResult) -> str:
    """The items' texts, each page below its title."""
    many = len(result.items) > 1 or any(item.header not in ("python", "error") for item in result.items)
    return "\n\n".join(f"{item.header}\n{item.text}" if many else item.text for item in result.items)


def _cut(text: str, limit: int) -> tuple[str, int]:
    """At most `limit` characters, and how many went."""
    return (text, 0) if len(text) <= limit else (text[:limit], len(text) - limit)


def counts_of_calls(saids: Sequence[Said]) -> dict[str, float]:
    """Calls, those that failed, and the tokens that results added to the prompt."""
    calls = [reply for said in saids for reply in said.calls]
    return {
        "tool_calls": len(calls),
        "tool_errors": sum(reply.error is not None for reply in calls),
        "tool_tokens": sum(int(reply.info["tokens"]) for reply in calls),
    }
