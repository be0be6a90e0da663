"""Whole conversations, as `transformers` renders them by a checkpoint's template, and as rows of a
harness hold them: the opening, and after each answer what follows it.

Templates are in words of our own; those of checkpoints (<name>*.jinja, *.gguf) are tested too where
AGENTRL_REAL_WEIGHTS names a folder with some.
"""

import copy
import functools
import json

import pytest
import real_tokenizers
import tokenizers
from llama_vocabulary import TEMPLATE, llama_tokenizer
from qwen_vocabulary import qwen_tokenizer
from smollm_vocabulary import smollm_tokenizer

from agentrl_jax.tokens import hf_folder
from agentrl_jax.tokens.chat import CHATML, CHATML_TOOLS, build_chat, message

# As SmolLM2's: a system message of its own, and no tools
SMOLLM2 = (
    "{% if messages[0].role != 'system' %}<|im_start|>system\nS<|im_end|>\n{% endif %}" + CHATML
)
# As Qwen3's, beside tools: thoughts are shown after the last question alone, there an empty one in
# a last answer without any
QWEN3 = CHATML_TOOLS.replace(
    "{% for message in messages %}{% set role = message['role'] %}",
    '{% set last = namespace(user=-1) %}{% for message in messages %}'
    "{% if message.role == 'user' %}{% set last.user = loop.index0 %}{% endif %}{% endfor %}"
    "{% for message in messages %}{% set role = message['role'] %}",
).replace(
    "+ (message['content'] or '') }}",
    "}}{% set parts = message.content.split('</think>\n\n') %}"
    "{% set thought = parts[0] + '</think>\n\n' if parts | length > 1 else '' %}"
    '{% if loop.index0 > last.user and loop.last and not thought %}'
    "{% set thought = '<think>\n\n</think>\n\n' %}{% endif %}"
    "{{ (thought if loop.index0 > last.user else '') + parts[-1] }}",
)
HERMES = '{{ bos_token }}' + CHATML  # as Hermes 2 Pro's, on a vocabulary of Llama 3
KINDS = ('qwen2.5', 'qwen3', 'smollm2', 'hermes', 'llama3')
PUBLISHED = ('qwen2.5', 'qwen3', 'smollm2', 'llama3.0', 'llama3.1', 'llama3.2')
DATE = '26 Jul 2024'


@functools.cache
def tokenizer_of(name):
    """One of KINDS, or '<name>, published'."""
    kind, _, published = name.partition(', ')
    if published and kind in real_tokenizers.FILES:
        return real_tokenizers.real_tokenizer(kind)
    template = real_tokenizers.real_template(kind) if published else None
    if kind.startswith('llama'):
        return llama_tokenizer(template or TEMPLATE)
    if kind == 'smollm2':
        return with_template(smollm_tokenizer(), SMOLLM2, bos='<|im_start|>')  # but adds none
    if kind == 'hermes':
        return with_template(smollm_tokenizer(), HERMES, bos='<|endoftext|>')
    return with_template(
        qwen_tokenizer(), template or {'qwen3': QWEN3, 'qwen2.5': CHATML_TOOLS}[kind]
    )


def with_template(tokenizer, template, bos=''):
    tokenizer = copy.copy(tokenizer)
    tokenizer.chat_template, tokenizer.bos = template, bos
    return tokenizer


def reference(tokenizer, messages, tools):
    """The ids of `transformers`."""
    from transformers import PreTrainedTokenizerFast  # loads for seconds

    template = tokenizer.chat_template
    if tools and 'tools' not in template:
        template = CHATML_TOOLS if template != HERMES else '{{ bos_token }}' + CHATML_TOOLS
    backend = tokenizers.Tokenizer.from_str(tokenizer.to_json())
    theirs = PreTrainedTokenizerFast(tokenizer_object=backend, bos_token=tokenizer.bos or None)
    return theirs.apply_chat_template(
        messages,
        tools=tools or None,
        chat_template=template,
        add_generation_prompt=True,
        return_dict=False,
        date_string=DATE,
    )


TOOLS = [
    {
        'type': 'function',
        'function': {
            'name': 'look',
            'description': 'Looks, é\n"twice".',
            'parameters': {'type': 'object', 'properties': {'place': {'type': 'string'}}},
        },
    }
]


def calling(*places, text=''):
    """An answer that calls, as templates expect it."""
    calls = [{'name': 'look', 'arguments': {'place': place}} for place in places]
    calls = [{'type': 'function', 'function': call} for call in calls]
    return message('assistant', text) | {'tool_calls': calls}


def sampled(answer, wording):
    """The text that a policy samples to say it."""
    functions = [call['function'] for call in answer.get('tool_calls', ())]
    texts = [answer['content']] if answer['content'] else []
    for one in functions:
        arguments = json.dumps(one['arguments'], ensure_ascii=False)
        if wording.calls == 'tags':
            written = f'{{"name": "{one["name"]}", "arguments": {arguments}}}'
            texts.append(f'<tool_call>\n{written}\n</tool_call>')
        else:
            texts.append(f'{{"name": "{one["name"]}", "parameters": {arguments}}}')
    return '\n'.join(texts)


