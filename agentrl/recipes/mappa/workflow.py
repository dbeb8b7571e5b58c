"""Who speaks when in a team, as its recipe declares it: stages in order, agents of a stage at once, loops to a limit.

An agent's visit is one context that grows append-only: its opening, its completions, what the environment answered.
A completion may call tools (`<tool_call>` with JSON, or else fenced Python blocks, outside thinking); no call ends the
visit, as does the turn limit, whose calls still run because the next agents and the coach see what came of them. A
faulty call is answered in words and uses up the turn. What an agent hands on is what it sampled in this trajectory
(M-20). In a loop every round is a visit of its own.

Coaches hear of an action once its tools are done (M-03), through `watch`, and nobody here waits for them.
"""

from __future__ import annotations

import re
from collections import Counter
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field

from agentrl.chat.context import Chat, Context
from agentrl.chat.tool_calls import CallError, ParseResult, ToolCall, parse, without_thinking
from agentrl.protocols import Tool
from agentrl.recipes.mappa.config import MappaRecipe, ReceiveConfig
from agentrl.recipes.mappa.prompts import opening
from agentrl.recipes.mappa.team import Stage
from agentrl.recipes.mappa.workspace import Desk, Workspace
from agentrl.recipes.voice import Voice
from agentrl.rollout.runner import Context as Rollout
from agentrl.scoring.ledger import FileLedger, shown
from agentrl.scoring.quoting import cut_middle
from agentrl.types import Observation, Prompt, Task, Trajectory, Turn

_PYTHON_BLOCK = re.compile(r"^```(?:python|py)[ \t]*\n(.*?)^```[ \t]*$", re.DOTALL | re.MULTILINE)
_TOOL_TIMEOUT_S = 3_600.0  # the sandbox keeps its own limit; waiting for a place in it is no fault of the program
NO_OUTPUT = "(no output)"


class VisitError(Exception):
    """An agent that cannot act. The trajectory fails with this reason and keeps what was done before."""


@dataclass(frozen=True, slots=True)
class Acted:
    """An action with everything a coach may be shown of it. `ledger` is the files' state after its tools, `submission`
    the text of `mappa.answer_file` as it then stood."""

    trajectory_id: str
    task: Task
    turn: Turn
    observed: str
    ledger: FileLedger
    submission: str | None = None


Watch = Callable[[Acted], None]


class TeamWorkflow:
    """The declared team as a coroutine. One instance serves all rollouts of a phase."""

    def __init__(
        self,
        recipe: MappaRecipe,
        chats: Mapping[str, Chat],
        tools: Mapping[str, Tool],
        temperature: float | None = None,
        watch: Watch | None = None,
    ) -> None:
        """`chats` by agent; `tools` all that are set up; `temperature` replaces every agent's own (evaluation)."""
        self.recipe = recipe
        self.team = recipe.team
        self.tools = tools
        self.watch = watch
        self.voices = {
            name: Voice(name, i, agent, chats[name], agent.sampling.temperature if temperature is None else temperature)
            for i, (name, agent) in enumerate(recipe.agents.items())
        }
        self.schemas = {
            name: {tool: tools[tool].parameters for tool in agent.tools} for name, agent in recipe.agents.items()
        }

    async def run(self, task: Task, ctx: Rollout) -> Trajectory:
        """One rollout. Raises what the engine raises, and `VisitError`; a tool's fault is an observation."""
        return await _Rollout(self, task, ctx).run()


@dataclass(slots=True)
class _Said:
    """What an agent said and heard on one visit."""

    outputs: list[str] = field(default_factory=list)
    feedback: list[str | None] = field(default_factory=list)


