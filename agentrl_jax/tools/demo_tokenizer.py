"""Train the small tokenizers on the project's prompts and environment texts.

  python -m agentrl_jax.tools.demo_tokenizer [--name=agents]

Each of these is one token (a user-defined symbol): a sentence of a prompt, a row of the default
lake and room, a cell of any other grid, an action name, a tag, a separator. Other words are pieces
of a unigram model, with byte fallback. The same inputs give the same file.

Rows are single tokens so that tiny policies can read maps: after a minute of cloning, a policy of
0.1 M parameters reads a map of four row tokens, but not of sixteen cells (experiments/LOG.md).

agents     tags of written turns. A row of its 6 x 6 lakes is two tokens, because there are 1792
           rows but only 80 halves; a row of the default room is one token.
babyai     phrases: "red ball" and " 2 ahead" are tokens.
textcraft  words of item names, and the texts around them.
search     countries, names of drawn questions, and pieces of region names. The pieces come from
           training regions, so that policies have copied the pieces of held-out names before.
shop       words of the shop's stalls.
miniwob    element numbers (the same token on a page and in an action), words of filler texts, and
           full lines of pages with odd and even numbers.
harness    texts around tools and calls, and texts of the boxes' agent.
"""

import argparse
import io
import itertools
import json
import re
import string
from pathlib import Path

import sentencepiece

from agentrl_jax.envs import BabyAI, bandit
from agentrl_jax.envs.babyai import sight
from agentrl_jax.envs.babyai import words as babyai_words
from agentrl_jax.envs.frozen_lake import world as frozen_lake
from agentrl_jax.envs.hosts import textcraft
from agentrl_jax.envs.hosts.harness import boxes
from agentrl_jax.envs.hosts.search import countries, dialects, drawn
from agentrl_jax.envs.hosts.search import world as search
from agentrl_jax.envs.hosts.web import miniwob
from agentrl_jax.envs.hosts.webshop import catalogue, products
from agentrl_jax.envs.hosts.webshop import world as shop
from agentrl_jax.envs.sokoban import world as sokoban
from agentrl_jax.text import agents
from agentrl_jax.text.prompts import BRIEF, RAGEN, SEPARATOR
from agentrl_jax.tokens import chat, rendering, unigram
from agentrl_jax.tokens.tokenizer import CHAT_SPECIALS

DEMO_MODEL = Path(__file__).parents[1] / 'tokens' / 'demo.model'
VOCAB_SIZE, BABYAI_VOCAB_SIZE, TEXTCRAFT_VOCAB_SIZE, SEARCH_VOCAB_SIZE = 1408, 446, 741, 832
AGENTS_VOCAB_SIZE = 954
SHOP_VOCAB_SIZE = 655
MINIWOB_VOCAB_SIZE = 949
HARNESS_VOCAB_SIZE = 367
TAGS = ('<think>', '</think>', '<answer>', '</answer>')
ROLES = ('system\n', 'user\n', 'assistant\n')
STYLES = (RAGEN, BRIEF)  # prompt styles with sentence tokens; others use smaller pieces
GRIDS = (frozen_lake.SYMBOLS, sokoban.SYMBOLS, sokoban.OTHER_SYMBOLS)
TEMPLATES = ('system', 'reward', 'header', 'warning', 'tail')
TURNS, ACTIONS, WORDS = 5, 10, 100  # as in configs/base.py; other numbers are single digits
AGENTS_LAKE = 6  # side of the lake whose half rows are tokens
BABYAI_ACTIONS = 16  # per episode, with MiniGrid's action set


def environments() -> list:
    """Environments and observation formats with word tokens for their texts.

    The library is omitted: its texts use pieces that already exist.
    """
    return [
        frozen_lake.FrozenLake(),
        frozen_lake.FrozenLake(observation_format='grid_coord'),
        sokoban.Sokoban(),
        sokoban.Sokoban(symbols=sokoban.OTHER_SYMBOLS),
        sokoban.Sokoban(observation_format='grid_coord'),
        *(bandit.Bandit(pairs=pairs) for pairs in bandit.PAIRS),
    ]


def action_names() -> list[str]:
    """Names of all actions of all environments."""
    return sorted({name for env in environments() for name in env.ACTION_NAMES})


def grid_symbols() -> list[str]:
    """Every symbol of a grid cell."""
    return sorted(set(''.join(GRIDS)))


def rows() -> list[str]:
    """Every row of the default lake and of the default room, with its newline."""
    return sorted({*frozen_lake.FrozenLake().lines(), *sokoban.Sokoban().lines()})


