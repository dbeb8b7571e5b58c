from __future__ import annotations

import logging
import warnings

import pytest

from agentrl.errors import ConfigError
from agentrl.recipes.plugins import plugin
from agentrl.recipes.quiet import quiet_libraries
from agentrl.run import Run


def test_what_libraries_warn_of_goes_to_the_runs_log_and_not_to_the_terminal(tmp_path, capfd):
    from transformers.utils import logging as hf_logging

    shown = hf_logging.is_progress_bar_enabled()
    with Run.create(tmp_path, "run", "method: mars\n"), quiet_libraries():
        warnings.warn(" ".join(["a tensor", "of python"]), UserWarning, stacklevel=1)
        hf_logging.get_logger("transformers.models").warning("a word of transformers")
        logging.getLogger("deepspeed.runtime").warning("a word of deepspeed")
        logging.getLogger("agentrl").warning("a word of ours")
        assert not hf_logging.is_progress_bar_enabled()
    log = (tmp_path / "run/logs/attempt_1.log").read_text()
    for text in ("a tensor of python", "a word of transformers", "a word of deepspeed", "a word of ours"):
        assert log.count(text) == 1, text
    out, err = capfd.readouterr()
    assert out == err == ""
    assert hf_logging.is_progress_bar_enabled() is shown
    assert not [h for h in logging.getLogger().handlers if type(h).__module__.startswith("agentrl")]


def test_without_a_run_the_words_of_libraries_are_dropped(capfd):
    with quiet_libraries():
        logging.getLogger("deepspeed").warning("nobody listens")
    assert capfd.readouterr() == ("", "")


@pytest.mark.parametrize(
    ("target", "cause"),
    [
        ("exact", "neither built in nor module:function"),
        ("no_such_module:f", "cannot be loaded"),
        ("json:nothing", "cannot be loaded"),
        ("json:__name__", "is str, not a function"),
        ("json:loads", "cannot be called without arguments"),
    ],
)
def test_a_plugin_that_is_none_is_named_with_its_key(target, cause):
    with pytest.raises(ConfigError, match=cause) as fault:
        plugin("reward", target)
    assert "reward: " in fault.value.cause


def test_what_a_plugin_itself_raises_is_told_with_its_key(tmp_path, monkeypatch):
    (tmp_path / "faulty_plugin.py").write_text("def make():\n    raise KeyError('mine')\n")
    monkeypatch.syspath_prepend(tmp_path)
    with pytest.raises(ConfigError, match=r"tools\.custom\.x: 'faulty_plugin:make' raised KeyError: 'mine'"):
        plugin("tools.custom.x", "faulty_plugin:make")
