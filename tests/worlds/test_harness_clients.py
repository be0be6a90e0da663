"""Real, unmodified clients as harnesses: each finishes, and its conversations are as expected.

`make harness-clients` installs them; a test without its package is skipped. A script answers
instead of a policy.
"""

import asyncio
import importlib
import inspect
import json
import pathlib
import re
import sys
import threading

import pytest

from agentrl_jax.envs.hosts.harness.episode import End, Episode
from agentrl_jax.envs.hosts.harness.world import HarnessEnvironment, Task, endpoint
from agentrl_jax.envs.hosts.world import Answer, world_errors

openai = pytest.importorskip('openai')
ROOT = pathlib.Path(__file__).parents[2]
NODE = pathlib.Path(sys.prefix) / 'node_modules' / '.bin'
CALL = '<tool_call>\n{{"name": "{}", "arguments": {}}}\n</tool_call>'
WEATHER = CALL.format('weather', '{"city": "Oslo"}')


def weather(city: str) -> str:
    """Return the weather of a city.

    Args:
        city: where
    """
    return f'It rains in {city}.'


def play(harness, answers, branches=4, **settings):
    """Return (observations, result of the harness); the answers are used in order."""
    episode, server = Episode(branches=branches, **settings), endpoint('127.0.0.1', 0)
    task = Task(3, f'{server.open(episode)}/v1', episode.secret)

    def run():
        with world_errors(
            lambda error: episode.events.put(End(error=f'{type(error).__name__}: {error}'))
        ):
            returned = harness(task)
            if inspect.iscoroutine(returned):
                returned = asyncio.run(returned)
            episode.events.put(End(returned))

    threading.Thread(target=run, daemon=True).start()
    observations, remaining = [], list(answers)
    while not isinstance(event := episode.events.get(timeout=60), End):
        observations.append(event.new)
        answer = Answer(remaining.pop(0))
        answer.ids, answer.logprobs, answer.pieces = (1, 2), (-0.5, -1.0), (b'a', b'b')
        episode.answer(answer)
    server.close(episode)
    assert not event.error and not remaining, (event, remaining)
    return observations, event.returned


def flow(observations):
    """Return [(branch, opens, roles of new messages)]."""
    return [(x.branch, x.opens, [one['role'] for one in x.messages]) for x in observations]


def chat(task):
    """Play three turns with openai's client, and send its answer objects back."""
    client = openai.OpenAI(base_url=task.base_url, api_key=task.api_key)
    messages, choices = [{'role': 'system', 'content': 'S'}], []
    for text in 'abc':
        messages.append({'role': 'user', 'content': text})
        completion = client.chat.completions.create(
            model=task.model, messages=messages, logprobs=True
        )
        messages.append(completion.choices[0].message.model_dump())
        choices.append(completion.choices[0])
    return choices


def test_openais_client_continues_one_conversation():
    observations, choices = play(chat, ['A', ' B\n', 'C'])
    assert flow(observations) == [(0, True, ['system', 'user']), *2 * [(0, False, ['user'])]]
    assert [one.message.content for one in choices] == ['A', ' B\n', 'C']
    assert [one.logprob for one in choices[0].logprobs.content] == [-0.5, -1.0]


def test_the_readme_example_runs(tmp_path, monkeypatch):
    readme = ROOT / 'agentrl_jax' / 'envs' / 'hosts' / 'harness' / 'README.md'
    (code,) = re.findall(r'```python\n# my_agent.py\n(.*?)```', readme.read_text(), re.DOTALL)
    (tmp_path / 'my_agent.py').write_text(code)
    monkeypatch.syspath_prepend(tmp_path)
    example = importlib.import_module('my_agent')
    calls = [CALL.format('open_box', f'{{"colour": "{colour}"}}') for colour in ('blue', 'red')]
    observations, reward = play(example.play, calls)
    assert reward == 1.0 and flow(observations) == [(0, True, ['user']), (0, False, ['tool'])]
    assert play(example.play, ['I do not know.'])[1] == 0.0


def test_openais_client_streams():
    def streaming(task):
        client, messages = openai.OpenAI(base_url=task.base_url, api_key='k'), []
        for text in 'ab':
            messages.append({'role': 'user', 'content': text})
            answer = ''
            for chunk in client.chat.completions.create(
                model='m', messages=messages, stream=True, stream_options={'include_usage': True}
            ):
                for choice in chunk.choices:
                    answer += choice.delta.content or ''
            messages.append({'role': 'assistant', 'content': answer})
        return answer

    observations, answer = play(streaming, ['A', 'B'])
    assert answer == 'B' and flow(observations)[1] == (0, False, ['user'])


