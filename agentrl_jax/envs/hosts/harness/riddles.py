"""A harness that tests what a pretrained model may know: the colour of a thing.

A prize is in one of six boxes, and the first message names a thing with the colour of its box.
The policy names up to three boxes. Things in validation and test items never occur in training.
"""

from agentrl_jax.envs.hosts.harness.clients import Client
from agentrl_jax.envs.hosts.harness.task import Task
from agentrl_jax.envs.splits import SPLITS, level_split

# 24 things per colour: 16 for training, four for validation and four for tests.
THINGS = {
    'red': (
        'blood, a ripe tomato, a strawberry, a fire engine, a stop sign, a ruby, a cherry, lava, '
        'a ladybird, a chili pepper, a raspberry, ketchup, a lobster, a cranberry, a brick, '
        'a poppy, a cardinal, Santa Claus, a beetroot, rust, a fire extinguisher, a red rose, '
        'a radish, the planet Mars'
    ),
    'green': (
        'grass, a cucumber, a frog, broccoli, spinach, an emerald, a lettuce, moss, a pea, a lime, '
        'a cactus, a crocodile, a leaf in spring, a kiwi fruit, mint, a shamrock, a pine tree, '
        'a pickle, a cabbage, an avocado, a caterpillar, jade, a fern, an iguana'
    ),
    'blue': (
        'the sky, the ocean, a sapphire, a blueberry, jeans, a cornflower, a bluebird, '
        'a deep lake, a swimming pool, a police uniform, the planet Neptune, a bluebell, '
        'turquoise, a blue whale, denim, a peacock, the sea, a clear day, '
        'a forget-me-not, cobalt, a kingfisher, a smurf, lapis lazuli, the Pacific'
    ),
    'black': (
        'coal, the night, a raven, ink, tar, a tyre, soot, a panther, ebony, a crow, '
        'a blackboard, a bowler hat, charcoal, an olive, a piano, asphalt, licorice, a shadow, '
        'oil, a hearse, pepper, a vinyl record, a black cat, a gorilla'
    ),
    'white': (
        'snow, milk, a swan, salt, chalk, a polar bear, cotton, a wedding dress, a pearl, flour, '
        'a dove, a ghost, rice, an egg, paper, ivory, a snowman, cream, a tooth, a cloud, '
        'sugar, a daisy, porcelain, a lily'
    ),
    'yellow': (
        'the sun, a banana, a lemon, a canary, a sunflower, butter, a chick, mustard, corn, '
        'cheese, a daffodil, a dandelion, an egg yolk, a school bus, a bee, a New York taxi, sand, '
        'a rubber duck, a giraffe, a pineapple, honey, a buttercup, straw, saffron'
    ),
}
COLOURS = tuple(THINGS)
PLACES = dict(zip(SPLITS, (slice(16), slice(16, 20), slice(20, 24)), strict=True))
OPENING = 'Boxes: {}. The prize is in the box of the colour of {}. Name a box.'
EMPTY = 'Empty. Name another.'


def listed(split: str) -> list[tuple[str, str]]:
    """Return the (colour, thing) pairs of a split, cycling through the colours."""
    things_of = [things.split(', ')[PLACES[split]] for things in THINGS.values()]
    return [(COLOURS[i % 6], things_of[i % 6][i // 6]) for i in range(6 * len(things_of[0]))]


def riddle(item: int) -> tuple[str, str]:
    """Return the (colour, thing) of an item."""
    pairs = listed(level_split(str(item).encode()))
    return pairs[item % len(pairs)]


def expert(messages: list[dict], tools: list[dict], item: int) -> str:
    """Answer with the colour."""
    return riddle(item)[0]


def play(task: Task) -> dict:
    """Play an episode; the reward is 1 for the prize in the first box, then .7 and .4."""
    colour, thing = riddle(task.item)
    client = Client(task, OPENING.format(', '.join(COLOURS), thing))
    for opened in range(3):
        message = client.ask()
        if message is None:
            break
        if message['content'].strip().lower() == colour:
            return {'reward': 1.0 - 0.3 * opened, 'success': True}
        client.messages.append({'role': 'user', 'content': EMPTY})
    return {'reward': 0.0, 'success': False}
