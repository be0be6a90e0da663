"""Every field of a run, with its default: RAGEN's StarPO sizes on FrozenLake (its main branch).

Other configs start from get_config() here and change fields. A field that is not here does not
exist: a mistyped name is an error before anything runs. A placeholder has no value until one is
set: each algorithm takes that of its own paper (agentrl_jax/algorithms/PRESETS.md), and one that
does not know the field rejects it. In full, with these values, a config is printed by
  python -m agentrl_jax.train --config=configs/... --show_config
"""

import ml_collections
from ml_collections.config_dict import placeholder


def _signal(action: str, limit: float, patience: int) -> ml_collections.ConfigDict:
    return ml_collections.ConfigDict(dict(action=action, limit=limit, patience=patience))


def get_config() -> ml_collections.ConfigDict:
    cfg = ml_collections.ConfigDict()
    cfg.seed = 0
    cfg.steps = 200  # rollout-update cycles
    cfg.algorithm = 'ppo'  # a name in agentrl_jax.algorithms.ALGORITHMS

    cfg.env = ml_collections.ConfigDict()
    cfg.env.name = 'frozen_lake'  # a name in agentrl_jax.envs.ENVIRONMENTS and of a section below
    cfg.env.mix = ()  # ((world, share of the groups), ...): several worlds, in the place of name
    cfg.env.prompt = 'ragen'  # wording: a name in agentrl_jax.text.prompts.STYLES
    cfg.env.think = True  # answers open with <think>; False: with <answer>
    cfg.env.max_turns = 5
    cfg.env.max_actions_per_turn = 5  # further actions of an answer are cut
    cfg.env.max_actions_per_episode = 10
    cfg.env.format_penalty = -0.1  # for a turn whose answer is not well formed
    cfg.env.max_words = 100  # named in the prompt only
    cfg.env.train_levels = 4096  # size of the training pool
    cfg.env.eval_levels = 256  # size of the validation and test pools, and episodes played
    cfg.env.pool_seed = 0  # pools of different splits never share a map

    cfg.agent = ml_collections.ConfigDict()
    cfg.agent.name = 'act'  # turns beside those that act: plan (a plan is written before a trial's
    # first action), reflect (after a failed trial what went wrong is written); act and react: none
    cfg.agent.trials = 1  # times that a level is tried, which share env.max_turns evenly
    cfg.agent.plan_every = 0  # a plan is written anew after so many turns that act; 0 = never
    cfg.agent.reward = 'whole'  # of an episode: the sum of its trials; gain: that of the last one,
    # for each trial takes back what the one before earned

    cfg.frozen_lake = ml_collections.ConfigDict()
    cfg.frozen_lake.size = 4
    cfg.frozen_lake.observation_format = 'grid'  # grid, cells (' P _': for BPE), coord, grid_coord
    cfg.frozen_lake.frozen = 0.8  # probability that a cell is ice
    cfg.frozen_lake.success_rate = 1.0 / 3.0  # probability that a move goes where it should

    cfg.sokoban = ml_collections.ConfigDict()
    cfg.sokoban.dim = 6  # side of the room, walls included
    cfg.sokoban.num_boxes = 1
    cfg.sokoban.search_depth = 300
    cfg.sokoban.observation_format = 'grid'  # grid, cells (' # P': for BPE), coord, grid_coord
    cfg.sokoban.symbols = '#_O√XPS'  # wall, floor, target, box on target, box, player, on target

    cfg.bandit = ml_collections.ConfigDict()
    cfg.bandit.pairs = 'main'  # which arm names: a key of envs.bandit.PAIRS

    cfg.library = ml_collections.ConfigDict()
    cfg.library.cards = 8  # cards of a level; 16 people may be asked for
    cfg.library.min_hops = 1  # lookups that a question needs, at least ...
    cfg.library.max_hops = 3  # ... and at most; the answer takes a turn more
    cfg.library.side = 4  # side x side boxes: a guess is right one time in so many
    cfg.library.tool_reward = 0.2  # for a lookup that finds a card not shown before
    cfg.library.presence_reward = 0.5  # more, if it is the card with the answer
    cfg.library.answer_reward = 1.5  # for the right answer: exact match 1.0 and presence 0.5
    cfg.library.graded = False  # outcome: word F1 of the answer; False: exact match
    cfg.library.lookup_cost = 0.0  # taken off a lookup, times the lookups so far

    cfg.babyai = ml_collections.ConfigDict()
    cfg.babyai.levels = 'all'  # names in envs.babyai.pool.LEVELS, with commas; they share the pool
    cfg.babyai.solvable = False  # without levels for which the expert finds no way
    cfg.babyai.train_ids = ''  # AgentGym's numbers of levels, such as 0:810, in place of the above
    cfg.babyai.test_ids = ''  # the same for validation and test
    cfg.babyai.actions = 'primitive'  # primitive: MiniGrid's six; macro: AgentGym's, such as go to
    # red ball 1; then one action a turn
    cfg.babyai.brief = False  # macro: short lines, and no list of the actions on offer
    cfg.babyai.agentgym_wording = False  # macro: its texts; the order of two tasks is not told
    cfg.babyai.agentgym_rewards = False  # macro: its score; late success does not end an episode
    cfg.babyai.most_seen = 12  # objects that an observation names, the nearest ones

    cfg.reward = ml_collections.ConfigDict()
    cfg.reward.function = ''  # module:name of a function of one's own, whose rewards take the place
    # of the world's (agentrl_jax/rollout/README.md); '' = those that the world pays

    # Worlds on hosts: their names are those of agentrl_jax.envs.hosts.HOSTS
    cfg.hosts = ml_collections.ConfigDict()
    cfg.hosts.answer_prefix = ''  # forced in front of each answer, such as '<think>'
    cfg.hosts.stop = ()  # texts that end a turn when the policy has written them
    cfg.hosts.max_observation = 512  # tokens of a text of a world; the middle of longer ones is cut
    cfg.hosts.read_tokens = 32  # of a row in a block: longer texts are read in several blocks
    cfg.hosts.poll = 8  # at most so many tokens are sampled before replies are looked for
    cfg.hosts.timeout_s = 120.0  # a world that is later is left behind, and a fresh one takes over
    cfg.hosts.tries = 3  # of a step, each in a fresh world, before its episode is a faulty one
    cfg.hosts.outage_s = 3600.0  # the run waits for so long when no world can be reached
    cfg.hosts.min_healthy = 0.5  # share of a rollout's episodes that must not be faulty

    cfg.gymnasium = ml_collections.ConfigDict()  # any environment of Gymnasium's that can be read
    cfg.gymnasium.id = ''  # such as FrozenLake-v1
    cfg.gymnasium.keywords = '{}'  # of gymnasium.make, JSON, such as {"render_mode": "ansi"}
    cfg.gymnasium.actions = ()  # names of numbered actions; () = their numbers
    cfg.gymnasium.instruction = ''  # what the task is

    cfg.objects = ml_collections.ConfigDict()  # any Python object with reset(item) and step(action)
    cfg.objects.make_object = ''  # package.module:callable, called once for each world
    cfg.objects.instruction = ''  # what the task is
    cfg.objects.deterministic = True  # the same item and actions give the same replies
    cfg.objects.num_items = 1000

    cfg.textcraft = ml_collections.ConfigDict()  # AgentGym's TextCraft
    cfg.textcraft.prompt = 'agentgym'  # or 'short'
    cfg.textcraft.wording = 'agentgym'  # 'plain': names as typed; 'drawn': single words, drawn anew
    cfg.textcraft.distractors = 10  # recipes shown that the goal does not need
    cfg.textcraft.depths = (1, 2, 3, 4)  # of goals: crafts one upon another
    cfg.textcraft.most_recipes = 0  # shown that a goal needs; 0 = any number
    cfg.textcraft.most_commands = 0  # of the planner to a goal; 0 = any number
    cfg.textcraft.variants = 1  # items of a goal, each among other recipes that it does not need
    cfg.textcraft.urls = ()  # of servers; () = in this process, or launch
    cfg.textcraft.launch = 0  # processes of a server that the run starts for itself
    cfg.textcraft.room = 64  # worlds in each of them
    cfg.textcraft.token = ''  # file whose first line the servers ask for
    cfg.textcraft.timeout_s = 60.0  # of a call to a server
    cfg.textcraft.item_files = ()  # AgentGym's, of train, validation and test; () = our splits

    cfg.sciworld = ml_collections.ConfigDict()  # AgentGym's ScienceWorld; needs Java 17
    cfg.sciworld.max_moves = 100
    cfg.sciworld.scale = 1.0  # of rewards, which add up to 100 at the end of a task
    cfg.sciworld.shifted = False  # items as in AgentGym's file without a task
    cfg.sciworld.heap_mb = 1024  # of a process' JVM
    cfg.sciworld.urls = ()
    cfg.sciworld.launch = 0
    cfg.sciworld.room = 64
    cfg.sciworld.token = ''
    cfg.sciworld.timeout_s = 60.0
    cfg.sciworld.item_files = ()

    cfg.search = ml_collections.ConfigDict()  # questions, and a search engine
    cfg.search.dialect = 'plain'  # or agentgym (SearchQA's), search_r1, mt_grpo (a tool in JSON)
    cfg.search.rewards = 'exact'  # match; or format (Search-R1 v0.3), mt_grpo, mt_ppo
    cfg.search.normaliser = 'squad'  # of answers that are compared; or triviaqa, as_written
    cfg.search.retries = True  # a wrong answer may be followed by another, as in AgentGym
    cfg.search.turns = 0  # the last of so many earns the outcome; 0: env.max_turns cuts it
    cfg.search.calls = 0  # end an episode, the last one not carried out (MT-GRPO 2); 0 = any number
    cfg.search.topk = 0  # documents of a result; 0 = the dialect's: 3, MT-GRPO 1
    cfg.search.corpus = ''  # http://... of a retriever, folder of an index, or file; '' = countries
    cfg.search.questions = ()  # files of train, validation and test; () = about countries
    cfg.search.hops = (1, 2)  # of the questions about countries
    cfg.search.about = ('country', 'region')  # what these ask about
    cfg.search.longest_name = 0  # letters of that, of one word of A to Z; 0 = any name
    cfg.search.urls = ()
    cfg.search.launch = 0
    cfg.search.room = 64
    cfg.search.token = ''
    cfg.search.timeout_s = 60.0
    cfg.search.item_files = ()

    cfg.shop = ml_collections.ConfigDict()  # WebShop: find a product, choose its options, buy it
    cfg.shop.prompt = 'long'  # or short
    cfg.shop.rewards = 'score'  # of the purchase; or success: 1 for a score of 1, else 0 (RAGEN)
    cfg.shop.list_actions = True  # below each page; AgentGym's does not
    cfg.shop.files = ()  # WebShop's, of products and of instructions; () = the seed's
    cfg.shop.products = 1000  # that the seed draws
    cfg.shop.seed = 0
    cfg.shop.stalls = 0  # an item has one of so many shops to itself, of few products; 0 = one shop
    cfg.shop.urls = ()
    cfg.shop.launch = 0
    cfg.shop.room = 64
    cfg.shop.token = ''
    cfg.shop.timeout_s = 60.0
    cfg.shop.item_files = ()

    cfg.miniwob = ml_collections.ConfigDict()  # MiniWoB++: small tasks on pages in Chromium
    cfg.miniwob.prompt = 'long'  # or short
    cfg.miniwob.rewards = 'score'  # -1 to 1, as the page says; success: 1 for a 1, else 0
    cfg.miniwob.tasks = ()  # names of pages; () = those that the expert knows
    cfg.miniwob.seeds = 100  # of each task, an item each
    cfg.miniwob.settle_s = 10.0  # that a page may take to come to rest
    cfg.miniwob.urls = ()
    cfg.miniwob.launch = 0
    cfg.miniwob.room = 16
    cfg.miniwob.token = ''
    cfg.miniwob.timeout_s = 60.0
    cfg.miniwob.item_files = ()

    cfg.web = ml_collections.ConfigDict()  # WebArena, on sites that you host
    cfg.web.tasks = ''  # file of tasks, such as test.raw.json of libwebarena
    cfg.web.sites = ()  # name=address: the only addresses that pages can reach
    cfg.web.states = ''  # folder of cookies of those who are logged in; '' = nobody is
    cfg.web.prompt = 'long'  # or short
    cfg.web.judge = ''  # module:function of answers that need not be literal; '' = none
    cfg.web.login = 'admin:admin1234'  # of the shop's administrator, for programs that ask it
    cfg.web.settle_s = 10.0  # that a page may take to come to rest
    cfg.web.urls = ()
    cfg.web.launch = 0
    cfg.web.room = 16
    cfg.web.token = ''
    cfg.web.timeout_s = 120.0
    cfg.web.item_files = ()

    cfg.agentgym = ml_collections.ConfigDict()  # another environment of AgentGym, on its servers
    cfg.agentgym.env = ''  # of agentrl_jax.envs.hosts.agentgym.ENVIRONMENTS
    cfg.agentgym.urls = ()
    cfg.agentgym.instruction = ''  # '' = AgentGym's, where this package knows it
    cfg.agentgym.num_items = 0
    cfg.agentgym.item_files = ()
    cfg.agentgym.token = ''
    cfg.agentgym.timeout_s = 60.0

    cfg.openenv = ml_collections.ConfigDict()  # an environment of OpenEnv, on its server
    cfg.openenv.url = ''
    cfg.openenv.action_field = ''  # of its Action that takes what the policy writes
    cfg.openenv.observation_field = ''  # of its Observation that is shown; '' = all of it, as JSON
    cfg.openenv.item_field = 'seed'  # of reset that takes the item
    cfg.openenv.instruction = ''
    cfg.openenv.deterministic = False
    cfg.openenv.errors_are_shown = False  # what an action raises there is no fault
    cfg.openenv.num_items = 1000
    cfg.openenv.timeout_s = 60.0

    cfg.model = ml_collections.ConfigDict()
    # HuggingFace folder (hf download ...), .gguf, or the workdir of a run (or its folder best);
    # '' = random weights of the sizes below
    cfg.model.path = ''
    cfg.model.tokenizer = ''  # folder, .gguf or .model; '' = that of path, or the bundled one
    cfg.model.dtype = 'float32'  # compute dtype; parameters and optimiser stay float32
    cfg.model.remat = False  # recompute activations in the backward pass, layer by layer
    cfg.model.scan_layers = placeholder(bool)  # training runs the layers as one loop, which
    # makes a small program of a deep model; unset: with remat, from 8 layers on
    cfg.model.hidden_size = 128
    cfg.model.intermediate_size = 256
    cfg.model.num_layers = 4
    cfg.model.num_heads = 4
    cfg.model.num_kv_heads = 2
    cfg.model.tie_embeddings = True  # one matrix for the embedding and the output head
    cfg.model.rope_theta = 1e6  # base of the rotary positions

    cfg.lora = ml_collections.ConfigDict()  # RAGEN with LoRA: rank 64, lr 1e-5, critic_lr 1e-4
    cfg.lora.rank = 0  # of trained corrections to the frozen kernels; 0 = train all parameters
    cfg.lora.alpha = 64.0  # corrections are scaled by alpha / rank
    cfg.lora.targets = 'all-linear'  # or some of q_proj,k_proj,v_proj,o_proj,gate_proj,up_proj,...

    cfg.rollout = ml_collections.ConfigDict()
    cfg.rollout.num_groups = 8  # different levels (prompts) per step
    cfg.rollout.group_size = 16  # episodes per level
    cfg.rollout.max_tokens = 3072  # tokens of an episode, prompts included
    cfg.rollout.max_response = 400  # sampled tokens of a turn
    cfg.rollout.temperature = 1.0
    cfg.rollout.sampler_dtype = ''  # compute dtype of playing; '' = model.dtype
    cfg.rollout.slots = 0  # episodes played at once; 0 = all
    cfg.rollout.serve_rows = 8  # waiting slots that are served together
    cfg.rollout.read_tokens = 0  # tokens of a waiting slot that are read at a time, where prompts
    # differ much in length; 0 = all of a prompt, in a block as wide as the longest can be
    cfg.rollout.stop_at_answer = False  # end a turn at </answer>; else at the end-of-turn token
    cfg.rollout.common_random_numbers = False  # members of a group share the world's luck

    cfg.curriculum = ml_collections.ConfigDict()  # ScalingInter-RL; validation plays max_turns
    cfg.curriculum.rounds = ()  # turns of an episode stage by stage, such as (2, 3, 5); () = off
    cfg.curriculum.stage_steps = 100  # steps of a stage; the last stage lasts to the end
    cfg.curriculum.interpolate = False  # climb evenly within a stage instead of at its end

    cfg.context = ml_collections.ConfigDict()
    cfg.context.window = 0  # turns the policy sees, this one included; 0 = the whole conversation
    cfg.context.summary = 0  # with window=1: earlier turns that each prompt tells in words

    cfg.filter = ml_collections.ConfigDict()
    # Which groups train, by the std of their raw returns: top_k (a share of them), top_p and
    # top_p_softmax (a share of their sum), min_p, percentile, varied (all that vary: DAPO), all;
    # within_group keeps members
    cfg.filter.rule = placeholder(str)
    cfg.filter.keep = 1.0  # top_k: share of groups; within_group: share of a group's episodes
    cfg.filter.smallest = False  # top_k: those with the smallest spread instead
    cfg.filter.p = 0.9  # top_p, top_p_softmax: share of the sum; min_p: of the largest
    cfg.filter.eps = 0.01  # top_p: what may be lacking
    cfg.filter.include_zero = placeholder(bool)  # top_p, min_p (False), top_p_softmax (True): may
    # groups without any spread be kept
    cfg.filter.low = 0.0  # percentile: first rank kept, from the largest, as a share
    cfg.filter.high = 1.0  # ... and the first one no longer kept
    cfg.filter.compact = True  # top_k, percentile: the others are left out of the update, which
    # saves their compute; False, and all other rules: they weigh 0
    cfg.filter.soft = False  # advantages x the group's spread / the largest
    cfg.filter.scaling = 'none'  # advantages x the share kept: none, linear, sqrt
    cfg.filter.refill = placeholder(int)  # dynamic sampling: further rollouts of other levels until
    # the batch is full of kept groups, at most so many; 0 = none
    cfg.filter.max_empty = 5  # steps in a row that keep nothing end the run; 0 = never

    cfg.loss = ml_collections.ConfigDict()
    cfg.loss.clip_low = placeholder(float)  # the ratio is clipped to 1 - clip_low
    cfg.loss.clip_high = placeholder(float)  # ... and 1 + clip_high
    cfg.loss.dual_clip = placeholder(float)  # bound of the loss at negative advantages; 0 = none
    cfg.loss.entropy_coef = placeholder(float)  # weight of the entropy, which is to be large
    cfg.loss.kl_coef = placeholder(float)  # weight of the KL to the start policy; 0 = no reference
    cfg.loss.kl_in = placeholder(str)  # loss or reward
    cfg.loss.kl_estimator = placeholder(str)  # k1, k2, k3; k1+, k3+: that with the gradient of k2
    cfg.loss.kl_target = 0.0  # adaptive coefficient: KL per token to steer to (others count it per
    # sequence, which is as many times more as answers have tokens); 0 = fixed
    cfg.loss.kl_horizon = 10000.0  # episodes over which the adaptive coefficient reacts
    cfg.loss.aggregation = placeholder(str)  # token_mean, seq_mean_token_mean, seq_mean_token_sum,
    # token_sum_norm
    cfg.loss.gamma = placeholder(float)  # discount, per action token
    cfg.loss.lam = placeholder(float)  # lambda of GAE, per action token
    cfg.loss.reward_on = placeholder(str)  # turn: each reward at its turn's end; episode: all at
    # the last
    cfg.loss.whiten = placeholder(bool)  # advantages to mean 0, variance 1 over action tokens
    cfg.loss.norm_length = placeholder(int)  # of token_sum_norm
    cfg.loss.norm = placeholder(str)  # comparison in a group: std, mean, none (gigpo: mean)
    cfg.loss.eps = placeholder(float)  # added to a group's std (grpo 1e-6, mt_grpo 1e-4)
    cfg.loss.std_floor = placeholder(float)  # smaller stds of a group count as this (0)
    cfg.loss.max_length = placeholder(int)  # dapo: sampled tokens of an episode; 0 = no penalty
    cfg.loss.overlong_buffer = placeholder(int)  # dapo: last tokens before max_length that cost
    cfg.loss.overlong_coef = placeholder(float)  # dapo: penalty at max_length
    cfg.loss.estimator = placeholder(str)  # ppo's GAE: token (the default), turn, bi_level
    cfg.loss.reward_normalization = placeholder(str)  # ppo, reward_on='episode': identity (the
    # default), mean, mean_std or asym_clip of the returns of a group
    cfg.loss.bootstrap_truncated = placeholder(bool)  # ppo: episodes cut by a budget of turns or
    # tokens go on with the critic's value; False: they are over
    cfg.loss.sampler_correction = 'off'  # for a sampler that is not the trainer: pi_trainer /
    # pi_sampler as a factor of advantages, clipped (tis) or 0 outside the bounds (icepop)
    cfg.loss.sampler_low = placeholder(float)  # lower bound of the factor (tis 0, icepop .5)
    cfg.loss.sampler_high = placeholder(float)  # upper bound (tis 2, icepop 5)
    cfg.loss.sampler_sequence = False  # one factor for an episode, the product of its tokens'
    cfg.loss.value_clip = 0.5
    cfg.loss.value_coef = 1.0  # weight of the value loss with critic.share_backbone; that loss is
    # in squared units of the return: returns up to 10 call for a hundredth of what suits 1

    cfg.parity = ml_collections.ConfigDict()  # what reference implementations do, for comparison
    # Tokens that train: sampled (those of the policy), answers (also the chat markers around them:
    # RAGEN's leak), all (everything behind the system message)
    cfg.parity.loss_on = 'sampled'
    cfg.parity.microbatch_means = False  # losses are averaged in each micro-batch, then over them
    cfg.parity.filter_normalised = False  # the filter ranks returns that are normalised already

    cfg.turn_credit = ml_collections.ConfigDict()  # mt_grpo and gspo_turn, where no other is named
    cfg.turn_credit.mode = placeholder(str)  # a name in agentrl_jax.rl.turn_credit.MODES: or, mr,
    # mt_v1, mt_cumulative, mt_local, gtpo, hybrid, flattened
    cfg.turn_credit.outcome = placeholder(str)  # answer, final, success, return: see
    # agentrl_jax/algorithms/mt_grpo.py
    cfg.turn_credit.turn_coef = placeholder(float)  # weight of the turn rewards (1)
    cfg.turn_credit.outcome_coef = placeholder(float)  # weight of the outcome (1)
    # Discount per turn: modes gtpo and hybrid (.9), gigpo (.95), ppo with loss.estimator turn or
    # bi_level (1)
    cfg.turn_credit.turn_gamma = placeholder(float)
    cfg.turn_credit.scale = placeholder(str)  # turn_grpo, vine: advantages by their rms in the
    # batch (rms) or in units of the return (none)
    cfg.turn_credit.step_coef = placeholder(float)  # gigpo: weight of the step advantage (1)

    cfg.fork = ml_collections.ConfigDict()  # vine: episodes are rewound and played on
    cfg.fork.turns = placeholder(str)  # from whose starts: every (the default), ahead (one, drawn
    # for each episode before it is played), or numbers such as 1,2; the first turn is 0
    cfg.fork.continuations = placeholder(int)  # from each of these turns that is reached (2)
    cfg.fork.train = placeholder(str)  # weighted (the default): the first turn of a continuation
    # trains too, at 1 / (1 + continuations) each; trunks: only episodes train
    cfg.fork.value_every = 0  # ppo: steps between measurements of the critic (value/vine_error): a
    # step's episodes are played again, with two continuations of each later turn; 0 = off

    cfg.critic = ml_collections.ConfigDict()
    cfg.critic.share_backbone = False  # a value head on the policy instead of a model of its own
    cfg.critic.warmup_steps = 0  # first steps in which only a critic of its own is trained

    cfg.optim = ml_collections.ConfigDict()
    cfg.optim.lr = 1e-6
    cfg.optim.critic_lr = 1e-5
    cfg.optim.beta1 = 0.9
    cfg.optim.beta2 = 0.999
    cfg.optim.weight_decay = 0.01
    cfg.optim.max_grad_norm = 1.0  # global norm
    cfg.optim.warmup_steps = 0  # optimiser steps of linear warm-up
    cfg.optim.schedule = 'constant'  # of both rates behind the warm-up: constant, linear, cosine
    cfg.optim.schedule_steps = 0  # optimiser steps until the rates are at their end; needed for
    # linear and cosine, so that a longer run is the same run
    cfg.optim.final_lr = 0.0  # where linear and cosine end, as a share of the rate

    cfg.batch = ml_collections.ConfigDict()
    cfg.batch.minibatch_rows = 32  # episodes per optimiser step
    cfg.batch.microbatch_rows = 8  # episodes per forward and backward pass
    cfg.batch.epochs = 1  # passes over a rollout
    cfg.batch.shuffle = False  # draw the episodes of optimiser steps anew in each pass
    cfg.batch.head_chunk = 1024  # tokens per chunk of the output head
    cfg.batch.widths = 1  # micro-batches of rows of like length are cut to the longest: so many
    # widths are compiled, for updates and cloning; 1 = all are as wide as rollout.max_tokens

    cfg.mesh = ml_collections.ConfigDict()
    cfg.mesh.data = -1  # rows; -1 = all devices that remain
    cfg.mesh.fsdp = 1  # rows and parameters
    cfg.mesh.tensor = 1  # heads and hidden units

    cfg.clone = ml_collections.ConfigDict()
    cfg.clone.file = ''  # trajectories to clone (AgentTraj's .json, .jsonl); '' = own ones:
    cfg.clone.episodes = 0  # own demonstrations cloned before step 0; 0 = none
    cfg.clone.oracle = 0.5  # share of turns played by the oracle, the rest at random
    cfg.clone.thoughts = False  # their thoughts name what the expert would do from there; False:
    # they are empty
    # Limits of own demonstrations; 0 = those of env and rollout. If they are set, arms whose
    # episodes differ can start from one clone.
    cfg.clone.max_turns = 0
    cfg.clone.max_actions_per_turn = 0
    cfg.clone.max_actions_per_episode = 0
    cfg.clone.max_tokens = 0
    cfg.clone.steps = 300  # optimiser steps
    cfg.clone.batch = 64  # episodes per step
    cfg.clone.microbatch_rows = 0  # episodes per forward and backward pass; 0 = all of a step
    cfg.clone.lr = 1e-3  # falls linearly to 0
    cfg.clone.keep_in = ''  # folder, below the workdir ('../clones'), whose clones runs share; '' =
    # every run clones for itself

    cfg.evol = ml_collections.ConfigDict()  # algorithm agent_evol
    cfg.evol.threshold = placeholder(float)  # episodes whose return is above are imitated (0)
    cfg.evol.weights = placeholder(str)  # of an episode: its return (reward, the default) or equal
    cfg.evol.iteration = 50  # steps in which the policy of the first one explores
    cfg.evol.restart = True  # each iteration learns from the policy of step 0, not the last one
    cfg.evol.base_rows = 0  # demonstrations (those of cfg.clone) that join each step's episodes

    cfg.dpo = ml_collections.ConfigDict()  # algorithm dpo
    cfg.dpo.beta = placeholder(float)  # how much log-ratios to the start policy count (.1)
    cfg.dpo.pairs = placeholder(int)  # of a group: best with worst, second with second, ... (1)
    cfg.dpo.min_gap = placeholder(float)  # returns of a pair differ by more (.01)

    cfg.eval = ml_collections.ConfigDict()
    cfg.eval.every = 10  # steps; 0 = only at the start and the end
    cfg.eval.split = 'validation'  # validation or test
    cfg.eval.temperature = 0.5  # RAGEN; 0 = greedy
    cfg.eval.top_k = 0  # 0 = all
    cfg.eval.top_p = 1.0
    cfg.eval.samples = 1  # episodes a level: eval/success is their mean (mean@k), eval/pass_at_k
    # the share of levels that one of them solves
    cfg.eval.also = ()  # further splits to play at every validation, such as ('test',)
    cfg.eval.worlds = ()  # and other worlds, such as ('sokoban',), with their sections above

    cfg.checkpoint = ml_collections.ConfigDict()
    cfg.checkpoint.every = 50  # steps
    cfg.checkpoint.keep = 2  # newest ones kept
    cfg.checkpoint.best = False  # keep the policy of the best eval/success too, in workdir/best

    # What watches for collapse (agentrl_jax/measure/collapse.py). action: off, warn, stop or
    # roll_back; limit: a number, or a multiple of what the run has shown; patience: measurements
    # in a row
    cfg.alarm = ml_collections.ConfigDict()
    cfg.alarm.baseline_steps = 10  # first values whose mean is the run's start
    cfg.alarm.std_drop = _signal('warn', 0.1, 10)  # group/return_std below 0.1 x start (RAGEN)
    cfg.alarm.no_success = _signal('warn', 0.01, 5)  # eval/success below 0.01 (RAGEN)
    cfg.alarm.grad_spike = _signal('warn', 10.0, 3)  # policy/grad_norm above 10 x start
    cfg.alarm.entropy_drop = _signal('warn', 0.05, 10)  # policy/entropy below 0.05 x start
    cfg.alarm.entropy_rise = _signal('warn', 2.0, 10)  # policy/entropy above 2 x start
    cfg.alarm.information_drop = _signal('warn', 0.1, 3)  # collapse/mi_share below 0.1 x its best
    cfg.alarm.skipped = _signal('stop', 1e-6, 5)  # update/applied: no optimiser step was taken
    cfg.alarm.critic_skipped = _signal('stop', 1e-6, 5)  # update/critic_applied: none of the critic
    cfg.alarm.faults = _signal('warn', 0.2, 4)  # rollout/env_error above 0.2
    cfg.alarm.cut = _signal('warn', 0.2, 4)  # rollout/token_budget_stop above 0.2
    cfg.alarm.max_roll_backs = 2  # the next one is a stop
    cfg.alarm.roll_back_lr = 0.5  # factor of both learning rates for each roll back
    cfg.alarm.mi_every = 0  # steps between measurements of mutual information (RAGEN-2: 5); 0 = off
    cfg.alarm.mi_pairs = 64  # answers scored under every prompt
    cfg.alarm.mi_turns = 'first'  # first: first turns, a prompt per group; any: each its own prompt
    cfg.alarm.mi_text = 'reasoning'  # what is scored: reasoning (up to </think>) or answer (all)
    cfg.alarm.low_mi = 0.1  # collapse/quadrant: share of its bound below which information is low
    cfg.alarm.low_entropy = 0.05  # ... and nats a token below which entropy is low

    cfg.log = ml_collections.ConfigDict()
    cfg.log.tensorboard = False
    cfg.log.wandb_project = ''  # '' = off
    cfg.log.profile_steps = 0  # steps to trace once compiled, after every start; 0 = none
    cfg.log.rollouts_every = 50  # steps between saved rollout pages; 0 = only the last
    return cfg
