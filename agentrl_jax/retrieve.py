"""Serves documents by BM25, in Search-R1's protocol (envs/hosts/search/service.py lists it).

  python -m agentrl_jax.retrieve --corpus=wiki-18.jsonl --index=wiki-18-bm25 --port=8000

The first line of the output is {"url": ...}; --port=0 takes a free port. The index is built from
the corpus where its folder does not exist, and memory-mapped where it does; without --index it is
kept in memory. Search-R1's own client knows no token, so one is asked for only where --token names
a file; without it whoever reaches --address may ask.
"""

from absl import flags

from agentrl_jax.run import command

if __name__ == '__main__':
    flags.DEFINE_string('corpus', '', 'Documents: a file of lines {"id": ..., "contents": ...}.')
    flags.DEFINE_string('index', '', 'Folder of their index.')
    flags.DEFINE_integer('topk', 3, 'Documents for a query that does not say how many.', 1, 100)
    flags.DEFINE_integer('port', 0, 'Port to listen at; 0 = a free one.', 0, 65535)
    flags.DEFINE_string('address', '127.0.0.1', 'Address to listen at; 0.0.0.0 = all.')
    flags.DEFINE_alias('host', 'address')
    flags.DEFINE_string('token', '', 'File whose first line clients must show.')
    command.begin(__doc__)

import json

import jax
import uvicorn

from agentrl_jax.envs.hosts import gate
from agentrl_jax.envs.hosts.search import service
from agentrl_jax.machine import files


def main() -> None:
    args = flags.FLAGS
    if not args.corpus and not args.index:
        raise ValueError('--corpus=<file of documents> or --index=<folder of an index> is needed')
    jax.config.update('jax_platforms', 'cpu')  # bm25s computes with JAX when it is imported
    token = gate.read_token(args.token)
    gate.resolved(args.address)  # before the index, which may take hours
    index = service.open_index(*files.in_mounts([args.corpus, args.index]))
    app = service.build_app(index, topk=args.topk, token=token)
    listener = gate.listening(args.address, args.port)
    print(json.dumps({'url': gate.url_of(listener)}), flush=True)
    settings = uvicorn.Config(app, access_log=False, log_level='warning')
    uvicorn.Server(settings).run(sockets=[listener])


if __name__ == '__main__':
    try:
        with command.usage():
            main()
    except (ValueError, OSError) as error:
        command.end(files.in_words(error), error)
