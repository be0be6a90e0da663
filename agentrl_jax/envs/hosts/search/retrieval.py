"""Document search: BM25 in this process, or any server with Search-R1's /retrieve.

A document is a row of a corpus in the format of wiki-18.jsonl, {"id": "0", "contents":
"\"Title\"\ntext"}; the first line of the contents is the title. `open_corpus` accepts a server, an
index on disk or a file of documents.

BM25 is `bm25s` with the constants of Pyserini's index, which the papers used (k1 = .9, b = .4),
without stemming. Ties keep the corpus order. A result shares at least one word with the query.
"""

import functools
import importlib
import json
import logging
import pathlib
import re
import shutil
import sys
import threading
from collections.abc import Callable, Iterable, Iterator, Sequence
from typing import Any

import numpy as np
import pydantic

from agentrl_jax.envs.hosts.connection import Connection, Text, read
from agentrl_jax.envs.hosts.world import WorldError, package_folder

Document = dict[str, Any]  # id, contents

K1, B = 0.9, 0.4
MOST_BYTES = 2**22  # of a server's reply
WORD = re.compile(r'\w+')
STOP_WORDS = frozenset(  # Lucene's
    'a an and are as at be but by for if in into is it no not of on or such that the their then '
    'there these they this to was will with'.split()
)
IMPORTING = threading.Lock()  # the worlds of a process are created in threads
# A row of a corpus: a title in quotes, a line break, the text
EXAMPLE = r'{"id": "0", "contents": "\"Oslo\"\nOslo is the capital of Norway."}'
ROWS, OFFSETS = 'documents.jsonl', 'offsets.npy'


def title_and_text(document: Document) -> tuple[str, str]:
    """Return the first line of the contents without its quotes, and the rest."""
    title, _, text = document['contents'].partition('\n')
    return title.strip('"'), text


def words(text: str) -> list[str]:
    return [word for word in WORD.findall(text.lower()) if word not in STOP_WORDS]


def check() -> None:
    """Raise ModuleNotFoundError if bm25s is not installed."""
    missing = 'an index of documents needs the package bm25s: pip install bm25s==0.3.16'
    package_folder('bm25s', missing)


def bm25s() -> Any:
    """Import bm25s, without JAX unless the process has already imported it.

    If JAX is installed, bm25s imports it and computes with it immediately, which a world server
    does not need.
    """
    check()
    with IMPORTING:
        alone = 'jax' not in sys.modules
        if alone:
            sys.modules['jax'] = None  # raises the ImportError that the package expects
        try:
            package = importlib.import_module('bm25s')
            logging.getLogger('bm25s').setLevel(logging.WARNING)  # it logs every index
            return package
        finally:
            if alone:
                del sys.modules['jax']


class Index:
    """BM25 over documents, in memory or in memory-mapped files of a folder."""

    def __init__(self, ranker: Any, documents: Sequence[Document]):
        self.ranker, self.documents = ranker, documents

    @classmethod
    def build(cls, documents: Sequence[Document]) -> 'Index':
        """Build an index in memory; word ids follow the order of first occurrence."""
        vocabulary: dict[str, int] = {}
        ids = [
            [vocabulary.setdefault(word, len(vocabulary)) for word in words(document['contents'])]
            for document in documents
        ]
        if not vocabulary:
            raise ValueError('the documents have no words')
        ranker = bm25s().BM25(k1=K1, b=B, method='lucene')
        ranker.index((ids, vocabulary), show_progress=False)
        return cls(ranker, documents)

    def save(self, folder: str | pathlib.Path) -> None:
        """Write a folder for `load`; it appears only when it is complete."""
        folder = pathlib.Path(folder)
        if folder.exists():
            raise FileExistsError(f'{folder} exists; choose a new folder for the index')
        part = folder.with_name(f'{folder.name}.part')
        shutil.rmtree(part, ignore_errors=True)
        self.ranker.save(part, show_progress=False)
        offsets = [0]
        with open(part / ROWS, 'wb') as file:
            for document in self.documents:
                offsets.append(offsets[-1] + file.write(json.dumps(document).encode() + b'\n'))
        np.save(part / OFFSETS, np.array(offsets, np.int64))
        part.rename(folder)

    @classmethod
    def load(cls, folder: str | pathlib.Path) -> 'Index':
        """Memory-map a folder: processes share it, and it may be larger than memory."""
        ranker = bm25s().BM25.load(folder, mmap=True, show_progress=False)
        return cls(ranker, Rows(pathlib.Path(folder)))

    def search(self, query: str, k: int) -> list[tuple[Document, float]]:
        """Return up to k (document, score) pairs, best first."""
        scores = self.ranker.get_scores_from_ids(self.ranker.get_tokens_ids(words(query)))
        hits = np.flatnonzero(scores > 0)
        if len(hits) > k:
            least = np.partition(scores[hits], len(hits) - k)[len(hits) - k]
            hits = hits[scores[hits] >= least]
        best = hits[np.argsort(-scores[hits], kind='stable')][:k]
        return [(self.documents[int(number)], float(scores[number])) for number in best]


