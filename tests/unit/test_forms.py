"""Forms of answers to host environments: language, token automaton and rollouts."""

import dataclasses
import functools
import itertools
import re

import host_worlds
import jax
import jax.numpy as jnp
import micro_runs
import numpy as np
import pytest
import tiny_agents as tiny
from host_worlds import Echo, Tests
from hypothesis import given, settings
from hypothesis import strategies as st

from agentrl_jax import export
from agentrl_jax.envs.hosts.search.dialects import DIALECTS
from agentrl_jax.envs.hosts.webshop.world import WebShop
from agentrl_jax.rl.algorithm import decision_tokens
from agentrl_jax.rollout import replies
from agentrl_jax.run.config import read
from agentrl_jax.text import conversation
from agentrl_jax.text import forms as languages
from agentrl_jax.text import grammar as grammars
from agentrl_jax.text.automata import DEAD
from agentrl_jax.tokens.chat import build_chat
from agentrl_jax.types import TurnStop

LISTS = [
    ('<search>{}</search>', '<answer>{}</answer>'),
    ('inventory', 'get {}', 'craft {} using {}'),
    ('{}',),
    ('aa{}aab',),
    ('stop', 'stop [{}]'),
]


def accepts(automaton, text):
    """Return the forms that match a text."""
    state = 0
    for byte in text if isinstance(text, bytes) else text.encode():
        state = automaton.row(state)[byte]
        if state == DEAD:
            return set()
    return automaton.ends(state)


automaton_of = functools.cache(languages.build_automaton)


def is_one_of(forms, text):
    return bool(accepts(automaton_of(forms), text))


@pytest.mark.parametrize('forms', LISTS, ids=str)
@settings(max_examples=100, deadline=None)
@given(data=st.data())
def test_the_automaton_accepts_the_same_texts_as_regular_expressions(forms, data):
    automaton = automaton_of(forms)
    pieces = sorted({piece for form in forms for piece in form.split('{}')} | {'a', 'b', 'aab'})
    text = ''.join(data.draw(st.lists(st.sampled_from(pieces), max_size=7)))
    patterns = [re.compile(languages.pattern([form])) for form in forms]
    want = {i for i, pattern in enumerate(patterns) if pattern.fullmatch(text)}
    assert accepts(automaton, text) == want


@pytest.mark.parametrize('forms', LISTS, ids=str)
def test_shortest_endings_complete_an_answer(forms):
    automaton = languages.build_automaton(forms)
    table = automaton.table()
    ends = np.array([bool(automaton.ends(state)) for state in range(len(table))])
    for state, way in enumerate(languages.shortest_endings(table, ends)):
        assert ends[functools.reduce(lambda now, byte: table[now, byte], way, state)]


@pytest.mark.parametrize('form', ['', 'a{}{}b'])
def test_invalid_forms_are_rejected(form):
    with pytest.raises(ValueError, match=re.escape(repr(form))):
        languages.build_automaton((form,))


@pytest.mark.parametrize('forms', LISTS, ids=str)
def test_a_token_leads_to_the_state_of_its_bytes(forms):
    automaton = languages.build_automaton(forms)
    grammar = languages.build_forms(tiny.tokenizer(), forms, longest=64)
    after = np.asarray(grammar.after)
    ids = np.arange(tiny.tokenizer().vocab_size)
    column = np.asarray(grammar.column(ids))
    table = automaton.table()
    for state in range(len(table)):
        for token, text in enumerate(tiny.tokenizer().token_bytes()):
            now = state if text else DEAD
            for byte in text:
                now = table[now, byte] if now != DEAD else now
            want = now + 1 if now != DEAD else -1
            if token == tiny.tokenizer().eos_ids[0]:
                want = 0 if automaton.ends(state) else -1
            assert after[1 + state, column[token]] == want
    assert len(set(column.tolist())) == after.shape[1] - 2  # the last two have no token
    beyond = np.arange(len(ids), len(ids) + 9)  # padding of the head, formerly the last token
    assert (after[:, np.asarray(grammar.column(beyond))] == -1).all()
    padded = grammar.bits.index(len(ids) + 9)[len(ids) :]
    assert (after[:, padded] == -1).all() and len(grammar.bits.index(len(ids))) == len(ids)


# ---- sampling ------------------------------------------------------------------------------------

