"""Recipe -> a system that can think: each model loaded once, links, chats, and the engine of the final decode."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path

from agentrl.chat.context import Chat
from agentrl.chat.format import ChatFormat
from agentrl.launch.devices import detect, plan
from agentrl.recipes.recursivemas.link_folders import link_name
from agentrl.recipes.recursivemas.links import Links, open_links
from agentrl.recipes.recursivemas.recipe import RecursiveRecipe
from agentrl.recipes.recursivemas.recursion import Agent, System
from agentrl.recipes.session import model_folder
from agentrl.rollout.engine import load_hf_policy
from agentrl.rollout.hf_generate import HFPolicy
from agentrl.rollout.latent_backbone import Backbone


@dataclass(frozen=True, slots=True)
class Loaded:
    """`policies`: by policy name; names of one folder share one model. `links`: as opened."""

    system: System
    links: Links
    policies: Mapping[str, HFPolicy]


def load_system(recipe: RecursiveRecipe, links: Links | None = None, *, allow_untrained: bool = False) -> Loaded:
    """Load what the recipe names, where `launch` says. `links` replaces those of the recipe; with `allow_untrained`
    they may be random.

    Raises `MissingError` for models and links that are not there, `DataError` for links of other models,
    `ConfigError` for a model that cannot think in latents, and as `plan`.
    """
    device = plan(recipe.launch, detect()).device
    names = {policy: link_name(model.name) for policy, model in recipe.policy_models.items()}
    folders = {policy: model_folder(model, policy, recipe.run.dir) for policy, model in recipe.policy_models.items()}
    by_place: dict[tuple[Path, str], HFPolicy] = {}
    backbones: dict[tuple[Path, str], Backbone] = {}
    formats: dict[Path, ChatFormat] = {}
    for policy, folder in folders.items():
        place = (folder, recipe.policy_models[policy].dtype)
        if place not in by_place:
            by_place[place] = load_hf_policy(*place, device)
            backbones[place] = Backbone(names[policy], by_place[place].model)
            formats.setdefault(folder, ChatFormat.from_folder(folder))
    config = recipe.recursivemas
    places = {
        name: (folders[agent.policy], recipe.policy_models[agent.policy].dtype) for name, agent in recipe.agents.items()
    }
    by_agent = {name: backbones[places[name]] for name in config.graph.agents}
    opened = links or open_links(
        config, by_agent, seed=recipe.run.seed, runs=recipe.run.dir, allow_untrained=allow_untrained
    )
    agents = {}
    for name, backbone in by_agent.items():
        link = opened.inner[name].to(backbone.device).requires_grad_(False)
        chat = Chat(formats[places[name][0]], enable_thinking=config.enable_thinking)
        agents[name] = Agent(name, backbone, link, chat)
    outer = {edge: link.to(by_agent[edge.source].device).requires_grad_(False) for edge, link in opened.outer.items()}
    decoders = {policy: by_place[(folders[policy], recipe.policy_models[policy].dtype)] for policy in folders}
    return Loaded(System(config.graph, agents, outer), opened, decoders)
