"""Tasks: from files and embedded sets, in an order that a resumed run repeats."""

from agentrl.data.benchmarks import BENCHMARKS
from agentrl.data.load import load_tasks
from agentrl.data.order import fingerprint, order, overlap
from agentrl.data.registry import EMBEDDED, embedded_corpus, embedded_folder, embedded_tasks

__all__ = [
    "BENCHMARKS",
    "EMBEDDED",
    "embedded_corpus",
    "embedded_folder",
    "embedded_tasks",
    "fingerprint",
    "load_tasks",
    "order",
    "overlap",
]
