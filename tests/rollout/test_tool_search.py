"""The search tool finds what is there, says so when nothing is, and never blocks the loop."""

from __future__ import annotations

import asyncio
import json
import subprocess
import sys
import time
from pathlib import Path
from typing import Any

import pytest

from agentrl.config.schema import SearchToolConfig
from agentrl.errors import DataError
from agentrl.protocols import Tool
from agentrl.rollout.tools.bm25_index import Bm25Index, words
from agentrl.rollout.tools.search import SearchTool

PAGES = [
    {"id": "1", "title": "Éric Rohmer", "text": "A French film director."},
    {"title": "Ducks", "text": "Ducks eat bread by the pond."},
    {"title": "Ducks", "text": "Ducks eat bread by the pond."},
    {"title": "Geese", "text": "Geese eat bread by the pond."},
    {"title": "Swans", "text": "Swans eat bread by the pond."},
]


def _tool(tmp_path: Path, pages: list[dict[str, str]] | None = None, **more: Any) -> SearchTool:
    path = tmp_path / "corpus.jsonl"
    path.write_text("\n".join(map(json.dumps, PAGES if pages is None else pages)) + "\n")
    config = {"corpus": str(path), "index_dir": str(tmp_path / "index"), "top_k": 2}
    progress = more.pop("progress", None)
    return SearchTool(SearchToolConfig(**{**config, **more}), progress=progress)


def _titles(tool: Tool, query: str | list[str]) -> list[str]:
    return [item.header for item in asyncio.run(tool.call({"query": query})).items]


def test_the_best_passage_comes_first_with_its_title_and_text(tmp_path: Path) -> None:
    result = asyncio.run(_tool(tmp_path).call({"query": "french DIRECTOR"}))
    assert [(i.header, i.text) for i in result.items] == [("Éric Rohmer", "A French film director.")]
    assert result.error is None


@pytest.mark.parametrize("query", ["eric rohmer", "E\u0301RIC", "Éric"])
def test_case_and_diacritics_do_not_matter(tmp_path: Path, query: str) -> None:
    assert _titles(_tool(tmp_path), query) == ["Éric Rohmer"]


@pytest.mark.parametrize("query", ["", "zebra", "the zebra", "?!", [], ["", "zebra"]])
def test_no_hit_gives_no_items(tmp_path: Path, query: str | list[str]) -> None:
    result = asyncio.run(_tool(tmp_path).call({"query": query}))
    assert result.items == ()
    assert result.error is None


def test_ties_keep_the_corpus_order_and_copies_are_found_once(tmp_path: Path) -> None:
    assert _titles(_tool(tmp_path), "bread pond") == ["Ducks", "Geese"]
    assert _titles(_tool(tmp_path, top_k=9), "bread pond") == ["Ducks", "Geese", "Swans"]


def test_results_of_several_queries_are_pooled_in_their_order_each_once(tmp_path: Path) -> None:
    tool = _tool(tmp_path)
    assert _titles(tool, ["geese", "bread pond", "film"]) == ["Geese", "Ducks", "Éric Rohmer"]
    result = asyncio.run(tool.call({"query": ["x"] * 11}))
    assert result.error == "malformed"
    assert "at most 10" in result.items[0].text


def test_an_index_is_built_once_and_again_when_the_corpus_changes(tmp_path: Path) -> None:
    done: list[tuple[int, int]] = []
    _tool(tmp_path, progress=lambda *args: done.append(args))
    assert done == [(5, 5)]
    _tool(tmp_path, progress=lambda *args: done.append(args))
    assert len(done) == 1
    tool = _tool(tmp_path, [*PAGES, {"title": "Zebra", "text": "stripes"}], progress=lambda *args: done.append(args))
    assert done[-1] == (6, 6)
    assert _titles(tool, "zebra") == ["Zebra"]
    assert len([p for p in (tmp_path / "index").iterdir() if p.is_dir()]) == 2


@pytest.mark.parametrize("name", ["texts.jsonl", "starts.npy", "bm25/vocab.index.json", "bm25/data.csc.index.npy"])
@pytest.mark.parametrize("damage", ["torn", "gone"])
def test_a_broken_index_is_built_again(tmp_path: Path, name: str, damage: str) -> None:
    _tool(tmp_path)
    (folder,) = (p for p in (tmp_path / "index").iterdir() if p.is_dir())
    if damage == "gone":
        (folder / name).unlink()
    else:
        (folder / name).write_bytes((folder / name).read_bytes()[:-9])
    assert _titles(_tool(tmp_path), "geese") == ["Geese"]


@pytest.mark.parametrize(
    ("text", "cause"),
    [
        ('{"title": "a", "text": "b"}\n{"title": ', r"corpus\.jsonl:2: broken JSON"),
        ('{"title": "a", "text": "b"}\n\n{"title": "a"}', r"corpus\.jsonl:3: no object with a `text`"),
        ("[1]", r"corpus\.jsonl:1: no object"),
        ('{"title": 3, "text": "b"}', r"corpus\.jsonl:1: the title"),
        ("", "no words"),
        ('{"text": "?"}', "no words"),
    ],
)
def test_a_malformed_corpus_is_refused_with_its_line_and_leaves_no_index(tmp_path: Path, text: str, cause: str) -> None:
    path = tmp_path / "corpus.jsonl"
    path.write_text(text)
    config = SearchToolConfig(corpus=str(path), index_dir=str(tmp_path / "index"))
    with pytest.raises(DataError, match=cause):
        SearchTool(config)
    assert not [p for p in (tmp_path / "index").iterdir() if p.is_dir()]


