"""Search-R1's retrieval protocol over an index of BM25 (arXiv:2503.09516).

  POST /retrieve {queries: [...], topk?, return_scores?}    {result: [[...], ...]}, in their order
  GET /health                                               {documents: ...}

A hit is {document: {id, title, text, contents}, score}, or without scores the document alone.
`query`, one text, does as well as queries; topk 0 or null is what the server was started with.
Requests pass the gate of all our servers (envs/hosts/gate.py). A few searches run at once and the
other requests wait, as many as may; the work for a client that has left ends with its query.
"""

import asyncio
import os
import pathlib
from typing import Annotated, Any

import fastapi
import pydantic
from starlette.concurrency import run_in_threadpool

from agentrl_jax.envs.hosts import gate
from agentrl_jax.envs.hosts.gate import Refused
from agentrl_jax.envs.hosts.search import retrieval

MOST = 100  # documents of a query
MOST_BYTES = 2**22  # of a request
MOST_REQUESTS = 1024  # that are answered or wait
Text = Annotated[str, pydantic.Field(max_length=4096)]


class Query(pydantic.BaseModel):
    queries: list[Text] | None = pydantic.Field(None, max_length=1024)
    query: Text | None = None
    topk: int | None = pydantic.Field(None, ge=0, le=MOST)
    return_scores: bool = False


class Desk:
    """Searches for all requests, a few at once."""

    def __init__(self, index: retrieval.Searcher, *, searches: int, requests: int):
        self.index, self.most = index, requests
        self.requests = 0
        self.turns = asyncio.Semaphore(searches)  # of a query, so that no request keeps others out

    async def search(
        self, queries: list[str], k: int, request: fastapi.Request
    ) -> list[list[tuple[retrieval.Document, float]]]:
        if self.requests >= self.most:
            raise Refused('no_room', f'{self.requests} requests are waiting')
        self.requests += 1
        try:
            found = []
            for query in queries:
                async with self.turns:
                    if await request.is_disconnected():
                        raise Refused('left', 'the client has left')
                    found += await run_in_threadpool(self.index.search, [query], k)
            return found
        finally:
            self.requests -= 1


def build_app(
    index: retrieval.Searcher,
    *,
    topk: int = 3,
    token: str = '',
    searches: int = 0,
    requests: int = MOST_REQUESTS,
) -> fastapi.FastAPI:
    """searches: at once, 0 = one for each core; requests: that wait or are answered."""
    app = gate.gated('retrieve', most_bytes=MOST_BYTES, token=token)
    desk = Desk(index, searches=searches or os.cpu_count() or 1, requests=requests)

    @app.post('/retrieve')
    async def retrieve(body: Query, request: fastapi.Request) -> dict:
        if (body.queries is None) == (body.query is None):
            raise Refused('invalid', 'give queries, a list, or query, one text')
        queries = [body.query] if body.queries is None else body.queries
        found = await desk.search(queries, body.topk or topk, request)
        return {'result': [[shown(*hit, body.return_scores) for hit in hits] for hits in found]}

    @app.get('/health')
    def health() -> dict:
        return {'documents': len(index.documents)}

    return app


def shown(document: retrieval.Document, score: float, scored: bool) -> dict[str, Any]:
    title, text = retrieval.title_and_text(document)
    whole = {**document, 'title': title, 'text': text}
    return {'document': whole, 'score': score} if scored else whole


def open_index(corpus: str, folder: str = '') -> retrieval.Index:
    """The index of a folder, built from the corpus where there is none; in memory without one."""
    if folder and pathlib.Path(folder).exists():
        return retrieval.Index.load(folder)
    built = retrieval.Index.build(list(retrieval.read_documents(corpus)))
    if not folder:
        return built
    built.save(folder)
    return retrieval.Index.load(folder)
