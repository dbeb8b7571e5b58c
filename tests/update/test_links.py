"""RecursiveLinks against hand-written NumPy, exact counts, and link files in both layouts."""

from __future__ import annotations

import json
import math
import pickle

import numpy as np
import pytest
import torch
from safetensors.torch import save_file

from agentrl.errors import AgentRLError, ConfigError, DataError, MissingError
from agentrl.update.link_files import (
    LinkSpec,
    load_link,
    official_inner_file,
    official_outer_files,
    read_state,
    save_link,
    save_official_inner,
    save_official_outer,
)
from agentrl.update.links import (
    FORMS,
    InnerLink,
    OuterLink,
    checksum,
    match_norm,
    mean_token_norm,
    transfer,
)

_erf = np.vectorize(math.erf)


def _array(tensor):
    return tensor.detach().double().numpy()


def _ln(x, norm):
    mean, var = x.mean(-1, keepdims=True), x.var(-1, keepdims=True)
    return (x - mean) / np.sqrt(var + 1e-5) * _array(norm.weight) + _array(norm.bias)


def _linear(x, linear):
    return x @ _array(linear.weight).T + (0 if linear.bias is None else _array(linear.bias))


def _gelu(x):
    return 0.5 * x * (1 + _erf(x / math.sqrt(2)))


def _shaken(link):
    """Every parameter away from its initial value, so that a norm's gain or bias that is left out shows."""
    with torch.no_grad():
        for parameter in link.parameters():
            parameter.add_(torch.randn(parameter.shape, generator=torch.Generator().manual_seed(7)) * 0.1)
    return link


@pytest.fixture(autouse=True)
def _seed():
    torch.manual_seed(0)
    torch.set_num_threads(1)


def test_t1_inner_link_is_ln_post_of_the_raw_input_plus_the_branch():
    link, x = _shaken(InnerLink(24)), torch.randn(3, 5, 24) * 4
    want = _linear(_gelu(_linear(_ln(_array(x), link.pre_ln), link.proj1)), link.proj2)
    np.testing.assert_allclose(_array(link(x)), _ln(_array(x) + want, link.post_ln), atol=1e-5)


def test_t1_with_a_zero_branch_the_inner_link_is_a_layer_norm():
    link, x = InnerLink(24), torch.randn(3, 24) * 4
    with torch.no_grad():
        link.proj2.weight.zero_()
        link.proj2.bias.zero_()
    torch.testing.assert_close(link(x), torch.nn.functional.layer_norm(x, (24,)), atol=1e-6, rtol=0)


def test_t2_outer_link_maps_24_to_40_with_a_branch_of_width_80():
    link, x = _shaken(OuterLink(24, 40)), torch.randn(2, 5, 24) * 4
    assert link.proj1.out_features == 80
    branch = _linear(_gelu(_linear(_ln(_array(x), link.ln_source), link.proj1)), link.proj2)
    want = _ln(_linear(_array(x), link.residual_proj) + branch, link.ln_target)
    np.testing.assert_allclose(_array(link(x)), want, atol=1e-5)


def test_t2_scaling_the_input_changes_only_the_residual_branch():
    link, x = OuterLink(24, 40), torch.randn(6, 24) * 20
    seen = {}
    link.proj2.register_forward_hook(lambda _m, _i, out: seen.setdefault("branch", []).append(out))
    link.residual_proj.register_forward_hook(lambda _m, _i, out: seen.setdefault("residual", []).append(out))
    link(x), link(10 * x)
    torch.testing.assert_close(*seen["branch"], atol=1e-5, rtol=1e-5)
    bias = link.residual_proj.bias
    torch.testing.assert_close(seen["residual"][1] - bias, 10 * (seen["residual"][0] - bias), atol=1e-3, rtol=1e-4)


@pytest.mark.parametrize("form", ["paper", "two_layer_res"])
def test_t3_plain_inner_link_is_the_identity_with_a_zero_branch(form):
    link, x = InnerLink(24, form), torch.randn(4, 24)
    with torch.no_grad():
        for parameter in link.proj2.parameters():
            parameter.zero_()
    assert torch.equal(link(x), x)


@pytest.mark.parametrize("form", [f for f in FORMS if f not in ("ln_res", "ln")])
def test_t3_plain_forms_are_what_the_ablation_names(form):
    spec = FORMS[form]
    inner, outer = _shaken(InnerLink(24, form)), _shaken(OuterLink(24, 40, form))
    x = torch.randn(4, 24)
    assert (inner.proj1.bias is None) == (form == "paper")
    assert outer.proj1.out_features == 40
    for link in (inner, outer):
        want = _linear(_array(x), link.proj1)
        if spec.layers == 2:
            want = _linear(_gelu(want), link.proj2)
        if spec.residual:
            want = want + (_array(x) if link is inner else _linear(_array(x), link.residual_proj))
        np.testing.assert_allclose(_array(link(x)), want, atol=1e-5)


