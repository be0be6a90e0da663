import random

import pytest
import qwen_vocabulary
from llama_vocabulary import TEMPLATE, llama_tokenizer

from agentrl_jax.envs.hosts.world import Messages
from agentrl_jax.text.conversation import Conversation, prefix_of
from agentrl_jax.tokens import rendering
from agentrl_jax.tokens.chat import build_chat, message, plain_template, render, tokenize
from agentrl_jax.tokens.load import load_tokenizer
from agentrl_jax.tokens.tokenizer import CHAT_SPECIALS
from agentrl_jax.tools import demo_tokenizer

# Qwen2.5's template for conversations that start with a system message and do not call
# tools, rewritten. The checkpoint's template is tested if AGENTRL_REAL_GGUF names a file.
CHATML = (
    "{% for message in messages %}{{ '<|im_start|>' + message.role + '\n' + message.content }}"
    "{{ '<|im_end|>\n' }}{% endfor %}"
    "{% if add_generation_prompt %}{{ '<|im_start|>assistant\n' }}{% endif %}"
)
SYSTEM = "You're a helpful assistant. You are solving the FrozenLake puzzle.\nUp, Down\n"
USER = '\nTurn 1:\nState:\nP_O_\n__OG\n\nYou have 10 actions left.\n'


@pytest.fixture(params=['demo', 'qwen', 'gguf'])
def tokenizer(request):
    if request.param == 'demo':
        return load_tokenizer(demo_tokenizer.DEMO_MODEL)
    if request.param == 'gguf':
        return qwen_vocabulary.gguf_tokenizer()
    return qwen_vocabulary.qwen_tokenizer()


def with_template(template):
    """Return the demo tokenizer with a chat template."""
    tokenizer = load_tokenizer(demo_tokenizer.DEMO_MODEL)
    tokenizer.chat_template = template
    return tokenizer


def rendered(tokenizer, messages) -> str:
    return render(tokenizer, messages, template=tokenizer.chat_template or CHATML)


def test_turns_equal_the_template_token_for_token_and_only_append(tokenizer):
    chat = build_chat(tokenizer)
    messages = [message('system', SYSTEM), message('user', USER)]
    ids = chat.episode_prefix(SYSTEM, USER)
    for turn in range(4):
        text = rendered(tokenizer, messages)
        for forced in ['', '<think>', '<answer>']:
            opened = [*ids, *chat.answer_open(forced)]
            assert opened == tokenize(tokenizer, text + forced)
        ids = [*ids, *chat.answer_open(''), *tokenizer.encode('go Up'), chat.end_id]
        ids += chat.user_open(f'Turn {turn}:\n__P\n')
        messages += [message('assistant', 'go Up'), message('user', f'Turn {turn}:\n__P\n')]
    assert tokenizer.decode(opened, show_special=True) == text + '<answer>'


def test_llama_3_pieces_equal_its_template_except_for_outer_white_space():
    tokenizer = llama_tokenizer()
    chat = build_chat(tokenizer)
    assert chat.preface == 'Today: 26 Jul 2024\n\n'
    messages = [message('system', SYSTEM.strip()), message('user', USER.strip())]
    pieces = [*chat.episode_prefix(SYSTEM.strip(), USER.strip()), *chat.answer_open('')]
    assert pieces == tokenize(tokenizer, render(tokenizer, messages))
    unstripped = [*chat.episode_prefix(SYSTEM, USER), *chat.answer_open('')]
    assert f'\n\n{USER}<|eot_id|>' in tokenizer.decode(unstripped, show_special=True)
    assert chat.default_prefix('U')[0] == chat.first_id == tokenizer.special('<|begin_of_text|>')
    assert tokenizer.eos_ids[0] == chat.end_id == tokenizer.special('<|eot_id|>')
    assert len(tokenizer.eos_ids) == 3
    start = chat.user_open('U\n\nV')[1:]
    assert chat.split_message(start) == ('user', 'U\n\nV')
    assert chat.split_message(chat.system_message('S')[2:-1]) == ('system', 'S')


OPENS = (
    "{% for message in messages %}{{ '<|im_start|>' + message.role + '\n' }}"
    "{{ message.content.split('</think>')[-1] + '<|im_end|>\n' }}{% endfor %}"
    "{% if add_generation_prompt %}{{ '<|im_start|>assistant\n' + THOUGHT }}{% endif %}"
)


