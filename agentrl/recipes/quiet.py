"""Libraries talk to the run's log, not to the terminal: no bars, and warnings in `logs/attempt_N.log`."""

from __future__ import annotations

import logging
import os
from collections.abc import Iterator
from contextlib import contextmanager


class _RunLog(logging.Handler):
    """Hands a library's records to the log of the run that is open, if one is. Our own go there by themselves."""

    def emit(self, record: logging.LogRecord) -> None:
        if record.name.partition(".")[0] != "agentrl":
            for handler in logging.getLogger("agentrl").handlers:
                handler.handle(record)


@contextmanager
def quiet_libraries() -> Iterator[None]:
    """Within the block transformers, torch, deepspeed and Python's `warnings` write to the run's log only.

    Afterwards the process is as before, but for `DS_ACCELERATOR`, which keeps deepspeed from warning about a machine
    without GPU.
    """
    from transformers.utils import logging as hf_logging

    if not os.path.exists("/dev/nvidiactl"):
        os.environ.setdefault("DS_ACCELERATOR", "cpu")
    bars = hf_logging.is_progress_bar_enabled()
    root, to_run = logging.getLogger(), _RunLog(logging.WARNING)
    hf_logging.disable_progress_bar()
    hf_logging.disable_default_handler()
    hf_logging.enable_propagation()
    logging.captureWarnings(True)
    root.addHandler(to_run)
    try:
        yield
    finally:
        root.removeHandler(to_run)
        logging.captureWarnings(False)
        hf_logging.disable_propagation()
        hf_logging.enable_default_handler()
        if bars:
            hf_logging.enable_progress_bar()
