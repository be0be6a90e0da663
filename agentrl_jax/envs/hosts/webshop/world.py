"""WebShop (arXiv:2207.01206): find a product for an instruction, choose its options, buy it.

There are four kinds of pages, as text: search; ten of up to fifty results; a product with its
options; and its description, features, reviews or attributes. Actions are search[words] on the
search page and click[text] elsewhere; invalid actions change nothing. A purchase ends the episode
and gives the only reward (scoring.py). An item is an index into the shuffled goals (products.py).

Products come from WebShop's files or from a catalogue drawn from a seed (catalogue.py). There is
one catalogue for all items, or a small one per item (a stall), which cannot be memorised. BM25
searches the texts that WebShop indexes (search/retrieval.py).
"""

import dataclasses
import functools
import re
import secrets
from collections.abc import Iterable, Sequence
from typing import Annotated, Any, Literal

import numpy as np

from agentrl_jax.envs.hosts.answers import Read
from agentrl_jax.envs.hosts.search import retrieval
from agentrl_jax.envs.hosts.served import Served, checked
from agentrl_jax.envs.hosts.webshop import catalogue, products, scoring
from agentrl_jax.envs.hosts.webshop.products import Goal, Product
from agentrl_jax.envs.hosts.world import ANY, Reply, package_folder
from agentrl_jax.envs.splits import level_split
from agentrl_jax.settings.marks import ONE, ZERO, ConfigName, NameIn

PROMPT = (
    'You shop on a website. Each round shows you a page; you answer with one action: '
    'search[words] where the page has a search box, else click[text] with the text of a button of '
    'the page, such as a product, an option, "next >" or "buy now". Any other action does nothing. '
    'Find what the instruction asks for, choose its options, and buy it: that ends the shopping.\n'
    'Answer in this form: "Thought:\nyour thoughts\n\nAction:\nyour action"'
)
SHORT_PROMPT = 'Buy what the instruction asks for: search[words] and click[text].'
PROMPTS = {'long': PROMPT, 'short': SHORT_PROMPT}
FIGURES = ('score',)
SEED = 0  # of drawn products
BETWEEN = ' [SEP] '
FOUND, SHOWN = 50, 10  # results per search, and per page
BACK, PREVIOUS, NEXT, BUY = 'Back to Search', '< Prev', 'Next >', 'Buy Now'
PARTS = ('Description', 'Features', 'Reviews', 'Attributes')
ACTION = re.compile(r'(.+?)\[(.+)\]', re.DOTALL)


@dataclasses.dataclass(frozen=True)
class Shop:
    """Products, goals and the search index, shared by the worlds of a process."""

    products: dict[str, Product]  # by asin
    goals: tuple[Goal, ...]
    index: retrieval.Index

    def find(self, words: str) -> tuple[str, ...]:
        """Return matching asins, best first."""
        return tuple(document['id'] for document, _ in self.index.search(words, FOUND))

    @classmethod
    def of(cls, known: Sequence[Product]) -> 'Shop':
        index = retrieval.Index.build([{'id': p.asin, 'contents': indexed(p)} for p in known])
        return cls({p.asin: p for p in known}, products.goals_of(known), index)


@functools.cache
def open_shop(files: tuple[str, ...] = (), count: int = 1000) -> Shop:
    """Open a shop. files: (products, instructions); () = count products drawn from the seed."""
    if files and len(files) != 2:
        raise ValueError(
            f'shop.files={files} must be the file of products and the file of instructions'
        )
    return Shop.of(products.read_files(*files) if files else catalogue.load(SEED, count))


def indexed(product: Product) -> str:
    """Return the indexed text: title, description, first feature and options."""
    options = (f'{kind}: {", ".join(values)}' for kind, values in product.options.items())
    return '\n'.join(
        (product.title, product.description, *product.features[:1], ', and '.join(options))
    ).lower()


@dataclasses.dataclass(frozen=True)
class Page:
    """A page; pages after the first include their search."""

    found: tuple[str, ...] | None = None  # asins of the results; None = search page
    number: int = 0  # of the results page, from 0
    asin: str = ''  # of the product; '' = results page
    part: str = ''  # of PARTS; '' = the product's main page
    chosen: tuple[tuple[str, str], ...] = ()  # options, by kind


@dataclasses.dataclass(frozen=True)
class Play:
    """Settings of a world."""

    prompt: Annotated[str, NameIn(PROMPTS), ConfigName('hosts.prompt')] = 'long'  # or short
    rewards: Literal['score', 'success'] = 'score'  # of the purchase; success: 1 for a score of 1,
    # else 0 (RAGEN)
    list_actions: bool = True  # below each page; AgentGym does not
    files: tuple[str, ...] = ()  # WebShop's products and instructions; () = drawn from the seed
    products: Annotated[int, ONE] = 1000  # number of drawn products
    stalls: Annotated[int, ZERO] = 0  # number of small shops, one per item; 0 = one shop for all