def phrases() -> list[str]:
    """Constant parts of the prompts: sentences, and the words around a number or a tag."""
    texts = [bandit.QUESTION, *(env.instruction for env in environments())]
    texts += [getattr(style, part) for style in STYLES for part in TEMPLATES]
    borders = r'\{\w+\}|\n|(?<=[.,:])(?= )|[()"\d]|' + '|'.join(TAGS)
    parts = {part for text in texts for part in re.split(borders, text)}
    parts = {p for p in parts if len(p.split()) > 1 and SEPARATOR not in p and ': ' not in p}
    return sorted(parts | {env.name for env in environments()})


def corpus() -> list[str]:
    """Texts of episodes without grids: system messages, parts of turns, answers.

    Without grids, no piece spans two cells, so a row has one token per cell.
    """
    texts = []
    for env, style in itertools.product(environments(), STYLES):
        texts.append(
            style.system.format(
                name=env.name,
                instruction=env.instruction,
                actions=', '.join(env.ACTION_NAMES),
                max_actions=ACTIONS,
                separator=SEPARATOR,
            )
        )
        texts += [style.reward.format(reward=f'{n / 10:.1f}') for n in range(-10, 11)]
        texts += [style.header.format(turn=k + 1) for k in range(TURNS)]
        texts += [style.warning] * TURNS
        texts += [style.tail.format(left=n, max_words=WORDS) for n in range(ACTIONS + 1)]
    texts += [bandit.QUESTION.format(a='Teacher', b='Trader'), *_coordinates(), *_thoughts()]
    words = {word for text in texts for word in re.split(r'[^A-Za-z]+', text) if len(word) > 2}
    texts += [f' {word}' for word in sorted(words)] * 2 + [word for word in sorted(words)] * 2
    # Pieces never exceed a line, because the newline is always a separate token.
    return [line for text in texts for line in text.split('\n') if line]


def _coordinates() -> list[str]:
    cells = list(itertools.product(range(6), repeat=2))
    names = ('Targets', 'Boxes', 'Boxes on target', 'Player', 'Start', 'Goal', 'Holes')
    texts = [f'{name}: {a}, {b}' for name in names for a, b in zip(cells, cells[7:], strict=False)]
    sizes = [f'Board size: {n} rows x {n} cols (zero-indexed).' for n in (4, 6, 8)]
    return [*texts, *(['Coordinates: ', 'Grid Map: ', *sizes] * 8)]


def _thoughts() -> list[str]:
    """Example thoughts of an agent."""
    things = ('box', 'target', 'wall', 'hole', 'goal', 'player')
    places = ('above', 'below', 'left of', 'right of', 'next to')
    moves = ('up', 'down', 'left', 'right')
    texts = [f'The {a} is {b} me, I go {c}.' for a in things for b in places for c in moves]
    texts += [f'The {a} is {b} the {c}.' for a in things for b in places for c in things]
    texts += [f'I push the box {a}, then I move {b}.' for a in moves for b in moves]
    return texts + [f'I should go {a} then go {b}.' for a in moves for b in moves]


def babyai_symbols() -> list[str]:
    """Parts of BabyAI's short observations and instructions, one token each."""
    phrases = {babyai_words.phrase(n) for n in range(babyai_words.DESCRIPTIONS)}
    descriptions = {phrase.split(' ', 1)[1] for phrase in phrases}
    where = [' in front of you', ' behind you', ' on your left', ' on your right']
    things = {re.sub('|'.join(where), '', text) for text in descriptions}
    verbs = [f'{verb} {article} ' for verb in (*sight.VERBS, 'next to') for article in ('the', 'a')]
    places = [f' {n} {side}' for n in range(1, 7) for side in ('ahead', 'left', 'right')]
    left = [f'{n} left' for n in range(BABYAI_ACTIONS + 1)]
    macro = ['go to ', 'pick up ', 'go through ', 'toggle and go through ', 'nothing happens']
    numbers = [f' {n}' for n in range(1, babyai_words.NUMBERS + 1)]
    links = [
        'and ',
        'then ',
        'after you ',
        'carrying ',
        'wall',
        'more objects',
        'babyai',
        'Invalid.',
    ]
    named = sorted(things | set(sight.NAMES))
    return [*named, *verbs, *where, *places, *left, *links, *macro, *numbers]


def babyai_corpus() -> list[str]:
    """Parts of BabyAI's observations, and digits; other texts are spelled in letters."""
    texts = [f'{n} left' for n in range(100)] + ['Right.', ', ', '<think>', 'a', 'the']
    return [*texts, *(line for line in BabyAI().lines() if len(line) < 40)]


