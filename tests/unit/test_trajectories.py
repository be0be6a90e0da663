"""Trajectory files: AgentTraj records to tokens, and round trips of episodes."""

import functools
import json

import jax
import numpy as np
import pytest
import qwen_vocabulary
import tiny_agents as tiny
from llama_vocabulary import llama_tokenizer
from test_chat import CHATML, with_template

from agentrl_jax.imitation import trajectories
from agentrl_jax.tokens.chat import build_chat
from agentrl_jax.types import EpisodeStop, TurnStop

NAMES = {'human': 'user', 'gpt': 'assistant'}
ACKNOWLEDGED = [
    {'from': 'human', 'loss': None, 'value': 'You walk on ice.\n'},
    {'from': 'gpt', 'loss': False, 'value': 'OK.'},
]


def record(*texts, start=tuple(ACKNOWLEDGED)):
    """Return a record with alternating messages of human and gpt; gpt's are trained."""
    messages = [dict(message) for message in start]
    for i, value in enumerate(texts):
        who = ('human', 'gpt')[(len(start) + i) % 2]
        messages.append({'from': who, 'loss': True if who == 'gpt' else None, 'value': value})
    return {'item_id': 'lake_3', 'conversations': messages}


def read(records, tokenizer=None, *, prefix='<think>', max_tokens=200):
    demos, dropped = trajectories.demonstrations_of(
        records, tokenizer or tiny.tokenizer(), openings=(prefix,), max_tokens=max_tokens
    )
    return jax.device_get(demos), dropped


def decode_row(demos, row, tokenizer=None):
    """Return (text of all real tokens, text of the trained tokens), with special tokens."""
    spell = functools.partial((tokenizer or tiny.tokenizer()).decode, show_special=True)
    real = demos.attention_mask[row]
    return spell(demos.tokens[row][real]), spell(demos.tokens[row][demos.mask[row]])


# ---- reading -----------------------------------------------------------------------------------


@pytest.fixture(params=['demo', 'qwen'])
def tokenizer(request):
    return tiny.tokenizer() if request.param == 'demo' else qwen_vocabulary.qwen_tokenizer()


def test_only_gpt_messages_with_loss_true_are_trained(tokenizer):
    demos, dropped = read([record('P_O\n', 'go Up', 'O_P\n', 'go Left')], tokenizer, prefix='<x>')
    text, trained = decode_row(demos, 0, tokenizer)
    head = '<|im_start|>user\nYou walk on ice.\n<|im_end|>\n<|im_start|>assistant\nOK.<|im_end|>\n'
    turns = (
        '<|im_start|>user\nP_O\n<|im_end|>\n<|im_start|>assistant\ngo Up<|im_end|>\n'
        '<|im_start|>user\nO_P\n<|im_end|>\n<|im_start|>assistant\ngo Left<|im_end|>'
    )
    assert text.endswith(head + turns) and dropped == 0
    assert trained == 'go Up<|im_end|>go Left<|im_end|>'
    assert (text == head + turns) == (tokenizer.chat_template is None)


def test_a_template_may_add_a_missing_system_message():
    default = "{{ '<|im_start|>system\nBe good.<|im_end|>\n' }}"
    guarded = f"{{% if messages[0].role != 'system' %}}{default}{{% endif %}}{CHATML}"
    demos, _ = read([record('P\n', 'Up')], with_template(guarded))
    assert decode_row(demos, 0)[0].startswith(
        '<|im_start|>system\nBe good.<|im_end|>\n<|im_start|>user'
    )
    messages = [{'from': 'system', 'loss': None, 'value': 'S\n'}, *ACKNOWLEDGED]
    both = record(start=tuple(messages))
    both['conversations'][2]['loss'] = True
    demos, _ = read([both], with_template(guarded))
    assert decode_row(demos, 0)[0].startswith(
        '<|im_start|>system\nS\n<|im_end|>\n<|im_start|>user\nYou'
    )


def test_the_forced_prefix_of_an_answer_is_not_trained():
    demos, _ = read([record('P\n', '<think>so</think><answer>Up</answer>')])
    assert decode_row(demos, 0)[1] == 'so</think><answer>Up</answer><|im_end|>'
    opening = tiny.tokenizer().encode('assistant\n<think>')
    row, first = demos.tokens[0].tolist(), int(np.argmax(demos.mask[0]))
    assert row[first - len(opening) : first] == opening


def test_messages_after_the_last_trained_one_are_dropped():
    """AgentGym appends the environment's last message even if the episode is over."""
    longer, _ = read([record('P\n', 'Up', 'You fell.\n')])
    short, _ = read([record('P\n', 'Up')])
    jax.tree.map(np.testing.assert_array_equal, longer, short)


