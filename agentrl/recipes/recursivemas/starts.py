"""What new links begin with. As released all weights are random; two named options begin nearer to what links learn.

    matched   the gain of a link's last norm is set so that outputs have the mean length of the receiver's token
              embeddings (a fresh norm makes them sqrt(d) long: 24 against 3.2 for SmolLM2-135M)
    aligned   matched, and an outer link's W3 begins as the ridge regression from the sender's token embeddings to the
              receiver's, over the tokens that both vocabularies have: what the inner link says is passed on

Both leave the form of a link as it is. Users of the released code blame its random start for weak outer links (specs,
section 8.7); the regression is their remedy, taken over shared tokens here, so that it needs no data.

Shapes: N shared tokens, I sender's width, O receiver's.
"""

from __future__ import annotations

import torch
from torch import Tensor, nn

from agentrl.errors import ConfigError
from agentrl.recipes.recursivemas.link_folders import inner_name, outer_name
from agentrl.recipes.recursivemas.links import Links
from agentrl.recipes.recursivemas.recursion import Agent, System
from agentrl.recipes.recursivemas.train_config import Start
from agentrl.update.links import mean_token_norm

_RIDGE = 1e-3  # of the mean squared length of the sender's embeddings
_MIN_SHARED = 100


@torch.no_grad()
def start_links(links: Links, system: System, start: Start) -> None:
    """Give every link that was not trained before its start; the recipe's schema has seen to it that the forms have
    what is set. Raises `ConfigError` for models that share too few tokens."""
    if start == "random":
        return
    untrained = set(links.untrained)
    for name, inner in links.inner.items():
        if inner_name(name) in untrained:
            _match(inner.post_ln, system.agents[name])
    for edge, outer in links.outer.items():
        if outer_name(edge) not in untrained:
            continue
        _match(outer.ln_target, system.agents[edge.target])
        if start == "aligned":
            assert outer.residual_proj is not None
            _align(outer.residual_proj, system.agents[edge.source], system.agents[edge.target])


def _match(norm: nn.LayerNorm | None, receiver: Agent) -> None:
    assert norm is not None
    norm.weight.fill_(mean_token_norm(receiver.backbone.embeddings) / norm.weight.numel() ** 0.5)


def _align(projection: nn.Linear, source: Agent, target: Agent) -> None:
    """W3 as the regression, scaled so that its outputs have unit spread: the other branch starts out small beside it,
    and the norm after the sum takes the scale back."""
    rows, columns = _shared_tokens(source, target)
    x_NI = source.backbone.embeddings(torch.tensor(rows, device=projection.weight.device)).float()
    y_NO = target.backbone.embeddings(torch.tensor(columns, device=projection.weight.device)).float()
    weight_OI = ridge(x_NI, y_NO)
    projection.weight.copy_(weight_OI / (x_NI @ weight_OI.T).std())
    if projection.bias is not None:
        projection.bias.zero_()


def ridge(x_NI: Tensor, y_NO: Tensor) -> Tensor:
    """W (O, I) that minimises |x W^T - y|^2 + l |W|^2, l a small part of the spread of x."""
    gram_II = x_NI.T @ x_NI
    penalty = _RIDGE * gram_II.diagonal().mean()
    weight_IO: Tensor = torch.linalg.solve(
        gram_II + penalty * torch.eye(len(gram_II), device=x_NI.device), x_NI.T @ y_NO
    )
    return weight_IO.T


def _shared_tokens(source: Agent, target: Agent) -> tuple[list[int], list[int]]:
    """Ids of the same token in both vocabularies, in the source's order."""
    if source.backbone is target.backbone:
        weight = source.backbone.embeddings.weight
        assert isinstance(weight, Tensor)
        ids = list(range(weight.shape[0]))
        return ids, ids
    own, other = source.chat.format.vocabulary, target.chat.format.vocabulary
    pairs = sorted((own[token], other[token]) for token in own.keys() & other.keys())
    if len(pairs) < _MIN_SHARED:
        raise ConfigError(
            f"recursivemas.train.start: aligned needs tokens that both models have; {source.backbone.name} and "
            f"{target.backbone.name} share {len(pairs)}",
            "use start: matched",
        )
    return [a for a, _ in pairs], [b for _, b in pairs]
