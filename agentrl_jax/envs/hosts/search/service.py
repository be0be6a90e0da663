"""Search-R1's retrieval protocol over an index of BM25 (arXiv:2503.09516).

  POST /retrieve {queries: [...], topk?, return_scores?}    {result: [[...], ...]}, in their order
  GET /health                                               {documents: ...}

A hit is {document: {id, title, text, contents}, score}, or without scores the document alone.
`query`, one text, does as well as queries; topk 0 or null is what the server was started with.
"""

import pathlib
from typing import Annotated, Any

import fastapi
import pydantic

from agentrl_jax.envs.hosts.search import retrieval

MOST = 100  # documents of a query
Text = Annotated[str, pydantic.Field(max_length=4096)]


class Query(pydantic.BaseModel):
    queries: list[Text] | None = pydantic.Field(None, max_length=1024)
    query: Text | None = None
    topk: int | None = pydantic.Field(None, ge=0, le=MOST)
    return_scores: bool = False


def build_app(index: retrieval.Index, *, topk: int = 3) -> fastapi.FastAPI:
    app = fastapi.FastAPI(docs_url=None, redoc_url=None, openapi_url=None)

    @app.post('/retrieve')
    def retrieve(body: Query) -> dict:
        if (body.queries is None) == (body.query is None):
            raise fastapi.HTTPException(422, 'give queries, a list, or query, one text')
        queries = [body.query] if body.queries is None else body.queries
        found = index.search(queries, body.topk or topk)
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
