"""Whether a text has a character as a word of its own, as WebArena's evaluators find it.

They ask NLTK: its sentences (Punkt's English ones), then its words, which are those of the Penn
Treebank (Marcus et al. 1993) with Unicode's quotes. Of its rules these are the ones that can set a
single character apart, for texts in lower case: there a sentence never begins with a letter after
a number or an initial. tests/data/webarena_words.tsv holds what NLTK says of hostile texts.
"""

import re

INITIALS = 'cdefghklmnprstvw'  # letters that Punkt takes for abbreviations
ALONE = r'(?:(?<![^\s()"`{[:;&#*@}\],-])|(?<=\.\.))'  # a word begins here
CLOSING = r'"\')\]}‘’“”«»'
# Ends of sentences: not the period of an initial, nor that of a number or letter before a letter
END = re.compile(
    rf'{ALONE}[{INITIALS}]\.|{ALONE}[^\W_]\.(?=\s+[^\W\d_])'
    rf'|[.!?](?P<ends>[{CLOSING}]*\s|(?=[{CLOSING}({{[;:*@!?]))'
)
# In this order
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
    """Pieces at whose ends a period is a word."""
    cuts = [found.end() for found in END.finditer(text) if found['ends'] is not None]
    return [text[a:b] for a, b in zip([0, *cuts], [*cuts, len(text)], strict=True)]


def has_word(text: str, character: str) -> bool:
    """text, character: in lower case."""
    for sentence in sentences(text):
        sentence = sentence.strip()
        for pattern, replacement in RULES:
            sentence = pattern.sub(replacement, sentence)
        if character in sentence.split():
            return True
    return False
