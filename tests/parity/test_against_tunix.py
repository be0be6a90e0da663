"""benchmarks.peers.tunix: both sides have the same weights, tokens and turns; times are not tested.

`make bench-tunix` installs Tunix (requirements/tunix.txt) and runs this file. Without Tunix it is
skipped.
"""

import jax
import pytest

from benchmarks import common
from benchmarks.peers import tunix

pytest.importorskip('tunix', reason='make bench-tunix runs it')

SHAPE = dict(hidden_size=32, intermediate_size=64, num_layers=2, num_heads=2, num_kv_heads=1)


@pytest.fixture(scope='module', autouse=True)
def any_rank():
    """Tunix multiplies vectors with arrays of more axes, which our tests forbid."""
    before = jax.config.jax_numpy_rank_promotion
    jax.config.update('jax_numpy_rank_promotion', 'allow')
    yield
    jax.config.update('jax_numpy_rank_promotion', before)


def test_both_decode_the_same_greedy_tokens():
    config = common.model_config(128, **SHAPE)
    result = tunix.compare_decode(
        common.init_params(config), config, batch=2, prompt=4, new=6, repeats=1, modes=('greedy',)
    )
    assert result['greedy']['same_tokens'] == 1.0


def test_both_updates_have_the_same_gradient():
    config = common.model_config(128, **SHAPE)
    result = tunix.compare_update(
        common.init_params(config), config, batch=4, prompt=4, new=4, repeats=1
    )
    assert result['gradient_difference'] < 1e-4


def test_both_play_the_same_number_of_turns_and_tokens():
    result = tunix.compare_turns(
        common.model_config(1408, **SHAPE), episodes=8, turns=2, new=3, repeats=1
    )
    assert result['turns'] == 8 * 2
    assert result['tunix_tokens'] == result['tokens']
    assert len(result['rows']) == 4
    assert 'step with update' in tunix.show({'shapes': {}, 'turns': result})