class WebShop:
    """One customer; actions are bare (`answers.py` reads replies)."""

    deterministic = True
    PLAY = Play
    FORMS = SEARCHES, CLICKS = 'search[{}]', 'click[{}]'

    def __init__(self, **settings: Any):
        play = self.play = checked('shop', Play(**settings))
        limit = len(catalogue.STALL_KINDS)
        if play.stalls and (play.files or play.products > limit):
            raise ValueError(
                f'shop.stalls={play.stalls} needs 1 to {limit} shop.products per stall, not '
                f'{play.products}, and no shop.files'
            )
        self.instruction = PROMPTS[play.prompt]
        self.shop = None if play.stalls else open_shop(play.files, play.products)
        self.count = play.stalls or len(self.shop.goals)  # of items
        self.done = False

    @classmethod
    def check(cls) -> None:
        retrieval.check()
        missing = 'WebShop needs the package rapidfuzz: pip install rapidfuzz==3.14.6'
        package_folder('rapidfuzz', missing)

    def reset(self, item: int) -> str:
        play = self.play
        if not 0 <= item < self.count:
            raise ValueError(f'item {item} is not in 0..{self.count - 1}')
        if play.stalls:
            stall = catalogue.draw_stall(SEED, item, play.products)
            self.shop = Shop.of(products.read_products(*stall))
        self.goal = self.shop.goals[0 if play.stalls else item]
        self.page, self.done = Page(), False
        return self.shown()

    def step(self, action: str) -> Reply:
        if self.done:
            return Reply('The shop has closed.', done=True, success=False, valid=False)
        verb, words = read_action(action)
        if verb == 'click' and words == BUY.lower() and BUY in self.buttons():
            return self._buy()
        page = None
        if verb == 'search' and words:  # on any page, as in WebShop
            page = Page(found=self.shop.find(words))
        elif verb == 'click':
            page = {text.lower(): page for text, page in self.links()}.get(words)
        self.page = page or self.page
        return Reply(self.shown(), success=False, figures=(0.0,), valid=page is not None)

    def close(self) -> None:
        pass

    def details(self) -> dict[str, Any]:
        """Return the additional fields of AgentGym's server."""
        buttons = [] if self.done else [button.lower() for button in self.buttons()]
        bar = self.page.found is None and not self.done
        actions = {'has_search_bar': bar, 'clickables': [*buttons, *['search'] * bar]}
        return {'available_actions': actions, 'instruction_text': f'Instruction: {self.goal.text}'}

    @property
    def offers(self) -> tuple[str, ...]:
        return (self.CLICKS if self.buttons() else self.SEARCHES,)

    # -- pages

    def links(self) -> list[tuple[str, Page]]:
        """Return the button texts, and the pages they lead to."""
        page, to = self.page, functools.partial(dataclasses.replace, self.page)
        if page.found is None:
            return []
        if page.part:
            return [(BACK, Page()), (PREVIOUS, to(part=''))]
        if page.asin:
            options = self.shop.products[page.asin].options
            kinds = {value: kind for kind, values in options.items() for value in values}
            choices = [
                (value, to(chosen=tuple((dict(page.chosen) | {kinds[value]: value}).items())))
                for values in options.values()
                for value in dict.fromkeys(values)
            ]
            parts = [(part, to(part=part)) for part in PARTS]
            before = [(BACK, Page()), (PREVIOUS, to(asin='', chosen=()))]
            return [*before, *choices, *parts, (BUY, page)]
        turns = [(PREVIOUS, page.number - 1)] * (page.number > 0)
        turns += [(NEXT, page.number + 1)] * (SHOWN * (page.number + 1) < len(page.found))
        return [
            (BACK, Page()),
            *((text, to(number=number)) for text, number in turns),
            *((asin, to(asin=asin)) for asin in self.results()),
        ]

    def buttons(self) -> list[str]:
        return [text for text, _ in self.links()]

    def results(self) -> tuple[str, ...]:
        return self.page.found[self.page.number * SHOWN :][:SHOWN]

    def shown(self) -> str:
        """Return the page as text, followed by its actions if list_actions is set."""
        page, buttons = self.page, self.buttons()
        lines = ['Instruction:', self.goal.text, BACK]
        if page.found is None:
            lines = ['WebShop', *lines[:2], 'Search']
        elif page.asin:
            product = self.shop.products[page.asin]
            lines += [PREVIOUS, *(part_of(product, page.part) if page.part else sheet(product))]
        else:
            count = f'Page {page.number + 1} (Total results: {len(page.found)})'
            lines += [count, *(button for button in buttons if button in (PREVIOUS, NEXT))]
            for asin in self.results():
                product = self.shop.products[asin]
                lines += [asin, product.title, product.price_tag]
        text = BETWEEN.join(lines)
        if not self.play.list_actions:
            return text
        actions = [f'click[{button.lower()}]' for button in buttons]
        return f'{text}\nActions: {", ".join(actions or ["search[words]"])}'

    def _buy(self) -> Reply:
        self.done = True
        bought = self.shop.products[self.page.asin]
        total = scoring.score(bought, dict(self.page.chosen), self.goal)
        success = total >= 1
        text = BETWEEN.join(
            ('Thank you for shopping with us!', 'Your score (min 0.0, max 1.0)', f'{total:g}')
        )
        reward = total if self.play.rewards == 'score' else float(success)
        return Reply(text, reward, done=True, success=success, figures=(total,), valid=True)

    # -- players

    def plan(self) -> list[str]:
        """Return actions that buy the goal; they search for its instruction, then its title."""
        if self.done:
            return []
        page, product, start = self.page, self.goal.product, []
        asin = product.asin
        if page.asin == asin:
            chosen = dict(page.chosen).values()
            left = dict.fromkeys(value for _, value in self.goal.options if value not in chosen)
            back = ['click[< prev]'] if page.part else []
            return [*back, *(f'click[{value}]' for value in left), 'click[buy now]']
        if page.found is not None and (page.asin or asin not in page.found):
            start, page = ['click[back to search]'], Page()
        if page.found is None:
            for words in (f'{product.query} {" ".join(product.wanted)}', product.title.lower()):
                page = Page(found=self.shop.find(words))
                if asin in page.found:
                    break
            else:
                return []
            start = [*start, f'search[{words}]']
        turn = page.found.index(asin) // SHOWN - page.number
        pages = [f'click[{(NEXT if turn > 0 else PREVIOUS).lower()}]'] * abs(turn)
        options = dict.fromkeys(f'click[{value}]' for _, value in self.goal.options)
        return [*start, *pages, f'click[{asin.lower()}]', *options, 'click[buy now]']