class Rows(Sequence):
    """The documents of a folder, read on access."""

    def __init__(self, folder: pathlib.Path):
        self.offsets = np.load(folder / OFFSETS, mmap_mode='r')
        self.bytes = np.memmap(folder / ROWS, np.uint8, 'r')

    def __len__(self) -> int:
        return len(self.offsets) - 1

    def __getitem__(self, number: int) -> Document:
        begin, end = self.offsets[number : number + 2]
        return json.loads(self.bytes[begin:end].tobytes())


def read_documents(path: str | pathlib.Path) -> Iterator[Document]:
    """Read the rows of a file in wiki-18's format."""
    with open(path, encoding='utf-8') as file:
        yield from parsed_rows(file, document_of, f'{path}:', f'a document is such as {EXAMPLE}')


def document_of(row: Any) -> Document:
    if not isinstance(row, dict) or not isinstance(row.get('contents'), str):
        raise ValueError('not a document')
    return row


def parsed_rows(rows: Iterable, parse: Callable[[Any], Any], where: str, hint: str) -> Iterator:
    """Parse each row, decoding text as JSON; a ValueError names the row number, from 1."""
    for number, row in enumerate(rows, 1):
        try:
            yield parse(json.loads(row) if isinstance(row, str) else row)
        except ValueError as error:
            excerpt = row.strip() if isinstance(row, str) else json.dumps(row)
            raise ValueError(f'{where}{number}: {error} in {excerpt:.80}; {hint}') from error


class Retrieved(pydantic.BaseModel):
    """Documents per query, with or without scores."""

    result: list[list[dict[str, Any]]]


class Client:
    """A client of a server with Search-R1's protocol, dense or not; not thread-safe."""

    def __init__(self, url: str, *, timeout_s: float = 30.0, token: str = ''):
        """url: with or without a final /retrieve."""
        url = url.rstrip('/').removesuffix('/retrieve')
        self.connection = Connection(url, timeout_s=timeout_s, most_bytes=MOST_BYTES, token=token)
        self.name = self.connection.name

    def search(self, query: str, k: int) -> list[tuple[Document, float]]:
        # Search-R1's server fails if no scores are requested
        body = {'queries': [query], 'topk': k, 'return_scores': True}
        reply = read(Retrieved, self.connection.post('retrieve', body), self.name)
        if len(reply.result) != 1:
            raise WorldError(f'{self.name}: one query, {len(reply.result)} answers')
        hits = []
        for hit in reply.result[0][:k]:
            document = hit.get('document', hit)
            text = read(Text, document.get('contents'), self.name)
            hits.append(({**document, 'contents': text}, hit.get('score', 0.0)))
        return hits

    def close(self) -> None:
        self.connection.close()


@functools.cache
def open_index(place: str) -> Index:
    """Open an index folder or a file of documents, once for all worlds of a process."""
    if pathlib.Path(place).is_dir():
        return Index.load(place)
    if pathlib.Path(place).is_file():
        return Index.build(list(read_documents(place)))
    raise FileNotFoundError(
        f'{place} does not exist: name a server, a folder with an index or a file of documents'
    )


def open_corpus(place: str, timeout_s: float = 30.0, token: str = '') -> 'Index | Client':
    """Open a server (http://...) or an index; timeout_s and token apply to servers."""
    if place.startswith(('http://', 'https://')):
        return Client(place, timeout_s=timeout_s, token=token)
    return open_index(place)


def as_rows(documents: Iterable[tuple[str, str]]) -> list[Document]:
    """Convert (title, text) pairs to documents."""
    return [
        {'id': str(number), 'contents': f'"{title}"\n{text}'}
        for number, (title, text) in enumerate(documents)
    ]
