"""Who speaks when in MARS: System 2 thinks and calls tools, System 1 distils what they return (section 3).

System 2's context grows append-only and never holds raw tool output. System 1 is stateless: its input is the purpose
and one bin. All bins of a turn are distilled concurrently and merged in the order of their smallest original item.

Where the sources are silent: a call without a purpose is refused with words to the model and uses up the turn; tool
errors are text to System 2 and are not distilled; at the turn limit one last completion without tools is asked for
(`mars.final_answer`); a response budget that is used up ends the rollout without an answer, which scores 0.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace

from agentrl.chat.context import Chat, Context, Message
from agentrl.chat.tool_calls import CallError, ParseResult, ToolCall, call_grammar, parse, usage, without_thinking
from agentrl.config.schema import AgentConfig
from agentrl.protocols import Tool, ToolResult
from agentrl.recipes.mars.config import SYSTEM1, SYSTEM2, MarsConfig, MarsRecipe
from agentrl.recipes.mars.packing import TextBin, cut_to, pack_results
from agentrl.recipes.mars.prompts import (
    NO_ACTION,
    NO_RESULTS,
    NOTHING_RELEVANT,
    item_text,
    system1_messages,
    system2_messages,
    tool_schemas,
)
from agentrl.rollout.runner import Context as Rollout
from agentrl.types import (
    Action,
    Grammar,
    Observation,
    Prompt,
    Sampling,
    Task,
    Trajectory,
    TrajectoryStatus,
    Turn,
)

MIN_CAPACITY = 16
MERGE_SEPARATOR = "\n"


@dataclass(frozen=True, slots=True)
class Voice:
    """One role: its settings, its chat, and how it samples in this phase."""

    name: str
    index: int
    config: AgentConfig
    chat: Chat
    temperature: float

    def sampling(self, max_tokens: int, grammar: Grammar | None = None, stop: tuple[str, ...] = ()) -> Sampling:
        given = self.config.sampling
        return Sampling(
            temperature=self.temperature,
            top_p=given.top_p,
            top_k=given.top_k,
            max_tokens=min(given.max_tokens, max_tokens),
            stop=stop,
            stop_token_ids=self.chat.format.eos_ids,
            grammar=grammar,
        )

    def text(self, ids: Sequence[int]) -> str:
        return self.chat.format.decode_completion(ids)


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
        if not self.mars.call_grammar:
            names = ("tool_call",) if self.mars.call_syntax == "hermes" else tuple(tools)
            self.stop = tuple(f"</{name}>" for name in (*names, "answer"))
        self._separator = len(self.system1.chat.format.encode_trusted("\n\n", continues=True))

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
            parsed = parse(action.text, w.mars.call_syntax, w.schemas if calls_allowed else {})
            over = self._over(action, parsed, calls_allowed)
            if over is not None:
                self._record(Turn(action, None, turn, 0))
                return self._end(*over)
            await self._observe(turn, action, parsed, final=turn + 1 == last)
            if self.remaining < 1:
                return self._end(None, "truncated", "the response budget is used up")
        return self._end(None, "turn_limit", f"no answer within {last} turns")

    async def _think(self, turn: int, calls_allowed: bool) -> Action:
        w = self.w
        sampling = w.system2.sampling(self.remaining, w.grammar(calls_allowed), w.stop)
        request = self.ctx.request(
            w.system2.config.policy, w.system2.index, Prompt.of(self.context.ids), sampling, turn
        )
        return await self.ctx.act(SYSTEM2, request, w.system2.text)

    def _over(
        self, action: Action, parsed: ParseResult, calls_allowed: bool
    ) -> tuple[str | None, TrajectoryStatus, str | None] | None:
        """How the rollout ends here, or None when the world answers first."""
        if parsed.answer is not None and not parsed.calls:
            return parsed.answer, "ok", None
        if not calls_allowed:
            return None, "turn_limit", f"no answer within {self.w.system2.config.max_turns} turns"
        if action.completion.finish_reason == "length" and not parsed.calls and self.remaining < 1:
            return None, "truncated", "the response budget is used up"
        return None

    async def _observe(self, turn: int, action: Action, parsed: ParseResult, final: bool) -> None:
        """Answer System 2's calls and errors in their order, append the answers, and record the turn."""
        attempts: list[ToolCall | CallError] = sorted((*parsed.calls, *parsed.errors), key=lambda a: a.index)
        replies: list[Reply] = []
        try:
            if attempts:
                replies = await self.ctx.gather(*(self._answer(turn, attempt) for attempt in attempts))
            else:
                replies = [self._no_action()]
            if final and self.w.mars.final_answer and self.w.mars.answer_now:
                replies.append(Reply(self.w.mars.answer_now, Observation(self.w.mars.answer_now)))
            texts = self._fit([reply.text for reply in replies])
            delta = self.context.observation_delta(texts, self.w.mars.observation_role)
            self.context = self.context.append(delta)
        finally:
            self._record(Turn(action, _joined(replies), turn, 0), *(t for r in replies for t in r.distilled))

    def _record(self, turn: Turn, *distilled: Turn) -> None:
        parent = len(self.turns)
        placed = [turn, *(replace(d, parent=parent) for d in distilled)]
        for item in sorted(placed, key=lambda t: t.order):
            self.turns.append(item)
            self.ctx.record(item)

    def _no_action(self) -> Reply:
        self.counts["malformed_calls"] += 1
        form = usage(self.w.mars.call_syntax, self.w.schemas)
        text = NO_ACTION.format(usage=form)
        return Reply(text, Observation(text, error="no_action"))

    async def _answer(self, turn: int, attempt: ToolCall | CallError) -> Reply:
        if isinstance(attempt, CallError):
            self.counts["malformed_calls"] += 1
            self.counts[f"malformed/{attempt.kind}"] += 1
            return Reply(attempt.message, Observation(attempt.message, tool=attempt.name, error=attempt.kind))
        self.counts[f"calls/{attempt.name}"] += 1
        result = await self.ctx.call_tool(attempt.name, attempt.arguments)
        return await self._distil(turn, attempt, result)

    async def _distil(self, turn: int, call: ToolCall, result: ToolResult) -> Reply:
        """Raw results -> bins -> System 1, one call per bin, all at once -> the merged digest."""
        w = self.w
        about = Observation("", tool=call.name, purpose=call.purpose, error=result.error, items=len(result.items))
        if not result.items:
            return Reply(NO_RESULTS, replace(about, text=NO_RESULTS))
        texts = [item_text(w.mars.item_template, i, item.header, item.text) for i, item in enumerate(result.items, 1)]
        if result.error is not None or w.mars.system1 == "off" or self._short(texts):
            raw = "\n\n".join(item.text for item in result.items) if result.error else "\n\n".join(texts)
            return Reply(raw, replace(about, text=raw))
        capacity = w.system1.config.max_prompt_tokens - len(w.system1_prompt([""], call.purpose, self.task.question))
        if capacity < MIN_CAPACITY:
            self.counts["malformed_calls"] += 1
            text = "The purpose is too long to be worked with. State it in one sentence."
            return Reply(text, replace(about, text=text, error="purpose_too_long"))
        format_ = w.system1.chat.format
        bins = pack_results(texts, capacity, self.w._separator, format_.encode_world, format_.decode, w.mars.packing)
        self.counts["bins"] += len(bins)
        self.counts["bin_tokens"] += sum(b.used for b in bins)
        self.counts["bin_capacity"] += capacity * len(bins)
        cut = sum(b.truncated_tokens for b in bins)
        self.counts["truncated_tokens"] += cut
        distilled = await self.ctx.gather(*(self._read(turn, call, place, b) for place, b in enumerate(bins)))
        text = merge([turn_.action.text for turn_ in distilled])
        return Reply(text, replace(about, text=text, truncated_tokens=cut), tuple(distilled))

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

    def _short(self, texts: Sequence[str]) -> bool:
        limit = self.w.mars.bypass_tokens
        encode = self.w.system1.chat.format.encode_world
        return limit > 0 and sum(len(encode(text)) for text in texts) <= limit

    def _fit(self, texts: list[str]) -> list[str]:
        """Cut the answers so that the turn's frame and `answer_reserve` tokens stay free; counts what was cut."""
        format_ = self.w.system2.chat.format
        room = self.remaining - self.w.mars.answer_reserve - len(self._frame([""] * len(texts)))
        fitted = []
        for text in texts:
            kept, cut = cut_to(text, max(0, room), format_.encode_world, format_.decode)
            if cut:
                self.counts["merge_cap_hits"] += 1
                self.counts["merge_cut_tokens"] += cut
            fitted.append(kept)
            room -= len(format_.encode_world(kept))
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
