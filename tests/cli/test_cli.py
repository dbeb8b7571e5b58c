from __future__ import annotations

import contextlib
import os
import pty
import re
import subprocess
import sys
import time

import pytest

HEAVY = {"torch", "ray", "vllm", "transformers", "numpy"}


def two_lines(done, code: int, cause: str, fix: str = "") -> None:
    assert done.code == code, done
    lines = done.err.strip().splitlines()
    assert lines[-2].startswith("error: ")
    assert cause in lines[-2]
    assert lines[-1].startswith("fix: ")
    assert fix in lines[-1]
    assert "Traceback" not in done.err


def best_time(*args: str, tries: int = 3) -> float:
    """The fastest of a few tries: what the command needs, not what a busy machine adds."""
    times = []
    for _ in range(tries):
        start = time.perf_counter()
        subprocess.run([sys.executable, *args], capture_output=True, check=True, timeout=60)
        times.append(time.perf_counter() - start)
    return min(times)


def test_help_is_quick_and_imports_nothing_heavy():
    code = "import sys\nfrom agentrl.cli import app\ntry:\n  app()\nfinally:\n  sys.stderr.write(' '.join(sys.modules))"
    done = subprocess.run(
        [sys.executable, "-c", code, "--help"], capture_output=True, text=True, check=True, timeout=60
    )
    assert "mars" in done.stdout
    assert not HEAVY & set(done.stderr.split())
    assert not {"pydantic", "yaml", "rich"} & set(done.stderr.split())
    limit = 0.35 if os.getloadavg()[0] < (os.cpu_count() or 1) else 1.5  # other work on the machine is not the CLI's
    assert best_time("-c", "from agentrl.cli import app; app()", "--help") < limit


def test_check_is_quick_and_imports_nothing_heavy(agentrl):
    start = time.perf_counter()
    done = agentrl("check", "toy.yaml", "--json", modules=True)
    assert done.code == 0, done
    assert time.perf_counter() - start < (2.0 if os.getloadavg()[0] < (os.cpu_count() or 1) else 6.0)
    assert not HEAVY & set(done.err.partition("MODULES ")[2].split())


def test_check_json_holds_the_resolved_tree_and_where_each_value_came_from(agentrl):
    done = agentrl("check", "toy.yaml", "--json", "--smoke", "--set", "run.seed=3")
    assert done.code == 0, done
    tree, origins = done.json["recipe"], done.json["origins"]
    assert tree["run"]["seed"] == 3
    assert origins["run.seed"] == "--set"
    assert origins["run.steps"] == "smoke"
    assert origins["engine.kind"] == "toy.yaml:5"
    assert origins["optim.lr"] == "default"
    assert done.json["ok"] is True


def test_check_in_a_pipe_prints_values_with_their_origin_and_ok(agentrl):
    done = agentrl("check", "toy.yaml")
    assert done.code == 0
    assert "run.steps\t2\ttoy.yaml:" in done.out
    assert "\nok: toy.yaml (toy, " in done.out
    assert "\x1b" not in done.out