def test_openais_client_sends_concurrent_requests():
    async def at_once(task):
        client = openai.AsyncOpenAI(base_url=task.base_url, api_key='k')

        async def one(text):
            messages = [{'role': 'user', 'content': text}]
            return await client.chat.completions.create(model='m', messages=messages)

        completions = await asyncio.gather(*map(one, 'abc'))
        return [one.choices[0].message.content for one in completions]

    observations, texts = play(at_once, ['A', 'B', 'C'])
    assert sorted(texts) == ['A', 'B', 'C'] and {x.branch for x in observations} == {0, 1, 2}


def test_openais_client_does_not_retry_after_the_end():
    episode, server = Episode(), endpoint('127.0.0.1', 0)
    address = server.open(episode)
    server.close(episode)
    client = openai.OpenAI(base_url=f'{address}/v1', api_key='k')
    with pytest.raises(openai.APIStatusError) as error:
        client.chat.completions.create(model='m', messages=[{'role': 'user', 'content': 'U'}])
    assert error.value.status_code == 410


def run_agents(build):
    """Return a harness around an Agents SDK agent, which build(SDK, model of the task) creates."""
    agents = pytest.importorskip('agents')

    async def run(task):
        agents.set_tracing_disabled(True)
        client = openai.AsyncOpenAI(base_url=task.base_url, api_key='k')
        agent = build(agents, agents.OpenAIChatCompletionsModel(task.model, client))
        return (await agents.Runner.run(agent, 'The weather in Oslo?', max_turns=4)).final_output

    return run


def test_the_agents_sdk_calls_a_tool():
    def build(agents, model):
        tools = [agents.function_tool(weather)]
        return agents.Agent('clerk', instructions='Be brief.', tools=tools, model=model)

    observations, output = play(run_agents(build), [WEATHER, 'Rain.'])
    assert output == 'Rain.'
    assert flow(observations) == [(0, True, ['system', 'user']), (0, False, ['tool'])]
    assert observations[1].messages[0]['content'] == 'It rains in Oslo.'
    assert observations[0].tools[0]['function']['name'] == 'weather'


def test_a_handoff_of_the_agents_sdk_opens_a_conversation():
    def build(agents, model):
        poet = agents.Agent('poet', instructions='Answer in verse.', model=model)
        return agents.Agent('triage', instructions='Hand off.', handoffs=[poet], model=model)

    observations, output = play(
        run_agents(build), [CALL.format('transfer_to_poet', '{}'), 'It rains.']
    )
    assert output == 'It rains.' and [x.branch for x in observations] == [0, 1]
    assert observations[1].opens and observations[1].messages[0]['content'] == 'Answer in verse.'


def test_pydantic_ai_calls_a_tool_and_returns_a_typed_answer():
    pydantic_ai = pytest.importorskip('pydantic_ai')
    import pydantic
    from pydantic_ai.models.openai import OpenAIChatModel
    from pydantic_ai.providers.openai import OpenAIProvider

    class Out(pydantic.BaseModel):
        city: str
        rain: bool

    async def run(task):
        provider = OpenAIProvider(base_url=task.base_url, api_key='k')
        agent = pydantic_ai.Agent(
            OpenAIChatModel(task.model, provider=provider), output_type=Out, system_prompt='Short.'
        )

        agent.tool_plain(weather)
        return (await agent.run('The weather in Oslo?')).output

    final = CALL.format('final_result', '{"city": "Oslo", "rain": true}')
    observations, out = play(run, [WEATHER, final])
    assert out.rain and flow(observations) == [(0, True, ['system', 'user']), (0, False, ['tool'])]


# ---- the Responses and Messages APIs -------------------------------------------------------------

THINKING = '<think>\nLet me see.\n</think>\n\n'
SCHEMA = {'type': 'object', 'properties': {'city': {'type': 'string'}}}
RESPONSES_TOOL = {'type': 'function', 'name': 'weather', 'parameters': SCHEMA, 'strict': False}
MESSAGES_TOOL = {'name': 'weather', 'input_schema': SCHEMA}
TOOL_FLOW = [(0, True, ['system', 'user']), (0, False, ['tool'])]


async def by_id(client, history, new, previous, more):
    """Continue the previous response."""
    previous = previous and previous.id
    return await client.responses.create(input=new, previous_response_id=previous, **more)


async def by_items(client, history, new, previous, more):
    """Send all items back."""
    include = ['message.output_text.logprobs']
    reply = await client.responses.create(input=history, include=include, store=False, **more)
    assert (
        reply.output[-1].type != 'message' or reply.output[-1].content[0].logprobs[1].logprob == -1
    )
    return reply


