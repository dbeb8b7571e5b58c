"""How much faster the ring answers than a text team on the same graph, prompts, models and questions.

    python tests/bench/bench_text_team.py [RECIPE] [--allow-untrained | --links DIR] [--threads N]

Three rounds and 16 latent steps against messages of 64 tokens, and of natural length (each agent until it ends its
text, at most --natural-cap tokens). Same process, threads and batch; everything is warmed up; the rows take turns and
the best of --repeats counts. Goals: at 64 tokens the ring is at least twice as fast, and with trained links at least as
often right. Exits 1 when one is missed. The last line is everything as JSON, the seconds of each stage too.
"""

from __future__ import annotations

import argparse
import asyncio
import json
import sys

import torch

from agentrl.recipes.recursivemas.comparison import Measured, compare, reductions
from agentrl.recipes.recursivemas.decode import open_decoder
from agentrl.recipes.recursivemas.evaluate import Setting, answer_row, batches_of, held_out_tasks, warm_up
from agentrl.recipes.recursivemas.held_out import grade
from agentrl.recipes.recursivemas.infer import Answered, trajectories
from agentrl.recipes.recursivemas.link_folders import refuse_untrained
from agentrl.recipes.recursivemas.recipe import RecursiveRecipe
from agentrl.recipes.recursivemas.setup import Loaded, load_system
from agentrl.recipes.recursivemas.text_team import TextTeam
from agentrl.recipes.registry import Silence, load_recipe
from agentrl.recipes.rewards import open_reward

GOAL = 2.0
TITLES = {"ring": "ring", "text": "text, given", "natural": "text, natural"}


def recipe_with(args: argparse.Namespace, message: int, exact: bool) -> RecursiveRecipe:
    sets = [
        f"recursivemas.rounds={args.rounds}",
        f"recursivemas.latent_steps={args.latent_steps}",
        f"recursivemas.max_batch={args.batch}",
        "recursivemas.controls=[text]",
        f"recursivemas.text_team.max_tokens={message}",
        f"recursivemas.text_team.exact={'true' if exact else 'false'}",
        f"recursivemas.allow_untrained={'true' if args.allow_untrained else 'false'}",
        *([] if args.links is None else [f"recursivemas.links={args.links}"]),
        *args.set,
    ]
    tree = load_recipe(args.recipe, sets).tree
    assert isinstance(tree, RecursiveRecipe), f"{args.recipe} is no recipe of RecursiveMAS"
    return tree


async def measure(args: argparse.Namespace, fixed: RecursiveRecipe, natural: RecursiveRecipe, loaded: Loaded) -> dict:
    """The best row of each, by wall time."""
    tasks = held_out_tasks(fixed)[: args.questions]
    best: dict[str, tuple[list[Answered], float]] = {}
    async with open_decoder(fixed, loaded) as decoder:
        teams = {"text": TextTeam(fixed, loaded), "natural": TextTeam(natural, loaded)}
        settings = {name: Setting(fixed, loaded, decoder, team) for name, team in teams.items()}
        batches = {name: batches_of(fixed, name, tasks) for name in ("ring", "text")}
        await warm_up(settings["text"], batches)
        for _ in range(args.repeats):
            for name in ("ring", "text", "natural"):
                row = "ring" if name == "ring" else "text"
                done = await answer_row(settings.get(name, settings["text"]), row, batches[row], Silence())
                if name not in best or done[1] < best[name][1]:
                    best[name] = done
    return best


async def graded(recipe: RecursiveRecipe, name: str, answered: list[Answered], wall_s: float) -> Measured:
    async with open_reward(recipe.grader) as reward:
        scored = await grade(reward, [one for batch in answered for one in trajectories(recipe, batch)])
    return Measured(name, tuple(answered), tuple(scored), wall_s)


def report(
    args: argparse.Namespace, recipe: RecursiveRecipe, best: dict[str, tuple[list[Answered], float]], loaded: Loaded
) -> bool:
    measured = {name: asyncio.run(graded(recipe, name, *row)) for name, row in best.items()}
    rows = compare(recipe, list(measured.values()))
    say = sys.stdout.write
    links = "trained" if loaded.links.trained else "untrained"
    say(
        f"rounds {args.rounds}, latent steps {args.latent_steps}, batch {args.batch}, threads "
        f"{torch.get_num_threads()}, links {links}; best of {args.repeats}, warm; "
        "counts per question, wall seconds of all\n"
    )
    heads = ("row", "right", "message", "text tokens", "latent steps", "positions", "seconds")
    say(" ".join(f"{head:>13}" for head in heads) + "\n")
    for name, row in rows.items():
        strict, length = row["strict"], row.get("tokens_per_message")
        cells = [TITLES[name], f"{strict['k']}/{strict['n']}", "-" if length is None else f"{length:.1f}"]
        cells += [f"{row[f'{key}_per_question']:.1f}" for key in ("text_tokens", "latent_steps", "positions")]
        say(" ".join(f"{cell:>13}" for cell in [*cells, f"{row['seconds']['wall']:.2f}"]) + "\n")
    good = True
    for name in ("text", "natural"):
        told = reductions({"ring": rows["ring"], "text": rows[name]})
        assert told is not None, "there is a text team"
        goal = f" (goal {GOAL})" if name == "text" else ""
        say(
            f"text team / ring at {rows[name]['tokens_per_message']:.1f} tokens a message ({TITLES[name]} length): "
            f"{told['times_faster']:.2f} x the wall time{goal}; the ring writes {told['text_tokens']:.1%} fewer text "
            f"tokens, {told['text_tokens_and_latent_steps']:.1%} with latent steps counted as tokens\n"
        )
        if name == "text":
            good = told["times_faster"] >= GOAL
            if loaded.links.trained:
                good = good and rows["ring"]["strict"]["k"] >= rows["text"]["strict"]["k"]
    say(json.dumps({"threads": torch.get_num_threads(), "rows": rows}) + "\n")
    return good


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("recipe", nargs="?", default="smoke/recursivemas")
    parser.add_argument("--rounds", type=int, default=3)
    parser.add_argument("--latent-steps", type=int, default=16)
    parser.add_argument("--message", type=int, default=64, help="tokens of a message")
    parser.add_argument("--natural-cap", type=int, default=256)
    parser.add_argument("--questions", type=int, default=8)
    parser.add_argument("--batch", type=int, default=8)
    parser.add_argument("--repeats", type=int, default=2)
    parser.add_argument("--threads", type=int, default=torch.get_num_threads())
    parser.add_argument("--links", default=None)
    parser.add_argument("--allow-untrained", action="store_true")
    parser.add_argument("--set", action="append", default=[], metavar="KEY=VALUE")
    args = parser.parse_args()
    torch.set_num_threads(args.threads)
    fixed, natural = recipe_with(args, args.message, True), recipe_with(args, args.natural_cap, False)
    refuse_untrained(fixed)
    loaded = load_system(fixed)
    best = asyncio.run(measure(args, fixed, natural, loaded))
    return 0 if report(args, fixed, best, loaded) else 1


if __name__ == "__main__":
    sys.exit(main())