@pytest.mark.parametrize(
    ("args", "code", "cause"),
    [
        (["check", "toy.yaml", "--set", "optim.lrr=1"], 2, "optim.lrr: unknown key (given 1)"),
        (["check", "toy.yaml", "--set", "rollout.group_size=1"], 2, "rollout.group_size: 1, but advantages"),
        (["check", "toy.yaml", "--set", "toy.word=no"], 2, "toy.word: no is refused"),
        (["check", "toy.yaml", "--set", "launch.gpus=4"], 3, "error: launch.gpus is 4"),
        (["check", "toy.yaml", "--set", "model.name=nobody/nothing"], 3, "model.name: model 'nobody/nothing'"),
        (["check", "toy.yaml", "--set", "model.name=tiny-lama"], 3, "model.name: "),
        (["check", "toy.yaml", "--set", "model.checkpoint=nowhere"], 3, "model.checkpoint: there is no run"),
        (
            ["check", "toy.yaml", "--set", "toy.url=http://x/v1", "--set", "toy.key_env=NO_SUCH"],
            3,
            "NO_SUCH is not set",
        ),
        (["check", "toy.yaml", "--set", "data.path=none.jsonl"], 4, "none.jsonl"),
        (["check", "toy.yaml", "--set", "data.path=null"], 4, "data.path: no data set is named"),
        (["check", "toy.yaml", "--set", "rollout.questions_per_step=9"], 4, "4 tasks, fewer than"),
        (["check", "toy.yaml", "--set", "tools.search.corpus=no.jsonl"], 4, "no embedded corpus 'no.jsonl'"),
        (["check", "toy.yaml", "--set", "tools.search.corpus=tasks.jsonl"], 4, "has no title and no text"),
        (["check", "toy.yaml", "--set", "tools.custom.x=nomodule:f"], 2, "there is no module nomodule"),
        (["check", "toy.yaml", "--set", "tools.custom.x=toymethod:f"], 2, "toymethod has no f"),
        (["toy", "train", "toy.yaml", "--set", "data.path=none.jsonl"], 4, "none.jsonl"),
        (["toy", "train", "toy.yaml", "--set", "toy.fail=diverged"], 5, "the loss is NaN at step 1"),
        (["toy", "train", "toy.yaml", "--set", "toy.fail=engine"], 1, "the engine died"),
        (["toy", "train", "toy.yaml", "--set", "toy.fail=bug"], 1, "KeyError: 'boom"),
        (["toy", "train", "toy.yaml", "--set", "toy.fail=interrupt"], 130, "interrupted"),
        (["toy", "train", "toy.yaml", "--steps", "x"], 2, "'--steps'"),
        (["toy", "train", "toy.yaml", "--steps", "-1"], 2, "run.steps: got -1, expected a whole number of at least 0"),
        (["toy", "train", "toy.yaml", "--from-rollouts", "none"], 2, "there is no folder none"),
        (["toy", "train"], 2, "Missing argument 'RECIPE'"),
        (["toy", "infer", "toy.yaml"], 2, "--question or --input, got neither"),
        (["toy", "infer", "toy.yaml", "--question", "a", "--input", "b"], 2, "got both"),
        (["toy", "infer", "toy.yaml", "--input", "none.jsonl"], 4, "there is no file none.jsonl"),
        (["mars", "train", "toy.yaml"], 2, "a recipe of toy, not of mars"),
        (["recipes", "show", "nothing"], 2, "no shipped recipe"),
        (["nothing"], 2, "No such command 'nothing'"),
    ],
)
def test_every_failure_has_its_exit_code_one_line_of_cause_and_one_of_fix(agentrl, args, code, cause):
    two_lines(agentrl(*args), code, cause)


def test_failures_come_in_the_order_of_repair_and_the_first_sets_the_code(agentrl):
    sets = ["data.path=none.jsonl", "model.name=nobody/nothing", "launch.gpus=4", "toy.url=http://x", "toy.key_env=NO"]
    done = agentrl("check", "toy.yaml", "--json", *(word for text in sets for word in ("--set", text)))
    keys = [finding["key"] for finding in done.json["findings"] if finding["level"] == "error"]
    assert keys == ["launch.gpus", "model.name", "toy.url", "data.path"]
    assert done.code == 3
    assert done.json["error"]["exit_code"] == 3
    assert [line.split(":")[0] for line in done.err.splitlines()] == ["error", "fix"] * 4


def test_a_window_too_small_for_the_budgets_is_refused(agentrl, folder):
    model = folder / "model"
    model.mkdir()
    (model / "config.json").write_text('{"max_position_embeddings": 150}')
    (model / "model.safetensors").write_bytes(b"")
    done = agentrl("check", "toy.yaml", "--set", f"model.name={model}")
    two_lines(done, 2, "agents.solver: max_prompt_tokens 100 + max_response_tokens 100 = 200 tokens do not fit")
    done = agentrl("check", "toy.yaml", "--set", f"model.name={model}", "--set", "engine.max_model_len=4096")
    assert "engine.max_model_len: 4096 is more than the 150 positions" in done.err