def test_outer_form_ln_has_norms_and_no_residual():
    link, x = _shaken(OuterLink(24, 40, "ln")), torch.randn(4, 24)
    branch = _linear(_gelu(_linear(_ln(_array(x), link.ln_source), link.proj1)), link.proj2)
    np.testing.assert_allclose(_array(link(x)), _ln(branch, link.ln_target), atol=1e-5)
    with pytest.raises(ConfigError, match="inner link has no form"):
        InnerLink(24, "ln")
    with pytest.raises(ConfigError, match="no link form 'mlp'"):
        OuterLink(24, 40, "mlp")


def test_t4_parameter_counts_are_exact_per_module_and_per_system():
    def inner(dim, form="ln_res"):
        return _size(InnerLink(dim, form))

    def ring(*dims):
        return {i: _size(OuterLink(a, b)) for i, (a, b) in enumerate(zip(dims, (*dims[1:], dims[0]), strict=True))}

    with torch.device("meta"):  # nothing is allocated
        assert (inner(2560), inner(24, "paper")) == (13_122_560, 2 * 24 * 24)
        light = ring(2048, 2048, 1536)
        assert list(light.values()) == [20_987_904, 14_169_088, 17_841_152]
        assert sum(light.values()) + 2 * inner(2048) + inner(1536) == 74_527_744
        assert (inner(2560), inner(3072)) == (13_122_560, 18_892_800)
        assert sum(ring(2560, 3072, 2560).values()) + 2 * inner(2560) + inner(3072) == 157_138_944
        assert sum(ring(576, 576, 576).values()) + 3 * inner(576) == 6_991_488


def _size(link):
    return sum(parameter.numel() for parameter in link.parameters())


def test_links_compute_in_fp32_whatever_comes_in():
    link = OuterLink(24, 40)
    x = torch.randn(3, 24)
    assert link(x.bfloat16()).dtype == torch.float32
    assert torch.equal(link(x.bfloat16()), link(x.bfloat16().float()))
    assert {p.dtype for p in link.parameters()} == {torch.float32}


def test_t12_transfer_is_the_outer_link_of_the_inner_link():
    inner, outer, states = InnerLink(24), OuterLink(24, 40), torch.randn(2, 7, 24)
    block = transfer(states, inner, outer)
    assert block.shape == (2, 7, 40)
    assert torch.equal(block, outer(inner(states)))
    assert not torch.allclose(block, outer(states))


def test_norm_matching_gives_every_vector_the_token_norm():
    embeddings = torch.nn.Embedding(50, 24)
    norm = mean_token_norm(embeddings, chunk=7)
    assert norm == pytest.approx(embeddings.weight.norm(dim=-1).mean().item(), rel=1e-5)
    x = torch.randn(5, 24)
    matched = InnerLink(24, target_norm=norm)
    torch.testing.assert_close(matched(x).norm(dim=-1), torch.full((5,), norm))
    plain = InnerLink(24)
    plain.load_state_dict(matched.state_dict())
    torch.testing.assert_close(matched(x), match_norm(plain(x), norm))
    assert OuterLink(24, 40, target_norm=2.0)(x).norm(dim=-1).tolist() == pytest.approx([2.0] * 5, rel=1e-5)
    assert torch.equal(match_norm(torch.zeros(2, 3), 1.0), torch.zeros(2, 3))


def test_t17_checksum_sees_one_bit_of_one_weight():
    link = InnerLink(24)
    before = checksum(link)
    assert checksum(link) == before
    with torch.no_grad():
        link.proj2.bias[3] = torch.nextafter(link.proj2.bias[3], torch.tensor(9.0))
    assert checksum(link) != before


SPEC = LinkSpec.outer("Planner", "Critic", 24, 40)


def test_t5_official_layout_round_trips_bit_equal_in_the_stored_dtype(tmp_path):
    link = _shaken(OuterLink(24, 40))
    for dtype in ("float32", "bfloat16"):
        first, second = tmp_path / f"{dtype}.pt", tmp_path / f"{dtype}-again.pt"
        save_link(link, first, SPEC, dtype)
        loaded = load_link(first, SPEC)
        assert {p.dtype for p in loaded.parameters()} == {torch.float32}
        save_link(loaded, second, SPEC, dtype)
        states = read_state(first), read_state(second)
        assert states[0].keys() == states[1].keys()
        assert all(torch.equal(states[0][k], states[1][k]) for k in states[0])
        assert {t.dtype for t in states[0].values()} == {getattr(torch, dtype)}