def train(vocab_size: int = VOCAB_SIZE) -> bytes:
    """The serialised SentencePiece model of the demo."""
    symbols = [*TAGS, f' {SEPARATOR} ', '\n', *ROLES, *action_names(), *phrases()]
    signs = [sign for sign in grid_symbols() if not sign.isalpha() and sign != '.']
    required = ''.join(sign for sign in grid_symbols() if sign not in signs)
    model = fit([*symbols, *signs, *rows()], corpus(), vocab_size, required)
    check(model)
    return model


def train_babyai(vocab_size: int = BABYAI_VOCAB_SIZE) -> bytes:
    """The serialised SentencePiece model of BabyAI's small policies."""
    fixed = [*TAGS, f' {SEPARATOR} ', '\n', *ROLES, *BabyAI().ACTION_NAMES]
    letters = string.ascii_lowercase + string.digits + ".,:;!?-'"
    return fit([*fixed, *babyai_symbols()], babyai_corpus(), vocab_size, letters)


def textcraft_symbols() -> list[str]:
    """Words of items with a leading blank, numbers, and the texts around them."""
    recipes = textcraft.load()
    names = (textcraft.spoken(name) for name in [*recipes.items, *recipes.tags])
    words = {f' {word}' for name in names for word in name.split()}
    frame = ['Crafting commands:\n', '\n\nGoal: craft', 'Action: ', 'get', 'craft', ' using', ',']
    frame += ['Got', 'Crafted', 'Inventory:', 'inventory', ' You are not carrying anything.', '.']
    frame += ['Could not find', ' enough items to craft', ' a valid recipe for']
    frame += [' with these ingredients', 'Could not execute', 'Wrong item format:', ' ']
    return [textcraft.SHORT_PROMPT, *frame, *sorted(words), *(f' {n}' for n in range(1, 65))]


def train_textcraft(vocab_size: int = TEXTCRAFT_VOCAB_SIZE) -> bytes:
    """The serialised SentencePiece model of TextCraft's small policies."""
    letters = string.ascii_letters + string.digits + "()[]:;!?-'"
    return fit([*TAGS, '\n', *ROLES, *textcraft_symbols()], list(letters) * 2, vocab_size, letters)


def search_symbols() -> list[str]:
    """Countries, and the texts around names in questions and documents about regions."""
    plain = dialects.PLAIN
    frame = ['Which country does the region ', ' belong to?', ' region belongs', ' ', '.']
    frame += [' is a region that belongs to the country ', ' is a country.', 'Nothing was found.']
    frame += [f' {fact.says.partition("{")[0]}' for fact in countries.FACTS]
    frame += [f'{mark}{tag}>' for tag in ('search', 'answer') for mark in ('<', '</')]
    words = ['Which', 'country', 'does', 'region', 'belong', 'belongs']  # of random searches
    words += [f' {word}' for word in (*words, 'the', 'to', 'is', 'a', 'that')]
    sentences = [plain.instruction, plain.invalid, plain.right, plain.wrong]
    names = [*drawn.REGIONS, *drawn.COUNTRIES, *(country.name for country in countries.load())]
    return [*sentences, *frame, *words, *names]


def search_corpus() -> list[str]:
    """One-word names of the training regions."""
    items = search.SearchEnvironment(hops=(1,)).our_items('train')
    questions = [search.bank()[item] for item in items]
    short = re.compile('[A-Za-z]{1,12}')
    regions = [question for question in questions if question.kind == countries.REGION]
    return [question.subject for question in regions if short.fullmatch(question.subject)]


def train_search(vocab_size: int = SEARCH_VOCAB_SIZE) -> bytes:
    """The serialised SentencePiece model of search's small policies."""
    symbols = dict.fromkeys(['<think>', '</think>', '\n', *ROLES, *search_symbols()])
    letters = string.ascii_letters + string.digits + ',:;!?-\'"'
    return fit(list(symbols), search_corpus(), vocab_size, letters)


