"""Serve a policy over the APIs of OpenAI and Anthropic, for any client or evaluation harness.

  python -m agentrl_jax.serve_policy --workdir=runs/demo
  python -m agentrl_jax.serve_policy --workdir=runs/demo --best --port=0 --slots=64
  python -m agentrl_jax.serve_policy --config=configs/base.py \\
      --config.model.path=Qwen2.5-0.5B-Instruct

Use base_url=http://127.0.0.1:8000/v1 and any key, without /v1 for Anthropic's client. The endpoint
has chat completions, Responses and Messages; the latter two need agentrl_jax[dialects].
Conversations share the device, which caches --slots of them: a request that continues a cached
conversation only reads its new messages. If all slots are in use, the longest idle conversation is
evicted. Answers have up to rollout.max_response tokens, and a conversation up to
rollout.max_tokens. Requests may set temperature, top_p and seed; defaults: eval.temperature,
eval.top_k and eval.top_p. Answers start with the run's forced prefix and follow its grammar
(rollout.constrain). Clients may use the stop strings of the run and of --stop. A field without
effect is an error 400. logprobs and return_token_ids return the samples.
"""

from absl import flags

from agentrl_jax.run import command

if __name__ == '__main__':
    command.define_config_of_run()
    flags.DEFINE_string('workdir', '', "Folder of the run; '' = the config's own model.")
    flags.DEFINE_integer('step', None, 'Checkpoint to use; default: the newest.')
    flags.DEFINE_string('address', '127.0.0.1', 'Address to listen on; 0.0.0.0 = all.')
    flags.DEFINE_alias('host', 'address')
    flags.DEFINE_integer('port', 8000, 'Port to listen on; 0 = a free one.', 0, 65535)
    flags.DEFINE_integer('slots', 16, 'Conversations on the device at a time.', lower_bound=1)
    flags.DEFINE_list('stop', [], "Stop strings in addition to the run's; they end every answer.")
    command.define_best()
    command.begin(__doc__, needs=('config',), says='agentrl_jax.serve_policy: loading')

import contextlib
import dataclasses
import itertools
import queue
import threading
from collections.abc import Callable
from typing import Any

import jax
import numpy as np

from agentrl_jax.envs.hosts.base import HostEnvironment
from agentrl_jax.envs.hosts.harness import wire
from agentrl_jax.envs.hosts.harness.endpoint import Endpoint
from agentrl_jax.envs.hosts.harness.episode import OVER, Caller, End, Episode, digest_of
from agentrl_jax.envs.hosts.harness.wire import Refused
from agentrl_jax.envs.hosts.harness.world import CUT
from agentrl_jax.envs.hosts.world import Answer, Messages, Reply, shown
from agentrl_jax.machine import checkpoint, files
from agentrl_jax.rollout import host
from agentrl_jax.rollout.keepers import Pool, without_surrogates
from agentrl_jax.rollout.programs import RowSampler
from agentrl_jax.rollout.slots import RolloutSettings
from agentrl_jax.rollout.world_calls import RetryPolicy
from agentrl_jax.run import loading, parts, saved_config
from agentrl_jax.run.config import Config, read
from agentrl_jax.run.params import chosen, saved_policy
from agentrl_jax.text.answer import END, FORMS
from agentrl_jax.text.conversation import Conversation, HostTask, build_host_task
from agentrl_jax.text.task import build_answers, limits_actions
from agentrl_jax.tokens.chat import build_chat
from agentrl_jax.types import Episodes

FOREVER = 1e9  # seconds
ROUND = 1024  # conversations per rollout; the next rollout starts when all of them are over
MAX_TURNS = 64  # turns per conversation


