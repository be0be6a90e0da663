"""Exported folders in `transformers` reproduce ids, chats and greedy answers; model cards."""

import functools
import io
import itertools
import json
import os
import random

import jax
import micro_runs
import numpy as np
import pytest
import qwen_vocabulary
import sentencepiece
import tiny_models

from agentrl_jax import evaluate, export
from agentrl_jax.machine import checkpoint
from agentrl_jax.models import weights
from agentrl_jax.records import run_log
from agentrl_jax.run import parts
from agentrl_jax.run.build import build
from agentrl_jax.run.config import read as read_config
from agentrl_jax.run.params import saved_policy
from agentrl_jax.run.state import restore_or_init
from agentrl_jax.text.prompt_lines import system_text
from agentrl_jax.text.prompts import STYLES
from agentrl_jax.tokens import hf_folder, rendering, unigram
from agentrl_jax.tokens.chat import build_chat, message, tokenize
from agentrl_jax.tokens.load import load_tokenizer
from agentrl_jax.tokens.tokenizer import CHAT_SPECIALS
from agentrl_jax.tools.demo_tokenizer import DEMO_MODEL

CHANGES = {
    'steps': 0,
    'algorithm': 'grpo',
    'clone.episodes': 64,
    'clone.steps': 40,
    'eval.temperature': 0.0,
    'env.think': False,
}
HOSTILE = [
    *' \n\t\r\x00#_O√PX019.,:|<>/"\'',
    *('  ', '\n\n', '\r\n', 'é', 'e\u0301', '日本', '😀', '\u2581', '\u200b', '<0x0A>', '<unk>'),
    *('<think>', '</answer', ' || ', 'user\n', 'assistant\n', '<|im_', '|>', 'Up', 'Down', '<<'),
]


@pytest.fixture(scope='module')
def finished(tmp_path_factory, one_device):
    """(config, workdir) of a run without steps, whose policy was cloned from demonstrations."""
    cfg = micro_runs.config('frozen_lake', **CHANGES)
    workdir = tmp_path_factory.mktemp('run')
    checkpoints = checkpoint.open_checkpoints(workdir, keep=1)
    restore_or_init(build(cfg), checkpoints)
    checkpoint.close(checkpoints)
    run_log.write_config(workdir, cfg)
    with run_log.RunLog(workdir) as log:
        log.write(0, {'eval/success': 0.25, 'time/step_s': 1.0})
    return cfg, workdir


@pytest.fixture(scope='module')
def exported(finished, tmp_path_factory):
    cfg, workdir = finished
    out = tmp_path_factory.mktemp('export') / 'policy'
    before = os.umask(0o027)
    try:
        export.export_checkpoint(cfg, str(workdir), str(out), step=None, dtype='float32')
    finally:
        os.umask(before)
    return out


@pytest.fixture(scope='module')
def theirs(exported):
    return auto_tokenizer(exported)


@functools.cache
def world_texts():
    """Return system messages and all lines of every world in every prompt style."""
    texts = []
    for name, style in itertools.product(micro_runs.MAX_TOKENS, STYLES):
        env, env_params = parts.build_environment(read_config(micro_runs.config(name)), 'train')
        words = STYLES[style]
        texts.append(system_text(env, words, 10))
        texts += [words.header.format(turn=k) for k in range(1, 12)]
        texts += [words.reward.format(reward=f'{n / 10:.1f}') for n in range(-30, 120)]
        texts += [words.tail.format(left=n, max_words=100) for n in range(21)]
        lines = env.lines(env_params)
        texts += [
            words.lead,
            words.warning,
            *lines,
            ''.join(lines[:40]),
            ' || '.join(env.ACTION_NAMES),
        ]
    return texts


def hostile_texts(count=2000):
    rng = random.Random(0)
    texts = [''.join(rng.choices(HOSTILE, k=rng.randrange(1, 30))) for _ in range(count)]
    planes = [range(1, 128), range(128, 0x3000), range(0xE000, 0x110000)]
    return texts + [
        ''.join(chr(rng.choice(rng.choice(planes))) for _ in range(30)) for _ in range(count)
    ]


