"""A small tokenizer with the rules of SmolLM2's: GPT-2's, with digits one by one."""

import functools

import tokenizers

from agentrl_jax.text.prompts import STYLES
from agentrl_jax.tokens import gguf_tokenizer
from agentrl_jax.tokens.tokenizer import CHAT_SPECIALS, BytePairTokenizer


@functools.cache
def smollm_tokenizer():
    """Trained on our prompts and on blank lines."""
    backend = tokenizers.Tokenizer(tokenizers.models.BPE())
    gguf_tokenizer.set_rules(backend, 'smollm', 'test')
    backend.decoder = tokenizers.decoders.ByteLevel()
    # Runs of white space are whole at the end of a text, and merge there.
    texts = ['Grid Map: \n', '-0.1\n\n', ' \n\n', '\n\n\n']
    texts += [getattr(style, part) for style in STYLES.values() for part in ('system', 'tail')]
    trainer = tokenizers.trainers.BpeTrainer(
        vocab_size=900,
        initial_alphabet=tokenizers.pre_tokenizers.ByteLevel.alphabet(),
        show_progress=False,
    )
    backend.train_from_iterator(texts * 9, trainer)
    backend.add_special_tokens(list(CHAT_SPECIALS))
    return BytePairTokenizer(backend, pad=None, eos=[], chat_template=None, source='test')