LONGEST, TEMPERATURE = 24, 1.3


@dataclasses.dataclass(frozen=True)
class Offering(Tests):
    """Echo that cycles through the forms."""

    FORMS = ('say {}', 'ask [{}]', 'rest')


class Offers(Echo):
    """Offers depend on the turn: only 'rest' after the first one."""

    def reset(self, item):
        self.offers = Offering.FORMS[:2]
        return super().reset(item)

    def step(self, action):
        self.offers = Offering.FORMS[2:]
        return super().step(action)


@functools.cache
def build_task(forms):
    env = Offering()
    params = env.make_params(num_levels=16)
    talk = conversation.Conversation(build_chat(tiny.tokenizer()), '', 96)
    task = conversation.build_host_task(
        env, params, talk, max_turns=3, forms=forms, max_response=LONGEST
    )
    return task, talk


@functools.cache
def rollout_of(forms=Offering.FORMS, world=Offers):
    task, talk = build_task(forms)
    sizes = dict(temperature=TEMPERATURE, max_response=LONGEST, max_tokens=420)
    collect = host_worlds.collector(talk, world, **sizes)
    try:
        listed = tiny.episodes('frozen_lake')
        return jax.device_get(collect(tiny.untrained(), task, listed, tiny.KEY))
    finally:
        collect.worlds.pool.close()


def test_the_log_contains_the_offers_and_a_replay_equals_the_rollout(tmp_path):
    task, talk = build_task(Offering.FORMS)
    sizes = dict(temperature=TEMPERATURE, max_response=LONGEST, max_tokens=420)

    def play(pool=None, log=None):
        collect = host_worlds.collector(talk, Offers, pool=pool, **sizes)
        if log is not None:
            collect.worlds.log = log
        try:
            listed = tiny.episodes('frozen_lake')
            return jax.device_get(collect(tiny.untrained(), task, listed, tiny.KEY))[0]
        finally:
            collect.worlds.pool.close()

    log = replies.ReplyLog(tmp_path / 'replies.jsonl')
    log.about = {'step': 0}
    first = play(log=log)
    log.close()
    lines = replies.read_log(tmp_path / 'replies.jsonl')
    assert {tuple(line['offers']) for line in lines} >= {Offering.FORMS[:2], Offering.FORMS[2:]}
    host_worlds.assert_same(play(replies.LoggedPool(lines, talk.prompt)), first)


def turns_of(out):
    """Return (episode, turn, ids) of all answers."""
    for b, k in itertools.product(*map(range, out.valid.shape)):
        ids = out.tokens[b][out.action_mask[b] & (out.turn[b] == k)]
        if len(ids):
            yield b, k, ids.tolist()


def test_answers_are_the_forms_on_offer():
    out, counters = rollout_of()
    assert counters['nonfinite'].sum() == counters['no_legal_token'].sum() == 0
    used = set()
    for _, k, ids in turns_of(out):
        assert ids[-1] == tiny.tokenizer().eos_ids[0]
        text = tiny.tokenizer().decode_bytes(ids[:-1])
        offered = Offering.FORMS[2:] if k else Offering.FORMS[:2]
        matches = [f for f in offered if is_one_of((f,), text)]
        assert matches, text
        used.update(matches)
    assert used == set(Offering.FORMS)
    assert (out.turn_stop[out.begin > 0] == TurnStop.EOS).all()


def test_a_budget_ends_answers_without_cutting_them():
    out, _ = rollout_of(world=Echo, forms=('ask [{}]',))
    lengths = [len(ids) for _, _, ids in turns_of(out)]
    assert max(lengths) == LONGEST  # random weights do not stop on their own
    for _, _, ids in turns_of(out):
        assert is_one_of(('ask [{}]',), tiny.tokenizer().decode_bytes(ids[:-1]))


def test_the_trainer_reproduces_the_probabilities_of_the_sampler():
    out, _ = rollout_of()
    bits = build_task(Offering.FORMS)[0].grammar.bits

    score = tiny.scored(bits, TEMPERATURE)
    logprobs, _ = score(tiny.untrained(), out.tokens, out.attention_mask, out.allowed)
    gap = np.where(out.action_mask, logprobs - out.logprobs, 0.0)
    assert np.abs(gap).max() <= 1e-5
    choice = np.asarray(decision_tokens(jax.tree.map(jnp.asarray, out)))
    forced = out.action_mask & (np.unpackbits(out.allowed.view(np.uint8), axis=-1).sum(-1) == 1)
    assert forced.any() and np.abs(out.logprobs[forced]).max() == 0.0
    ends = [(b, k) for b, k, _ in turns_of(out)]
    assert all(choice[b][out.turn[b] == k].any() for b, k in ends)


