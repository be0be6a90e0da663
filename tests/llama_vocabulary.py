"""A small tokenizer with Llama 3's rules and special tokens, and a similar template."""

import functools

import tokenizers

from agentrl_jax.tokens import gguf_tokenizer
from agentrl_jax.tokens.tokenizer import BytePairTokenizer

SPECIALS = (
    '<|begin_of_text|>',
    '<|end_of_text|>',
    '<|finetune_right_pad_id|>',
    '<|start_header_id|>',
    '<|end_header_id|>',
    '<|eom_id|>',
    '<|eot_id|>',
    '<|python_tag|>',
)
# A reimplementation of Llama-3.2-Instruct's template (its tokenizer_config.json): always a system
# message with a date; tools in the first user message; one call per answer, which is a bare object;
# results as JSON with a separate role; no white space around texts.
TEMPLATE = """{{- bos_token }}
{%- macro said(role, text) %}
    {{- '<|start_header_id|>' + role + '<|end_header_id|>\n\n' + text + '<|eot_id|>' }}
{%- endmacro %}
{%- set own = messages[0].content | trim if messages[0].role == 'system' else '' %}
{%- set day = date_string if date_string is defined else strftime_now('%d %b %Y') %}
{%- set kind = 'Environment: ipython\n' if tools else '' %}
{{- said('system', kind + 'Today: ' + day + '\n\n' + own) }}
{%- for message in messages %}
    {%- set before = loop.index0 - (messages[0].role == 'system') %}
    {%- if message.tool_calls %}
        {%- if message.tool_calls | length > 1 %}
            {{- raise_exception('one call at a time') }}
        {%- endif %}
        {%- set call = message.tool_calls[0].function %}
        {%- set object = '{"name": "' + call.name + '", "parameters": ' + call.arguments | tojson %}
        {{- said('assistant', object + '}') }}
    {%- elif message.role == 'tool' %}
        {{- said('ipython', message.content | tojson) }}
    {%- elif before == 0 and tools %}
        {%- set shown = namespace(tools='') %}
        {%- for tool in tools %}
            {%- set shown.tools = shown.tools + tool | tojson(indent=4) + '\n\n' %}
        {%- endfor %}
        {{- said(message.role, 'Call with {"name", "parameters"}.\n\n' + shown.tools
            + message.content | trim) }}
    {%- elif before >= 0 %}
        {{- said(message.role, message.content | trim) }}
    {%- endif %}
{%- endfor %}
{%- if add_generation_prompt %}{{ '<|start_header_id|>assistant<|end_header_id|>\n\n' }}{% endif %}
"""


@functools.cache
def llama_tokenizer(template=TEMPLATE):
    """Return a tokenizer trained on the template."""
    backend = tokenizers.Tokenizer(tokenizers.models.BPE())
    gguf_tokenizer.set_rules(backend, 'llama-bpe', 'test')
    backend.decoder = tokenizers.decoders.ByteLevel()
    trainer = tokenizers.trainers.BpeTrainer(
        vocab_size=500,
        initial_alphabet=tokenizers.pre_tokenizers.ByteLevel.alphabet(),
        show_progress=False,
    )
    backend.train_from_iterator([TEMPLATE, '\n\n', '\n\n\n'] * 9, trainer)
    backend.add_special_tokens(list(SPECIALS))
    return BytePairTokenizer(
        backend,
        pad='<|finetune_right_pad_id|>',
        eos=['<|end_of_text|>', '<|eom_id|>', '<|eot_id|>'],
        chat_template=template,
        source='llama',
        bos='<|begin_of_text|>',
    )