class _Rollout:
    """The state of one rollout: the workspace, everything said so far, and the turns."""

    def __init__(self, workflow: TeamWorkflow, task: Task, ctx: Rollout) -> None:
        self.w, self.task, self.ctx = workflow, task, ctx
        self.space = Workspace.for_task(workflow.recipe, task)
        self.visits: dict[str, list[_Said]] = {name: [] for name in workflow.recipe.agents}
        self.turns: list[Turn] = []
        self.counts: Counter[str] = Counter()
        self.next_turn = 0

    async def run(self) -> Trajectory:
        team, place = self.w.team, 0
        while place < len(team.stages):
            loop = team.loop_at(place)
            last = place if loop is None else loop.last
            for number in range(1, 2 if loop is None else loop.max_rounds + 1):
                for stage in team.stages[place : last + 1]:
                    await self._stage(stage, number)
                if loop is not None:
                    self.counts["loop_rounds"] += 1
                    if loop.until is not None and loop.until in self._last_output(team.stages[last].agents[-1]):
                        break
            place = last + 1
        turns = tuple(sorted(self.turns, key=lambda turn: turn.order))
        return Trajectory(
            self.ctx.trajectory_id, self.task, self.ctx.job.g, turns, self._answer(), "ok", None, dict(self.counts)
        )

    async def _stage(self, stage: Stage, loop_round: int) -> None:
        """The agents of a stage, at once. Each sees the workspace as it stood before the stage."""
        visits = [_Visit(self, name, loop_round, self.next_turn) for name in stage.agents]
        if len(visits) == 1:
            await visits[0].run()
        else:
            await self.ctx.gather(*(visit.run() for visit in visits))
        for visit in visits:
            self.space.clear(visit.desk)
            self.visits[visit.name].append(visit.said)
        self.next_turn += max(len(visit.said.outputs) for visit in visits)

    def received(self, got: ReceiveConfig) -> str:
        """What one agent hands over: empty when it has not acted yet."""
        visits = self.visits[got.agent]
        pairs: list[tuple[str | None, str | None]] = []
        for said in visits if got.what == "all" else visits[-1:]:
            spoken = [output if got.thinking else without_thinking(output) for output in said.outputs]
            if got.what == "all":
                pairs += zip(spoken, said.feedback, strict=True)
            else:
                heard = [feedback for feedback in said.feedback if feedback is not None]
                pairs.append((spoken[-1], heard[-1] if heard else None))
        texts = [
            text
            for output, feedback in pairs
            for text in (output if got.what != "feedback" else None, feedback if got.what != "output" else None)
        ]
        text = "\n\n".join(part.strip() for part in texts if part and part.strip())
        return text if got.max_chars is None else cut_middle(text, got.max_chars)

    def keep(self, turn: Turn, observed: str, desk: Desk) -> None:
        self.turns.append(turn)
        self.ctx.record(turn)
        if self.w.watch is not None:
            submission = self._file(desk.files)
            self.w.watch(Acted(self.ctx.trajectory_id, self.task, turn, observed, desk.ledger, submission))

    def _file(self, files: Mapping[str, bytes]) -> str | None:
        """The text of `mappa.answer_file` among some files."""
        name = self.w.recipe.mappa.answer_file
        data = None if name is None else files.get(name)
        return None if data is None else data.decode("utf-8", errors="replace")

    def _last_output(self, agent: str) -> str:
        return without_thinking(self.visits[agent][-1].outputs[-1])

    def _answer(self) -> str | None:
        recipe = self.w.recipe
        if recipe.mappa.answer_file is not None:
            return self._file(self.space.files)
        text = self.visits[recipe.answers][-1].outputs[-1]
        tagged = parse(text, "hermes", {}, require_purpose=False).answer
        return tagged or without_thinking(text).strip() or None