class Desk:
    """Assigns requests to their conversations, and new conversations to free slots."""

    def __init__(
        self,
        slots: int,
        stops: tuple[str, ...],
        drops: bool = False,
        round_size: int = ROUND,
        read: Callable[[Messages], Any] = str,
    ):
        """drops: a request after a thought starts a new conversation, as in Episode; read: as the
        rollout reads messages."""
        self.read = read
        self.slots, self.stops, self.drops, self.round_size = slots, stops, drops, round_size
        self.waiting: queue.SimpleQueue = queue.SimpleQueue()  # Episodes without a slot
        self.open: dict[str, Episode] = {}  # by secret, ordered by the time of the last request
        self.asking: set[str] = set()  # secrets of conversations with an unanswered request
        self.seated = 0  # number of conversations with a slot in this round
        self.lock = threading.Lock()
        self.reported: set[str] = set()  # message keys without effect

    def ask(
        self,
        raw: bytes,
        retried: bool = False,
        caller: Caller | None = None,
        dialect: str = 'chat',
    ) -> bytes:
        """Return the answer to a request."""
        request = wire.read(raw, self.stops, dialect, serving=True)
        digest, caller = digest_of(raw, dialect), caller or Caller()
        with self.lock:
            fresh = set(request.ignored) - self.reported
            self.reported |= fresh
            known = list(self.open.values())
            earlier = next((one for one in known if one.repeats(digest, retried)), None)
        for name in sorted(fresh):
            files.warn(f'{shown(name)} of a request has no effect')
        if earlier is not None:
            return earlier.answer_once(request, digest, True, caller)
        with self.lock:
            origins = (one for one in known if request.answers[0] in one.histories)
            if request.answers:
                request = next(origins, Episode()).resolve(request)
            episode = self._known(request)
            if episode is None:
                episode = Episode(drops=self.drops)
                self.waiting.put(episode)
            self.open.pop(episode.secret, None)
            self.open[episode.secret] = episode
            self.asking.add(episode.secret)
            self._make_room()
        try:
            return episode.answer_once(request, digest, retried, caller)
        finally:
            with self.lock:
                self.asking.discard(episode.secret)
                if episode.refusal is not None:
                    self.open.pop(episode.secret, None)
                self._make_room()

    def count(self, raw: bytes) -> int:
        """Return the number of tokens of a request, as a new conversation."""
        request = wire.read_count(raw)
        messages = tuple(one.message for one in request.messages)
        return 1 + len(self.prompt(Messages(messages, request.tools, opens=True)).tokens)

    def prompt(self, messages: Messages) -> Any:
        """Read messages; raise Refused if the checkpoint's chat template rejects them."""
        try:
            return self.read(without_surrogates(messages))
        except Exception as error:  # the template may raise anything
            raise Refused(400, 'unsupported_messages', str(error)) from error

    def _idle(self) -> list[Episode]:
        """Return conversations without a pending request, longest idle first."""
        return [one for one in self.open.values() if one.secret not in self.asking]

    def _known(self, asked: wire.ParsedRequest) -> Episode | None:
        """Return the conversation that a request extends; parallel requests need their own."""
        for episode in reversed(self._idle()):
            if any(branch.extended_by(asked) is not None for branch in episode.branches):
                return episode
        return None

    def _make_room(self) -> None:
        """End one idle conversation per waiting one. If all slots of the round are used, end all of
        them, so that the next round can start."""
        idle = self._idle()
        count = len(idle) if self.seated >= self.round_size else max(len(self.open) - self.slots, 0)
        for episode in idle[:count]:
            self.open.pop(episode.secret)
            episode.refuse(OVER)
            episode.events.put(End(0.0))


class Client:
    """An environment that plays one client's conversation at a time."""

    instruction, deterministic = '', False

    def __init__(self, desk: Desk):
        self.desk = desk
        self.episode: Episode | None = None

    def reset(self, item: int) -> Messages:
        del item
        messages = None
        while messages is None:
            self.episode = self.desk.waiting.get()
            messages = self._next_messages()
        with self.desk.lock:
            self.desk.seated += 1
        return messages

    def step(self, action: Answer) -> Reply:
        self.episode.answer(action)
        messages = self._next_messages()
        return Reply('', done=True) if messages is None else Reply(messages)

    def _next_messages(self) -> Messages | None:
        """Return the next messages; None if the conversation is over, for example since the chat
        template rejects its messages."""
        event = self.episode.events.get()
        if isinstance(event, End):
            return None
        try:
            self.desk.prompt(event.new)
        except Refused as refused:
            self.episode.refuse(refused)
            return None
        return event.new

    def finish(self, reason: str) -> Reply:
        self.episode.refuse(CUT[reason])
        return Reply('', done=True)

    def close(self) -> None:
        """Reject a request that still waits for an answer."""
        if self.episode is not None:
            self.episode.refuse(OVER)


@dataclasses.dataclass(frozen=True)
class Clients(HostEnvironment):
    """The clients of the server."""

    name = 'clients'
    chats = finishes = True

    def item_range(self, split: str) -> range:
        return range(1)


def build_served_task(cfg: Config, conversation: Conversation) -> HostTask:
    """Build the task of conversations, whose answers follow the run's grammar."""
    params = Clients().make_params(num_levels=1)
    sizes = dict(max_turns=MAX_TURNS, max_response=cfg.rollout.max_response)
    forms = cfg.answer_forms(cfg.worlds[0]) if cfg.on_hosts else ()
    task = build_host_task(
        Clients(), params, conversation, forms=forms, spelling=cfg.rollout.constrain, **sizes
    )
    if cfg.on_hosts or not cfg.rollout.constrain:
        return task
    table, grammar = build_answers(
        conversation.chat.tokenizer,
        tuple(dict.fromkeys(name for world in cfg.worlds for name in world.ACTION_NAMES)),
        max_actions=cfg.env.max_actions_per_turn,
        opening=cfg.answer_opening,
        agent=cfg.agent.build(),
        constrain=cfg.rollout.constrain,
        max_response=cfg.rollout.max_response,
        offers=any(map(limits_actions, cfg.worlds)),
        writes=True,  # host rollouts have the logits of all tokens
    )
    return jax.tree.map(np.asarray, task.replace(grammar=grammar, answer=table))