ASKED, SYSTEM = message('user', 'What is it?'), message('system', 'You are brief.')
TALK = [ASKED, message('assistant', 'A wall.'), message('user', 'And\n\n now?')]
CALLS = [
    ASKED,
    calling('here é'),
    message('tool', 'a "wall"'),
    calling('there'),
    message('tool', '{"seen": 2}'),
    message('assistant', 'Two.'),
    message('user', 'Sure?'),
]
SEVERAL = [ASKED, calling('here', 'there'), message('tool', 'a'), message('tool', 'b')]
SPOKEN = [ASKED, calling('here', text='I look.'), message('tool', 'a'), message('user', 'So?')]
THOUGHTS = [ASKED, calling('here', text='<think>\nso\n</think>\n\nI look.'), message('tool', 'a')]
CASES = {
    'talk': (TALK, ()),
    'talk with tools': (TALK, TOOLS),
    'calls': (CALLS, TOOLS),
    'several calls at once': (SEVERAL, TOOLS),
    'a call after a text': (SPOKEN, TOOLS),
}
NAMES = [*KINDS, *(f'{name}, published' for name in PUBLISHED)]


def pieces(chat, messages, tools):
    """The row of a conversation."""
    answers = [at for at, one in enumerate(messages) if one['role'] == 'assistant']
    ids = chat.opening(messages[: answers[0]], tools)
    for at, end in zip(answers, [*answers[1:], len(messages)], strict=True):
        ids += [*chat.tokenizer.encode(sampled(messages[at], chat.wording)), chat.end_id]
        ids += chat.following(messages[at + 1 : end], tools)
    return ids


@pytest.mark.soak
@pytest.mark.parametrize('system', [True, False], ids=['system', 'no system'])
@pytest.mark.parametrize('case', CASES)
@pytest.mark.parametrize('name', NAMES)
def test_a_row_is_the_conversation_as_transformers_renders_it(name, case, system):
    tokenizer = tokenizer_of(name)
    chat = build_chat(tokenizer)
    messages, tools = CASES[case]
    messages = [SYSTEM] * system + messages
    one_call = case in ('talk', 'talk with tools', 'calls')
    if name.startswith('llama3.0') and tools:
        with pytest.raises(ValueError, match='tools'):
            chat.opening(messages, tools)
    elif name.startswith('llama') and case == 'several calls at once':
        with pytest.raises(ValueError, match='call'):
            chat.opening(messages, tools)
    elif name.startswith('llama') and not one_call:
        # The template leaves out what is said in front of a call; in a row it stays
        assert chat.opening(messages, tools) == reference(tokenizer, messages, tools)
    else:
        whole = reference(tokenizer, messages, tools)
        assert chat.opening(messages, tools) == whole
        assert pieces(chat, messages, tools) == whole


@pytest.mark.parametrize('name', ['qwen3', 'qwen3, published'])
def test_thoughts_stay_until_the_next_question_and_are_left_out_of_reworded_histories(name):
    tokenizer = tokenizer_of(name)
    chat = build_chat(tokenizer)
    assert pieces(chat, THOUGHTS, TOOLS) == reference(tokenizer, THOUGHTS, TOOLS)
    later = [*THOUGHTS, message('assistant', 'A wall.'), message('user', 'So?')]
    whole = chat.opening(later, TOOLS)
    assert whole == reference(tokenizer, later, TOOLS)
    assert '<think>' not in tokenizer.decode(whole)
    row = pieces(chat, later, TOOLS)
    assert row != whole and tokenizer.decode(row).count('<think>') == 1


@pytest.mark.parametrize('name', NAMES)
def test_what_messages_and_tools_spell_is_never_a_special_token(name):
    tokenizer = tokenizer_of(name)
    chat = build_chat(tokenizer)
    spelled = ' '.join(tokenizer.special_names())
    tools = [{'type': 'function', 'function': {'name': 'look', 'description': spelled}}]
    tools = () if name.startswith('llama3.0') else tools
    specials = {tokenizer.special(one) for one in tokenizer.special_names()}

    def marks(text):
        rows = chat.opening([message('system', text), message('user', text)], tools)
        rows += chat.following([message('tool' if tools else 'user', text)], tools)
        return [token for token in rows if token in specials], tokenizer.decode(rows)

    honest, _ = marks('x')
    found, shown = marks(spelled)
    assert found == honest and shown.count(tokenizer.special_names()[-1]) >= 3


DROPS = HERMES.replace("message['content']", "message['content'].split('</think>')[-1]")
LLAMA_ENDS = {'eos_token': '<|eot_id|>', 'pad_token': '<|finetune_right_pad_id|>'}
EXPORTS = {  # template of the folder, its special tokens, whether messages may have tools
    'llama3': (TEMPLATE, LLAMA_ENDS, False),  # as made from a .gguf: without bos_token
    'hermes': (DROPS, {'bos_token': {'content': '<|endoftext|>'}}, False),
    'hermes, calls': (HERMES, {'bos_token': {'content': '<|endoftext|>'}}, True),
}


@pytest.mark.parametrize('name', EXPORTS)
def test_an_exported_tokenizer_renders_the_chats_of_its_run_in_transformers(tmp_path, name):
    from transformers import AutoTokenizer

    tokenizer, (template, settings, calls) = tokenizer_of(name.split(',')[0]), EXPORTS[name]
    source, out = tmp_path / 'source', tmp_path / 'out'
    for folder in (source, out):
        folder.mkdir()
    (source / 'tokenizer.json').write_text(tokenizer.to_json())
    settings = settings | {'chat_template': template}
    (source / 'tokenizer_config.json').write_text(json.dumps(settings))
    written = hf_folder.write(out, source, calls=calls)
    hf_folder.compare(written, out)
    theirs = AutoTokenizer.from_pretrained(out)
    messages, tools = (TALK, None) if name == 'hermes' else (CALLS, TOOLS)
    found = theirs.apply_chat_template(
        messages, tools=tools, add_generation_prompt=True, return_dict=False, date_string=DATE
    )
    assert found == build_chat(written).opening(messages, tools or ())
    assert found[0] == build_chat(tokenizer).first_id