def test_held_out_questions_seen_in_training_are_a_warning(agentrl):
    done = agentrl("check", "toy.yaml", "--set", "data.eval.path=tasks.jsonl")
    assert done.code == 0
    assert "warning: data.eval.path: 4 of its 4 questions are in the training data too" in done.out


def test_shown_sample_tells_trained_text_from_masked(agentrl):
    done = agentrl("check", "toy.yaml", "--show-sample")
    assert "--- System 2\n[prompt] You are\n[trained] hello\n[world] page\n" in done.out


def test_json_keeps_stdout_to_one_object_whatever_libraries_print(agentrl):
    args = ("--steps", "3", "--seed", "5", "--name", "2024", "--run-dir", "out", "--resume", "--json")
    done = agentrl("toy", "train", "toy.yaml", "--set", "run.seed=1", *args)
    assert done.code == 0, done
    result = done.json
    assert (result["steps"], result["seed"], result["name"], result["dir"]) == (3, 5, "2024", "out")
    assert result["resume"] is True
    assert result["origin"] == "--set"
    assert "a library prints" in done.err
    assert "a child prints" in done.err
    assert "step 3/3  reward 1  loss 0.167  left 0:00:00" in done.err


def test_json_errors_are_on_stdout_too(agentrl):
    done = agentrl("toy", "train", "toy.yaml", "--json", "--set", "toy.fail=diverged")
    assert done.json["error"]["exit_code"] == 5
    assert done.json["error"]["cause"] == "the loss is NaN at step 1"
    two_lines(done, 5, "the loss is NaN at step 1", "lower optim.lr")


def test_quiet_drops_progress_and_keeps_the_result(agentrl):
    done = agentrl("toy", "train", "toy.yaml", "--quiet", "--smoke")
    assert done.err == ""
    assert "rise.value: 0.25" in done.out
    assert "items" not in done.out


def test_debug_shows_the_trace(agentrl):
    done = agentrl("toy", "train", "toy.yaml", "--debug", "--set", "toy.fail=bug")
    assert done.code == 1
    assert "Traceback" in done.err


def test_checkpoint_flag_is_an_alias_of_its_key(agentrl, folder):
    (folder / "runs" / "first").mkdir(parents=True)
    done = agentrl("toy", "eval", "toy.yaml", "--checkpoint", "first@10", "--json")
    assert done.json["checkpoint"] == "first@10"


def test_an_answer_cannot_drive_the_terminal(agentrl):
    done = agentrl("toy", "infer", "toy.yaml", "--question", "how much?")
    assert done.code == 0
    assert "answers[0].answer: 42 \\x1b[31mred" in done.out


def test_infer_needs_no_data(agentrl):
    assert agentrl("toy", "infer", "toy.yaml", "--question", "q", "--set", "data.path=null").code == 0


def test_deep_check_names_an_endpoint_that_does_not_answer_and_never_its_key(agentrl):
    sets = ("--set", "toy.url=http://127.0.0.1:9/v1", "--set", "toy.key_env=TOY_KEY")
    done = agentrl("check", "toy.yaml", "--deep", *sets, TOY_KEY="sk-very-secret")
    two_lines(done, 3, "toy.url: 127.0.0.1 cannot be reached")
    assert "sk-very-secret" not in done.out + done.err
    assert agentrl("check", "toy.yaml", *sets, TOY_KEY="sk-very-secret").code == 0


def test_recipes_copy_never_replaces_a_file(agentrl, folder):
    assert agentrl("recipes", "copy", "toy.yaml", "mine/new.yaml").code == 0
    assert (folder / "mine/new.yaml").read_text() == (folder / "toy.yaml").read_text()
    two_lines(agentrl("recipes", "copy", "toy.yaml", "mine/new.yaml"), 2, "is there already")
    assert agentrl("recipes", "show", "toy.yaml").out == (folder / "toy.yaml").read_text()


def test_version_and_bare_groups(agentrl):
    assert agentrl("--version").out.startswith("agentrl 0.")
    assert "Usage: agentrl" in agentrl("--help").out.replace("-c", "agentrl")


