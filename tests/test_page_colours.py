"""Contrast of the rollout page: WCAG 2.2 ratios of the colours of its style sheet, both modes."""

import importlib.resources
import itertools
import re

import pytest

from agentrl_jax.records.page_episode import CELLS

TEMPLATE = importlib.resources.files('agentrl_jax.records').joinpath('page_template.html')
STYLE = TEMPLATE.read_text(encoding='utf-8')
MODES = ('light', 'dark')
TEXT, GRAPHIC = 4.5, 3.0  # WCAG 2.2, 1.4.3 and 1.4.11: text; what must be seen to understand
PAIRS = re.findall(r'--([a-z-]+): light-dark\((#[0-9a-f]{6}), (#[0-9a-f]{6})\)', STYLE)
COLOURS = {mode: {name: both[i] for name, *both in PAIRS} for i, mode in enumerate(MODES)}


def channels(colour):
    return [int(colour[i : i + 2], 16) / 255 for i in (1, 3, 5)]


def luminance(rgb):
    """Relative luminance as WCAG 2.2 defines it."""
    linear = [x / 12.92 if x <= 0.04045 else ((x + 0.055) / 1.055) ** 2.4 for x in rgb]
    return 0.2126 * linear[0] + 0.7152 * linear[1] + 0.0722 * linear[2]


def contrast(a, b):
    """(lighter + 0.05) / (darker + 0.05), of colours as '#rrggbb' or as three channels."""
    light, dark = sorted(
        (luminance(channels(x) if isinstance(x, str) else x) for x in (a, b)), reverse=True
    )
    return (light + 0.05) / (dark + 0.05)


def mixed(colour, share, with_colour):
    """color-mix(in srgb, colour share, with_colour)."""
    pairs = zip(channels(colour), channels(with_colour), strict=True)
    return [share * a + (1 - share) * b for a, b in pairs]


def test_contrast_by_hand():
    assert contrast('#000000', '#ffffff') == pytest.approx(21)
    assert contrast('#777777', '#ffffff') == pytest.approx(4.48, abs=0.01)  # the usual example
    assert mixed('#ffffff', 0.25, '#000000') == [0.25] * 3


@pytest.mark.parametrize('mode', MODES)
def test_text_can_be_read_on_every_ground_it_stands_on(mode):
    colour = COLOURS[mode]
    for ink, ground in itertools.product(
        ('ink', 'soft', 'link', 'good', 'bad', 'odd'), ('page', 'card', 'prompt')
    ):
        assert contrast(colour[ink], colour[ground]) >= TEXT, (ink, ground)


SHARES = sorted({int(share) / 100 for share in re.findall(r'--heat: (\d+)%', STYLE)})


@pytest.mark.parametrize('mode', MODES)
@pytest.mark.parametrize('hue', ['hot', 'cold', 'mask'])
def test_tokens_can_be_read_on_every_heat(mode, hue):
    """In the dark, light text on the hottest tokens had a ratio of 3.2."""
    colour = COLOURS[mode]
    assert SHARES[0] == 0 and SHARES[-1] >= 0.9
    for share in SHARES:
        ground = mixed(colour[hue], share, colour['card'])
        assert contrast(colour['ink'], ground) >= TEXT, share
    # The hottest differs from what is not coloured.
    assert contrast(mixed(colour[hue], SHARES[-1], colour['card']), colour['card']) >= 1.5


@pytest.mark.parametrize('mode', MODES)
def test_glyphs_can_be_seen_on_their_cells(mode):
    colour, classes = COLOURS[mode], sorted({css for _, css in CELLS.values()})
    for css in classes:
        rule = f'.board .{css} {{ background: var(--{css}); color: var(--{css}-ink); }}'
        assert rule in STYLE, css
        assert contrast(colour[css], colour[f'{css}-ink']) >= TEXT, css


@pytest.mark.parametrize('mode', MODES)
def test_what_ends_an_episode_stands_out_from_the_floor(mode):
    """Holes were #05080c on #2a2722 in the dark, a ratio of 1.3."""
    colour = COLOURS[mode]
    for css in ('wall', 'hole'):
        assert contrast(colour[css], colour['floor']) >= (GRAPHIC if css == 'hole' else 2.0), css
    # The others by their ground or by their glyph.
    for css in ('target', 'box', 'boxed', 'player', 'goal', 'lost', 'won'):
        assert max(contrast(colour[x], colour['floor']) for x in (css, f'{css}-ink')) >= GRAPHIC
    # A hole has a glyph and a wall has none: both are dark.
    assert contrast(colour['hole-ink'], colour['wall']) >= GRAPHIC


@pytest.mark.parametrize('mode', MODES)
def test_marks_of_the_map_can_be_seen(mode):
    colour = COLOURS[mode]
    for ink, ground in (('won-ink', 'won'), ('soft', 'card'), ('lost-ink', 'lost')):
        assert contrast(colour[ink], colour[ground]) >= TEXT


def test_every_colour_of_the_page_is_looked_at_here():
    """A colour that is written into a rule would be in no test above."""
    rules = STYLE[STYLE.index(':root:has(#theme-light') : STYLE.index('</style>')]
    assert re.findall(r'#[0-9a-fA-F]{3,8}\b(?=\s*[;,)])', rules) == []
    used = set(re.findall(r'var\(--([a-z-]+)[,)]', STYLE)) - {'sign', 'heat', 'hue', *'nsrla'}
    assert used <= COLOURS['light'].keys()