def test_the_project_tokenizer_matches_sentencepiece():
    """sentencepiece computed the ids before; all texts of all environments keep them."""
    reference = sentencepiece.SentencePieceProcessor(model_file=str(DEMO_MODEL))
    ours = load_tokenizer(DEMO_MODEL)
    texts = world_texts() + hostile_texts()
    assert ours.encode_batch(texts) == reference.EncodeAsIds(texts)
    assert ours.vocab_size == reference.GetPieceSize()
    for i, piece in enumerate(ours.token_bytes()):
        if not (reference.IsControl(i) or reference.IsUnknown(i) or reference.IsByte(i)):
            assert piece == reference.IdToPiece(i).replace('\u2581', ' ').encode()


@pytest.mark.soak
def test_transformers_tokenises_any_text_as_in_the_run(exported, theirs):
    ours = load_tokenizer(DEMO_MODEL)
    texts = world_texts() + hostile_texts()
    assert theirs(texts, add_special_tokens=False)['input_ids'] == ours.encode_batch(texts)
    assert load_tokenizer(exported).encode_batch(texts) == ours.encode_batch(texts)
    for text in texts[::50]:
        ids = ours.encode(text)
        assert theirs.decode(ids) == ours.decode(ids)


@pytest.mark.soak
@pytest.mark.slow('loads transformers')
def test_transformers_tokenises_as_in_the_run_with_an_exported_qwen_tokenizer(tmp_path):
    source, out = tmp_path / 'in', tmp_path / 'out'
    source.mkdir(), out.mkdir()
    (source / 'tokenizer.json').write_text(qwen_vocabulary.qwen_tokenizer().to_json())
    ends = '{"eos_token": "<|endoftext|>"}'  # of a base model; turns end with another token
    (source / 'special_tokens_map.json').write_text(ends)
    ours = hf_folder.write(out, source)
    (out / 'config.json').write_text('{"model_type": "qwen2"}')
    theirs = auto_tokenizer(out)
    assert theirs.eos_token == '<|im_end|>'
    texts = [t for t in world_texts() + hostile_texts(500) if '<|' not in t]
    assert theirs(texts, add_special_tokens=False)['input_ids'] == ours.encode_batch(texts)
    text = '<|im_start|>user\n\nTurn 1<|im_end|>\n'
    assert theirs(text)['input_ids'] == tokenize(ours, text)


def auto_tokenizer(folder):
    from transformers import AutoTokenizer

    return AutoTokenizer.from_pretrained(folder)


def test_chats_of_transformers_match_those_of_the_run(exported, theirs):
    chat = build_chat(load_tokenizer(DEMO_MODEL))
    messages = [message('system', 'sokoban\n'), message('user', '\nTurn 1:\n#_P\n')]
    pieces = [*chat.episode_prefix('sokoban\n', '\nTurn 1:\n#_P\n'), *chat.answer_open('')]
    for answer, text in (('Up || Left', 'Turn 2:\n##\n'), ('<think>no', 'x')):
        ids = theirs.apply_chat_template(messages, add_generation_prompt=True, return_dict=False)
        assert ids == pieces
        rendered = theirs.apply_chat_template(messages, add_generation_prompt=True, tokenize=False)
        assert rendered == rendering.render(theirs.chat_template, messages)
        messages += [message('assistant', answer), message('user', text)]
        pieces += [*chat.tokenizer.encode(answer), chat.end_id]
        pieces += [*chat.user_open(text), *chat.answer_open('')]
    assert (theirs.eos_token, theirs.pad_token) == ('<|im_end|>', '<|endoftext|>')


@pytest.mark.soak
def test_generate_returns_the_greedy_answers_of_the_run_and_stops(finished, exported):
    import torch
    import transformers

    cfg, workdir = finished
    run = build(cfg)
    validation = run.validation
    policy = saved_policy(run.config, run.model, run.mesh, run.params, str(workdir))
    rollout, _ = jax.device_get(
        validation.collect(policy, validation.task, validation.episodes, jax.random.key(0))
    )
    model = transformers.AutoModelForCausalLM.from_pretrained(exported, dtype=torch.float32)
    ends, compared = set(run.tokenizer.eos_ids), 0
    for tokens, sampled, turn in zip(
        rollout.tokens, rollout.action_mask, rollout.turn, strict=True
    ):
        for k in range(turn.max() + 1):
            answer = np.flatnonzero(sampled & (turn == k))
            ids = torch.tensor(tokens[None, : answer[0]], dtype=torch.long)
            out = model.generate(ids, attention_mask=torch.ones_like(ids))[0, ids.shape[1] :]
            assert out.tolist() == tokens[answer].tolist()
            compared += out[-1].item() in ends
    assert compared > 12  # turns that the policy ended itself