def test_a_reader_that_goes_away_leaves_no_trace(folder):
    command = f"{sys.executable} -c 'from agentrl.cli import app; app()' models list | true"
    done = subprocess.run(["bash", "-c", command], capture_output=True, text=True, timeout=60, check=False)
    assert "Traceback" not in done.stderr


def test_a_terminal_gets_a_live_table_with_the_time_left_and_no_colour_where_it_is_off(driver):
    for no_color in ("", "1"):
        pid, terminal = pty.fork()
        if pid == 0:
            os.environ.update({"NO_COLOR": no_color, "TERM": "xterm-256color", "COLUMNS": "120"})
            os.execv(sys.executable, [sys.executable, "-c", driver, "toy", "train", "toy.yaml"])
        text = b""
        with contextlib.suppress(OSError):  # Linux ends a terminal whose process has left with EIO
            while chunk := os.read(terminal, 65536):
                text += chunk
        os.close(terminal)
        assert os.waitstatus_to_exitcode(os.waitpid(pid, 0)[1]) == 0
        assert b"reward" in text
        assert b"step 2 of 2" in text
        assert b"left 0:00:0" in text
        assert bool(re.search(rb"\x1b\[[0-9;]*3[0-9]m", text) or b"\x1b[9" in text) is (no_color == "")


@pytest.mark.parametrize("closed", [">&-", ">&- 2>&-", "<&- >&- 2>&-"])
def test_a_closed_stdout_is_no_fault(closed):
    command = f'"{sys.executable}" -c "from agentrl.cli import app; app()" recipes list {closed}'
    done = subprocess.run(["sh", "-c", command], stderr=subprocess.PIPE, text=True, timeout=60, check=False)
    assert (done.returncode, done.stderr) == (0, "")


LONG = "a" * 5000
LOCAL_COACH = ["check", "smoke/mappa", "--set", "coach.kind=local", "--set", "coach.rules=null", "--set"]


@pytest.mark.parametrize(
    ("args", "cause"),
    [
        (["check", "~nobody-here/x.yaml"], "no such file"),
        (["check", LONG], "no such file"),
        (["check", "toy.yaml", "--set", f"data.path={LONG}"], "data.path: a path of 5000 characters, too long"),
        (["check", "toy.yaml", "--set", 'data.path="a\\0b"'], "data.path: a path with a NUL"),
        (["check", "toy.yaml", "--set", "data.path=~nobody-here/x"], "data.path: ~nobody-here is no user's home"),
        (["check", "toy.yaml", "--set", "model.name=~nobody-here/x"], "model.name: ~nobody-here is no user's home"),
        (["check", "toy.yaml", "--set", 'model.checkpoint=""'], "model.checkpoint: an empty path"),
        (["check", "toy.yaml", "--set", f"run.dir={LONG}"], "run.dir: a path of 5000 characters"),
        (["toy", "train", "toy.yaml", "--run-dir", "~nobody-here"], "run.dir: ~nobody-here is no user's home"),
        (["toy", "train", "toy.yaml", "--from-rollouts", LONG], "a path of 5000 characters is too long"),
        (["toy", "infer", "toy.yaml", "--input", LONG], "a path of 5000 characters is too long"),
        (["check", "toy.yaml", "--set", "tools.search.corpus=~nobody-here"], "tools.search.corpus: ~nobody-here is no"),
        ([*LOCAL_COACH, "coach.model=~nobody-here/x"], "coach.model: ~nobody-here is no user's home"),
        ([*LOCAL_COACH, f"coach.model={LONG}"], "coach.model: a path of 5000 characters"),
        (["export", "~nobody-here/run", "dest"], "RUN: there is no run"),
        (["toy", "train", "toy.yaml", "--run-dir", "tasks.jsonl"], "run.dir: tasks.jsonl is a file"),
        (["check", "toy.yaml", "--set", "run.dir=tasks.jsonl/x"], "run.dir: tasks.jsonl is a file"),
        (["check", "toy.yaml", "--set", "tools.custom.x=..:x"], "tools.custom.x: '..:x'"),
    ],
)
def test_a_path_that_no_system_can_look_up_is_a_config_fault(agentrl, args, cause):
    two_lines(agentrl(*args), 2, cause)
