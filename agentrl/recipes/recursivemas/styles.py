"""The five styles of the paper as data: graph, models, and what each role hears.

The order inside each user turn is the released code's (question and slot, specs section 3.3); released links expect it.
The wording is ours: the paper's appendix prints other prompts than the code uses. `{question}` and `{instruction}` are
texts, `{NAME}` is the slot of agent NAME's latents. `first` is the prompt of round 1, before any feedback.

Sources: "Recursive Multi-Agent Systems", arXiv 2604.25917, and its released code.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from types import MappingProxyType

from agentrl.recipes.recursivemas.graph import Edge, Graph, ring

SYSTEM = "You are a helpful assistant."
TOOL_SYSTEM = (
    "You are a helpful assistant with two tools. Write <python>CODE</python> to run Python, or "
    "<search>QUERY</search> to search. The reply comes back as <result>...</result>."
)

INSTRUCTIONS: Mapping[str, str] = MappingProxyType(
    {
        "boxed": r"Reason step by step, and put the final answer in \boxed{}.",
        "choice": r"Reason step by step, and put the letter of the right option in \boxed{}.",
        "code": "Write a complete Python solution in one ```python code block.",
        "short": "Answer in a few words, without explanation.",
    }
)


@dataclass(frozen=True, slots=True)
class Role:
    """A role's user turn in round 2 and later, and in round 1 where that differs; its default model."""

    prompt: str
    first: str | None = None
    model: str | None = None
    system: str = SYSTEM


@dataclass(frozen=True, slots=True)
class Style:
    graph: Graph
    roles: Mapping[str, Role]


_STEPS = "\nWrite the plan as Step 1, Step 2, and so on."
_FEEDBACK = (
    "\nFeedback on the last round, to be taken as a soft correction where it helps: {%s}\nKeep what was right." + _STEPS
)
_PLANNER = "You are the planner. Make a short plan that solves the problem.\n\nProblem: {question}\n"
_CRITIC = (
    "You are the critic. Refine the plan below.\n\nProblem: {question}\n\nPlan: {planner}\n"
    "\nCorrect its mistakes and fill its gaps." + _STEPS
)
_SOLVER = (
    "You are the solver. Solve the problem with the help of the plan.\n\nPlan: {critic}\n\nProblem: {question}\n"
    "\n{instruction}"
)


def _sequential(planner: str, critic: str, solver: str) -> Style:
    return Style(
        ring(("planner", "critic", "solver"), ("12", "23", "31")),
        MappingProxyType(
            {
                "planner": Role(_PLANNER + _FEEDBACK % "solver", _PLANNER + _STEPS, planner),
                "critic": Role(_CRITIC, model=critic),
                "solver": Role(_SOLVER, model=solver),
            }
        ),
    )


def _mixture() -> Style:
    experts = {
        "math": ("a mathematician", "deepseek-ai/DeepSeek-R1-Distill-Qwen-1.5B"),
        "code": ("a programmer", "Qwen/Qwen2.5-Coder-3B-Instruct"),
        "science": ("a scientist", "BioMistral/BioMistral-7B"),
    }
    roles, edges = {}, []
    for number, (name, (who, model)) in enumerate(experts.items(), start=1):
        head = f"You are {who}. Work on the task from your field.\n"
        task = "\nTask: {question}"
        roles[name] = Role(head + "\nFeedback on the last round: {summarizer}\n" + task, head + task, model)
        edges += [Edge(name, "summarizer", key=f"{number}s"), Edge("summarizer", name, True, f"s{number}")]
    text = (
        "You are the summarizer. Three experts worked on the task.\n\nMathematician: {math}\nProgrammer: {code}\n"
        "Scientist: {science}\n---\nTask: {question}\n\n{instruction}"
    )
    roles["summarizer"] = Role(text, model="Qwen/Qwen3.5-2B")
    return Style(Graph(tuple(roles), tuple(edges), "summarizer"), MappingProxyType(roles))


def _distillation() -> Style:
    head = "You are the expert. Guide a learner to the solution of the problem.\n\nProblem: {question}\n"
    learner = (
        "You are the learner. Solve the problem with the expert's guidance.\n\nGuidance: {expert}\n"
        "\nProblem: {question}\n\n{instruction}"
    )
    return Style(
        ring(("expert", "learner"), ("el", "le")),
        MappingProxyType(
            {
                "expert": Role(head + _FEEDBACK % "learner", head + _STEPS, "Qwen/Qwen3.5-9B"),
                "learner": Role(learner, model="Qwen/Qwen3.5-4B"),
            }
        ),
    )


def _deliberation() -> Style:
    head, tools = (
        "You are the reflector. Think about how the task can be solved.\n",
        "\nPython and search may be used.\n",
    )
    task = "\nTask: {question}"
    caller = (
        "You are the tool caller. Solve the task.\n\nReflection: {reflector}\n" + tools + task + "\n\n{instruction}"
    )
    reflector = Role(
        head + "\nFeedback on the last round: {caller}\n" + tools + task,
        head + tools + task,
        "Qwen/Qwen3.5-4B",
        TOOL_SYSTEM,
    )
    return Style(
        ring(("reflector", "caller"), ("rt", "tr")),
        MappingProxyType({"reflector": reflector, "caller": Role(caller, None, "Qwen/Qwen3.5-4B", TOOL_SYSTEM)}),
    )


STYLES: Mapping[str, Style] = MappingProxyType(
    {
        "sequential_light": _sequential(
            "Qwen/Qwen3-1.7B", "meta-llama/Llama-3.2-1B-Instruct", "Qwen/Qwen2.5-Math-1.5B-Instruct"
        ),
        "sequential_scaled": _sequential("google/gemma-3-4b-it", "meta-llama/Llama-3.2-3B-Instruct", "Qwen/Qwen3.5-4B"),
        "mixture": _mixture(),
        "distillation": _distillation(),
        "deliberation": _deliberation(),
    }
)
