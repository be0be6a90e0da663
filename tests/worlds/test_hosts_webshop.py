"""WebShop: files, goals, pages and scores of purchases."""

import dataclasses
import json
import pathlib

import fastapi
import host_worlds as hosts
import numpy as np
import pytest
from fastapi.testclient import TestClient

from agentrl_jax.envs.hosts import server
from agentrl_jax.envs.hosts.webshop import catalogue, products, scoring, world
from agentrl_jax.envs.hosts.webshop.world import WebShop
from agentrl_jax.envs.splits import SPLITS

ROOT = pathlib.Path(__file__).resolve().parents[2]
SHIRT = {  # rows in WebShop's format; the values are ours
    'asin': 'B000000001',
    'name': 'Acme Slim Shirt, Dark Blue',
    'pricing': '$19.90',
    'query': 'Shirts for men',
    'product_category': 'Clothing › Men › Shirts',
    'full_description': 'A shirt. Machine wash.',
    'small_description': ['Cotton', 'Long sleeves'],
    'customization_options': {
        'Color': [{'value': 'Dark Blue', 'image': 'x.jpg'}, {'value': ' red/white '}],
        'Size': [{'value': 'Small'}, {'value': 'Large'}],
        'Fit': None,
    },
}
LAMP = {
    'asin': 'B000000002',
    'name': 'Lamp',
    'pricing': '$5.00$1,009.50',
    'query': 'lamp',
    'product_category': 'Home › Light',
    'full_description': None,
    'small_description': None,
    'customization_options': None,
}
SHELF = {**LAMP, 'asin': 'B000000003', 'name': 'Oak Shelf', 'query': 'shelf', 'pricing': None}
TASKS = {
    'B000000001': {
        'attributes': ['machine wash', 'long sleeve'],
        'instruction': 'Find me a slim shirt that is machine wash.',
        'instruction_attributes': ['machine wash', 'long sleeve'],
    },
    'B000000002': {
        'attributes': ['warm light'],
        'instruction': 'I need a warm light lamp',
        'instruction_attributes': ['warm light'],
    },
    'B000000003': {'attributes': []},
}


@pytest.fixture(scope='module')
def files(tmp_path_factory):
    """Write files with the real names; the last two rows are not products."""
    folder = tmp_path_factory.mktemp('webshop')
    rows = [SHIRT, LAMP, SHELF, {**SHIRT, 'name': 'Again'}, {**LAMP, 'asin': 'much too long'}]
    paths = [folder / 'items_shuffle_1000.json', folder / 'items_ins_v2_1000.json']
    for path, content in zip(paths, (rows, TASKS), strict=True):
        path.write_text(json.dumps(content), encoding='utf-8')
    return tuple(map(str, paths))


@pytest.fixture(scope='module')
def shop():
    return WebShop(products=300)


@pytest.fixture
def one_shirt(tmp_path):
    """Return a factory of shops with one shirt and these options."""

    def make(**options):
        paths = tmp_path / 'items.json', tmp_path / 'ins.json'
        row = {**SHIRT, 'customization_options': options}
        for path, content in zip(paths, ([row], TASKS), strict=True):
            path.write_text(json.dumps(content), encoding='utf-8')
        play = WebShop(files=tuple(map(str, paths)))
        play.reset(0)
        return play

    return make


# ---- files and goals -----------------------------------------------------------------------------


def test_webshops_product_files_are_read(files):
    shirt, lamp, shelf = products.read_files(*files)
    assert shirt.title == 'Acme Slim Shirt, Dark Blue' and shirt.query == 'shirts for men'
    assert shirt.categories == {'Clothing', 'Men', 'Shirts'}
    assert (shirt.price, shirt.price_tag) == (19.9, '$19.9')
    assert shirt.options == {'color': ('dark blue', 'red | white'), 'size': ('small', 'large')}
    assert shirt.features == ('Cotton', 'Long sleeves') and lamp.features == ()
    assert 5.0 <= lamp.price <= 1009.5 and lamp.price_tag == '$5.0 to $1009.5'
    assert (shelf.price, shelf.price_tag, shelf.instruction) == (100.0, '$100.0', '')


