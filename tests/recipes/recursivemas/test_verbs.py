"""check, --smoke and infer of RecursiveMAS: what a user sees before and without training."""

from __future__ import annotations

import json

import pytest

from agentrl.cli.recursivemas import DEFAULT_RECIPE
from agentrl.config.shipped import shipped_links
from agentrl.recipes.recursivemas.link_folders import file_in, inner_name, outer_name
from agentrl.recipes.recursivemas.links import new_links, save_links
from agentrl.recipes.recursivemas.setup import load_system
from agentrl.recipes.registry import load_recipe
from agentrl.update.link_header import read_metadata
from agentrl.update.links import InnerLink, OuterLink

TINY = ("model.name=tiny-llama", "model.dtype=float32", "engine.deterministic=true", "launch.threads=1")


def test_the_smoke_recipe_trains_in_both_stages(cli, folder):
    done = cli("recursivemas", "train", "smoke/recursivemas", "--steps", "4", "--name", "r", "--json", sets=TINY)
    assert done.code == 0, done
    steps = [json.loads(line) for line in (folder / "runs/r/metrics.jsonl").read_text().splitlines()]
    assert [m["recursivemas/stage"] for m in steps] == ["inner"] * 3 + ["outer"]
    assert (done.json["frozen"], done.json["links"]["trained"]) == (True, True)
    seen = cli("inspect", "r").out.splitlines()
    head = ["step", "loss", *(f"recursivemas/{key}" for key in ("link_norm_ratio", "latent_steps", "text_tokens"))]
    at = next(i for i, line in enumerate(seen) if line.split() == head)
    assert [line.split()[0] for line in seen[at + 1 : at + 5]] == ["1", "2", "3", "4"]


@pytest.mark.parametrize("own", ["{stage: outer, form: teacher_forced, targets: {expert: hint}}", "{stage: inner}"])
def test_smoke_cuts_any_graph_down_to_what_runs_offline(cli, folder, own):
    (folder / "mine.yaml").write_text(
        f"""\
method: recursivemas
policies: {{expert: {{name: nobody/big}}, learner: {{name: nobody/small, mode: frozen}}}}
agents: {{learner: {{sampling: {{max_tokens: 4000}}}}}}
engine: {{kind: hf, max_batch: 8}}
data: {{path: train.csv, columns: {{question: q}}, limit: 3, eval: {{path: held.csv}}}}
reward: mine:grade
recursivemas:
  {{style: distillation, rounds: 3, latent_steps: 48, links: somewhere, train: {own}}}
optim: {{warmup_steps: 100}}
launch: {{gpus: 8}}
run: {{steps: 20000, eval_every: 100, keep_best: true, seed: 9}}
"""
    )
    done = cli("recursivemas", "train", "mine.yaml", "--smoke", "--name", "r", "--json", sets=TINY)
    assert done.code == 0, done
    assert (done.json["steps"], done.json["rounds"], done.json["latent_steps"]) == (2, 2, 4)
    assert done.json["eval_after"]["n"] == 4
    assert json.loads((folder / "runs/r/summary.json").read_text())["seed"] == 9


def test_check_shows_where_latents_stand_and_what_the_decoder_learns(cli, folder):
    done = cli("check", "smoke/recursivemas", "--show-sample", sets=TINY)
    assert done.code == 0, done
    assert "--- planner, round 1: " in done.out
    assert "--- planner, round 2: " in done.out
    assert done.out.count("--- critic, round 1: ") == 1
    assert "--- critic, round 2: " not in done.out
    assert "[world] 4 latent thoughts of critic" in done.out
    assert "[trained] crab<|im_end|>" in done.out
    assert "none are named, so training begins with new ones" in done.out


def test_links_of_a_run_answer_a_file_of_questions_in_order(cli, folder):
    (folder / "q.jsonl").write_text("".join(f'{{"question": "What is {i}?"}}\n' for i in range(3)))
    words = ("recursivemas", "infer", "smoke/recursivemas", "--allow-untrained", "--input", "q.jsonl", "--json")
    done = cli(*words, "--latent-steps", "2", sets=TINY)
    assert done.code == 0, done
    assert [a["question"] for a in done.json["answers"]] == [f"What is {i}?" for i in range(3)]
    assert {a["counts"]["latent_steps"] for a in done.json["answers"]} == {2 * 5}
    assert done.json["links"]["trained"] is False


def test_infer_with_no_recipe_asks_the_embedded_rings_own_question_in_three_rounds(cli, folder, monkeypatch):
    recipe = load_recipe(DEFAULT_RECIPE, TINY).tree
    system = load_system(recipe.model_copy(update={"recursivemas": _new(recipe)}), allow_untrained=True).system
    backbones = {name: agent.backbone for name, agent in system.agents.items()}
    made = new_links(recipe.recursivemas, backbones, 0)
    save_links(made.after(made.by_name, {"stage": "outer"}), folder / "embedded-ring", "bfloat16")
    done = cli("recursivemas", "infer", "--rounds", "3", sets=(*TINY, "recursivemas.links=embedded-ring"))
    assert done.code == 0, done
    assert f"question: {recipe.recursivemas.sample}" in done.out
    head = done.out.splitlines().index("round\tagent\tsteps\tpositions\treused\tstate norm\tsent, norm")
    trace = [line.split("\t") for line in done.out.splitlines()[head + 1 : head + 9]]
    assert [(int(row[0]), row[1]) for row in trace] == [
        (r, a) for r in (1, 2, 3) for a in ("sender", "relay", "speaker") if (r, a) != (3, "speaker")
    ]
    given = cli(
        *("recursivemas", "infer", "--question", "What is the code word?", "--json"),
        sets=(*TINY, "recursivemas.links=embedded-ring"),
    )
    assert given.json["answers"][0]["question"] == "What is the code word?"


def _new(recipe):
    return recipe.recursivemas.model_copy(update={"links": None})


def test_shipped_links_are_small_trained_and_say_how_they_were_made():
    for folder in shipped_links().values():
        files = sorted(folder.glob("*.safetensors"))
        assert 0 < sum(path.stat().st_size for path in files) <= 16_000_000
        assert all(read_metadata(path)["training"] for path in files)
        about = json.loads((folder / "provenance.json").read_text("utf-8"))
        assert {"command", "seed", "git_commit", "eval_after"} <= set(about)
        assert about["stored"] == "bfloat16"


def test_t4_the_embedded_ring_has_three_links_of_each_kind_and_6991488_parameters():
    config = load_recipe(DEFAULT_RECIPE).tree.recursivemas
    names = {*map(inner_name, config.graph.agents), *map(outer_name, config.graph.edges)}
    links = [InnerLink(576, config.inner_form), OuterLink(576, 576, config.outer_form)]
    sizes = [sum(parameter.numel() for parameter in link.parameters()) for link in links]
    assert (len(names), 3 * sum(sizes)) == (6, 6_991_488)
    folder = shipped_links().get(config.links)
    assert folder is None or {file_in(folder, name) for name in names} == set(folder.glob("*.safetensors"))
