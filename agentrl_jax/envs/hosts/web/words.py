"""Test whether a character is a separate word of a text, as WebArena's evaluators do.

They use NLTK: its English Punkt sentences, then its words, which follow the Penn Treebank (Marcus
et al. 1993) plus Unicode quotes. The rules here are those that can separate a single character in
lower-case text, where no sentence starts with a letter after a number or an initial.
tests/data/webarena_words.tsv holds NLTK's results on adversarial texts.
"""

import re

INITIALS = 'cdefghklmnprstvw'  # letters that Punkt takes for abbreviations
ALONE = r'(?:(?<![^\s()"`{[:;&#*@}\],-])|(?<=\.\.))'  # start of a word
CLOSING = r'"\')\]}‘’“”«»'
# Ends of sentences: not the period of an initial, or of a number or letter before a letter
END = re.compile(
    rf'{ALONE}[{INITIALS}]\.|{ALONE}[^\W_]\.(?=\s+[^\W\d_])'
    rf'|[.!?](?P<ends>[{CLOSING}]*\s|(?=[{CLOSING}({{[;:*@!?]))'
)
# Applied in this order
RULES = tuple(
    (re.compile(pattern), replacement)
    for pattern, replacement in (
        (r'([«“‘„]|`+)', r' \1 '),
        (r"(?<!\w)'(?!(?:re|ve|ll|m|t|s|d|n)\b)(?=\w)", "' "),
        (r'([^.])\.([])}>"\'»”’ ]*)\s*$', r'\1 . \2 '),
        (r'([:,])(\D)', r' \1 \2'),
        (r'[:,]$', r' \g<0> '),
        (r'\.{2,}', r' \g<0> '),
        (r'[;@#$%&‒–—―]', r' \g<0> '),
        (r'[?!]', r' \g<0> '),
        (r"([^'])' ", r"\1 ' "),
        (r'[*]', r' \g<0> '),
        (r'[][(){}<>]', r' \g<0> '),
        (r'--', ' -- '),
        (r'^|$', ' '),
        (r'[»”’]', r' \g<0> '),
        (r"''|\"", " '' "),
        (r'\s+', ' '),
        (r"([^' ])('[smd]|') ", r'\1 \2 '),
        (r"([^' ])('ll|'re|'ve|n't) ", r'\1 \2 '),
        (r"\b(d)('ye)\b", r' \1 \2 '),
    )
)


def sentences(text: str) -> list[str]:
    """Split a text into sentences; the final period of a sentence is a separate word."""
    cuts = [match.end() for match in END.finditer(text) if match['ends'] is not None]
    return [text[a:b] for a, b in zip([0, *cuts], [*cuts, len(text)], strict=True)]


def has_word(text: str, character: str) -> bool:
    """Return whether a character is a word of a text; both must be in lower case."""
    for sentence in sentences(text):
        sentence = sentence.strip()
        for pattern, replacement in RULES:
            sentence = pattern.sub(replacement, sentence)
        if character in sentence.split():
            return True
    return False