def test_goals_have_all_choices_of_options_and_a_limit_above_the_price(files):
    goals = products.goals_of(products.read_files(*files))
    assert len(goals) == 2 * 2 + 1  # the shelf has no instruction
    shirts = [goal for goal in goals if goal.options]
    assert len({goal.options for goal in shirts}) == 4
    for goal in shirts:
        assert goal.most in (30.0, 40.0, 50.0)  # the larger of two of 20, 30, 40 and 50
        color, size = (value for _, value in goal.options)
        assert goal.text == (
            f'Find me a slim shirt that is machine wash with color: {color}, and size: {size}, '
            f'and price lower than {goal.most:.2f} dollars'
        )


def test_the_number_of_goals_matches_webshops_loader():
    """Repeated values and empty options were dropped, so AgentGym's items were other goals."""
    small, red = {'value': 'Small'}, {'value': 'Red'}

    def goals(**options):
        known = products.read_products([{**SHIRT, 'customization_options': options}, LAMP], TASKS)
        choices = [goal.options for goal in products.goals_of(known) if goal.product is known[0]]
        return known[0], sorted(choices)

    shirt, choices = goals(Size=[small, small], Color=[red, {'value': 'red '}, {'value': 'blue'}])
    assert shirt.options == {'size': ('small', 'small'), 'color': ('red', 'red', 'blue')}
    blue, red = ((('color', value), ('size', 'small')) for value in ('blue', 'red'))
    assert choices == [blue] * 2 + [red] * 4
    assert goals(Size=[small], Fit=[])[1] == []  # no choice of a fit
    assert len(goals(Size=[small], Fit=None)[1]) == 1


def test_rows_that_are_not_products_are_errors(tmp_path):
    (tmp_path / 'ins.json').write_text('{}')
    path = tmp_path / 'items.json'
    for rows in ([SHIRT, {'asin': 'B1', 'name': 'x'}], [3], [], {}):
        path.write_text(json.dumps(rows))
        with pytest.raises(ValueError, match='product'):
            products.read_files(str(path), str(tmp_path / 'ins.json'))
    with pytest.raises(ValueError):
        products.goals_of(products.read_products([SHELF], {}))
    with pytest.raises(ValueError):
        world.open_shop(('one',))


# ---- rewards -------------------------------------------------------------------------------------


def test_texts_are_compared_by_their_sets_of_words():
    """Accents were kept: 'über' and 'uber' had a ratio of 75."""
    assert scoring.token_set_ratio('machine wash', 'wash, machine only') == 100  # a subset
    # By hand: no common words; 'ab' and 'ad' share one letter of two: 2 * 1 / 4
    assert scoring.token_set_ratio('ab', 'ad') == 50
    # the letters a and c, in order, of three and two: 2 * 2 / 5
    assert scoring.token_set_ratio('abc', 'ac') == 80
    assert scoring.token_set_ratio('', 'x') == 0
    # As in thefuzz 0.19.0: 'ber' and 'uber' share three letters; an underscore is a letter
    for one, other, percent in (
        ('über', 'uber', 86),
        ('a_b', 'a b', 67),
        ('12 ΑΣ 3/4 ﬁt', '１２ red ΑΣ İ', 42),
        ('İa', '日\u2003 c  ', 0),
        ('c_日\nbüİAB', '-\té//İ/', 36),
    ):
        assert scoring.token_set_ratio(one, other) == percent


def test_purchase_scores_by_hand(files):
    shirt, lamp, _ = products.read_files(*files)
    goal = products.Goal(shirt, (('color', 'dark blue'), ('size', 'small')), 20.0)
    # Two attributes, two options and the price: five parts
    chosen = {'color': 'dark blue', 'size': 'small'}
    assert scoring.score(shirt, chosen, goal) == 1.0
    assert scoring.score(shirt, chosen | {'color': 'light blue'}, goal) == 1.0  # blue is blue
    other = scoring.score(shirt, chosen | {'color': 'red | white'}, goal)
    assert other == pytest.approx(4 / 5)
    small = scoring.score(shirt, chosen | {'size': 'smaller'}, goal)
    assert small == pytest.approx(4 / 5)
    dear = dataclasses.replace(goal, most=10.0)
    assert scoring.score(shirt, {}, dear) == pytest.approx(2 / 5)
    assert scoring.score(lamp, {'size': 'small'}, goal) == 0.0  # the titles share no noun


