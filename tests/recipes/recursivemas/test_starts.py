"""What new links begin with: lengths, and that an aligned link passes a token's embedding on."""

from __future__ import annotations

import pytest
import torch
from pydantic import ValidationError

from agentrl.recipes.recursivemas.setup import load_system
from agentrl.recipes.recursivemas.starts import ridge, start_links
from agentrl.update.links import checksum, mean_token_norm

MODELS = {"planner": "tiny-llama", "critic": "tiny-llama-h96", "solver": "tiny-llama"}


@pytest.fixture
def load(make_recipe):
    def load(**own):
        recipe = make_recipe("sequential_light", models=MODELS, **own)
        return load_system(recipe)

    return load


def _said(system, name, count=200):
    return system.agents[name].backbone.embeddings(torch.arange(20, 20 + count)).float()


def test_matched_links_begin_with_the_length_of_token_embeddings(load):
    loaded = load()
    start_links(loaded.links, loaded.system, "matched")
    for edge, link in loaded.links.outer.items():
        length = link(torch.randn(50, link.dim_in)).norm(dim=-1).mean().item()
        assert length == pytest.approx(mean_token_norm(loaded.system.agents[edge.target].backbone.embeddings), rel=0.02)
    for name, link in loaded.links.inner.items():
        length = link(torch.randn(50, link.dim_in)).norm(dim=-1).mean().item()
        assert length == pytest.approx(mean_token_norm(loaded.system.agents[name].backbone.embeddings), rel=0.02)


def _hits(loaded, edge):
    """How often the nearest of the receiver's embeddings is the one of the token that was sent."""
    sent = _said(loaded.system, edge.source)
    own = torch.nn.functional.normalize(_said(loaded.system, edge.target), dim=-1)
    got = torch.nn.functional.normalize(loaded.links.outer[edge](sent), dim=-1)
    return ((got @ own.T).argmax(-1) == torch.arange(len(sent))).float().mean().item()


def test_aligned_links_pass_a_tokens_embedding_on_between_sizes_too(load):
    loaded = load()
    edges = list(loaded.links.outer)
    assert max(_hits(loaded, edge) for edge in edges) < 0.1
    start_links(loaded.links, loaded.system, "aligned")
    hits = {edge.name: _hits(loaded, edge) for edge in edges}
    assert hits["solver-planner"] > 0.9
    assert min(hits.values()) > 0.3, hits


def test_links_that_were_trained_before_keep_their_weights(load):
    loaded = load()
    edge = next(iter(loaded.links.outer))
    name = f"outer-{edge.name}"
    links = loaded.links.after([name], {"stage": "outer"})
    before = {n: checksum(link) for n, link in links.by_name.items()}
    start_links(links, loaded.system, "random")
    assert before == {n: checksum(link) for n, link in links.by_name.items()}
    start_links(links, loaded.system, "aligned")
    assert [n for n, link in links.by_name.items() if checksum(link) == before[n]] == [name]


@pytest.mark.parametrize(
    ("start", "own", "fault"),
    [
        ("matched", {"outer_form": "one_layer"}, "matched sets the last norm"),
        ("aligned", {"inner_form": "paper"}, "aligned sets the last norm"),
        ("aligned", {"outer_form": "ln"}, "aligned sets W3"),
        ("matched", {"match_norm": True}, "has no effect with match_norm"),
    ],
)
def test_a_start_that_sets_nothing_is_refused(make_recipe, start, own, fault):
    with pytest.raises(ValidationError, match=fault):
        make_recipe(train={"start": start}, **own)


def test_the_regression_finds_the_map_between_embeddings():
    torch.manual_seed(0)
    x, wanted = torch.randn(400, 24), torch.randn(16, 24)
    assert (ridge(x, x @ wanted.T) - wanted).abs().max() < 0.05
