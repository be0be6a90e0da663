"""Reading and writing of trajectories in AgentTraj's format (AgentGym, arXiv:2406.04151).

A file is a JSON list of records, or has one record per line:

  {"item_id": "webshop_5475", "conversations": [
    {"from": "human", "loss": null, "value": "You are web shopping. ..."},
    {"from": "gpt", "loss": false, "value": "Ok."},
    {"from": "human", "loss": null, "value": "WebShop [SEP] Instruction: ..."},
    {"from": "gpt", "loss": true, "value": "Thought: ... Action: search[...]"}]}

Only gpt messages with loss true are trained, including their end-of-turn tokens. The first pair is
the instruction and a canned acknowledgement. (AgentGym's bc_trainer.py ignores the flag and trains
on every gpt message.) Messages after the last trained one have no effect and are dropped.

The formats of ShareGPT, AgentInstruct and OpenAI are also supported (`converted`). All answers are
trained if no message has a loss flag.

Files written here have two optional additions: a first message from "system", and in a gpt message
"tokens", the sampled ids. The ids are used if they decode to the message with the current
tokenizer, so our episodes are restored token for token. Otherwise the text is tokenised.
"""

import json
from collections.abc import Iterable
from pathlib import Path
from typing import Any

import numpy as np

from agentrl_jax.imitation.demonstrations import pad_rows
from agentrl_jax.machine import files
from agentrl_jax.tokens.chat import Chat, build_chat
from agentrl_jax.tokens.tokenizer import MAX_IDS, Tokenizer
from agentrl_jax.types import Demonstrations, Rollout

Record = dict[str, Any]
EXAMPLE = (
    '{"item_id": "lake_3", "conversations": [{"from": "human", "loss": null, "value": "P _ O"}, '
    '{"from": "gpt", "loss": true, "value": "<think></think><answer>Right</answer>"}]}'
)
MAX_VALUE_CHARS = 60  # maximum number of characters of a value in an error
SPEAKERS = {'user': 'human', 'assistant': 'gpt', 'chatgpt': 'gpt'}  # names in other formats
ROLES = {'system': 'system', 'human': 'user', 'gpt': 'assistant'}
NAMES = {role: name for name, role in ROLES.items()} | {'ipython': 'human'}  # Llama 3's tools


# ---- reading -----------------------------------------------------------------------------------


def read_records(path: str | Path) -> list[Record]:
    """Read and check the records of a .json or .jsonl file; the path may be gs://bucket/file."""
    path = files.local_path(path)
    if not path.is_file():
        raise ValueError(f'{path}: no such trajectory file')
    text = files.read_text(path)
    by_line = path.suffix == '.jsonl' or _holds_lines(text)
    lines = enumerate(text.split('\n'), 1) if by_line else [(1, text)]
    records = []
    for number, line in lines:
        value = files.parse_json(line, str(path), number) if line.strip() else []
        for record in value if isinstance(value, list) else [value]:
            record = converted(record, len(records))
            try:
                check_record(record, len(records))
            except ValueError as error:
                place = f'{path}:{number}' if by_line else path
                raise ValueError(f'{place}: {error}; a record is such as {EXAMPLE}') from error
            records.append(record)
    return records


def _holds_lines(text: str) -> bool:
    """Whether a text has several JSON values, one per line."""
    first, _, rest = text.strip().partition('\n')
    try:
        json.loads(first)
    except (ValueError, RecursionError):
        return False
    return bool(rest)


def converted(record: Any, number: int) -> Any:
    """Convert a record of ShareGPT, AgentInstruct or OpenAI ("messages") to AgentTraj's format.

    Other values are returned unchanged. number: item_id for records without one.
    """
    if not isinstance(record, dict):
        return record
    name = 'conversations' if 'conversations' in record else 'messages'
    messages = record.get(name)
    if not isinstance(messages, list) or not all(isinstance(one, dict) for one in messages):
        return record
    flagged = any('loss' in one for one in messages)
    messages = [_converted_message(one, flagged) for one in messages]
    system = record.get('system')
    speaker = messages[0].get('from') if messages else ''
    if system and isinstance(system, str) and speaker != 'system':
        messages.insert(0, {'from': 'system', 'loss': None, 'value': system})
    item = record.get('item_id', record.get('id'))
    item = str(number if item is None else item)
    return {**record, 'item_id': item, 'conversations': messages}