async def streamed(client, history, new, previous, more):
    async with client.responses.stream(input=history, **more) as events:
        kinds = [event.type async for event in events]
        reply = await events.get_final_response()
    assert kinds[0] == 'response.created' and kinds[-1] == 'response.completed'
    return reply


@pytest.mark.parametrize('ask', [by_id, by_items, streamed])
def test_openais_client_continues_one_conversation_of_responses(ask):
    async def run(task):
        client = openai.AsyncOpenAI(base_url=task.base_url, api_key='k')
        more = dict(model=task.model, instructions='S', tools=[RESPONSES_TOOL])
        history, replies, item = [], [], {'role': 'user', 'content': 'Oslo?'}
        for _ in range(3):
            history.append(item)
            reply = await ask(client, history, [item], replies[-1] if replies else None, more)
            history += [one.model_dump() for one in reply.output]
            replies.append(reply)
            item = {'role': 'user', 'content': 'And?'}
            if reply.output[-1].type == 'function_call':
                item = {'type': 'function_call_output', 'output': 'Rain.'}
                item['call_id'] = reply.output[-1].call_id
        return replies

    answers = [f'{THINKING}I look.\n{WEATHER}', f'{THINKING}It rains.', 'No.']
    observations, replies = play(run, answers)
    assert flow(observations) == [*TOOL_FLOW, (0, False, ['user'])]
    assert [one.type for one in replies[0].output] == ['reasoning', 'message', 'function_call']
    assert [one.output_text for one in replies] == ['I look.', 'It rains.', 'No.']
    assert replies[0].usage.output_tokens == 2 and replies[2].status == 'completed'


def messages_of(stream, thoughts):
    """Return a harness around anthropic's client; thoughts: whether it sends them back."""
    anthropic = pytest.importorskip('anthropic')

    async def run(task):
        client = anthropic.AsyncAnthropic(base_url=task.root_url, api_key='k')
        more = dict(model=task.model, max_tokens=100, system='S', tools=[MESSAGES_TOOL])
        messages, replies = [], []

        async def ask(content):
            messages.append({'role': 'user', 'content': content})
            if stream:
                async with client.messages.stream(messages=messages, **more) as events:
                    kinds = [event.type async for event in events]
                    reply = await events.get_final_message()
                assert kinds[0] == 'message_start' and kinds[-1] == 'message_stop'
            else:
                reply = await client.messages.create(messages=messages, **more)
            content = [one for one in reply.content if thoughts or one.type != 'thinking']
            messages.append({'role': 'assistant', 'content': content})
            replies.append(reply)
            return reply

        call = (await ask('Oslo?')).content[-1]
        await ask([{'type': 'tool_result', 'tool_use_id': call.id, 'content': 'Rain.'}])
        more_tokens = await client.messages.count_tokens(
            model='m', system='S', messages=messages, tools=[MESSAGES_TOOL]
        )
        assert more_tokens.input_tokens > 0
        await ask('And?')
        return replies

    return run


@pytest.mark.parametrize(('stream', 'thoughts'), [(False, True), (True, True), (False, False)])
def test_anthropics_client_continues_one_conversation(stream, thoughts):
    answers = [f'{THINKING}I look.\n{WEATHER}', f'{THINKING}It rains.', 'No.']
    observations, replies = play(messages_of(stream, thoughts), answers)
    assert flow(observations) == [*TOOL_FLOW, (0, False, ['user'])]
    assert [one.type for one in replies[0].content] == ['thinking', 'text', 'tool_use']
    assert [one.stop_reason for one in replies] == ['tool_use', 'end_turn', 'end_turn']
    assert replies[0].content[-1].input == {'city': 'Oslo'} and replies[2].content[0].text == 'No.'


def test_each_client_raises_its_error_types():
    anthropic = pytest.importorskip('anthropic')

    def run(task):
        client = openai.OpenAI(base_url=task.base_url, api_key='k')
        with pytest.raises(openai.BadRequestError) as error:
            client.responses.create(model='m', input='U', previous_response_id='resp_other')
        assert error.value.code == 'previous_response_not_found'
        client = anthropic.Anthropic(base_url=task.root_url, api_key='k')
        with pytest.raises(anthropic.BadRequestError) as error:
            client.messages.create(model='m', max_tokens=0, messages=[])
        assert error.value.body['error']['type'] == 'invalid_request_error'
        assert [one.id for one in client.models.list()] == ['policy']
        client.messages.create(model='m', max_tokens=9, messages=[{'role': 'user', 'content': 'U'}])

    assert flow(play(run, ['A'])[0]) == [(0, True, ['user'])]