def test_purchase_scores_match_webshops_functions():
    """Scores followed a commit that was never merged into WebShop's master."""
    recorded = json.loads((ROOT / 'tests/data/webshop_scores.json').read_text(encoding='utf-8'))
    known = [
        products.Product(
            asin=f'{number:010}',
            title=row['title'],
            price=row['price'],
            price_tag='',
            query=row['query'],
            categories=frozenset(part.strip() for part in row['category'].split('›')),
            description=row['description'],
            features=tuple(row['features']),
            options={},
            attributes=tuple(row['attributes']),
            instruction='',
            wanted=tuple(row['wanted']),
        )
        for number, row in enumerate(recorded['products'])
    ]
    assert len(recorded['purchases']) > 700
    for bought, target, options, limit, chosen, paid in recorded['purchases']:
        goal = products.Goal(known[target], tuple(options.items()), limit)
        total = scoring.score(known[bought], chosen, goal)
        kind = scoring.type_factor(known[bought], known[target])
        parts = [total, kind, *scoring.matches(known[bought], chosen, goal)]
        assert parts == paid, (bought, target, options, chosen)
        assert total <= 1


# ---- pages ---------------------------------------------------------------------------------------


def test_navigation_through_the_pages_of_products(files):
    play = WebShop(files=files, list_actions=False)
    item = next(i for i, goal in enumerate(play.shop.goals) if goal.options)
    text, goal = play.reset(item), play.shop.goals[item]
    head = f'Instruction: [SEP] {goal.text} [SEP] '
    assert text == f'WebShop [SEP] {head}Search'
    for cannot in ('click[buy now]', 'search', 'buy[it]', 'search[]'):
        reply = play.step(cannot)
        assert reply.observation == text and reply.valid is False
    reply = play.step('search[SHIRT red]')
    assert reply.valid and play.step('click[b000000009]').valid is False
    results = reply.observation
    assert results == (
        f'{head}Back to Search [SEP] Page 1 (Total results: 1) [SEP] B000000001 [SEP] '
        'Acme Slim Shirt, Dark Blue [SEP] $19.9'
    )
    elsewhere = play.step('search[lamp]').observation  # WebShop searches on any page
    assert elsewhere != results and play.step('search[SHIRT red]').observation == results
    assert play.step('search[]').observation == results
    page = play.step('click[b000000001]').observation
    assert page == (
        f'{head}Back to Search [SEP] < Prev [SEP] color [SEP] dark blue [SEP] red | white [SEP] '
        'size [SEP] small [SEP] large [SEP] Acme Slim Shirt, Dark Blue [SEP] Price: $19.9 [SEP] '
        'Rating: N.A. [SEP] Description [SEP] Features [SEP] Reviews [SEP] Attributes [SEP] Buy Now'
    )
    part = play.step('click[features]').observation
    assert part.endswith('< Prev [SEP] Cotton [SEP] Long sleeves')
    assert play.step('click[< prev]').observation == page
    assert play.step('click[tiny]').valid is False and not play.page.chosen
    assert play.step('click[Dark Blue]').observation == page and play.page.chosen
    assert play.step('click[< prev]').observation == results and not play.page.chosen
    assert play.step('click[back to search]').observation == text


def test_a_search_has_ten_results_per_page_and_up_to_fifty_in_total(shop):
    shop.reset(0)
    shop.step("search[men's women's cable charger]")
    assert len(shop.page.found) == 50 and len(shop.results()) == 10
    for number in range(1, 5):
        assert f'Page {number + 1} (Total results: 50)' in shop.step('click[next >]').observation
    assert 'click[next >]' not in shop.shown() and 'click[< prev]' in shop.shown()
    shop.step('click[< prev]')
    assert shop.page.number == 3
    shop.reset(0)
    assert 'Total results: 0' in shop.step('search[?]').observation


def test_only_a_purchase_is_rewarded_and_it_ends_the_episode(shop):
    strict = WebShop(products=300, rewards='success')
    item = next(i for i, goal in enumerate(shop.shop.goals) if len(goal.options) == 2)
    goal = shop.shop.goals[item]
    share = pytest.approx(1 - 2 / (len(goal.product.wanted) + 3))
    for play, reward in ((shop, share), (strict, 0.0)):
        play.reset(item)
        *way, _, _, buy = play.plan()  # without its two options
        replies = [play.step(action) for action in [*way, buy]]
        assert {reply.reward for reply in replies[:-1]} == {0.0}
        last = replies[-1]
        assert last.done and last.success is False
        assert last.reward == reward and last.figures == (share,)
        assert last.observation.endswith(f' [SEP] {last.figures[0]:g}')
        assert play.step('search[x]').done


