"""Facts about a small run compiled for an absent accelerator, from its compiled text, as JSON.

  python tests/accelerator_facts.py TOPOLOGY PROGRAM [FIELD=VALUE ...]

It is a separate process, since jax finds its plugins when its backend starts.
"""

import json
import sys

from agentrl_jax.planning import hardware

if __name__ == '__main__':
    hardware.prepare([f'--topology={sys.argv[1]}'])

import hlo

from agentrl_jax.planning import programs as plan_programs
from configs import small

EPISODES, TOKENS = 64, 384
SMALL = {
    'model.dtype': 'bfloat16',
    'model.hidden_size': 256,
    'model.num_layers': 2,
    'model.remat': True,
    'model.scan_layers': True,
    'rollout.num_groups': 8,
    'rollout.group_size': 8,
    'rollout.max_tokens': TOKENS,
    'rollout.serve_rows': 16,
    'batch.minibatch_rows': 64,
    'batch.microbatch_rows': 32,
    'env.train_levels': 64,
    'env.eval_levels': 64,
    'clone.episodes': 0,
    'algorithm': 'ppo',
}


def facts(topology, name, **fields):
    cfg = small.get_config()
    cfg.update_from_flattened_dict(SMALL | fields)
    shapes = plan_programs.shapes(cfg, hardware.find(topology).devices)
    config, mesh = shapes.config, shapes.mesh.shape
    rows = EPISODES // (mesh['data'] * mesh['fsdp'])
    cache = rows * TOKENS * config.num_kv_heads * config.head_dim * 2 // mesh['tensor']
    function, arguments = getattr(shapes, name)
    compiled = function.trace(*arguments).lower().compile()
    text = compiled.as_text()
    program = hlo.read(text)
    moved = hlo.collectives_in_loops(program)
    return {
        'fused_attention': hlo.fused_attention(text),
        'copies_of_a_cache': [one.shape for one in hlo.copies(program, cache)],
        'scores': sorted(hlo.square_arrays(program, TOKENS)),
        'largest_transfer': max((one.bytes for one in moved), default=0),
        'logits': rows * config.vocab_size * 4,
        'state': plan_programs.device_bytes(shapes.state),
        'donated': compiled.memory_analysis().alias_size_in_bytes,
    }


if __name__ == '__main__':
    fields = dict(word.split('=', 1) for word in sys.argv[3:])
    result = facts(*sys.argv[1:3], **{name: json.loads(x) for name, x in fields.items()})
    print(json.dumps(result))
