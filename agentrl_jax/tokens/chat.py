"""ChatML as pieces of token ids, checked against the checkpoint's own chat template.

<|im_start|>system\\n{system}<|im_end|>\\n<|im_start|>user\\n{user}<|im_end|>\\n<|im_start|>assistant\\n...
Pieces are only ever appended, so an episode of n turns is a prefix of the same episode with n + 1.
"""

import dataclasses
from typing import Any

from jinja2.sandbox import ImmutableSandboxedEnvironment


@dataclasses.dataclass(frozen=True)
class Chat:
    """Token pieces between messages."""

    tokenizer: Any
    start_id: int  # <|im_start|>
    end_id: int  # <|im_end|>

    def episode_prefix(self, system: str, user_start: str) -> list[int]:
        """System message and the opening of the first user message, up to user_start included."""
        encode = self.tokenizer.encode
        return [
            self.start_id, *encode(f'system\n{system}'), self.end_id, *encode('\n'),
            self.start_id, *encode(f'user\n{user_start}'),
        ]  # fmt: skip

    def user_open(self, user_start: str) -> list[int]:
        """From behind the <|im_end|> of an answer into the next user message."""
        encode = self.tokenizer.encode
        return [*encode('\n'), self.start_id, *encode(f'user\n{user_start}')]

    def answer_open(self, prefix: str) -> list[int]:
        """End of the user message, and the answer up to the prefix that is forced on it."""
        encode = self.tokenizer.encode
        return [self.end_id, *encode('\n'), self.start_id, *encode(f'assistant\n{prefix}')]


def build_chat(tokenizer: Any) -> Chat:
    """The pieces; a ValueError if the checkpoint's template words a chat in another way."""
    chat = Chat(tokenizer, tokenizer.special('<|im_start|>'), tokenizer.special('<|im_end|>'))
    if tokenizer.chat_template is not None:
        expected = 'S<|im_end|>\n<|im_start|>user\nU<|im_end|>\n<|im_start|>assistant\n'
        rendered = render(tokenizer.chat_template, 'S', 'U')
        if rendered != f'<|im_start|>system\n{expected}':
            raise ValueError(
                'the chat template of this checkpoint is not ChatML as Qwen2.5 uses it; it renders '
                f'{rendered!r}'
            )
    return chat


def render(template: str, system: str, user: str) -> str:
    """The template's own wording of a system and a user message and the opening of the answer."""
    messages = [{'role': 'system', 'content': system}, {'role': 'user', 'content': user}]
    environment = ImmutableSandboxedEnvironment(trim_blocks=True, lstrip_blocks=True)
    return environment.from_string(template).render(messages=messages, add_generation_prompt=True)
