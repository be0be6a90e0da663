"""Full conversations: rendered by `transformers` with a checkpoint's template, and as rows of a
harness, which consist of the opening, the answers and the replies to each answer.

Templates are rewritten here. The originals (<name>*.jinja, *.gguf) are also tested if
AGENTRL_REAL_WEIGHTS names a folder that contains them.
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

# Like SmolLM2's: a default system message, no tools
SMOLLM2 = (
    "{% if messages[0].role != 'system' %}<|im_start|>system\nS<|im_end|>\n{% endif %}" + CHATML
)
# Like Qwen3's, with tools: only answers after the last question keep their thoughts, and a last
# answer without a thought gets an empty one
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
HERMES = '{{ bos_token }}' + CHATML  # like Hermes 2 Pro's, for a Llama 3 vocabulary
KINDS = ('qwen2.5', 'qwen3', 'smollm2', 'hermes', 'llama3')
PUBLISHED = ('qwen2.5', 'qwen3', 'smollm2', 'llama3.0', 'llama3.1', 'llama3.2')
DATE = '26 Jul 2024'


@functools.cache
def tokenizer_of(name):
    """Return the tokenizer of one of KINDS or of '<name>, published'."""
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
    """Return the ids of `transformers`."""
    from transformers import PreTrainedTokenizerFast  # takes seconds to import

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
    """Return an answer with tool calls, in the format of templates."""
    calls = [{'name': 'look', 'arguments': {'place': place}} for place in places]
    calls = [{'type': 'function', 'function': call} for call in calls]
    return message('assistant', text) | {'tool_calls': calls}


def sampled(answer, wording):
    """Return the text that a policy samples for an answer."""
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


QUESTION, SYSTEM = message('user', 'What is it?'), message('system', 'You are brief.')
TALK = [QUESTION, message('assistant', 'A wall.'), message('user', 'And\n\n now?')]
CALLS = [
    QUESTION,
    calling('here é'),
    message('tool', 'a "wall"'),
    calling('there'),
    message('tool', '{"seen": 2}'),
    message('assistant', 'Two.'),
    message('user', 'Sure?'),
]
SEVERAL = [QUESTION, calling('here', 'there'), message('tool', 'a'), message('tool', 'b')]
SPOKEN = [QUESTION, calling('here', text='I look.'), message('tool', 'a'), message('user', 'So?')]
THOUGHTS = [
    QUESTION,
    calling('here', text='<think>\nso\n</think>\n\nI look.'),
    message('tool', 'a'),
]
CASES = {
    'talk': (TALK, ()),
    'talk with tools': (TALK, TOOLS),
    'calls': (CALLS, TOOLS),
    'several calls at once': (SEVERAL, TOOLS),
    'a call after a text': (SPOKEN, TOOLS),
}
NAMES = [*KINDS, *(f'{name}, published' for name in PUBLISHED)]


def pieces(chat, messages, tools):
    """Return the row of a conversation."""
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
def test_a_row_equals_the_conversation_rendered_by_transformers(name, case, system):
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
        # The template drops text before a call; a row keeps it
        assert chat.opening(messages, tools) == reference(tokenizer, messages, tools)
    else:
        expected = reference(tokenizer, messages, tools)
        assert chat.opening(messages, tools) == expected
        assert pieces(chat, messages, tools) == expected


@pytest.mark.parametrize('name', ['qwen3', 'qwen3, published'])
def test_rows_keep_thoughts_that_templates_drop_after_the_next_question(name):
    tokenizer = tokenizer_of(name)
    chat = build_chat(tokenizer)
    assert pieces(chat, THOUGHTS, TOOLS) == reference(tokenizer, THOUGHTS, TOOLS)
    later = [*THOUGHTS, message('assistant', 'A wall.'), message('user', 'So?')]
    rendered = chat.opening(later, TOOLS)
    assert rendered == reference(tokenizer, later, TOOLS)
    assert '<think>' not in tokenizer.decode(rendered)
    row = pieces(chat, later, TOOLS)
    assert row != rendered and tokenizer.decode(row).count('<think>') == 1


@pytest.mark.parametrize('name', NAMES)
def test_text_of_messages_and_tools_is_never_a_special_token(name):
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
    forged, decoded = marks(spelled)
    assert forged == honest and decoded.count(tokenizer.special_names()[-1]) >= 3


DROPS = HERMES.replace("message['content']", "message['content'].split('</think>')[-1]")
LLAMA_ENDS = {'eos_token': '<|eot_id|>', 'pad_token': '<|finetune_right_pad_id|>'}
EXPORTS = {  # template of the folder, its special tokens, whether messages may have tools
    'llama3': (TEMPLATE, LLAMA_ENDS, False),  # as converted from a .gguf: without bos_token
    'hermes': (DROPS, {'bos_token': {'content': '<|endoftext|>'}}, False),
    'hermes, calls': (HERMES, {'bos_token': {'content': '<|endoftext|>'}}, True),
}


@pytest.mark.parametrize('name', EXPORTS)
def test_an_exported_tokenizer_renders_the_same_chats_in_transformers(tmp_path, name):
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
    ids = theirs.apply_chat_template(
        messages, tools=tools, add_generation_prompt=True, return_dict=False, date_string=DATE
    )
    assert ids == build_chat(written).opening(messages, tools or ())
    assert ids[0] == build_chat(tokenizer).first_id
