"""What each action is worth: coach score and outcome -> one reward per action of a trajectory (M-07, M-11, X-04).

By default the reward is score / 10 and stays with its action. With `return_to_go: agent` an action's worth adds the
discounted rewards of the same agent's later actions; one of them missing leaves it unknown. The outcome enters only by
`outcome_weight`, or where a baseline is made of it: at every action, or with `return_to_go: agent` at the agent's last.
"""

from __future__ import annotations

from agentrl.recipes.mappa.config import MappaConfig
from agentrl.scoring.coach import to_reward
from agentrl.types import ScoredTrajectory


def action_rewards(scored: ScoredTrajectory, mappa: MappaConfig) -> tuple[float | None, ...]:
    """One value per turn, None where it is missing. GRPO and imitation take the outcome as it is."""
    turns = scored.trajectory.turns
    if mappa.credit in ("grpo", "supervised"):
        return (scored.outcome.value,) * len(turns)
    process_weight = mappa.process_weight if mappa.credit == "process" else 0.0
    outcome_weight = mappa.outcome_weight if mappa.credit == "process" else 1.0
    last: dict[str, int] = {turn.action.agent: i for i, turn in enumerate(turns)}
    worth: list[float | None] = []
    for i, turn in enumerate(turns):
        shares = outcome_weight and (mappa.return_to_go == "action" or last[turn.action.agent] == i)
        value: float | None = 0.0
        if process_weight:
            score = scored.action_scores[i]
            reward = None if score is None else to_reward(score)
            value = None if reward is None else process_weight * reward
        if shares:
            outcome = scored.outcome.value
            value = None if value is None or outcome is None else value + outcome_weight * outcome
        worth.append(value)
    if mappa.return_to_go == "agent":
        running: dict[str, float | None] = {}
        for i in reversed(range(len(turns))):
            agent, own = turns[i].action.agent, worth[i]
            later = running.get(agent, 0.0)
            running[agent] = worth[i] = None if own is None or later is None else own + mappa.gamma * later
    return tuple(worth)
