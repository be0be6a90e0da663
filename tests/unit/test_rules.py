"""Rules between settings by hand: the configs that they reject, and the fields in the error."""

import dataclasses

import pytest

from agentrl_jax.settings.marks import In
from agentrl_jax.settings.rules import Must, Rule, broken_by, exclude, must, rules_of

VALUES = {'a.x': 3, 'a.y': 0, 'b.z': 'on', 'b.unset': None}


@pytest.mark.parametrize(
    'needs, holds',
    [
        ({'a.x': 3}, True),
        ({'a.x': 0}, False),
        ({'a.x': 0, 'b.z': {'on', 'off'}}, True),  # one is enough
        ({'a.x': 0, 'b.z': {'off'}}, False),
        ({'a.x': In(high=3)}, True),
        ({'a.x': In(low=4)}, False),
        ({'b.unset': 5}, True),
        ({'c.missing': 5}, True),
        ({'a.x': Must('more', lambda subject: subject > 1)}, True),
        ({'a.x': Must('more', lambda subject: subject > 2)}, False),
    ],
)
def test_a_rule_holds_if_one_of_its_needs_does(needs, holds):
    assert (Rule(needs).check(2, VALUES) is None) == holds


def test_the_error_names_all_fields_with_their_values():
    rule = must('a.x', 'a multiple of a.y', lambda subject: False, unless={'b.z': 'off'})
    error = rule.check(None, VALUES)
    assert set(error.fields) == {'a.x', 'a.y', 'b.z'}
    assert all(word in error.sentence for word in ('a.x=3', 'a.y=0', "b.z='on'"))
    both = exclude({'a.x': 0}, {'a.y': 1, 'b.z': 'off'}, 'why')
    assert [rule.check(None, VALUES).fields for rule in both] == [('a.x', 'a.y'), ('a.x', 'b.z')]


@dataclasses.dataclass(frozen=True)
class World:
    size: int = 1
    name = 'world'
    RULES = (Rule({'size': In(high=2)}),)


@dataclasses.dataclass(frozen=True)
class Larger(World):
    RULES = (must('size', 'an odd number', lambda world: world.size % 2),)


def test_a_world_has_the_rules_of_its_bases():
    assert len(rules_of(Larger())) == 2 and not broken_by(Larger(1))
    assert [broken.fields for broken in broken_by(Larger(4))] == [('world.size',)] * 2