def _converted_message(message: Record, flagged: bool) -> Record:
    """Convert a message; flagged: messages of the record have loss flags."""
    message = dict(message)
    for name, other in (('from', 'role'), ('value', 'content')):
        if name not in message and other in message:
            message[name] = message.pop(other)
    speaker, value = message.get('from'), message.get('value')
    if isinstance(speaker, str):
        message['from'] = SPEAKERS.get(speaker, speaker)
    if isinstance(value, list) and all(isinstance(part, dict) for part in value):
        texts = [part.get('text') if part.get('type') == 'text' else None for part in value]
        message['value'] = ''.join(texts) if all(isinstance(x, str) for x in texts) else value
    if not flagged:
        trained = message.get('from') == 'gpt' and bool(message.get('weight', 1))
        message['loss'] = trained or None
    return message


def check_record(record: Any, number: int) -> None:
    """Raise a ValueError that names the record and the field; number counts from 0."""

    def refuse(field: str, problem: str) -> None:
        name = record['item_id'] if isinstance(record, dict) and 'item_id' in record else '?'
        raise ValueError(f'record {number} (item_id {_shown(name)}): {field} {problem}')

    if not isinstance(record, dict):
        refuse('the record', f'is {type(record).__name__}, not an object')
    for field, kind in (('item_id', str), ('conversations', list)):
        if field not in record:
            refuse(field, 'is missing')
        if not isinstance(record[field], kind):
            refuse(field, f'is {type(record[field]).__name__}, not {kind.__name__}')
    for i, message in enumerate(record['conversations']):
        problem = _message_problem(message)
        if problem:
            refuse(f'conversations[{i}]', problem)
    speakers = [message['from'] for message in record['conversations']]
    dialogue = speakers[1:] if speakers[:1] == ['system'] else speakers
    for i, speaker in enumerate(dialogue):
        if speaker != ('human', 'gpt')[i % 2]:
            at = i + len(speakers) - len(dialogue)
            refuse(f'conversations[{at}].from', f'is {speaker!r} where the roles must alternate')
    if not any(message['loss'] for message in record['conversations']):
        refuse('conversations', 'has no gpt message whose loss is true: nothing to learn')


def _message_problem(message: Any) -> str:
    if not isinstance(message, dict):
        return f'is {type(message).__name__}, not an object'
    missing = [field for field in ('from', 'loss', 'value') if field not in message]
    if missing:
        return f'has no {missing[0]!r}'
    if message.get('tool_calls') or message.get('function_call'):
        return 'has tool calls, which are not supported: write them into its text'
    if not isinstance(message['from'], str) or message['from'] not in ROLES:
        return f"has 'from' {_shown(message['from'])}, not human or gpt"
    if not isinstance(message['value'], str):
        return f"has a 'value' that is {type(message['value']).__name__}, not a text"
    if not isinstance(message['loss'], bool | None):
        return f"has 'loss' {_shown(message['loss'])}, not null, true or false"
    if message['loss'] and message['from'] != 'gpt':
        return f"has 'loss' true, but is from {message['from']!r}: only gpt messages are trained"
    return ''


def _shown(value: Any) -> str:
    text = repr(value)
    return text if len(text) <= MAX_VALUE_CHARS else f'{text[:MAX_VALUE_CHARS]}...'


def encode_record(
    record: Record, chat: Chat, openings: tuple[str, ...], vocab_size: int = MAX_IDS
) -> tuple[list[int], list[bool]]:
    """Return (tokens, trained flags) of a checked record, formatted like a rollout.

    openings: forced prefixes of answers ('<think>'). The first one that a gpt message starts with
    is not trained. vocab_size: of the model.
    """
    openings = (*map(chat.forced, openings), *openings)
    conversation = record['conversations']
    last = max(i for i, message in enumerate(conversation) if message['loss'])
    conversation = conversation[: last + 1]
    system = conversation[0]['from'] == 'system'
    first = conversation[1 if system else 0]['value']
    if system:
        tokens = chat.episode_prefix(conversation[0]['value'], first)
    else:
        tokens = chat.default_prefix(first)
    trained, ended = [False] * len(tokens), True
    for message in conversation[2 if system else 1 :]:
        if message['from'] == 'human':
            new = [*([] if ended else [chat.end_id]), *chat.user_open(message['value'])]
            learnt = [False] * len(new)
        else:
            forced = next(filter(message['value'].startswith, openings), '')
            opening = chat.answer_open(forced)
            answer = _answer_ids(message, message['value'][len(forced) :], chat, vocab_size)
            ended = answer[-1] in chat.tokenizer.eos_ids
            new = [*opening, *answer]
            learnt = [False] * len(opening) + [bool(message['loss'])] * len(answer)
        tokens += new
        trained += learnt
    return tokens, trained


def _answer_ids(message: Record, text: str, chat: Chat, vocab_size: int) -> list[int]:
    """Return the tokens of a gpt message: the sampled ones if known, else those of its text."""
    tokenizer = chat.tokenizer
    if 'tokens' in message:
        ids = message['tokens']
        if isinstance(ids, list) and ids and all(_is_token(i, vocab_size) for i in ids):
            if tokenizer.decode(ids[: len(ids) - (ids[-1] in tokenizer.eos_ids)]) == text:
                return ids
    return [*tokenizer.encode(text), chat.end_id]