@pytest.mark.parametrize('thought', ['<think>\n', '<think>\n\n</think>\n\n'])
def test_a_template_may_start_the_thought_of_an_answer(thought):
    """Examples: Qwen3-Thinking, minimind."""
    tokenizer = with_template(OPENS.replace('THOUGHT', repr(thought)))
    chat = build_chat(tokenizer)
    assert chat.forced('') == thought and chat.forced('<answer>') == '<answer>'
    assert chat.forced('<think>') == (thought if '/' not in thought else '<think>')
    expected = tokenize(tokenizer, render(tokenizer, [message('user', 'U')]))
    talk = Conversation(chat, '', 48)
    messages = Messages([message('user', 'U')], tools=[], branch=0, opens=True)
    assert [*talk.messages_prompt(messages).tokens] == expected[1:]
    assert talk.prompt('U').tokens[-len(tokenizer.encode(thought)) :] == tokenizer.encode(thought)
    assert talk.said(tokenizer.encode('so')) == f'{thought}so'
    exported = with_template(plain_template('', thought))
    assert build_chat(exported).opening([message('user', 'U')]) == expected


@pytest.mark.parametrize('generates', ['', '<think>\n\n</think>\n\n'])
def test_a_template_may_give_earlier_answers_an_empty_thought(generates):
    """Example: TRL's training template of Qwen3."""
    empty = "('' if '<think>' in message.content or message.role != 'assistant' else EMPTY)"
    template = CHATML.replace('+ message.content', f'+ {empty} + message.content')
    template = template.replace('EMPTY', repr('<think>\n\n</think>\n\n'))
    template = template.replace("assistant\n' }}", f"assistant\n' + {generates!r} }}}}")
    chat = build_chat(with_template(template))
    assert chat.thought == generates
    assert chat.opening([message('user', 'U')])[-1:] == chat.answer_open(generates)[-1:]


def test_a_template_gets_the_variables_of_transformers():
    names = '{{ bos_token }}{{ eos_token }}{{ image_token }}{{ mask_token is defined }}'
    checks = '{% if tools is not none or documents is not none %}{{ x() }}{% endif %}'
    marked = CHATML.replace(
        ' + message.content }}', ' }}{% generation %}{{ message.content }}{% endgeneration %}'
    )
    named = {'bos_token': 'b', 'eos_token': 'e', 'image_token': 'i'}
    messages = [message('user', 'U')]
    text = rendering.render(checks + names + marked, messages, **named)
    assert text == 'bei' + 'False' + rendering.render(CHATML, messages)


def test_a_bos_token_starts_chats_only_if_the_template_adds_it():
    """Hermes 2 Pro's template adds one, but it was dropped; SmolLM2's bos_token is <|im_start|>."""
    tokenizer = with_template('{{ bos_token }}' + CHATML)
    tokenizer.bos = '<|endoftext|>'
    chat, bos = build_chat(tokenizer), tokenizer.special('<|endoftext|>')
    bare = build_chat(with_template(CHATML))
    assert chat.first_id == bos and bare.first_id == bare.start_id
    assert chat.episode_prefix('S', 'U') == [bos, *bare.episode_prefix('S', 'U')]
    assert chat.default_prefix('U') == [bos, *bare.default_prefix('U')]
    assert chat.user_open('U') == bare.user_open('U')
    assert prefix_of(chat, '', 'Find it.', 'OK.') == [bos, *prefix_of(bare, '', 'Find it.', 'OK.')]
    for unused in ('<|im_start|>', '<|endoftext|>', '<s>'):
        tokenizer = with_template(CHATML)
        tokenizer.bos = unused
        assert build_chat(tokenizer).wording == bare.wording
    tokenizer = with_template('{{ bos_token }}' + CHATML)
    tokenizer.bos = '<s>'
    with pytest.raises(ValueError, match='has no special token <s>'):
        build_chat(tokenizer)


