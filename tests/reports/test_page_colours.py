"""Contrast of the rollout page: WCAG 2.2 ratios of the colours of its style sheet, both modes."""

import importlib.resources
import itertools
import re

import pytest

from agentrl_jax.records.page_episode import CELLS

TEMPLATE = importlib.resources.files('agentrl_jax.records').joinpath('page_template.html')
STYLE = TEMPLATE.read_text(encoding='utf-8')
TEXT, GRAPHIC = 4.5, 3.0  # WCAG 2.2, 1.4.3 and 1.4.11: text; what must be seen to understand
PAIRS = re.findall(r'--([a-z-]+): light-dark\((#[0-9a-f]{6}), (#[0-9a-f]{6})\)', STYLE)
MARKS = sorted({css for _, css in CELLS.values()})


def channels(colour):
    return [int(colour[i : i + 2], 16) / 255 for i in (1, 3, 5)]


def luminance(rgb):
    """Relative luminance as WCAG 2.2 defines it."""
    linear = [x / 12.92 if x <= 0.04045 else ((x + 0.055) / 1.055) ** 2.4 for x in rgb]
    return 0.2126 * linear[0] + 0.7152 * linear[1] + 0.0722 * linear[2]


def contrast(a, b):
    """(lighter + 0.05) / (darker + 0.05), of two colours given by their channels."""
    light, dark = sorted(map(luminance, (a, b)), reverse=True)
    return (light + 0.05) / (dark + 0.05)


def mixed(colour, share, with_colour):
    """color-mix(in srgb, colour share, with_colour)."""
    return [share * a + (1 - share) * b for a, b in zip(colour, with_colour, strict=True)]


def test_contrast_by_hand():
    black, white = [0.0] * 3, [1.0] * 3
    assert contrast(black, white) == pytest.approx(21)
    assert contrast(channels('#777777'), white) == pytest.approx(4.48, abs=0.01)  # well known
    assert mixed(white, 0.25, black) == [0.25] * 3


@pytest.mark.parametrize('mode', [0, 1])
def test_everything_on_the_page_can_be_read_and_seen(mode):
    """In the dark, text on the hottest tokens had a ratio of 3.2, holes on the floor one of 1.3."""
    colour = {name: channels(both[mode]) for name, *both in PAIRS}
    inks = itertools.product(
        ('ink', 'soft', 'link', 'good', 'bad', 'odd'), ('page', 'card', 'prompt')
    )
    marks = [('won-ink', 'won'), ('soft', 'card'), ('lost-ink', 'lost')]
    for ink, ground in [*inks, *marks, *((f'{css}-ink', css) for css in MARKS)]:
        assert contrast(colour[ink], colour[ground]) >= TEXT, (ink, ground)
    shares = sorted({int(share) / 100 for share in re.findall(r'--heat: (\d+)%', STYLE)})
    assert shares[0] == 0 and shares[-1] >= 0.9
    for hue, share in itertools.product(('hot', 'cold', 'mask'), shares):
        ground = mixed(colour[hue], share, colour['card'])
        assert contrast(colour['ink'], ground) >= TEXT, (hue, share)
    for hue in ('hot', 'cold', 'mask'):  # the hottest differs from what is not coloured
        assert contrast(mixed(colour[hue], shares[-1], colour['card']), colour['card']) >= 1.5
    assert contrast(colour['wall'], colour['floor']) >= 2.0
    for css in ('hole', *(set(MARKS) - {'wall', 'floor'})):  # by their ground or by their glyph
        grounds = (css,) if css == 'hole' else (css, f'{css}-ink')
        assert max(contrast(colour[x], colour['floor']) for x in grounds) >= GRAPHIC, css
    # A hole has a glyph and a wall has none: both are dark.
    assert contrast(colour['hole-ink'], colour['wall']) >= GRAPHIC


def test_every_colour_of_the_page_is_looked_at_here():
    """A colour that is written into a rule would be in no test above."""
    for css in MARKS:
        assert f'.board .{css} {{ background: var(--{css}); color: var(--{css}-ink); }}' in STYLE
    rules = STYLE[STYLE.index(':root:has(#theme-light') : STYLE.index('</style>')]
    assert re.findall(r'#[0-9a-fA-F]{3,8}\b(?=\s*[;,)])', rules) == []
    used = set(re.findall(r'var\(--([a-z-]+)[,)]', STYLE)) - {'sign', 'heat', 'hue', *'nsrla'}
    assert used <= {name for name, *_ in PAIRS}