def test_the_folder_contains_end_tokens_and_length_limits(finished, exported):
    tokenizer = load_tokenizer(DEMO_MODEL)
    end, over = tokenizer.special('<|im_end|>'), tokenizer.special('<|endoftext|>')
    hf = json.loads((exported / 'config.json').read_text())
    assert (hf['eos_token_id'], hf['pad_token_id'], hf['bos_token_id']) == (end, over, None)
    assert hf['max_position_embeddings'] == finished[0].rollout.max_tokens
    assert json.loads((exported / 'generation_config.json').read_text()) == {
        'bos_token_id': None,
        'eos_token_id': [end, over],
        'pad_token_id': over,
        'do_sample': False,
        'max_new_tokens': finished[0].rollout.max_response,
    }


@pytest.mark.soak
def test_the_folder_loads_to_the_exported_policy(finished, exported):
    cfg, workdir = finished
    run = build(cfg)
    policy = saved_policy(run.config, run.model, run.mesh, run.params, str(workdir))
    config, params = weights.load_model(exported)
    assert config == run.model
    jax.tree.map(np.testing.assert_array_equal, params, jax.device_get(policy))
    cfg = cfg.copy_and_resolve_references()
    cfg.model.path = str(exported)
    metrics = evaluate.evaluate(cfg, '', str(workdir / 'again'), None)
    expected = evaluate.evaluate(finished[0], str(workdir), str(workdir / 'first'), None)
    assert metrics == expected


def with_bias(tmp_path, value):
    """A llama folder with attention biases; the last bias is `value`."""
    tensors = tiny_models.hf_tensors(tiny_models.TINY)
    for i in range(2):
        tensors[f'model.layers.{i}.self_attn.o_proj.bias'] = np.full(64, value, np.float32)
    return tiny_models.write_folder(
        tmp_path / 'm', tiny_models.TINY, tensors, model_type='llama', attention_bias=True
    )


def test_an_attention_output_bias_is_dropped_if_zero_and_rejected_otherwise(tmp_path):
    config, params = weights.load_model(with_bias(tmp_path, 0.0))
    assert config == tiny_models.TINY
    ours = tiny_models.by_hf_name(params)
    assert ours.keys() == tiny_models.hf_tensors(tiny_models.TINY).keys()
    (tmp_path / 'other').mkdir()
    with pytest.raises(ValueError, match='layers.0.self_attn.o_proj.bias other than zero'):
        weights.load_model(with_bias(tmp_path / 'other', 0.1))


@pytest.mark.parametrize(
    ('settings', 'named'),
    [
        ({'add_dummy_prefix': True}, 'changed'),
        ({'byte_fallback': False}, 'byte_fallback'),
        ({'model_type': 'bpe'}, 'changed'),
        ({'control_symbols': ['<|im_end|>']}, 'im_start'),
    ],
)
def test_sentencepiece_models_of_other_kinds_are_rejected(settings, named):
    options = dict(vocab_size=340, byte_fallback=True, hard_vocab_limit=False, minloglevel=2)
    options |= dict(control_symbols=list(CHAT_SPECIALS), bos_id=-1, eos_id=-1, num_threads=1)
    options |= dict(normalization_rule_name='identity', remove_extra_whitespaces=False)
    model = io.BytesIO()
    sentencepiece.SentencePieceTrainer.train(
        sentence_iterator=iter(world_texts()[:200]),
        model_writer=model,
        **options | dict(add_dummy_prefix=False) | settings,
    )
    with pytest.raises(ValueError, match=named):
        unigram.load_model(model.getvalue(), 'changed')
