"""RecursiveLinks: the small trained networks through which frozen agents talk.

An inner link maps an agent's hidden state back into its own input embeddings; an outer link maps agent i's space into
agent j's input embeddings. Source: "Recursive Multi-Agent Systems", arXiv 2604.25917, equations 3 and 4, and the
released weights, which differ from them (form `ln_res`).

Weights are fp32 and inputs are cast to it; the caller casts the output to the receiver's dtype.

Shapes: ... any leading dimensions, D the link's dimension (I in, O out).
"""

from __future__ import annotations

import hashlib
from collections.abc import Mapping
from dataclasses import dataclass
from types import MappingProxyType
from typing import Literal

import torch
from torch import Tensor, nn
from torch.nn import functional as F

from agentrl.errors import ConfigError

Form = Literal["ln_res", "ln", "paper", "two_layer_res", "two_layer", "one_layer_res", "one_layer"]


@dataclass(frozen=True, slots=True)
class FormSpec:
    """How a link is built. `layers` 1 is a plain linear map, 2 has an exact GELU between two."""

    layers: Literal[1, 2]
    residual: bool
    norm: bool = False
    bias: bool = True


FORMS: Mapping[str, FormSpec] = MappingProxyType(
    {
        "ln_res": FormSpec(2, residual=True, norm=True),  # as released
        "ln": FormSpec(2, residual=False, norm=True),  # outer links only
        "paper": FormSpec(2, residual=True, bias=False),  # equations 3 and 4 to the letter
        "two_layer_res": FormSpec(2, residual=True),
        "two_layer": FormSpec(2, residual=False),
        "one_layer_res": FormSpec(1, residual=True),
        "one_layer": FormSpec(1, residual=False),
    }
)


class InnerLink(nn.Module):
    """An agent's hidden state (..., D) -> its own input embedding (..., D), fp32.

    `ln_res`: LN_post(x + P2 gelu(P1 LN_pre(x))). The other forms drop the norms, the residual or the second layer.
    `target_norm`, where set, rescales every output vector to that length (LatentMAS does so with the mean
    token-embedding norm; the released weights expect it off). Raises `ConfigError` for a form inner links do not have.
    """

    def __init__(self, dim: int, form: Form = "ln_res", *, target_norm: float | None = None) -> None:
        super().__init__()
        spec = form_spec(form)
        if form == "ln":
            raise ConfigError("an inner link has no form 'ln'", "use ln_res; 'ln' is a form of outer links")
        self.dim_in = self.dim_out = dim
        self.form: Form = form
        self.target_norm = target_norm
        self.proj1 = nn.Linear(dim, dim, spec.bias, dtype=torch.float32)
        self.proj2 = nn.Linear(dim, dim, spec.bias, dtype=torch.float32) if spec.layers == 2 else None
        self.pre_ln = nn.LayerNorm(dim, dtype=torch.float32) if spec.norm else None
        self.post_ln = nn.LayerNorm(dim, dtype=torch.float32) if spec.norm else None

    def forward(self, x_D: Tensor) -> Tensor:
        x_D = x_D.float()
        y_D = _branch(x_D, self.pre_ln, self.proj1, self.proj2)
        if FORMS[self.form].residual:
            y_D = x_D + y_D
        return match_norm(y_D if self.post_ln is None else self.post_ln(y_D), self.target_norm)


class OuterLink(nn.Module):
    """Agent i's space (..., I) -> agent j's input embedding (..., O), fp32.

    `ln_res`: LN_tgt(W3 x + P2 gelu(P1 LN_src(x))), P1 of width 2 O; forms without norms have width O.
    `target_norm` as in `InnerLink`.
    """

    def __init__(self, dim_in: int, dim_out: int, form: Form = "ln_res", *, target_norm: float | None = None) -> None:
        super().__init__()
        spec = form_spec(form)
        self.dim_in, self.dim_out = dim_in, dim_out
        self.form: Form = form
        self.target_norm = target_norm
        width = dim_out if spec.layers == 1 else 2 * dim_out if spec.norm else dim_out
        self.proj1 = nn.Linear(dim_in, width, spec.bias, dtype=torch.float32)
        self.proj2 = nn.Linear(width, dim_out, spec.bias, dtype=torch.float32) if spec.layers == 2 else None
        self.residual_proj = nn.Linear(dim_in, dim_out, spec.bias, dtype=torch.float32) if spec.residual else None
        self.ln_source = nn.LayerNorm(dim_in, dtype=torch.float32) if spec.norm else None
        self.ln_target = nn.LayerNorm(dim_out, dtype=torch.float32) if spec.norm else None

    def forward(self, x_I: Tensor) -> Tensor:
        x_I = x_I.float()
        y_O = _branch(x_I, self.ln_source, self.proj1, self.proj2)
        if self.residual_proj is not None:
            y_O = self.residual_proj(x_I) + y_O
        return match_norm(y_O if self.ln_target is None else self.ln_target(y_O), self.target_norm)


Link = InnerLink | OuterLink


def form_spec(form: str) -> FormSpec:
    """Raises `ConfigError` for a form that does not exist."""
    if form not in FORMS:
        raise ConfigError(f"there is no link form {form!r}", f"use one of {', '.join(FORMS)}")
    return FORMS[form]


def _branch(x: Tensor, norm: nn.Module | None, first: nn.Module, second: nn.Module | None) -> Tensor:
    y: Tensor = first(x if norm is None else norm(x))
    if second is not None:
        y = second(F.gelu(y))
    return y


def match_norm(x: Tensor, target: float | None) -> Tensor:
    """Every vector along the last dimension rescaled to length `target`; None leaves it as it is."""
    if target is None:
        return x
    scaled: Tensor = x * (target / x.norm(dim=-1, keepdim=True).clamp_min(1e-12))
    return scaled


def transfer(states_D: Tensor, inner: nn.Module, outer: nn.Module) -> Tensor:
    """The block that an agent sends: R_out(R_in(H)), (..., m, D) -> (..., m, D_next).

    The released code applies the inner link to the stored raw states before the outer one, in training and in use.
    """
    block: Tensor = outer(inner(states_D))
    return block


@torch.no_grad()
def mean_token_norm(embeddings: nn.Module, chunk: int = 8192) -> float:
    """The mean length of a model's token embeddings as it sees them: through its own embedding module, since some
    (Gemma) scale what their table holds."""
    weight = embeddings.weight
    assert isinstance(weight, Tensor)
    total = 0.0
    for start in range(0, weight.shape[0], chunk):
        ids = torch.arange(start, min(start + chunk, weight.shape[0]), device=weight.device)
        total += float(embeddings(ids).float().norm(dim=-1).sum())
    return total / weight.shape[0]


@torch.no_grad()
def checksum(module: nn.Module) -> str:
    """A digest of every parameter and buffer, bit for bit: equal before and after training proves a model frozen."""
    digest = hashlib.blake2b(digest_size=16)
    for name, tensor in sorted({**dict(module.named_parameters()), **dict(module.named_buffers())}.items()):
        digest.update(f"{name} {tensor.dtype} {tuple(tensor.shape)}\n".encode())
        digest.update(tensor.detach().cpu().contiguous().reshape(-1).view(torch.uint8).numpy().data)
    return digest.hexdigest()