def test_t5_state_dict_keys_and_shapes_are_the_official_ones():
    inner = {k: tuple(v.shape) for k, v in InnerLink(24).state_dict().items()}
    assert inner == {
        **{f"{p}.weight": (24, 24) for p in ("proj1", "proj2")},
        **{f"{p}.bias": (24,) for p in ("proj1", "proj2")},
        **{f"{n}.{v}": (24,) for n in ("pre_ln", "post_ln") for v in ("weight", "bias")},
    }
    outer = {k: tuple(v.shape) for k, v in OuterLink(24, 40).state_dict().items()}
    assert outer == {
        "proj1.weight": (80, 24),
        "proj1.bias": (80,),
        "proj2.weight": (40, 80),
        "proj2.bias": (40,),
        "ln_source.weight": (24,),
        "ln_source.bias": (24,),
        "ln_target.weight": (40,),
        "ln_target.bias": (40,),
        "residual_proj.weight": (40, 24),
        "residual_proj.bias": (40,),
    }


def _broken(name, state):
    if name == "missing":
        del state["ln_target.bias"]
    elif name == "extra":
        state["proj3.weight"] = torch.zeros(2)
    elif name == "nan":
        state["proj1.bias"][3] = float("nan")
    elif name == "shape":
        state["proj1.weight"] = torch.zeros(80, 32)
    elif name == "integers":
        state["proj1.bias"] = torch.zeros(80, dtype=torch.int64)
    return state


@pytest.mark.parametrize("suffix", [".pt", ".safetensors"])
@pytest.mark.parametrize(
    ("name", "words"),
    [
        ("missing", ["lacks ln_target.bias", "Planner", "Critic"]),
        ("extra", ["has also proj3.weight"]),
        ("nan", ["proj1.bias", "no finite numbers"]),
        ("shape", ["proj1.weight is (80, 32)", "Planner (24) to Critic (40) has (80, 24)"]),
        ("integers", ["proj1.bias", "no finite numbers"]),
    ],
)
def test_t5_a_file_that_does_not_fit_is_refused_with_names_and_sizes(tmp_path, suffix, name, words):
    path = tmp_path / f"link{suffix}"
    save_link(OuterLink(24, 40), path, SPEC)
    state = _broken(name, read_state(path))
    if suffix == ".pt":
        torch.save(state, path)
    else:
        save_file(state, path, {k: json.dumps(v) for k, v in _meta().items()})
    with pytest.raises(DataError) as fault:
        load_link(path, SPEC)
    for word in [str(path), *words]:
        assert word in str(fault.value)


def _meta(**changes):
    own = {"agentrl_link": 1, "kind": "outer", "form": "ln_res", "source": "Planner", "target": "Critic"}
    return {**own, "dim_in": 24, "dim_out": 40, "task": "any", "target_norm": None, **changes}


class _Evil:
    def __reduce__(self):
        return (open, ("evil.txt", "w"))


@pytest.mark.parametrize("kind", ["code", "list", "not a tensor", "garbage", "empty", "plain pickle"])
def test_t5_a_pickle_that_is_not_plain_tensors_is_refused_and_never_run(tmp_path, monkeypatch, kind):
    monkeypatch.chdir(tmp_path)
    path = tmp_path / "adapter.pt"
    if kind == "garbage":
        path.write_bytes(b"not a pickle at all")
    elif kind == "empty":
        path.write_bytes(b"")
    elif kind == "plain pickle":
        path.write_bytes(pickle.dumps({"proj1.weight": _Evil()}, protocol=2))
    else:
        value = {"code": {"proj1.weight": _Evil()}, "list": [torch.zeros(2)], "not a tensor": {"epoch": 3}}[kind]
        torch.save(value, path)
    with pytest.raises(DataError, match=r"adapter\.pt"):
        load_link(path, LinkSpec.inner("Planner", 24))
    assert not (tmp_path / "evil.txt").exists()


