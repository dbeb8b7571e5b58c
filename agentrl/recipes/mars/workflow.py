"""Who speaks when in MARS: System 2 thinks and calls tools, System 1 distils what they return (section 3).

System 2's context grows append-only and never holds raw tool output. System 1 is stateless: its input is the purpose
and one bin. All bins of a turn are distilled concurrently and merged in the order of their smallest original item.

Where the sources are silent (spec 3.2 to 3.5, 13):
- a call without a purpose, or with one that leaves System 1 no room, is refused unexecuted, with words to the model,
  and uses up the turn; an answer beside calls waits, beside faulty ones it stands;
- a tool's error is text to System 2 as it is up to `mars.error_tokens`, and distilled beyond; results without items are
  answered in words and make no System 1 sample; short results may skip System 1 (`mars.bypass_tokens`);
- System 1 sees the purpose and the bin alone (`mars.include_question`) and does not think (its chat is opened so);
- digests are joined in the order of each bin's smallest item, "nothing relevant" dropped but for one line; what does
  not fit beside `mars.answer_reserve` is cut, the longest first, and counted;
- at the turn limit one last completion without tools is asked for (`mars.final_answer`); without it the last turn's
  calls are not executed, as nobody could read the results; a used up response budget ends the rollout the same way,
  without an answer, which scores 0.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace

from agentrl.chat.context import Chat, Context, Message
from agentrl.chat.tool_calls import CallError, ParseResult, ToolCall, call_grammar, parse, usage, without_thinking
from agentrl.protocols import Tool, ToolResult
from agentrl.recipes.mars.config import MarsConfig, MarsRecipe
from agentrl.recipes.mars.packing import TextBin, cut_to, pack_results
from agentrl.recipes.mars.prompts import (
    NO_RESULTS,
    NOTHING_RELEVANT,
    item_text,
    no_action,
    system1_messages,
    system2_messages,
    tool_schemas,
)
from agentrl.recipes.mars.roles import SYSTEM1, SYSTEM2
from agentrl.recipes.voice import Voice
from agentrl.rollout.runner import Context as Rollout
from agentrl.types import (
    Action,
    Grammar,
    Observation,
    Prompt,
    Task,
    Trajectory,
    TrajectoryStatus,
    Turn,
)

MIN_CAPACITY = 16
PURPOSE_TOO_LONG = "The purpose is too long to be worked with. State it in one sentence."
MERGE_SEPARATOR = "\n"


@dataclass(frozen=True, slots=True)
class Reply:
    """What one call, or one error, puts into System 2's context, and what it cost."""

    text: str
    observation: Observation
    distilled: tuple[Turn, ...] = ()


class MarsWorkflow:
    """The loop of section 3.1 as a coroutine. One instance serves all rollouts of a phase."""

    def __init__(
        self, recipe: MarsRecipe, chats: Mapping[str, Chat], tools: Mapping[str, Tool], temperature: float | None = None
    ) -> None:
        """`chats` by agent; `tools` those System 2 may call; `temperature` replaces both roles' own (evaluation)."""
        self.mars: MarsConfig = recipe.mars
        self.tools = tools
        self.schemas = tool_schemas(tools)

        def voice(name: str, index: int) -> Voice:
            own = recipe.agents[name].sampling.temperature
            return Voice(name, index, recipe.agents[name], chats[name], own if temperature is None else temperature)

        self.system2, self.system1 = voice(SYSTEM2, 0), voice(SYSTEM1, 1)
        # Under a grammar the completion ends with the end token; else it may stop at the end of a call.
        self.stop: tuple[str, ...] = ()
        if self.mars.stop_at_tags and not self.mars.call_grammar:
            names = ("tool_call",) if self.mars.call_syntax == "hermes" else tuple(tools)
            self.stop = tuple(f"</{name}>" for name in (*names, "answer"))
        self.separator = len(self.system1.chat.format.encode_trusted("\n\n", continues=True))

    async def run(self, task: Task, ctx: Rollout) -> Trajectory:
        """One rollout. Raises what the engine raises; a tool's fault is an observation."""
        return await _Rollout(self, task, ctx).run()

    def grammar(self, tools: bool) -> Grammar | None:
        """The grammar of a System 2 completion, with or without calls; None when sampling is free."""
        if not self.mars.call_grammar:
            return None
        return call_grammar(
            "tag",
            self.schemas if tools else {},
            max_query_chars=self.mars.max_query_chars,
            max_purpose_chars=self.mars.max_purpose_chars,
            max_answer_chars=self.mars.max_answer_chars,
        )

    def capacity(self, purpose: str, question: str) -> int:
        """Tokens that one bin may hold beside the template and the purpose; below 1 when these leave no room."""
        return self.system1.config.max_prompt_tokens - len(self.system1_prompt([""], purpose, question))

    def system1_prompt(self, texts: Sequence[str], purpose: str, question: str) -> tuple[int, ...]:
        """Ids of System 1's prompt: f(purpose, bin), and the question where the recipe shows it."""
        messages = system1_messages(self.system1.config, self.mars.distil_template, texts, purpose, question)
        return self.system1.chat.start(messages)


