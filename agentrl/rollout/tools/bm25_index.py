"""A BM25 index over a local corpus: built once, kept in a cache folder, memory-mapped by every process."""

from __future__ import annotations

import hashlib
import json
import re
import shutil
import unicodedata
import uuid
from array import array
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any

from agentrl.errors import DataError
from agentrl.files import encode
from agentrl.models.cache import install_folder
from agentrl.protocols import ToolItem

if TYPE_CHECKING:
    import numpy as np

Progress = Callable[[int, int], None]  # documents done, documents in all
Document = tuple[str, str]  # title, text

_FORMAT = "1"  # change it whenever an index of the same corpus would differ
_WORD = re.compile(r"\w+")
# Left out of a query, where other words remain: they cost the most and tell the least.
_FUNCTION_WORDS = frozenset(
    _WORD.findall(
        "a an and are as at be but by for if in into is it no not of on or such that the their then there these they "
        "this to was will with"
    )
)
_REPORT_EVERY = 1000


def words(text: str) -> list[str]:
    """The search terms of a text: words without case and diacritics."""
    plain = unicodedata.normalize("NFKD", text).casefold()
    plain = "".join(c for c in plain if not unicodedata.combining(c))
    return _WORD.findall(plain)


def read_corpus(path: Path) -> Iterator[Document]:
    """The (title, text) of every line. Raises `DataError` naming the file and the line that is malformed."""
    if not path.is_file():
        raise DataError(f"{path}: no such corpus", "check tools.search.corpus: a .jsonl file or an embedded corpus")
    with path.open("rb") as file:
        for number, line in enumerate(file, start=1):
            if line.strip():
                yield _document(line.removeprefix(b"\xef\xbb\xbf"), f"{path}:{number}")


def _document(line: bytes, place: str) -> Document:
    try:
        row = json.loads(line)
    except ValueError as error:
        raise DataError(f"{place}: broken JSON: {error}", "write one whole JSON object per line") from error
    return checked(row, place)


def checked(row: Any, place: str) -> Document:
    """Title and text of a row. Raises `DataError` when they are not text."""
    if not isinstance(row, Mapping) or not isinstance(row.get("text"), str):
        raise DataError(f"{place}: no object with a `text`", 'write {"title": "...", "text": "..."}')
    title = row.get("title", "")
    if not isinstance(title, str):
        raise DataError(f"{place}: the title is not text: {title!r}", 'write {"title": "...", "text": "..."}')
    return title, row["text"]


def corpus_key(lines: Iterable[bytes]) -> str:
    """The name of a corpus' index: a hash of its content and of everything that shapes the index."""
    import bm25s

    digest = hashlib.sha256(f"{_FORMAT} {bm25s.__version__}\n".encode())
    for line in lines:
        digest.update(line)
    return digest.hexdigest()[:24]


def file_key(path: Path) -> str:
    if not path.is_file():
        raise DataError(f"{path}: no such corpus", "check tools.search.corpus: a .jsonl file or an embedded corpus")
    with path.open("rb") as file:
        return corpus_key(iter(lambda: file.read(1 << 20), b""))


def rows_key(rows: Sequence[Document]) -> str:
    return corpus_key(encode(row) + b"\n" for row in rows)


@dataclass(frozen=True, slots=True)
class Bm25Index:
    """An opened index. Searching is read-only and safe from several threads."""

    bm25: Any
    starts: np.ndarray  # (documents + 1,) byte offsets into `texts`
    texts: np.ndarray  # (bytes,) the documents as JSON lines
    num_documents: int

    @staticmethod
    def open(folder: Path, documents: Callable[[], Iterable[Document]], total: int, progress: Progress) -> Bm25Index:
        """The index in `folder`, built from `documents` where it is not there or broken.

        Processes that ask at once wait for the first; a killed one leaves nothing behind that counts.
        """
        install_folder(folder, lambda temp: _build(temp, documents(), total, progress))
        try:
            return _load(folder)
        except (OSError, ValueError, KeyError):
            # A lost machine may tear a file that had its name already; the corpus is at hand, so build anew.
            broken = folder.with_name(f".{folder.name}.broken-{uuid.uuid4().hex}")
            folder.rename(broken)
            shutil.rmtree(broken, ignore_errors=True)
            install_folder(folder, lambda temp: _build(temp, documents(), total, progress))
            return _load(folder)

    def search(self, query: str, k: int) -> list[int]:
        """The places of the at most `k` best documents that share a term with the query, best first.

        Equal scores keep the corpus' order.
        """
        import numpy as np

        given = words(query)
        telling = [word for word in given if word not in _FUNCTION_WORDS] or given
        terms = [word for word in telling if word in self.bm25.vocab_dict]
        if not terms:
            return []
        scores = self.bm25.get_scores(terms)
        if k < len(scores):
            least = np.partition(scores, len(scores) - k)[len(scores) - k]
            found = np.flatnonzero((scores >= least) & (scores > 0))
        else:
            found = np.flatnonzero(scores > 0)
        best = np.lexsort((found, -scores[found]))[:k]
        return [int(place) for place in found[best]]

    def item(self, place: int) -> ToolItem:
        raw = self.texts[int(self.starts[place]) : int(self.starts[place + 1])].tobytes()
        title, text = json.loads(raw)
        return ToolItem(header=title, text=text)


def _build(folder: Path, documents: Iterable[Document], total: int, progress: Progress) -> None:
    import bm25s
    import numpy as np

    vocabulary: dict[str, int] = {}
    ids: list[list[int]] = []
    starts = array("q", [0])
    seen: set[bytes] = set()
    with (folder / "texts.jsonl").open("wb") as file:
        for number, (title, text) in enumerate(documents, start=1):
            line = encode((title, text)) + b"\n"
            digest = hashlib.sha256(line).digest()[:16]
            if digest not in seen:  # a passage that stands twice is found once
                seen.add(digest)
                file.write(line)
                starts.append(starts[-1] + len(line))
                ids.append([vocabulary.setdefault(word, len(vocabulary)) for word in words(f"{title} {text}")])
            if number % _REPORT_EVERY == 0 or number == total:
                progress(number, total)
    if not vocabulary:
        raise DataError("the search corpus holds no words", "check tools.search.corpus")
    index = bm25s.BM25(method="lucene", backend="numpy")
    index.index(bm25s.tokenization.Tokenized(ids=ids, vocab=vocabulary), show_progress=False)
    index.save(str(folder / "bm25"), show_progress=False)
    np.save(folder / "starts.npy", np.frombuffer(starts, dtype=np.int64))


def _load(folder: Path) -> Bm25Index:
    import bm25s
    import numpy as np

    bm25 = bm25s.BM25.load(str(folder / "bm25"), mmap=True, show_progress=False, backend="numpy", auto_compile=False)
    starts = np.load(folder / "starts.npy", mmap_mode="r")
    texts = np.memmap(folder / "texts.jsonl", dtype=np.uint8, mode="r")
    documents = len(starts) - 1
    if int(starts[-1]) != len(texts) or bm25.scores["num_docs"] != documents:
        raise ValueError(f"{folder}: its parts do not fit together")
    return Bm25Index(bm25, starts, texts, documents)
