"""Search rewards: the numbers of the papers' own functions, per episode and per turn."""

import pytest

from agentrl_jax.envs.hosts.search import scoring
from agentrl_jax.envs.hosts.search.dialects import TAGS, TOOL_TAGS, WORDLESS
from agentrl_jax.envs.hosts.search.scoring import Golds, Step

GOLDS = Golds(('paris',), 'as_written')
THINK = '<reasoning>\nlet me see\n</reasoning>\n'
CALL = '<tool>\n{"name": "wiki_search", "args": {"query": "capital"}}\n</tool>'
HIT, MISS = 'Paris is a city.', 'Lyon is a city.'


def answer_step(answer):
    return Step(f'{THINK}<answer>\n{answer}\n</answer>', answer=answer)


SEARCH = Step(THINK + CALL, HIT)
# Results of MT-GRPO's functions: tool, search, presence, exact match, format, tags; R_T, R_O
MT_GRPO = {
    'search and answer': ([SEARCH, answer_step('Paris')], 0.2, 0.5, 0.5, 1, 0.2, 0.2, 0.7, 1.9),
    'found nothing': (
        [Step(THINK + CALL, MISS), answer_step('Paris')],
        *(0.2, 0, 0.5, 1, 0.2, 0.2, 0.2, 1.9),
    ),
    'a longer answer': (
        [SEARCH, answer_step('The city of Paris, France')],
        *(0.2, 0.5, 0.5, 0, 0.2, 0.2, 0.7, 0.9),
    ),
    'a wrong answer': ([SEARCH, answer_step('Lyon')], 0.2, 0.5, 0, 0, 0.2, 0.2, 0.7, 0.4),
    'an error': (
        [Step(THINK + CALL, 'Error: Invalid JSON format'), answer_step('Paris')],
        *(0, 0, 0.5, 1, 0.2, 0.2, 0, 1.9),
    ),
    'no search': ([answer_step('Paris')], 0, 0, 0.5, 1, 0.2, 0.2, 0, 1.9),
    'no tags': ([Step('It is Paris.')], 0, 0, 0, 0, 0.04, 0, 0, 0.04),
    'nothing': ([Step('')], 0, 0, 0, 0, 0.04, 0, 0, 0.04),
    'two searches': ([SEARCH, Step(THINK + CALL)], 0.2, 0.5, 0, 0, 0.2, 0.2, 0.7, 0.4),
    'a malformed turn first': (
        [Step('hello'), SEARCH, answer_step('Paris')],
        *(0.2, 0.5, 0.5, 1, 0.1467, 0.1333, 0.7, 1.78),
    ),
    'an open answer': (
        [SEARCH, Step(f'{THINK}<answer>\nParis')],
        *(0.2, 0.5, 0, 0, 0.18, 0.175, 0.7, 0.355),
    ),
    'no thoughts': (
        [Step(CALL, HIT), Step('<answer>\nParis\n</answer>')],
        *(0.2, 0.5, 0.5, 1, 0.12, 0.2, 0.7, 1.82),
    ),
    'a full stop': ([SEARCH, answer_step('Paris.')], 0.2, 0.5, 0.5, 0, 0.2, 0.2, 0.7, 0.9),
    'two thoughts': (
        [Step(THINK + THINK + CALL, HIT), answer_step('Paris')],
        *(0.2, 0.5, 0.5, 1, 0.2, 0.15, 0.7, 1.85),
    ),
    'three answers': (
        [SEARCH, Step(THINK + 3 * '<answer>\nParis\n</answer>\n')],
        *(0.2, 0.5, 0.5, 1, 0.2, 0.1, 0.7, 1.8),
    ),
}


@pytest.mark.parametrize('name', MT_GRPO)
def test_mt_grpo_rewards_match_its_reference_functions(name):
    steps, tool, search, presence, match, form, tags, turn, outcome = MT_GRPO[name]
    answer = scoring.last_answer(steps, TOOL_TAGS)
    assert 0.2 * scoring.tool_success(steps, TOOL_TAGS) == pytest.approx(tool)
    assert 0.5 * scoring.answer_presence(steps, GOLDS) == search
    assert (0.5 * GOLDS.within(answer), GOLDS.equal(answer)) == (presence, match)
    assert 0.2 * scoring.format_score(steps, TOOL_TAGS) == pytest.approx(form, abs=5e-5)
    assert 0.2 * scoring.tag_count(steps, TOOL_TAGS) == pytest.approx(tags, abs=5e-5)
    assert scoring.mt_grpo_turn(steps, TOOL_TAGS, GOLDS) == pytest.approx(turn)
    assert scoring.mt_grpo_outcome(steps, TOOL_TAGS, GOLDS) == pytest.approx(outcome, abs=5e-5)
    count = len(steps)
    *before, last = (
        scoring.mt_grpo(steps[:k], TOOL_TAGS, GOLDS, k == count) for k in range(1, count + 1)
    )
    assert sum(before) == pytest.approx(turn) and last == pytest.approx(outcome, abs=5e-5)
    figures = [*scoring.measured(steps, TOOL_TAGS, GOLDS).values()]
    assert figures == pytest.approx([tool / 0.2, search / 0.5, match, form / 0.2], abs=5e-4)