NEAR = ('look', 'look at {}', 'lock the long door now', 'say {}!')


@pytest.mark.parametrize('spare', [1, 12])
def test_a_budget_forces_only_forms_on_offer(spare):
    """The shortest text to any end was forced, even if it was not on offer."""
    rng = np.random.default_rng(spare)
    with pytest.raises(ValueError, match='too small') as error:
        languages.build_forms(tiny.tokenizer(), NEAR, longest=1, offers=True)
    longest = spare + int(re.search(r'takes (\d+) tokens', str(error.value))[1])
    grammar = languages.build_forms(tiny.tokenizer(), NEAR, longest=longest, offers=True)
    offered = rng.random((64, len(NEAR))) < 0.3
    offered[np.arange(64), rng.integers(len(NEAR), size=64)] = True
    packed = grammars.pack(jnp.asarray(offered))
    place = grammars.begin(grammar, jnp.zeros(64, jnp.int32), packed)
    column = np.asarray(grammar.column(np.arange(tiny.tokenizer().vocab_size)))
    tokens, live = np.zeros((64, longest), int), np.ones(64, bool)
    push = jax.jit(grammars.advance)
    for step in range(longest):
        legal = np.asarray(grammars.allowed(grammar, place))[:, column]
        assert legal.any(1)[live].all()
        tokens[:, step] = np.where(legal, rng.gumbel(size=legal.shape), -np.inf).argmax(1)
        left = jnp.full(64, longest - 1 - step)
        place = push(grammar, place, jnp.asarray(tokens[:, step]), jnp.asarray(live), left)
        live &= tokens[:, step] != tiny.tokenizer().eos_ids[0]
    assert not live.any()
    for row, some in zip(tokens.tolist(), offered, strict=True):
        text = tiny.tokenizer().decode_bytes(row[: row.index(tiny.tokenizer().eos_ids[0])])
        forms = tuple(itertools.compress(NEAR, some))
        assert is_one_of(forms, text), (forms, text)


# ---- environment texts ---------------------------------------------------------------------------


@pytest.mark.parametrize('dialect', DIALECTS)
def test_a_dialect_reads_its_forms_and_its_oracle_writes_them(dialect):
    spec = DIALECTS[dialect]
    automaton = languages.build_automaton(spec.forms)
    assert accepts(automaton, spec.searching('Lund in Sweden')) == {0}
    assert accepts(automaton, spec.answering('Sweden')) == {1}
    for form, kind in zip(spec.forms, ('search', 'answer'), strict=True):
        assert spec.read(form.replace('{}', 'Lund')) == (kind, 'Lund') or (
            spec.read(form.replace('{}', 'Lund')).kind == kind
        )


def test_the_shop_offers_a_search_or_clicks():
    shop = WebShop(products=20, prompt='short')
    shop.reset(0)
    assert shop.offers == ('search[{}]',)
    shop.step('search[red]')
    assert shop.offers == ('click[{}]',)
    plan = shop.plan()
    automaton = languages.build_automaton(WebShop.FORMS)
    assert all(accepts(automaton, action) for action in plan)


def test_exports_contain_the_pattern_of_legal_answers():
    cfg = micro_runs.plain(
        'frozen_lake', **{'rollout.constrain': 'own', 'env.think': False, 'rollout.max_response': 9}
    )
    legal = re.compile(export.answer_pattern(read(cfg)))
    assert legal.fullmatch('Left || Up</answer>') and not legal.fullmatch('Left ||</answer>')
    cfg = micro_runs.plain(
        'frozen_lake',
        **host_worlds.OBJECTS | {'rollout.constrain': 'any', 'hosts.forms': ('say {}', 'rest')},
    )
    legal = re.compile(export.answer_pattern(read(cfg)))
    assert legal.fullmatch('say Left') and not legal.fullmatch('say ')
    assert export.answer_pattern(read(micro_runs.plain('frozen_lake'))) == ''