def test_the_default_model_of_the_agents_sdk_calls_a_tool_and_hands_off():
    agents = pytest.importorskip('agents')

    async def run(task):
        agents.set_tracing_disabled(True)
        agents.set_default_openai_client(openai.AsyncOpenAI(base_url=task.base_url, api_key='k'))
        poet = agents.Agent('poet', instructions='Answer in verse.', model=task.model)
        clerk = agents.Agent(
            'clerk',
            instructions='Be brief.',
            tools=[agents.function_tool(weather)],
            handoffs=[poet],
            model=task.model,
        )
        return (await agents.Runner.run(clerk, 'The weather in Oslo?', max_turns=4)).final_output

    handoff = CALL.format('transfer_to_poet', '{}')
    observations, output = play(run, [f'{THINKING}{WEATHER}', handoff, 'It rains.'])
    assert output == 'It rains.' and flow(observations)[:2] == TOOL_FLOW
    assert observations[1].messages[0]['content'] == 'It rains in Oslo.'
    assert observations[2].opens and observations[2].messages[0]['content'] == 'Answer in verse.'


@pytest.mark.parametrize('dialect', ['responses', 'messages'])
def test_pydantic_ai_calls_a_tool_in_both_apis(dialect):
    pydantic_ai = pytest.importorskip('pydantic_ai')

    def model_of(task):
        if dialect == 'messages':
            from pydantic_ai.models.anthropic import AnthropicModel
            from pydantic_ai.providers.anthropic import AnthropicProvider

            provider = AnthropicProvider(
                anthropic_client=importlib.import_module('anthropic').AsyncAnthropic(
                    base_url=task.root_url, api_key='k'
                )
            )
            return AnthropicModel(task.model, provider=provider)
        from pydantic_ai.models.openai import OpenAIResponsesModel
        from pydantic_ai.providers.openai import OpenAIProvider

        provider = OpenAIProvider(base_url=task.base_url, api_key='k')
        return OpenAIResponsesModel(task.model, provider=provider)

    async def run(task):
        agent = pydantic_ai.Agent(model_of(task), system_prompt='Short.')
        agent.tool_plain(weather)
        return (await agent.run('The weather in Oslo?')).output

    observations, out = play(run, [f'{THINKING}{WEATHER}', 'Rain.'])
    assert out == 'Rain.' and flow(observations) == TOOL_FLOW


def run_smolagents(kind, question, functions=()):
    """Return a harness around a smolagents agent; kind: its class."""
    smolagents = pytest.importorskip('smolagents')

    def run(task):
        address = dict(api_base=task.base_url, api_key='k')
        model = smolagents.OpenAIServerModel(model_id=task.model, **address)
        tools = [smolagents.tool(one) for one in functions]
        return getattr(smolagents, kind)(tools, model, max_steps=4, verbosity_level=0).run(question)

    return run


STOPS = ('Observation:', 'Calling tools:', '</code>')  # of smolagents


def test_smolagents_calls_tools():
    run = run_smolagents('ToolCallingAgent', 'The weather in Oslo?', [weather])
    final = CALL.format('final_answer', '{"answer": "rain"}')
    observations, output = play(run, [WEATHER, final], stops=STOPS)
    assert output == 'rain' and len(observations) == 2


def test_smolagents_runs_code_and_completes_truncated_answers():
    code = 'Thought: I count.\n<code>\nx = 6 * 7\nprint(x)\n'
    final = 'Thought: done.\n<code>\nfinal_answer(x)\n'
    run = run_smolagents('CodeAgent', 'What is 6 times 7?')
    observations, output = play(run, [code, final], stops=STOPS)
    assert output == 42 and len(observations) == 2