class _Rollout:
    """The state of one rollout: System 2's context, its budget, and the turns so far."""

    def __init__(self, workflow: MarsWorkflow, task: Task, ctx: Rollout) -> None:
        self.w, self.task, self.ctx = workflow, task, ctx
        self.turns: list[Turn] = []
        self.counts: Counter[str] = Counter()
        self.context: Context
        self.prompt_tokens = 0

    @property
    def remaining(self) -> int:
        """Response tokens left, environment text included."""
        return self.w.system2.config.max_response_tokens - (len(self.context.ids) - self.prompt_tokens)

    async def run(self) -> Trajectory:
        w = self.w
        messages: list[Message] = system2_messages(w.system2.config, w.tools, w.mars.call_syntax, self.task.question)
        self.context = w.system2.chat.open(messages)
        self.prompt_tokens = len(self.context.ids)
        if self.prompt_tokens > w.system2.config.max_prompt_tokens:
            self.counts["prompt_too_long"] += 1
            limit = w.system2.config.max_prompt_tokens
            return self._end(None, "failed", f"the prompt has {self.prompt_tokens} tokens, more than {limit}")
        last = w.system2.config.max_turns
        for turn in range(last + int(w.mars.final_answer)):
            calls_allowed = turn < last
            action = await self._think(turn, calls_allowed)
            self.context = self.context.after_completion(action.completion.ids)
            parsed = parse(w.system2.said(action), w.mars.call_syntax, w.schemas if calls_allowed else {})
            if calls_allowed:
                self._count_faults(parsed)
            over = self._over(turn, parsed)
            if over is not None:
                self._record(Turn(action, None, turn, 0))
                return self._end(*over)
            await self._observe(turn, action, parsed)
        raise AssertionError("the last turn always ends the rollout")

    def _count_faults(self, parsed: ParseResult) -> None:
        faults: list[str] = [error.kind for error in parsed.errors]
        if not faults and not parsed.calls and parsed.answer is None:
            faults = ["no_action"]
        for kind in faults:
            self.counts["malformed_calls"] += 1
            self.counts[f"malformed/{kind}"] += 1

    async def _think(self, turn: int, calls_allowed: bool) -> Action:
        w = self.w
        sampling = w.system2.sampling(self.remaining, w.grammar(calls_allowed), w.stop)
        request = self.ctx.request(
            w.system2.config.policy, w.system2.index, Prompt.of(self.context.ids), sampling, turn
        )
        return await self.ctx.act(SYSTEM2, request, w.system2.text)

    def _over(self, turn: int, parsed: ParseResult) -> tuple[str | None, TrajectoryStatus, str | None] | None:
        """How the rollout ends after this completion, or None when the world answers and System 2 goes on."""
        if parsed.answer is not None and not parsed.calls:
            return parsed.answer, "ok", None
        last = self.w.system2.config.max_turns
        if self._room(parsed, turn) < 1:
            return None, "truncated", "the response budget is used up"
        if turn + 1 >= last + int(self.w.mars.final_answer):
            return None, "turn_limit", f"no answer within {last} turns"
        return None

    def _reminder(self, turn: int) -> str:
        """What the environment adds to the last turn's answers, if anything."""
        due = self.w.mars.final_answer and turn + 1 == self.w.system2.config.max_turns
        return self.w.mars.answer_now if due else ""

    def _room(self, parsed: ParseResult, turn: int) -> int:
        """Response tokens left for answers and what follows, once the frame of the world's turn is taken off."""
        num_texts = max(1, len(parsed.calls) + len(parsed.errors)) + bool(self._reminder(turn))
        return self.remaining - len(self._frame([""] * num_texts))

    async def _observe(self, turn: int, action: Action, parsed: ParseResult) -> None:
        """Answer System 2's calls and errors in their order, append the answers, and record the turn."""
        attempts: list[ToolCall | CallError] = sorted((*parsed.calls, *parsed.errors), key=lambda a: a.index)
        replies: list[Reply] = []
        try:
            if attempts:
                replies = await self.ctx.gather(*(self._answer(turn, attempt) for attempt in attempts))
            else:
                replies = [self._no_action()]
            reminder = self._reminder(turn)
            if reminder:
                replies.append(Reply(reminder, Observation(reminder)))
            texts = self._fit([reply.text for reply in replies], self._room(parsed, turn))
            replies = [
                replace(r, observation=replace(r.observation, text=text))
                for r, text in zip(replies, texts, strict=True)
            ]
            self.context = self.context.append(self._frame(texts))
        finally:
            self._record(Turn(action, _joined(replies), turn, 0), *(t for r in replies for t in r.distilled))

    def _record(self, turn: Turn, *distilled: Turn) -> None:
        parent = len(self.turns)
        placed = [turn, *(replace(d, parent=parent) for d in distilled)]
        for item in sorted(placed, key=lambda t: t.order):
            self.turns.append(item)
            self.ctx.record(item)

    def _no_action(self) -> Reply:
        text = no_action(usage(self.w.mars.call_syntax, self.w.schemas))
        return Reply(text, Observation(text, error="no_action"))

    async def _answer(self, turn: int, attempt: ToolCall | CallError) -> Reply:
        if isinstance(attempt, CallError):
            return Reply(attempt.message, Observation(attempt.message, tool=attempt.name, error=attempt.kind))
        if self.w.mars.system1 == "on" and self.w.capacity(attempt.purpose, self.task.question) < MIN_CAPACITY:
            self.counts["malformed_calls"] += 1
            self.counts["malformed/purpose_too_long"] += 1
            about = Observation(PURPOSE_TOO_LONG, attempt.name, attempt.purpose, "purpose_too_long")
            return Reply(PURPOSE_TOO_LONG, about)
        self.counts[f"calls/{attempt.name}"] += 1
        result = await self.ctx.call_tool(attempt.name, attempt.arguments)
        raw = self._undistilled(result)
        if raw is None:
            return await self._distil(turn, attempt, result)
        about = Observation(raw, attempt.name, attempt.purpose, result.error, len(result.items))
        return Reply(raw, about)

    def _undistilled(self, result: ToolResult) -> str | None:
        """What System 2 is told without System 1's help, None where the results are distilled."""
        mars = self.w.mars
        if not result.items:
            return NO_RESULTS if result.error is None else f"The tool failed: {result.error}"
        if result.error is not None:
            raw, limit = "\n\n".join(item.text for item in result.items), mars.error_tokens
        else:
            raw, limit = "\n\n".join(self._items(result)), mars.bypass_tokens
            if limit == 0 and mars.system1 == "on":
                return None
        short = mars.system1 == "off" or len(self.w.system1.chat.format.encode_world(raw)) <= limit
        return raw if short else None

    def _items(self, result: ToolResult) -> list[str]:
        template = self.w.mars.item_template
        return [item_text(template, i, item.header, item.text) for i, item in enumerate(result.items, 1)]

    async def _distil(self, turn: int, call: ToolCall, result: ToolResult) -> Reply:
        """Raw results -> bins -> System 1, one call per bin, all at once -> the merged digest."""
        w, format_ = self.w, self.w.system1.chat.format
        capacity = w.capacity(call.purpose, self.task.question)
        encode, decode = format_.encode_world, format_.decode
        bins = pack_results(self._items(result), capacity, w.separator, encode, decode, w.mars.packing)
        cut = sum(b.truncated_tokens for b in bins)
        self.counts["distilled_calls"] += 1
        self.counts["bins"] += len(bins)
        self.counts["bin_tokens"] += sum(b.used for b in bins)
        self.counts["bin_capacity"] += capacity * len(bins)
        self.counts["truncated_tokens"] += cut
        distilled = await self.ctx.gather(*(self._read(turn, call, place, b) for place, b in enumerate(bins)))
        text = merge([w.system1.said(one.action) for one in distilled])
        about = Observation(text, call.name, call.purpose, result.error, len(result.items), cut)
        return Reply(text, about, tuple(distilled))

    async def _read(self, turn: int, call: ToolCall, place: int, bin_: TextBin) -> Turn:
        """System 1 on one bin."""
        w = self.w
        prompt = w.system1_prompt(bin_.texts, call.purpose, self.task.question)
        sampling = w.system1.sampling(w.system1.config.max_response_tokens)
        request = self.ctx.request(
            w.system1.config.policy, w.system1.index, Prompt.of(prompt), sampling, turn, call.index, place
        )
        action = await self.ctx.act(SYSTEM1, request, w.system1.text)
        return Turn(action, None, turn, 1, call.index, place)

    def _fit(self, texts: list[str], room: int) -> list[str]:
        """Cut the answers so that `answer_reserve` of the `room` tokens stay free; counts what was cut.

        Short answers keep their whole text, and the long ones share what is left evenly: the reply to one call does
        not swallow those to the others, or the reminder.
        """
        format_ = self.w.system2.chat.format
        lengths = [len(format_.encode_world(text)) for text in texts]
        room = max(0, room - self.w.mars.answer_reserve)
        fitted = list(texts)
        for place, i in enumerate(sorted(range(len(texts)), key=lambda i: (lengths[i], i))):
            share = room // (len(texts) - place)
            cut = 0
            if lengths[i] > share:
                fitted[i], cut = cut_to(texts[i], share, format_.encode_world, format_.decode)
                self.counts["merge_cap_hits"] += 1
                self.counts["merge_cut_tokens"] += cut
            room -= lengths[i] - cut
        return fitted

    def _frame(self, texts: Sequence[str]) -> tuple[int, ...]:
        return self.context.observation_delta(texts, self.w.mars.observation_role)

    def _end(self, answer: str | None, status: TrajectoryStatus, reason: str | None) -> Trajectory:
        self.counts["turns"] = sum(turn.agent_index == 0 for turn in self.turns)
        self.counts["s1_calls"] = sum(turn.agent_index == 1 for turn in self.turns)
        return Trajectory(
            self.ctx.trajectory_id,
            self.task,
            self.ctx.job.g,
            tuple(self.turns),
            answer,
            status,
            reason,
            dict(self.counts),
        )


def merge(outputs: Sequence[str]) -> str:
    """The digest of a call: outputs in bin order, empty and irrelevant ones dropped, at least one line kept."""
    texts = [without_thinking(output).strip() for output in outputs]
    kept = [text for text in texts if text and text.lower().rstrip(".") != NOTHING_RELEVANT]
    return MERGE_SEPARATOR.join(kept) if kept else NOTHING_RELEVANT


def _joined(replies: Sequence[Reply]) -> Observation | None:
    """One observation for the turn. A turn with several calls lists them; single ones keep their fields."""
    if not replies:
        return None
    if len(replies) == 1:
        return replies[0].observation
    observations = [reply.observation for reply in replies]
    errors = [o.error for o in observations if o.error]
    return Observation(
        text="\n\n".join(o.text for o in observations),
        tool=", ".join(o.tool for o in observations if o.tool) or None,
        purpose="\n".join(o.purpose for o in observations if o.purpose) or None,
        error=", ".join(errors) or None,
        items=sum(o.items for o in observations),
        truncated_tokens=sum(o.truncated_tokens for o in observations),
    )