def test_a_missing_corpus_is_refused(tmp_path: Path) -> None:
    with pytest.raises(DataError, match="no such corpus"):
        SearchTool(SearchToolConfig(corpus="none.jsonl", index_dir=str(tmp_path)), base=tmp_path)


def test_embedded_corpora_come_from_the_resolver_and_other_names_are_paths(tmp_path: Path) -> None:
    def resolve(name: str) -> list[dict[str, str]] | None:
        return PAGES if name == "invented" else None

    tool = SearchTool(SearchToolConfig(corpus="invented", index_dir=str(tmp_path)), resolve=resolve)
    assert _titles(tool, "geese") == ["Geese"]
    assert tool.num_documents == 4
    with pytest.raises(DataError, match="no such corpus"):
        SearchTool(SearchToolConfig(corpus="other", index_dir=str(tmp_path)), resolve=resolve)


def test_the_loop_runs_on_while_a_search_does_and_a_slow_one_is_told_of(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    tool = _tool(tmp_path, timeout_s=0.2)

    def slow(self: Bm25Index, query: str, k: int) -> list[int]:
        time.sleep(0.6)
        return []

    monkeypatch.setattr(Bm25Index, "search", slow)

    async def main() -> tuple[Any, int]:
        ticks = 0
        call = asyncio.create_task(tool.call({"query": "x"}))
        while not call.done():
            await asyncio.sleep(0.01)
            ticks += 1
        return await call, ticks

    result, ticks = asyncio.run(main())
    assert result.error == "timeout"
    assert "0.2 s" in result.items[0].text
    assert ticks > 5


def test_waiting_for_a_thread_does_not_count_as_searching(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    tool = _tool(tmp_path, timeout_s=0.4)

    def slow(self: Bm25Index, query: str, k: int) -> list[int]:
        time.sleep(0.15)
        return []

    monkeypatch.setattr(Bm25Index, "search", slow)

    async def main() -> list[Any]:
        return await asyncio.gather(*(tool.call({"query": "x"}) for _ in range(16)))

    for _ in range(2):  # a tool outlives the loop it was first called from
        assert all(r.error is None for r in asyncio.run(main()))


def test_two_processes_build_one_index_at_once(tmp_path: Path) -> None:
    path = tmp_path / "corpus.jsonl"
    path.write_text("\n".join(json.dumps({"title": str(i), "text": f"page {i}"}) for i in range(500)))
    code = (
        "import sys, asyncio; from agentrl.config.schema import SearchToolConfig as C;"
        "from agentrl.rollout.tools.search import SearchTool as T;"
        "t = T(C(corpus=sys.argv[1], index_dir=sys.argv[2]));"
        "print(asyncio.run(t.call({'query': '77'})).items[0].header)"
    )
    command = [sys.executable, "-c", code, str(path), str(tmp_path / "index")]
    processes = [subprocess.Popen(command, stdout=subprocess.PIPE, text=True) for _ in range(2)]
    assert [p.communicate()[0] for p in processes] == ["77\n", "77\n"]
    assert len([p for p in (tmp_path / "index").iterdir() if p.is_dir()]) == 1


def test_words_have_neither_case_nor_diacritics() -> None:
    assert words("The Straße of Zoë_1, 5th") == ["the", "strasse", "of", "zoe_1", "5th"]


def test_function_words_count_only_when_a_query_has_no_others(tmp_path: Path) -> None:
    tool = _tool(tmp_path, [{"title": "It", "text": "A clown."}, {"title": "Sea", "text": "Blue as it is."}], top_k=9)
    assert _titles(tool, "it") == ["It", "Sea"]
    assert _titles(tool, "is it blue") == ["Sea"]


def test_the_2wiki_corpus_answers_its_questions(tmp_path: Path, data_dir: Path) -> None:
    config = SearchToolConfig(corpus="2wiki_corpus.jsonl", index_dir=str(tmp_path), top_k=10)
    began = time.perf_counter()
    tool = SearchTool(config, base=data_dir)
    built = time.perf_counter()
    SearchTool(config, base=data_dir)
    opened = time.perf_counter()
    rows = [json.loads(x) for x in (data_dir / "2wiki_local_dev.jsonl").read_text().splitlines()]
    hits = 0
    searched = time.perf_counter()
    for row in rows:
        found = {item.header for item in tool.search([row["question"]])}
        hits += bool(found & set(row["support_titles"]))
    each = (time.perf_counter() - searched) / len(rows)
    print(f"build {built - began:.2f} s, open {opened - built:.3f} s, query {each * 1000:.2f} ms, {hits}/{len(rows)}")
    assert tool.num_documents > 6000
    assert hits >= 0.9 * len(rows)
    assert each < 0.2