def test_the_token_that_starts_a_call_is_spelled_out():
    chat = build_chat(llama_tokenizer())
    encode, call = chat.tokenizer.encode, chat.tokenizer.special('<|python_tag|>')
    assert chat.said([*encode('a'), call, *encode('b')]) == 'a<|python_tag|>b'
    assert chat.said([*encode('<|python_tag|>'), chat.end_id]) == '<|python_tag|>'


def test_chats_of_unsupported_families_are_rejected():
    strange = TEMPLATE.replace("text + '<|eot_id|>'", "text + '<|eom_id|>'")
    for template in (None, '{{ messages }}', strange):
        with pytest.raises(ValueError, match='llama'):
            build_chat(llama_tokenizer(template))


def test_observations_cannot_forge_a_turn(tokenizer):
    chat = build_chat(tokenizer)
    specials = [tokenizer.special(name) for name in CHAT_SPECIALS]
    honest = chat.episode_prefix(SYSTEM, USER)
    rng = random.Random(0)
    words = [*CHAT_SPECIALS, '<|im_', 'end|>', 'assistant\n', '\n', '<|', '|>', ' ', '\u200b', 'é']
    for _ in range(300):
        forged = chat.episode_prefix(SYSTEM, ''.join(rng.choices(words, k=6)))
        for special in specials:
            assert forged.count(special) == honest.count(special)


FORGETS = '{% if messages | length > 2 %}x{% endif %}'  # right for one turn


@pytest.mark.parametrize(
    'template',
    [
        "{{ messages[0]['content'] }}",
        CHATML.replace('message.content', '(message.content | trim)'),
        CHATML.replace("'<|im_end|>\n'", "'<|im_end|>'"),
        FORGETS + CHATML,
        "{{ raise_exception('a\n\x1b[31mb') }}",
        '{% for %}',
        "{{ ''.__class__.__mro__ }}",
        '{% for a in range(10**6) %}{% endfor %}',
        "{% for a in range(9) %}{{ 'x' * 10**6 }}{% endfor %}",
        '{# ' + 'x' * 2**20 + ' #}' + CHATML,
        '{% macro m() %}{{ m() }}{% endmacro %}{{ m() }}',
        "{{ '\\ud800' }}",
    ],
)
def test_templates_that_fail_or_render_other_chats_are_rejected(template):
    build_chat(with_template(CHATML))
    tokenizer = with_template(template)
    with pytest.raises(ValueError) as error:
        build_chat(tokenizer)
    assert tokenizer.source in str(error.value) and str(error.value).isprintable()


TOOLS = [
    {
        'type': 'function',
        'function': {'name': 'look', 'description': 'Says "<|im_end|>", é.', 'parameters': {}},
    }
]
CALLS = [{'type': 'function', 'function': {'name': 'look', 'arguments': {'place': 'here'}}}]
ANSWERED = '<tool_call>\n{"name": "look", "arguments": {"place": "here"}}\n</tool_call>'
NEW = {
    'a question': ('A', {'content': 'A'}, [message('user', ' V\n')]),
    'two results': (
        ANSWERED,
        {'content': '', 'tool_calls': CALLS},
        [message('tool', 'a <|im_start|>wall'), message('tool', 'a door')],
    ),
    'text and a call, a result and a question': (
        f'I look.\n{ANSWERED}',
        {'content': 'I look.', 'tool_calls': CALLS},
        [message('tool', 'a wall'), message('user', 'So?')],
    ),
}


@pytest.mark.parametrize('new', NEW)
@pytest.mark.parametrize('tools', [(), TOOLS], ids=['no tools', 'tools'])
@pytest.mark.parametrize('system', ['S <|im_end|>', ''])
def test_the_reply_to_an_answer_is_what_the_template_appends(tokenizer, new, tools, system):
    chat = build_chat(tokenizer)
    first = [message('system', system)] * bool(system) + [message('user', '\nU <|im_start|>')]
    sampled, fields, later = NEW[new]
    tools = TOOLS if 'tool_calls' in fields else tools  # a call needs tools
    ids = chat.opening(first, tools)
    pieces = [*ids, *tokenizer.encode(sampled), chat.end_id, *chat.following(later, tools)]
    assert pieces == chat.opening([*first, message('assistant', '') | fields, *later], tools)
    text = tokenizer.decode(ids, show_special=True)
    assert text.count('<|im_start|>') == ids.count(chat.start_id) + 1  # for the question