# ---- play ----------------------------------------------------------------------------------------


def test_an_oracle_buys_every_goal_from_any_state(shop):
    generator, player = np.random.default_rng(0), world.Player(shop, 'last_action')
    for number, item in enumerate(range(0, len(shop.shop.goals), 29)):
        player.reset(item)
        for _ in range(number % 6):
            if player.step(player.random(generator)).done:
                player.reset(item)
        plan = shop.plan()
        assert len(plan) <= 9
        for action in plan:
            assert player.best() == f'Action: {action}'
            reply = player.step(player.best())
        assert reply.done and reply.success and reply.reward == 1.0
    assert player.best() == ''


def test_splits_share_no_product(shop):
    splits = [world.ShopEnvironment(products=300).our_items(split).tolist() for split in SPLITS]
    assert sorted(sum(splits, [])) == list(range(len(shop.shop.goals)))
    asins = [{shop.shop.goals[item].product.asin for item in items} for items in splits]
    assert not (asins[0] & asins[1] | asins[0] & asins[2] | asins[1] & asins[2])


def test_each_stall_is_a_separate_shop_and_an_oracle_buys_its_goal():
    play, pages, bought = WebShop(prompt='short', stalls=256, products=4), {}, set()
    for item in range(0, 256, 8):
        pages[item] = play.reset(item)
        known = play.shop.products.values()
        assert len({product.query for product in known}) == 4 == len(known)
        assert {product.asin for product in known} <= {*catalogue.STALL_ASINS}
        assert all(len(product.options) == 1 for product in known)
        plan = play.plan()
        assert len(plan) == 4  # search, product, option, purchase
        replies = [play.step(action) for action in plan]
        assert replies[-1].success and replies[-1].reward == 1
        bought.add((play.goal.product.asin, play.goal.product.query))
        without = (plan[0], plan[1], plan[3])
        play.reset(item)
        assert 0 < [play.step(action) for action in without][-1].reward < 1
    assert len({*pages.values()}) == len(pages) and len(bought) > 20
    assert pages == {item: play.reset(item) for item in pages}  # in any order
    splits = [world.ShopEnvironment(stalls=256).our_items(split).tolist() for split in SPLITS]
    assert sorted(sum(splits, [])) == list(range(256)) and min(map(len, splits)) > 10


# ---- in environments and servers -----------------------------------------------------------------


def test_an_oracle_clicks_a_value_of_two_options_only_once(one_shirt):
    """The value was chosen for one option, and the oracle kept clicking for the other."""
    play = one_shirt(Fit=[{'value': 'small'}], Size=[{'value': 'small'}])
    replies = [play.step(play.plan()[0]) for _ in range(4)]
    assert replies[-1].done and len(play.goal.options) == 2
    assert replies[-1].reward == 1.0  # one chosen value matches both


def test_the_server_supports_the_calls_of_agentgyms_webshop_client():
    app, play = fastapi.FastAPI(), world.AgentGymShop(products=60)
    server.add_routes(app, hosts.Kept(play), server.WORDINGS['webshop'])
    client = TestClient(app)

    def post(path, **body):
        return client.post(path, json=body).json()

    def get(path):
        return client.get(path, params={'env_idx': 5}).json()

    assert client.post('/create').json() == 5
    assert post('/reset', env_idx=5)[0] == get('/observation')  # of any goal
    text, nothing = post('/reset', env_idx=5, session_id=3)
    assert text == get('/observation') and nothing is None and 'Actions:' not in text
    assert get('/available_actions') == {'has_search_bar': True, 'clickables': ['search']}
    assert get('/instruction_text') == f'Instruction: {play.goal.text}'
    for action in play.plan():
        reply = post('/step', env_idx=5, action=action)
    assert reply == {'state': get('/observation'), 'reward': 1.0, 'done': True, 'info': None}
    assert get('/available_actions') == {'has_search_bar': False, 'clickables': []}
    assert post('/close', env_idx=5) is True
