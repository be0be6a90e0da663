"""Supported families of chat templates: the markers between messages."""

import dataclasses
from typing import Literal

IM_START, IM_END, END_OF_TEXT = '<|im_start|>', '<|im_end|>', '<|endoftext|>'


@dataclasses.dataclass(frozen=True)
class Wording:
    """A message is start, role, role_end, space, its text, end, after. Text between special tokens
    is tokenised in one piece."""

    name: str
    start: str  # special tokens, as they are spelled; '' = none
    role_end: str
    space: str
    end: str
    after: str
    ends: tuple[str, ...]  # tokens that end a turn, `end` first; the last is the default padding
    begin: str = ''  # in front of every chat, as the template's bos_token
    calls: Literal['tags', 'object'] = 'tags'  # <tool_call>{...}</tool_call>, or only {...}
    call: str = ''  # may announce a call
    strips: bool = False  # the template strips white space from the ends of a message


CHAT_ML = Wording(
    name='ChatML',  # Qwen2.5, Qwen3, SmolLM2
    start=IM_START,
    role_end='',
    space='\n',
    end=IM_END,
    after='\n',
    ends=(IM_END, END_OF_TEXT),
)
LLAMA_3 = Wording(  # github.com/meta-llama/llama-models, models/llama3_2/text_prompt_format.md
    name='Llama 3',
    start='<|start_header_id|>',
    role_end='<|end_header_id|>',
    space='\n\n',
    end='<|eot_id|>',
    after='',
    ends=('<|eot_id|>', '<|eom_id|>', '<|end_of_text|>'),
    begin='<|begin_of_text|>',
    calls='object',
    call='<|python_tag|>',
    strips=True,
)