class _Visit:
    """One agent's stretch of turns in one context."""

    def __init__(self, rollout: _Rollout, name: str, loop_round: int, first_turn: int) -> None:
        self.r, self.name, self.loop_round, self.first_turn = rollout, name, loop_round, first_turn
        self.voice = rollout.w.voices[name]
        self.agent = rollout.w.recipe.agents[name]
        self.schemas = rollout.w.schemas[name]
        self.desk = rollout.space.desk(name, self.agent)
        self.said = _Said()

    async def run(self) -> None:
        context = self._open()
        opened = len(context.ids)
        for k in range(self.agent.max_turns):
            room = self.agent.max_response_tokens - (len(context.ids) - opened)
            request = self.r.ctx.request(
                self.agent.policy,
                self.voice.index,
                Prompt.of(context.ids),
                self.voice.sampling(room),
                self.first_turn + k,
            )
            observed = self.voice.chat.format.decode(context.ids)
            action = await self.r.ctx.act(self.name, request, self.voice.text)
            text = self.voice.said(action)
            context = context.after_completion(action.completion.ids)
            replies = await self._answer_calls(text)
            goes_on = bool(replies) and k + 1 < self.agent.max_turns
            if goes_on:
                room = self.agent.max_response_tokens - (len(context.ids) - opened)
                replies, delta = self._fit(context, replies, room)
                goes_on = delta is not None
            observation = _joined(replies)
            turn = Turn(action, observation, self.first_turn + k, self.voice.index)
            self.said.outputs.append(text)
            self.said.feedback.append(None if observation is None else observation.text)
            self.r.keep(turn, observed, self.desk)
            if not goes_on:
                return
            context = context.append(delta or ())

    def _open(self) -> Context:
        recipe = self.r.w.recipe
        received: dict[str, str] = {}
        for got in recipe.receives(self.name):
            text = self.r.received(got)
            received[got.agent] = "\n\n".join(part for part in (received.get(got.agent), text) if part)
        messages = opening(
            recipe,
            self.name,
            self.schemas,
            question=self.r.task.question,
            received=received,
            files=shown(self.desk.ledger.view(self.name)),
            loop_round=self.loop_round,
        )
        context = self.voice.chat.open(messages)
        if len(context.ids) > self.agent.max_prompt_tokens:
            raise VisitError(
                f"agents.{self.name}: the prompt has {len(context.ids)} tokens, more than max_prompt_tokens "
                f"({self.agent.max_prompt_tokens}); set receives.max_chars"
            )
        return context

    async def _answer_calls(self, text: str) -> list[Observation]:
        """Execute the calls of a completion one after another, in its order; faulty ones are answered in words."""
        parsed = parse(text, "hermes", self.schemas, require_purpose=False)
        attempts: Sequence[ToolCall | CallError] = sorted((*parsed.calls, *_faults(parsed)), key=lambda a: a.index)
        if not attempts and "python" in self.schemas:
            blocks = _PYTHON_BLOCK.findall(without_thinking(text))
            attempts = [ToolCall("python", {"code": code}, "", i) for i, code in enumerate(blocks)]
        return [await self._execute(attempt) for attempt in attempts]

    async def _execute(self, attempt: ToolCall | CallError) -> Observation:
        if isinstance(attempt, CallError):
            self.r.counts["malformed_calls"] += 1
            self.r.counts[f"malformed/{attempt.kind}"] += 1
            return Observation(attempt.message, error=attempt.kind)
        tool = self.desk.bound(self.r.w.tools.get(attempt.name))
        result = await self.r.ctx.call_tool(attempt.name, attempt.arguments, timeout_s=_TOOL_TIMEOUT_S, tool=tool)
        text = "\n\n".join(item.text for item in result.items) or NO_OUTPUT
        return Observation(text, attempt.name, None, result.error, len(result.items))

    def _fit(
        self, context: Context, replies: list[Observation], room: int
    ) -> tuple[list[Observation], tuple[int, ...] | None]:
        """The replies cut to half of the `room` tokens, and their ids; None for ids where no room is left to speak."""
        format_ = self.voice.chat.format
        frame = len(context.observation_delta([""] * len(replies)))
        share = (room - frame) // 2 // len(replies)
        if share < 1:
            self.r.counts["response_budget_hits"] += 1
            return replies, None
        fitted = []
        for reply in replies:
            text, length = reply.text, len(format_.encode_world(reply.text))
            before = length
            while length > share:
                text = cut_middle(reply.text, max(0, int(len(text) * share / length * 0.9) - 40))
                shorter = len(format_.encode_world(text))
                if shorter >= length:
                    text, shorter = "", 0
                length = shorter
            fitted.append(_with_text(reply, text, before - length) if before != length else reply)
        return fitted, context.observation_delta([reply.text for reply in fitted])


def _faults(parsed: ParseResult) -> tuple[CallError, ...]:
    """Faulty calls. An answer that is not closed or empty is no call: it ends the visit as it stands."""
    return tuple(error for error in parsed.errors if error.name != "answer" and error.kind != "empty_answer")


def _with_text(reply: Observation, text: str, cut: int) -> Observation:
    return Observation(text, reply.tool, reply.purpose, reply.error, reply.items, cut, reply.info)


def _joined(replies: Sequence[Observation]) -> Observation | None:
    """One observation for the turn; a turn with several calls lists them."""
    if len(replies) <= 1:
        return replies[0] if replies else None
    return Observation(
        text="\n\n".join(reply.text for reply in replies),
        tool=", ".join(reply.tool for reply in replies if reply.tool) or None,
        error=", ".join(reply.error for reply in replies if reply.error) or None,
        items=sum(reply.items for reply in replies),
        truncated_tokens=sum(reply.truncated_tokens for reply in replies),
    )
