"""A small tokenizer with SmolLM2's rules: GPT-2's, with separate digits."""

import functools

import tokenizers

from agentrl_jax.text.prompts import STYLES
from agentrl_jax.tokens import gguf_tokenizer
from agentrl_jax.tokens.tokenizer import CHAT_SPECIALS, BytePairTokenizer


@functools.cache
def smollm_tokenizer():
    """Return a tokenizer trained on our prompts and on blank lines."""
    backend = tokenizers.Tokenizer(tokenizers.models.BPE())
    gguf_tokenizer.set_rules(backend, 'smollm', 'test')
    backend.decoder = tokenizers.decoders.ByteLevel()
    # White space at the end of a text is not split, so it merges there.
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