def test_a_dialect_without_thoughts_can_have_the_best_format():
    """Missing thoughts cost points although the dialect has none: at most .6, and malformed."""
    searched = Step('<search>capital</search>', HIT)
    answered = Step('<answer>Paris</answer>', answer='Paris')
    steps = [searched, answered]
    assert scoring.format_score(steps, WORDLESS) == scoring.tag_count(steps, WORDLESS) == 1
    assert scoring.mt_grpo_outcome(steps, WORDLESS, GOLDS) == pytest.approx(1.9)
    assert scoring.format_too(steps, WORDLESS, GOLDS, True) == 1
    # By hand: .3 for the answer found, .1 for the format, minus .1 for one search; then 1
    assert scoring.mt_ppo([searched], WORDLESS, GOLDS, False) == pytest.approx(0.3)
    assert scoring.mt_ppo(steps, WORDLESS, GOLDS, True) == 1
    twice = Step('<search>a</search><search>b</search>', HIT)
    assert scoring.mt_ppo([twice], WORDLESS, GOLDS, False) == pytest.approx(0.0)
    # right tags, but text before them: .4 + .2 + 0 + .2
    assert scoring.format_score([Step('so <answer>x</answer>')], WORDLESS) == pytest.approx(0.8)
    assert scoring.format_score([Step('hello')], WORDLESS) == pytest.approx(0.2)
    assert not scoring.is_sequence([searched, Step('<search>a</search>')], WORDLESS)


NORMALISED = (  # original, SQuAD's normalisation, TriviaQA's
    ('Spider-Man', 'spiderman', 'spider man'),
    ('J.R.R. Tolkien', 'jrr tolkien', 'j r r tolkien'),
    ('O\u2019Neill', 'o\u2019neill', 'o neill'),
    ('U.S.', 'us', 'u s'),
    ('The Beatles', 'beatles', 'beatles'),
    ('A', '', ''),
    ('snake_case', 'snakecase', 'snake case'),
)


def test_answers_are_normalised_as_in_squad_and_triviaqa():
    for text, squad, triviaqa in NORMALISED:
        assert (scoring.squad(text), scoring.triviaqa(text)) == (squad, triviaqa)
    assert scoring.as_written(' The Beatles. ') == 'the beatles.'
    assert Golds(('beatles',), 'squad').equal('The Beatles!')
    assert not Golds(('beatles',), 'as_written').equal('The Beatles!')


@pytest.mark.parametrize('normaliser', ['squad', 'triviaqa'])
@pytest.mark.parametrize('gold', ['A', 'The The', '...', 'the, a!'])
def test_an_answer_of_articles_and_punctuation_can_be_right(gold, normaliser):
    """It never was. SQuAD's script compares the normalised texts, here two empty ones."""
    golds = Golds(('Paris', gold), normaliser)
    assert golds.equal(gold) and golds.equal('an') and golds.equal('') and golds.equal('paris.')
    assert not golds.equal('London') and not golds.equal(None)
    assert scoring.exact([Step('', answer=gold)], TAGS, golds, True) == 1
    assert not golds.within('anything') and golds.within('in Paris')  # the empty answer is ignored


QUERY = '<think>what?</think>\n<search>capital</search>'
FINAL = '<think>so</think><answer>{}</answer>'


def test_a_bad_format_lowers_the_second_reward_of_search_r1():
    """1, .8, .2, .1 or 0, from the example in its script; a right answer in a bad format: .8."""
    searched, malformed = Step(QUERY, HIT), Step(QUERY + ' more', HIT)
    cases = (
        ([searched, Step(FINAL.format('Paris'))], 1.0),
        ([Step(FINAL.format('Paris'))], 1.0),
        ([malformed, Step(FINAL.format('Paris'))], 0.8),
        ([searched, Step('<answer>Paris</answer>')], 0.8),
        ([Step(' '), searched, Step(FINAL.format('Paris'))], 0.8),
        ([searched, Step(FINAL.format('Lyon'))], 0.2),
        ([searched, Step('<answer>Lyon</answer>')], 0.1),
        ([searched, Step(QUERY)], 0.0),
    )
    for steps, reward in cases:
        assert scoring.format_too(steps, TAGS, GOLDS, True) == reward
        assert scoring.format_too(steps, TAGS, GOLDS, False) == 0.0


def test_checking_a_format_that_is_nearly_right_is_fast():
    gaps = 400 * ' '
    searches = [Step(f'{gaps}<think>x</think>{gaps}<search>x</search>{gaps}', HIT)] * 20
    assert not scoring.is_sequence([*searches, Step('<think>')], TAGS)
    assert scoring.is_sequence([*searches, Step(FINAL.format('x') + gaps)], TAGS)


def test_mt_ppo_rewards_each_search_and_charges_more_for_each_further_one():
    steps = [Step(QUERY, HIT), Step(QUERY, MISS), Step('?'), Step('<search>x</search>', HIT)]
    paid = [scoring.mt_ppo(steps[:k], TAGS, GOLDS, False) for k in range(1, 5)]
    # .3 + .1 - .1;  .1 - .2;  -.2 - .2;  .3 - .2 - .3
    assert paid == pytest.approx([0.3, -0.1, -0.4, -0.2])
    ends = (FINAL.format('Paris'), FINAL.format('Lyon'), '<answer>Paris</answer>', QUERY)
    doubled = FINAL.format('Paris') + '<answer>Paris</answer>'
    outcomes = [scoring.mt_ppo([Step(end)], TAGS, GOLDS, True) for end in (*ends, doubled)]
    assert outcomes == [1.0, 0.2, -1.0, -1.0, -1.0]


def test_exact_rewards_are_paid_for_turns_that_count_as_answers():
    steps = Step('', answer='Paris'), Step('', answer='paris!'), Step(FINAL.format('Paris'), HIT)
    paid = [scoring.exact([step], TAGS, GOLDS, True) for step in steps]
    assert paid == [1.0, 0.0, 0.0]
    golds = Golds(('Lyon', 'PARIS'))
    assert scoring.exact(steps[:1], TAGS, golds, False) == 1.0