@pytest.mark.parametrize(
    ("spec", "word"),
    [
        (LinkSpec.outer("Planner", "Solver", 24, 40), "'Critic'"),
        (LinkSpec.outer("Critic", "Critic", 24, 40), "'Planner'"),
        (LinkSpec.outer("Planner", "Critic", 24, 40, task="code"), "'math'"),
        (LinkSpec.outer("Planner", "Critic", 24, 40, form="ln"), "'ln_res'"),
        (LinkSpec.outer("Planner", "Critic", 24, 40, target_norm=1.5), "target_norm"),
        (LinkSpec.inner("Planner", 24), "'outer'"),
        (LinkSpec.outer("Planner", "Critic", 24, 48), "40"),
    ],
)
def test_t22_our_link_file_of_another_pair_task_or_form_is_refused(tmp_path, spec, word):
    path = tmp_path / "link.safetensors"
    save_link(OuterLink(24, 40), path, LinkSpec.outer("Planner", "Critic", 24, 40, task="math"))
    load_link(path, LinkSpec.outer("Planner", "Critic", 24, 40, task="math"))
    load_link(path, SPEC)
    with pytest.raises(DataError, match=word):
        load_link(path, spec)


def test_link_files_that_are_absent_cut_or_without_metadata_are_named(tmp_path):
    with pytest.raises(MissingError, match="no link file"):
        load_link(tmp_path / "none.pt", SPEC)
    path = tmp_path / "link.safetensors"
    save_link(OuterLink(24, 40), path, SPEC)
    whole = path.read_bytes()
    path.write_bytes(whole[:-10])
    with pytest.raises(DataError, match="cut short"):
        load_link(path, SPEC)
    save_file(OuterLink(24, 40).state_dict(), path)
    with pytest.raises(DataError, match="metadata has no"):
        load_link(path, SPEC)


def test_our_link_file_keeps_bf16_and_loads_fp32(tmp_path):
    link, path = OuterLink(24, 40, target_norm=1.5), tmp_path / "link.safetensors"
    spec = LinkSpec.outer("Planner", "Critic", 24, 40, target_norm=1.5)
    save_link(link, path, spec, "bfloat16")
    loaded = load_link(path, spec)
    assert loaded.target_norm == 1.5
    assert loaded.proj1.weight.dtype == torch.float32
    assert torch.equal(loaded.proj1.weight, link.proj1.weight.bfloat16().float())
    assert path.stat().st_size < 2.2 * sum(p.numel() for p in link.parameters()) + 2000


def test_t22_official_folders_are_read_by_task_and_edge(tmp_path):
    inner = {"math": InnerLink(24), "code": InnerLink(24)}
    save_official_inner(tmp_path / "planner", inner, "float32")
    for task in inner:
        found = official_inner_file(tmp_path / "planner", task)
        assert found.name == f"adapter({task}).pt"
        loaded = load_link(found, LinkSpec.inner("Planner", 24))
        assert torch.equal(loaded.proj1.weight, inner[task].proj1.weight)
    with pytest.raises(MissingError, match=r"'science'.*\n.*code, math"):
        official_inner_file(tmp_path / "planner", "science")
    plain = tmp_path / "plain"
    plain.mkdir()
    assert official_inner_file(plain, "math") == plain / "adapter.pt"

    outer = OuterLink(24, 40)
    save_official_outer(tmp_path / "outer", {"math": [("12", "Planner-Critic-Outerlink", outer)]}, "sequential")
    files = official_outer_files(tmp_path / "outer", "math")
    assert (files["12"].dim_in, files["12"].dim_out) == (24, 40)
    assert files["12"].path.name == "Planner-Critic-Outerlink(math).pt"
    load_link(files["12"].path, SPEC)
    with pytest.raises(MissingError, match="'code'"):
        official_outer_files(tmp_path / "outer", "code")
    with pytest.raises(MissingError, match="is missing"):
        official_outer_files(plain, "math")


@pytest.mark.parametrize(
    ("value", "word"),
    [
        ("{", "not valid JSON"),
        ("[]", "JSON object"),
        ({"adapters": [{"legacy_key": "12"}]}, "malformed"),
        ({"adapters": [{"legacy_key": "12", "filename": "../x.pt", "in_dim": 2, "out_dim": 2}]}, "names the link file"),
        (
            {"adapters": [{"legacy_key": "1", "filename": "x", "in_dim": 2, "out_dim": 2, "adapter_type": "moe"}]},
            "'moe'",
        ),
    ],
)
def test_official_config_that_is_malformed_is_refused(tmp_path, value, word):
    text = value if isinstance(value, str) else json.dumps(value)
    (tmp_path / "outerlink_config.json").write_text(text, "utf-8")
    with pytest.raises(AgentRLError, match=word):
        official_outer_files(tmp_path, "math")