@pytest.mark.parametrize('dialect', ['chat', 'responses', 'messages'])
def test_verifiers_plays_a_taskset_and_returns_its_reward(dialect, monkeypatch):
    """verifiers 0.4 runs in a separate environment, because it needs an older openai."""
    vf = pytest.importorskip('verifiers.v1')
    loaders = pytest.importorskip('verifiers.v1.utils.loaders')
    weather_of = importlib.import_module('verifiers_weather')
    monkeypatch.setattr(weather_of, 'DIALECT', [dialect])
    agent = {'runtime': {'type': 'subprocess'}}  # for programs; this harness starts none
    config = vf.SingleAgentEnvConfig(taskset={'id': 'verifiers_weather'}, agent=agent)

    async def run(task):
        env = loaders.load_environment(config)
        client = vf.EvalClientConfig(base_url=task.base_url, api_key_var='OPENAI_API_KEY')
        async with env.serving():
            (slot,) = env.slots(next(iter(env.taskset)))
            episode = await env.run_slot(slot, vf.ModelContext(task.model, client))
        assert episode.ok, episode
        return episode.traces[0].reward

    for answer, reward in (('Rain.', 1.0), ('Snow.', 0.0)):
        observations, earned = play(run, [WEATHER, answer])
        assert earned == reward
        assert flow(observations) == [(0, True, ['system', 'user']), (0, False, ['tool'])]
        assert observations[1].messages[0]['content'] == 'It rains in Oslo.'


# These programs have no rewards: a second program checks their work and posts one
SOLVING = """
import json, os, pathlib, subprocess, sys, urllib.request

item, found = os.environ['AGENTRL_ITEM'], pathlib.Path('found')
task, command = f'Write {item} into the file found.', sys.argv[1:]
command = [word.format(task=task, **os.environ) for word in command]
subprocess.run(command, check=True, stdin=subprocess.DEVNULL)
right = found.exists() and found.read_text().strip() == item
body = json.dumps({'reward': float(right), 'success': right}).encode()
urllib.request.urlopen(os.environ['AGENTRL_REWARD_URL'], body)
"""


PROVIDER = '{{name="own",base_url="{OPENAI_BASE_URL}",wire_api="responses"}}'
PROGRAMS = {  # name: (command, tool, its arguments)
    'minisweagent': (
        f'{sys.executable} -m minisweagent --model openai/{{OPENAI_MODEL}} --yolo '
        '--exit-immediately --task'.split(),
        ('bash', 'command'),
    ),
    'claude': (
        [str(NODE / 'claude'), *'--model {ANTHROPIC_MODEL} --allowedTools Bash -p'.split()],
        ('Bash', 'command'),
    ),
    'codex': (
        [str(NODE / 'codex'), *'exec --skip-git-repo-check -m {OPENAI_MODEL}'.split()]
        + ['--dangerously-bypass-approvals-and-sandbox', '-c', 'model_provider="own"']
        + ['-c', f'model_providers.own={PROVIDER}'],
        ('exec_command', 'cmd'),
    ),
}


@pytest.mark.parametrize('written', ['3', '4'])
@pytest.mark.parametrize('program', PROGRAMS)
def test_a_coding_agent_works_in_a_shell(program, written, tmp_path, monkeypatch):
    """mini-swe-agent calls chat completions, Claude Code the Messages API, Codex Responses."""
    command, (tool, argument) = PROGRAMS[program]
    if program == 'minisweagent':
        pytest.importorskip('minisweagent')
    elif not pathlib.Path(command[0]).exists():
        pytest.skip(f'{program} is not installed (make harness-clients)')
    monkeypatch.chdir(tmp_path)
    for name, value in {
        'MSWEA_CONFIGURED': 'true',
        'MSWEA_COST_TRACKING': 'ignore_errors',
        'MSWEA_GLOBAL_CONFIG_DIR': str(tmp_path),
        'LITELLM_LOCAL_MODEL_COST_MAP': 'true',
        'HOME': str(tmp_path),
        'CODEX_HOME': str(tmp_path),
        'CLAUDE_CODE_DISABLE_NONESSENTIAL_TRAFFIC': '1',
    }.items():
        monkeypatch.setenv(name, value)
    (tmp_path / 'solve.py').write_text(SOLVING)
    words = (sys.executable, 'solve.py', *command, '{task}')
    env = HarnessEnvironment(command=words, start_s=300.0, silent_s=300.0)
    world = env.make()

    def call(line):
        return Answer(CALL.format(tool, json.dumps({argument: line, 'description': 'x'})))

    try:
        observation = world.reset(3)
        roles = [one['role'] for one in observation.messages]
        assert roles[0] == 'system' and 'user' in roles
        assert tool in [one['function']['name'] for one in observation.tools]
        reply = world.step(call(f'echo {written} | tee found'))
        (result,) = reply.observation.messages
        assert reply.valid and result['role'] == 'tool' and not reply.observation.opens
        assert written in result['content']
        mini = program == 'minisweagent'
        done = call('echo COMPLETE_TASK_AND_SUBMIT_FINAL_OUTPUT') if mini else Answer('Done.')
        reply = world.step(done)
        right = written == '3'
        assert reply.done and (reply.reward, reply.success) == (float(right), right)
    finally:
        world.close()