def sheet(product: Product) -> list[str]:
    """Return the lines of a product's page."""
    lines = []
    for kind, values in product.options.items():
        lines += [kind, *dict.fromkeys(values)]
    return [*lines, product.title, f'Price: {product.price_tag}', 'Rating: N.A.', *PARTS, BUY]


def part_of(product: Product, part: str) -> Iterable[str]:
    texts = {
        'Description': [product.description],
        'Features': product.features,
        'Attributes': product.attributes,
    }
    return filter(None, texts.get(part, ()))


def read_action(action: str) -> tuple[str, str]:
    """Return ('search', words) or ('click', text) in lower case; ('', '') for anything else."""
    match = ACTION.match(action.strip())
    if not match or match[1] not in ('search', 'click'):
        return '', ''
    return match[1], match[2].lower().strip()


class AgentGymShop(WebShop):
    """The shop as AgentGym serves it, without a list of actions."""

    def __init__(self, *, list_actions: bool = False, **settings: Any):
        super().__init__(list_actions=list_actions, **settings)

    def reset(self, item: int) -> str:
        """Start a goal; item ANY (no session_id) draws one at random."""
        return super().reset(secrets.randbelow(self.count) if item == ANY else item)


class Player(Read):
    """The shop with its expert and random play."""

    def best(self) -> str:
        plan = self.world.plan()
        return f'Action: {plan[0]}' if plan else ''

    def random(self, generator: np.random.Generator) -> str:
        """Click any button, or search for some words of the instruction."""
        buttons = self.world.buttons()
        if buttons:
            return f'Action: click[{buttons[generator.integers(len(buttons))].lower()}]'
        words = re.findall(r'\w+', self.world.goal.text)
        among = generator.integers(len(words), size=generator.integers(1, 4))
        return f'Action: search[{" ".join(words[number] for number in among)}]'


@dataclasses.dataclass(frozen=True)
class ShopEnvironment(Served, Play):
    name, quick, WORLD, PROMPTS, FIGURES = 'shop', True, WebShop, PROMPTS, FIGURES

    def player(self) -> Player:
        return Player(self.world(), self.quirks.reader)

    def our_items(self, split: str) -> np.ndarray:
        """Split the stalls or goals; all goals of a product are in one split."""
        WebShop.check()
        if self.stalls:
            keys = [f'stall {number}' for number in range(self.stalls)]
        else:
            goals = open_shop(self.files, self.products).goals
            keys = [goal.product.asin for goal in goals]
        chosen = [number for number, key in enumerate(keys) if level_split(key.encode()) == split]
        return np.array(chosen, np.int32)
