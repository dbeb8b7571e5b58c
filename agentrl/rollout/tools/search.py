"""The search tool: BM25 over a local corpus, off the event loop."""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

from agentrl.config.schema import SearchToolConfig
from agentrl.models.cache import home
from agentrl.protocols import ToolItem, ToolResult
from agentrl.rollout.tools.bm25_index import Bm25Index, Progress, checked, file_key, read_corpus, rows_key

MAX_QUERIES = 10
_WORKERS = 4


class SearchTool:
    """Finds passages by words. The results of several queries are pooled in their order, each passage once.

    `resolve` gives the rows (`title`, `text`) of an embedded corpus by name, or None for a name that is a path;
    `base` is the folder that a relative path starts from. The index is built here, with `progress(done, all)`, and
    kept under a name made of the corpus' content. Raises `DataError` for a corpus that is missing or malformed.
    """

    name = "search"
    description = "Search the corpus by words. Returns the best passages of each query."
    parameters: Mapping[str, Any] = {
        "type": "object",
        "properties": {
            "query": {
                "type": ["string", "array"],
                "items": {"type": "string"},
                "description": "one query, or a list of queries whose results are pooled",
            }
        },
        "required": ["query"],
        "additionalProperties": False,
    }

    def __init__(
        self,
        config: SearchToolConfig,
        *,
        resolve: Callable[[str], Sequence[Mapping[str, str]] | None] | None = None,
        base: Path | None = None,
        progress: Progress | None = None,
    ) -> None:
        self._config = config
        root = Path(config.index_dir).expanduser() if config.index_dir else home() / "search"
        report = progress or (lambda done, total: None)
        rows = resolve(config.corpus) if resolve else None
        if rows is not None:
            documents = [checked(row, f"{config.corpus}: row {i}") for i, row in enumerate(rows, start=1)]
            self._index = Bm25Index.open(root / rows_key(documents), lambda: documents, len(documents), report)
        else:
            path = Path(config.corpus) if base is None else base / config.corpus
            key = file_key(path)
            self._index = Bm25Index.open(root / key, lambda: read_corpus(path), _count_lines(path), report)
        self._threads = ThreadPoolExecutor(_WORKERS, thread_name_prefix="search")

    @property
    def num_documents(self) -> int:
        return self._index.num_documents

    async def call(self, arguments: Mapping[str, Any]) -> ToolResult:
        """Search in a worker thread. The time limit counts from the start of the search, not of the wait for a thread.

        A query without a hit gives no items; too many queries and a search over its time are faults in the result.
        """
        given = arguments["query"]
        queries = [given] if isinstance(given, str) else list(given)
        if len(queries) > MAX_QUERIES:
            return _fault("malformed", f"{len(queries)} queries in one call; at most {MAX_QUERIES} are allowed")
        loop = asyncio.get_running_loop()
        started = asyncio.Event()

        def work() -> tuple[ToolItem, ...]:
            loop.call_soon_threadsafe(started.set)
            return self.search(queries)

        future = loop.run_in_executor(self._threads, work)
        await started.wait()
        try:
            return ToolResult(items=await asyncio.wait_for(future, self._config.timeout_s))
        except TimeoutError:
            return _fault("timeout", f"the search took more than {self._config.timeout_s:g} s; ask for less")

    def search(self, queries: Sequence[str]) -> tuple[ToolItem, ...]:
        """The passages of every query, best first, in the order of the queries, each passage once."""
        places: dict[int, None] = {}
        for query in queries:
            for place in self._index.search(query, self._config.top_k):
                places.setdefault(place)
        return tuple(self._index.item(place) for place in places)


def _fault(error: str, text: str) -> ToolResult:
    return ToolResult(items=(ToolItem(header="error", text=text),), error=error)


def _count_lines(path: Path) -> int:
    with path.open("rb") as file:
        return sum(1 for line in file if line.strip())