def test_long_trajectories_are_dropped_and_counted():
    records = [record('P\n', 'Up'), record('P\n' * 40, 'Up'), record('P\n', 'Left')]
    demos, dropped = read(records, max_tokens=60)
    assert dropped == 1 and [decode_row(demos, i)[1][:2] for i in range(2)] == ['Up', 'Le']
    with pytest.raises(ValueError, match=r'all 1 .* rollout.max_tokens=60'):
        read([records[1]], max_tokens=60)


def broken(change):
    bad = record('P\n', 'Up')
    change(bad)
    return bad


@pytest.mark.parametrize(
    'change, message',
    [
        (lambda r: r.pop('item_id'), "item_id '\\?'.*: item_id is missing"),
        (lambda r: r.update(conversations={}), 'conversations is dict, not list'),
        (lambda r: r['conversations'][2].pop('loss'), r"conversations\[2\] has no 'loss'"),
        (lambda r: r['conversations'][2].update({'from': 'user'}), "'from' 'user', not human"),
        (lambda r: r['conversations'][3].update(value=None), "a 'value' that is NoneType"),
        (lambda r: r['conversations'][3].update(loss=1), "has 'loss' 1, not null, true or false"),
        (lambda r: r['conversations'][2].update(loss=True), 'only gpt messages are trained'),
        (
            lambda r: r['conversations'].pop(1),
            r"conversations\[1\].from is 'human' where",
        ),
        (lambda r: r['conversations'][3].update(loss=False), 'nothing to learn'),
        (lambda r: r['conversations'].insert(0, 'hello'), r'conversations\[0\] is str, not an'),
    ],
)
def test_errors_name_the_number_and_field_of_a_malformed_record(change, message):
    with pytest.raises(ValueError, match=f'^record 1 .*{message}'):
        read([record('P\n', 'Up'), broken(change)])


def test_files_contain_lists_or_lines(tmp_path):
    records = [record('P\u2028\n', 'Up'), record('O\n', 'Left')]  # U+2028 is not a newline
    for name in ('a.json', 'a.jsonl'):
        trajectories.write_records(tmp_path / name, records)
        assert trajectories.read_records(tmp_path / name) == records
    assert len((tmp_path / 'a.jsonl').read_text(encoding='utf-8').strip().split('\n')) == 2
    (tmp_path / 'b.jsonl').write_text('{"item_id": "a_1"}\n{"item_id"\n')
    expected = r'b.jsonl:1: record 0 .*conversations is missing; a record is such as {"item_id"'
    with pytest.raises(ValueError, match=expected):
        trajectories.read_records(tmp_path / 'b.jsonl')
    (tmp_path / 'd.jsonl').write_text(json.dumps(records[0]) + '\n{"item_id"\n')
    with pytest.raises(ValueError, match='d.jsonl: broken JSON in line 2'):
        trajectories.read_records(tmp_path / 'd.jsonl')
    with pytest.raises(ValueError, match='c.json: no such trajectory file'):
        trajectories.read_records(tmp_path / 'c.json')


ANSWERED = [('human', 'P\n'), ('gpt', 'Up'), ('human', 'O\n'), ('gpt', 'Left')]
CHAT = [{'role': NAMES[name], 'content': value} for name, value in ANSWERED]
FORMATS = {
    'sharegpt': {'conversations': [{'from': name, 'value': value} for name, value in ANSWERED]},
    'sharegpt with a system text': {
        'system': 'S',
        'conversations': [{'from': name, 'value': value} for name, value in ANSWERED],
    },
    'agentinstruct': {
        'id': 'os_0',
        'conversations': [
            {'from': name, 'loss': None if name == 'human' else value == 'Left', 'value': value}
            for name, value in ANSWERED
        ],
    },
    'messages': {'messages': [{'role': 'system', 'content': 'S'}, *CHAT]},
    'messages in parts': {
        'messages': [
            {'role': one['role'], 'content': [{'type': 'text', 'text': one['content']}]}
            for one in CHAT
        ],
    },
    'messages with weights': {
        'messages': [one | {'weight': int(one['content'] == 'Left')} for one in CHAT]
    },
}


@pytest.mark.parametrize('name', FORMATS)
def test_files_of_other_projects_are_read(tmp_path, name):
    lines = json.dumps(FORMATS[name]) + '\n'
    (tmp_path / 'lines.json').write_text(lines * 2)
    demos, _ = read(trajectories.read_records(tmp_path / 'lines.json'))
    text, trained = decode_row(demos, 1)
    some = name in ('agentinstruct', 'messages with weights')
    assert trained == 'Left<|im_end|>' if some else 'Up<|im_end|>Left<|im_end|>'
    system = '<|im_start|>system\nS<|im_end|>\n' if 'S' in str(FORMATS[name]) else ''
    assert text.startswith(f'{system}<|im_start|>user\nP\n<|im_end|>\n<|im_start|>assistant\nUp')