def half_rows(size: int) -> list[str]:
    """All left and right halves of rows of a lake."""
    lines = frozen_lake.FrozenLake(size=size).lines()
    return sorted({half for line in lines for half in (line[: size // 2], line[size // 2 :])})


def agents_symbols() -> list[str]:
    """Brief prompts, tags of all kinds of turns, and rows of the lake and the room."""
    written = [tag for part in agents.WRITTEN.values() for tag in (part.opening, part.closing)]
    lines = [BRIEF.plan, BRIEF.reflect, BRIEF.again, BRIEF.warning]
    tails = [BRIEF.tail.format(left=n) for n in range(ACTIONS + 1)]
    worlds = [frozen_lake.FrozenLake(), sokoban.Sokoban()]
    systems = [BRIEF.system.format(name=world.name) for world in worlds]
    rows = [*half_rows(AGENTS_LAKE), *sokoban.Sokoban().lines()]
    frame = [*TAGS, *written, f' {SEPARATOR} ', '\n', *ROLES, *frozen_lake.FrozenLake.ACTION_NAMES]
    return list(dict.fromkeys([*frame, *lines, *tails, *systems, *rows]))


def train_agents(vocab_size: int = AGENTS_VOCAB_SIZE) -> bytes:
    """The serialised SentencePiece model of small policies that plan and reflect."""
    letters = string.ascii_lowercase[:-1] + string.digits + ' '  # the blank replaces 'z'
    return fit(agents_symbols(), list(letters) * 2, vocab_size, letters)


def shop_symbols() -> list[str]:
    """Parts of the pages of stalls: products, attributes, options, buttons, names."""
    words = {*catalogue.STALL_KINDS}
    for kind in catalogue.STALL_KINDS:
        _, attributes, choices, _ = catalogue.KINDS[kind]
        words |= {*attributes.split('|'), *choices}
        words |= {value for choice in choices for value in catalogue.CHOICES[choice]}
    words |= {shop.BACK, shop.PREVIOUS, shop.NEXT, shop.BUY, *shop.PARTS}
    titles = {string.capwords(word) for word in words} | {word.capitalize() for word in words}
    single = {part for word in words for part in (f' {w}' for w in word.split())}
    brands = {case(part) for part in catalogue.SYLLABLES for case in (str, str.capitalize)}
    head = shop.BETWEEN.join(('Instruction:', 'Find me a '))
    back, between = f'{shop.BETWEEN}{shop.BACK}{shop.BETWEEN}', shop.BETWEEN
    choices = dict.fromkeys(
        kind for name in catalogue.STALL_KINDS for kind in catalogue.KINDS[name][2]
    )
    frame = [f'WebShop{between}{head}', head, f'{between}Search', ' with these: ', ', ', ' ', '.']
    frame += [f' with {kind}: ' for kind in choices]
    frame += [f', and price lower than {limit:.2f} dollars' for limit in products.LIMITS[:20]]
    frame += [f'{back}{shop.PREVIOUS}{between}{kind}{between}' for kind in choices]
    frame += [f'{back}{shop.PREVIOUS}{between}', f'{back}Page 1 (Total results: ', f'){between}']
    frame += [f'{between}$', f'{between}Price: $', ' makes this ', '. It stands for ', 'A ', ' of ']
    frame += [between.join((f'{between}Rating: N.A.', *shop.PARTS, shop.BUY)), between]
    frame += ['Action: ', 'search[', 'click[', ']', 'Thank you for shopping with us!']
    frame += ['Your score (min 0.0, max 1.0)', shop.SHORT_PROMPT]
    lower = {word.lower() for word in words}
    return [*frame, *catalogue.STALL_ASINS, *sorted({*words, *lower, *titles, *single, *brands})]


def train_shop(vocab_size: int = SHOP_VOCAB_SIZE) -> bytes:
    """The serialised SentencePiece model of small policies that shop."""
    letters = string.ascii_letters + string.digits + "([:;!?-'<>"
    symbols = dict.fromkeys([*TAGS, '\n', *ROLES, *shop_symbols()])
    return fit(list(symbols), list(letters) * 2, vocab_size, letters)


def miniwob_symbols() -> list[str]:
    """Lines of pages and their parts, element numbers, filler words, actions."""
    names = ['submit', 'okay', 'ok', 'yes', 'no', 'cancel', 'next', 'previous', 'close']
    names += [name.capitalize() for name in names] + ['OK', 'x']
    lines = [" button 'Odd'", " button 'Even'", " button 'Submit'", " textbox ''", " dialog ''"]
    lines += [f" StaticText '{n}'" for n in range(-5, 11)]  # of the odd-or-even task
    frame = [" StaticText '", " button '", "'", ' focused: True', ' value: ', '\t', '.', ',', ':']
    tasks = [
        'TASK: Click on the "',
        '" button.',
        'TASK: Click the button in the dialog box labeled "',
        '".',
        'TASK: Mark the numbers below as odd or even and press submit when done.',
        'PREVIOUS ACTION: ',
        'none',
        'The task is over, its score ',
    ]
    actions = ['```', 'click ', 'type ', ' [0]', ' [1]', ' [', ']', ' ']
    numbers = [f'[{n}]' for n in range(1, 21)]
    words = miniwob.filling_words()
    words += [word.capitalize() for word in words] + [f' {word}' for word in words]
    texts = [miniwob.SHORT_PROMPT, *lines, *(f'{line}\n' for line in lines), *frame, *tasks]
    return [*texts, *actions, *numbers, *names, *words]


def train_miniwob(vocab_size: int = MINIWOB_VOCAB_SIZE) -> bytes:
    """The serialised SentencePiece model of small policies on pages of MiniWoB++."""
    symbols = dict.fromkeys(['<think>', '</think>', '\n', *ROLES, *miniwob_symbols()])
    known = string.ascii_letters + string.digits + '()[]:;!?-"#'
    letters = ''.join(letter for letter in known if letter not in symbols)
    return fit(list(symbols), list(letters) * 2, vocab_size, letters)


def harness_symbols() -> list[str]:
    """Texts of the chat template about tools, calls of a box, and the boxes' agent."""
    tool = json.dumps(boxes.TOOL)
    messages = [{'role': 'user', 'content': 'U'}]
    text = rendering.render(chat.CHATML_TOOLS, messages, tools=[boxes.TOOL])
    system = text.split('system\n')[1].split('<|im_end|>')[0]
    frame = [*system.split(tool), tool, '<tool_call>\n{"name": "open", "arguments": {"box": "']
    frame += ['"}}\n</tool_call>', '<tool_response>\n', '\n</tool_response>', 'Find the prize. ']
    frame += ['It is like ', 'Nobody knows which.', 'Empty. The ', ' one.', 'No such box.', '.']
    return [part for part in [*frame, *boxes.BOXES, *boxes.HINTS] if part]


def train_harness(vocab_size: int = HARNESS_VOCAB_SIZE) -> bytes:
    """The serialised SentencePiece model of the small policy that a harness calls."""
    # The blank takes the id of '}', which becomes a byte: other ids stay as in earlier runs.
    letters = string.ascii_letters + string.digits + ',:;!?-"{[]<>/_ '
    symbols = dict.fromkeys(['\n', *ROLES, *harness_symbols()])
    return fit(list(symbols), list(letters) * 2, vocab_size, letters)


def fit(symbols: list[str], texts: list[str], vocab_size: int, required: str) -> bytes:
    """Train a unigram model with user-defined symbols as single tokens."""
    model = io.BytesIO()
    sentencepiece.SentencePieceTrainer.train(
        sentence_iterator=iter(texts),
        model_writer=model,
        model_type='unigram',
        vocab_size=vocab_size,
        byte_fallback=True,
        character_coverage=1.0,
        required_chars=required.replace(' ', '\u2581'),
        control_symbols=list(CHAT_SPECIALS),
        user_defined_symbols=[text.replace(' ', '\u2581') for text in symbols],
        bos_id=-1,
        eos_id=-1,
        pad_id=-1,
        normalization_rule_name='identity',
        add_dummy_prefix=False,
        remove_extra_whitespaces=False,
        split_by_whitespace=False,
        split_by_unicode_script=False,
        split_by_number=False,
        split_digits=True,
        max_sentencepiece_length=64,
        num_threads=1,
        minloglevel=2,
    )
    return model.getvalue()


def check(model: bytes) -> None:
    """Raise ValueError unless cells, newlines, rows, tags and action names are single tokens."""
    tokenizer = unigram.load_model(model, 'the trained model')
    for grid in GRIDS:
        for a, b in itertools.product(grid, repeat=2):
            pieces = [tokenizer.decode([i]) for i in tokenizer.encode(f'{a}{b}\n')]
            if pieces != [a, b, '\n']:
                raise ValueError(f'the cells {a}{b} became the pieces {pieces}')
    for text in [*TAGS, f' {SEPARATOR} ', *action_names(), *rows()]:
        if len(tokenizer.encode(text)) != 1:
            raise ValueError(f'{text!r} is not a single token')


# File in tokens/ -> function that trains it.
WORLDS = {
    'demo': train,
    'agents': train_agents,
    'babyai': train_babyai,
    'textcraft': train_textcraft,
    'search': train_search,
    'shop': train_shop,
    'miniwob': train_miniwob,
    'harness': train_harness,
}


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.split('\n')[0])
    parser.add_argument('--name', choices=WORLDS, default='demo')
    parser.add_argument('--out', type=Path)
    options = parser.parse_args()
    model = WORLDS[options.name]()
    out = options.out or DEMO_MODEL.with_name(f'{options.name}.model')
    out.write_bytes(model)
    print(f'{out}: {len(model)} bytes')


if __name__ == '__main__':
    main()
