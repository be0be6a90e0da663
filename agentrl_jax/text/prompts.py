"""Prompt styles as data: the system message and the wording of turns.

A user message is the concatenation, in this order, of
  reward (after the first turn), hint (in the first turn, with env.hint), header, again (at the
  start of a further trial), observation, warning (after an invalid answer), tail.
The environment provides the observation. The other parts are templates with one integer each, so
every possible text is known before training and tokenised once.
"""

import dataclasses
import re


@dataclasses.dataclass(frozen=True)
class PromptStyle:
    """Templates of a prompt style, with {reward}, {turn} and {left} as placeholders."""

    system: str  # {name} {instruction} {actions} {max_actions} {separator}
    lead: str  # starts the first user message, in front of the first header
    reward: str  # {reward}; '' omits rewards
    header: str  # {turn} counts from 1
    warning: str  # after an invalid answer
    tail: str  # {left} actions left, {max_words}
    # For agents that write (agents.py), instead of the tail
    plan: str = (
        'Before you act, write a plan: <plan> [which actions lead to the goal, and why] </plan>, '
        'with no extra text.\n'
    )
    reflect: str = (
        'This trial failed. Write what went wrong and what to do instead when you try the same '
        'again: <reflect> [your reflection] </reflect>, with no extra text.\n'
    )
    again: str = 'Trial {trial}: everything is again as it was at the start.\n'
    # First line of a hint (env.hint); its actions follow, one per line
    hint: str = 'Hint: the best actions from here on, in order:\n'


# Wording of RAGEN (mll-lab-nu/RAGEN, main). RAGEN formats the reward of a turn as a Python float;
# here it always has one decimal ("-0.3", never "-0.30000000000000004").
RAGEN = PromptStyle(
    system=(
        "You're a helpful assistant. {instruction}\nYour available actions are:\n{actions}\n"
        'You can make up to {max_actions} actions, separated by the action separator '
        '" {separator} "\n'
    ),
    lead='\n',
    reward='Reward:\n{reward}\n\n',
    header='Turn {turn}:\nState:\n',
    warning=(
        'No valid action provided previously. Environment state remains the same. '
        'Please try again.\n'
    ),
    tail=(
        'You have {left} actions left. Always output: <think> [Your thoughts] </think> <answer> '
        '[your answer] </answer> with no extra text. Strictly follow this format. '
        'Max response length: {max_words} words (tokens).\n'
    ),
)

# The shortest wording that names the task, for small policies trained from scratch.
BRIEF = PromptStyle(
    system='{name}\n',
    lead='',
    reward='',
    header='',
    warning='Invalid.\n',
    tail='{left} left\n',
    plan='Plan.\n',
    reflect='Failed.\n',
    again='Again.\n',
    hint='Hint.\n',
)

# The same, without the number of actions left: prompts do not depend on the budget.
PLAIN = dataclasses.replace(BRIEF, tail='')

# For tool use, with one action per turn. Rewards are hidden as in MT-GRPO (arXiv:2505.11821),
# because they would reveal the value of a result. The wording is our own.
TOOLS = PromptStyle(
    system=(
        "You're a helpful assistant. {instruction}\nYour available actions are:\n{actions}\n"
        'Take one action a turn, {max_actions} at most.\n'
    ),
    lead='\n',
    reward='',
    header='Turn {turn}:\n',
    warning='That was not an available action. Please try again.\n',
    tail=(
        'You have {left} actions left. Think, then act, as in <think> [your thoughts] </think> '
        '<answer> [one action] </answer>, with no extra text and in {max_words} words at most.\n'
    ),
)

# For environments that list the possible actions in every observation, not in the system message.
MENU = PromptStyle(
    system=(
        "You're a helpful assistant. {instruction}\n"
        'Take one action a turn, {max_actions} at most.\n'
    ),
    lead='\n',
    reward='',
    header='Turn {turn}:\n',
    warning='The action is not recognized. Please check valid actions.\n',
    tail=(
        'Think, then act, as in <think> [your thoughts] </think> <answer> [one action] </answer>, '
        'with no extra text and in {max_words} words at most.\n'
    ),
)


def react_text(text: str) -> str:
    """Replace '<think>a</think><answer>b</answer>', or a part, by 'Thought: a Action: b'."""
    text = re.sub(r'<think>\s*(.*?)\s*</think>\s*', r'Thought: \1 ', text)
    return re.sub(r'<answer>\s*(.*?)\s*</answer>', r'Action: \1', text)


STYLES = {'ragen': RAGEN, 'brief': BRIEF, 'plain': PLAIN, 'tools': TOOLS, 'menu': MENU}
SEPARATOR = '||'
