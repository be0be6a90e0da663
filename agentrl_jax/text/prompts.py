"""Prompt styles as data: what the system message says and how a turn is worded.

A user message is the concatenation, in this order, of
  reward (from the second turn on), hint (in the first turn, with env.hint), header, again (where a
  further trial begins), observation, warning (after an invalid answer), tail.
The observation comes from the environment; the other parts are templates over one integer each, so
that every possible text is known before training and turned into tokens once.
"""

import dataclasses
import re


@dataclasses.dataclass(frozen=True)
class PromptStyle:
    """Templates of one way to word an episode; {reward}, {turn}, {left} are filled in."""

    system: str  # {name} {instruction} {actions} {max_actions} {separator}
    lead: str  # opens the first user message, in front of the first header
    reward: str  # {reward}; '' leaves rewards out
    header: str  # {turn} counts from 1
    warning: str  # shown when the previous answer was invalid
    tail: str  # {left} actions left, {max_words}
    # Of agents that write (agents.py), in the place of the tail
    plan: str = (
        'Before you act, write a plan: <plan> [which actions lead to the goal, and why] </plan>, '
        'with no extra text.\n'
    )
    reflect: str = (
        'This trial failed. Write what went wrong and what to do instead when you try the same '
        'again: <reflect> [your reflection] </reflect>, with no extra text.\n'
    )
    again: str = 'Trial {trial}: everything is again as it was at the start.\n'
    # Opens a hint (env.hint), whose actions follow, one a line
    hint: str = 'Hint: the best actions from here on, in order:\n'

    def rewards_shown(self) -> bool:
        return bool(self.reward)


# Wording of RAGEN (mll-lab-nu/RAGEN, main). Its per-turn reward is a bare Python float there; here
# it always has one decimal ("-0.3", never "-0.30000000000000004").
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

# The shortest wording that still names the task, for small policies trained from scratch.
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

# The same for every budget of actions: no agent reads what is left of it.
PLAIN = dataclasses.replace(BRIEF, tail='')

# For tool use: one action a turn. Rewards stay unseen, as in MT-GRPO (arXiv:2505.11821): one could
# tell from them what a result is worth. The wording is ours.
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

# For worlds that list what can be done with every observation: the system message does not.
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
    """The text with 'Thought: a Action: b' for '<think>a</think><answer>b</answer>', or a part."""
    text = re.sub(r'<think>\s*(.*?)\s*</think>\s*', r'Thought: \1 ', text)
    return re.sub(r'<answer>\s*(.*?)\s*</answer>', r'Action: \1', text)


def in_react(style: PromptStyle) -> PromptStyle:
    """A style that asks for ReAct's form."""
    return dataclasses.replace(style, tail=react_text(style.tail))


STYLES = {'ragen': RAGEN, 'brief': BRIEF, 'plain': PLAIN, 'tools': TOOLS, 'menu': MENU}
SEPARATOR = '||'