def closing_of(cfg: Config) -> tuple[str, ...]:
    """Return the closing text of answers on the device, if the run stops there."""
    if cfg.on_hosts or not cfg.rollout.stop_at_answer:
        return ()
    closing = FORMS[cfg.answer_opening].closing
    return () if closing == END else (closing.decode(),)


def with_request_sampling(settings: RolloutSettings) -> RolloutSettings:
    """Return settings in which each answer uses its request's temperature and top_p."""
    sampler = RowSampler(**dataclasses.asdict(settings.sampler))
    return dataclasses.replace(settings, sampler=sampler)


class Served:
    """A policy and its HTTP endpoint."""

    def __init__(
        self,
        cfg: Config,
        *,
        workdir: str = '',
        step: int | None = None,
        address: str = '127.0.0.1',
        port: int = 0,
        slots: int = 16,
        stops: tuple[str, ...] = (),
    ):
        mesh, tokenizer = parts.build_mesh(cfg), loading.build_tokenizer(cfg)
        config, params = loading.build_model(cfg, tokenizer, mesh)
        if workdir:
            params = saved_policy(cfg, config, mesh, params, workdir, step=step)
        self.params = params
        shards = mesh.shape['data'] * mesh.shape['fsdp']
        slots, self.round = (-(-count // shards) * shards for count in (slots, ROUND))
        world = cfg.worlds[0] if cfg.on_hosts else None
        stops = (*getattr(world, 'stop', ()), *stops)
        drops = getattr(world, 'thoughts', '') == 'drop'
        chat = build_chat(tokenizer)
        conversation = Conversation(chat, cfg.answer_opening, cfg.hosts.max_observation)
        self.desk = Desk(slots, stops, drops, self.round, conversation.prompt)
        self.endpoint = Endpoint(address, port, desk=self.desk, setting='--port')
        self.task = build_served_task(cfg, conversation)
        self.key = jax.random.key(cfg.seed)
        pool = Pool(lambda: Client(self.desk), conversation.prompt)
        run = dataclasses.replace(
            cfg,
            worlds=(Clients(),),
            env=dataclasses.replace(cfg.env, eval_levels=self.round),
            rollout=dataclasses.replace(cfg.rollout, slots=slots),
            context=dataclasses.replace(cfg.context, window=0),
            reward=dataclasses.replace(cfg.reward, function=''),
            hosts=dataclasses.replace(
                cfg.hosts,
                stop=tuple(dict.fromkeys((*cfg.hosts.stop, *stops, *closing_of(cfg)))),
                policy=RetryPolicy(timeout_s=FOREVER, min_healthy=0.0),
            ),
        )
        worlds = host.Worlds(pool, conversation)
        self.collect = parts.build_collect(
            run, config, mesh, training=False, worlds=worlds, change=with_request_sampling
        )

    @property
    def url(self) -> str:
        return f'{self.endpoint.url}/v1'

    def run(self) -> None:
        """Answer requests until Ctrl-C."""
        none = np.zeros(self.round, np.int32)
        for number in itertools.count():
            self.desk.seated = 0
            first = number * self.round % 2**30  # one key, so a seed works the same in all rounds
            streams = np.arange(first, first + self.round, dtype=np.int32)
            episodes = Episodes(level=none, world_stream=streams, token_stream=streams)
            self.collect(self.params, self.task, episodes, self.key)


def open_policy(args: Any) -> Served:
    """Load the policy that the flags select, and open its port."""
    workdir, step = chosen(args)
    if workdir:
        origin = saved_config.origin(workdir, args.config, step=step)
        saved_config.say(origin)
        step = origin.step
    cfg = read(args.config, None)
    if workdir:
        saved_config.check_model(checkpoint.read_extra(workdir, step=step), args.config)
    return Served(
        cfg,
        workdir=workdir,
        step=step,
        address=args.host,
        port=args.port,
        slots=args.slots,
        stops=tuple(args.stop),
    )


def main() -> None:
    args = flags.FLAGS
    with command.running(args.workdir or None):
        served = open_policy(args)
    print(f'serving {served.url}', flush=True)
    with contextlib.suppress(KeyboardInterrupt):
        served.run()


if __name__ == '__main__':
    main()