# ---- round trips -------------------------------------------------------------------------------


def round_trip(records):
    """Write records to a file and read them as demonstrations."""
    return read(json.loads(json.dumps(records)), max_tokens=400)[0]


def assert_same_episodes(demos, tokens, attention, mask):
    assert len(demos.tokens) == len(tokens)
    for i, real in enumerate(attention):
        np.testing.assert_array_equal(demos.tokens[i][demos.attention_mask[i]], tokens[i][real])
        np.testing.assert_array_equal(demos.mask[i][demos.attention_mask[i]], mask[i][real])


@pytest.mark.parametrize(
    'name',
    [pytest.param(n, marks=[] if n == 'sokoban' else pytest.mark.soak) for n in tiny.NAMES],
)
def test_demonstrations_round_trip_token_for_token(name):
    """This also holds for texts only: a demonstration is tokenised like its text."""
    demos = jax.device_get(tiny.demonstrations(name, oracle=0.5, episodes=24))
    names = [f'{name}_{i}' for i in range(24)]
    rows = (demos.tokens, demos.attention_mask, demos.mask)
    records = trajectories.records_of(*rows, tiny.tokenizer(), item_ids=names)
    assert_same_episodes(round_trip(records), *rows)
    for item in records:
        assert item['conversations'][0]['from'] == 'system'
        for message in item['conversations']:
            message.pop('tokens', None)
    assert_same_episodes(round_trip(records), *rows)


def test_sampled_episodes_of_any_tokens_round_trip_token_for_token():
    """A policy of high temperature: answers with any bytes and special tokens, often truncated."""
    out, _ = tiny.play('frozen_lake', tiny.untrained(), tiny.KEY, temperature=1.0)
    cut = (out.turn_stop == TurnStop.LENGTH).any(1)
    assert cut.any()
    out = out.replace(
        episode_stop=np.where(np.arange(16) == 2, EpisodeStop.ENV_ERROR, out.episode_stop)
    )
    records = trajectories.rollout_records(out, tiny.tokenizer(), 'frozen_lake')
    keep = np.arange(16) != 2  # a faulty episode is not exported
    demos = round_trip(records)
    assert_same_episodes(demos, out.tokens[keep], out.attention_mask[keep], out.action_mask[keep])
    assert records[0]['item_id'] == f'frozenlake_{out.level[0]}'
    np.testing.assert_allclose([r['reward'] for r in records], out.rewards[keep].sum(1), atol=1e-6)
    assert [r['success'] for r in records] == out.success[keep].tolist()


def test_sampled_ids_beyond_the_tokenizer_round_trip():
    """Models may have more rows than tokenizers; these ids were lost by tokenising again."""
    tokenizer = tiny.tokenizer()
    ids = [*tokenizer.encode('so'), tokenizer.vocab_size + 3, *tokenizer.encode('</think>')]
    sampled = record('P\n', '<think>so</think>')
    sampled['conversations'][3]['tokens'] = ids
    chat = build_chat(tokenizer)
    for vocab_size, valid in (
        (tokenizer.vocab_size + 4, True),
        (tokenizer.vocab_size + 3, False),
    ):
        tokens, mask = trajectories.encode_record(sampled, chat, ('<think>',), vocab_size)
        actions = [token for token, trained in zip(tokens, mask, strict=True) if trained]
        assert (actions == ids) == valid and len(actions) > 1


def test_tokens_of_another_tokenizer_are_ignored():
    sampled = record('P\n', '<think></think>')
    sampled['conversations'][3]['tokens'] = [5, 6, 7]
    plain = record('P\n', '<think></think>')
    jax.tree.map(np.testing.assert_array_equal, read([sampled])[0], read([plain])[0])
    chat = build_chat(tiny.tokenizer())
    encode = functools.partial(trajectories.encode_record, chat=chat, openings=('<think>',))
    for ids in ([], 'abc', [10**6], [True, None]):
        sampled['conversations'][3]['tokens'] = ids
        assert encode(sampled) == encode(plain)


def test_llama_3_records_have_our_system_message_and_human_tool_results():
    chat = build_chat(llama_tokenizer())
    answer = [*chat.tokenizer.encode('look'), chat.end_id]
    parts = [chat.episode_prefix('S', 'U'), chat.answer_open(''), answer]
    parts += [chat.following([{'role': 'tool', 'content': 'a wall'}])]
    trained = np.concatenate([np.full(len(part), part is answer) for part in parts])
    messages = trajectories.conversation_of(np.concatenate(parts), trained, chat)
    assert [(one['from'], one['value']) for one in messages] == [
        ('system', 'S'),
        ('human', 'U'),
        ('gpt', 'look'),
        ('human', '"a wall"'),
        ('gpt', ''),
    ]