def _is_token(i: Any, vocab_size: int) -> bool:
    return isinstance(i, int) and not isinstance(i, bool) and 0 <= i < vocab_size


def demonstrations_of(
    records: list[Record],
    tokenizer: Tokenizer,
    *,
    openings: tuple[str, ...],
    max_tokens: int,
    vocab_size: int = MAX_IDS,
) -> tuple[Demonstrations, int]:
    """Return (demonstrations, number of dropped records longer than max_tokens).

    vocab_size: of the model, which may sample ids that the tokenizer does not have. Raises a
    ValueError for a malformed record, which it names, and if all records are dropped.
    """
    for number, record in enumerate(records):
        check_record(record, number)
    chat = build_chat(tokenizer)
    encoded = [encode_record(record, chat, openings, vocab_size) for record in records]
    rows = [pair for pair in encoded if len(pair[0]) <= max_tokens]
    if not rows:
        longest = max((len(tokens) for tokens, _ in encoded), default=0)
        raise ValueError(
            f'all {len(records)} trajectories are too long: the longest has {longest} tokens, '
            f'rollout.max_tokens={max_tokens}'
        )
    return pad_rows(rows, max_tokens, tokenizer.pad_id), len(encoded) - len(rows)


# ---- writing -----------------------------------------------------------------------------------


def conversation_of(tokens: np.ndarray, trained: np.ndarray, chat: Chat) -> list[Record]:
    """Return the messages of one episode; tokens int [n] without padding, trained bool [n]."""
    # A message starts at each start_id that was not sampled; a sampled one is text.
    starts = np.flatnonzero((np.asarray(tokens) == chat.start_id) & ~np.asarray(trained))
    ends = [*starts[1:], len(tokens)]
    return [
        _message(np.asarray(tokens[i + 1 : j]), np.asarray(trained[i + 1 : j]), chat)
        for i, j in zip(starts, ends, strict=True)
    ]


def _message(ids: np.ndarray, trained: np.ndarray, chat: Chat) -> Record:
    tokenizer = chat.tokenizer
    if not trained.any():
        end = int(np.argmax(ids == chat.end_id)) if (ids == chat.end_id).any() else len(ids)
        role, value = chat.split_message(ids[:end])
        return {'from': NAMES[role], 'loss': False if role == 'assistant' else None, 'value': value}
    sampled = ids[trained].tolist()
    role, prefix = chat.split_message(ids[: int(np.argmax(trained))])
    content = sampled[: len(sampled) - (sampled[-1] in tokenizer.eos_ids)]
    value = prefix + tokenizer.decode(content)
    return {'from': NAMES[role], 'loss': True, 'value': value, 'tokens': sampled}


def records_of(
    tokens: Any, attention_mask: Any, trained: Any, tokenizer: Tokenizer, *, item_ids: list[str]
) -> list[Record]:
    """Return the records of N episodes; arguments are host arrays [N, T]."""
    chat = build_chat(tokenizer)
    rows = zip(*map(np.asarray, (tokens, attention_mask, trained)), item_ids, strict=True)
    return [
        {'item_id': name, 'conversations': conversation_of(row[real], mask[real], chat)}
        for row, real, mask, name in rows
    ]


def rollout_records(rollout: Rollout, tokenizer: Tokenizer, env_name: str) -> list[Record]:
    """Return the records of the healthy episodes of a rollout, with their reward and success.

    item_id is the environment's name without underscores, an underscore and the level: AgentGym
    uses the parts before the first and after the last underscore.
    """
    names = [f'{env_name.replace("_", "")}_{level}' for level in np.asarray(rollout.level)]
    records = records_of(
        rollout.tokens, rollout.attention_mask, rollout.action_mask, tokenizer, item_ids=names
    )
    rewards = np.asarray(rollout.rewards).sum(1)
    outcomes = zip(records, rewards, np.asarray(rollout.success), strict=True)
    for record, reward, success in outcomes:
        record |= {'reward': round(float(reward), 6), 'success': bool(success)}
    healthy = np.asarray(rollout.healthy)
    return [record for record, fine in zip(records, healthy, strict=True) if fine]


def write_records(path: str | Path, records: Iterable[Record]) -> None:
    """Write a .json list, or one line per record if the name ends in .jsonl."""
    path, lines = files.local_path(path), [json.dumps(one, ensure_ascii=False) for one in records]
    if path.suffix == '.jsonl':
        files.write_atomic(path, ''.join(line + '\n' for line in lines))
    else:
        files.write_atomic(path, '[\n' + ',\n'.join(lines) + '\n]\n')
