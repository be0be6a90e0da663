"""Real, unmodified clients as harnesses: each finishes, and its conversations are as expected.

`make harness-clients` installs them; a test without its package is skipped. A script answers
instead of a policy.
"""

import asyncio
import importlib
import inspect
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
CALL = '<tool_call>\n{{"name": "{}", "arguments": {}}}\n</tool_call>'
WEATHER = CALL.format('weather', '{"city": "Oslo"}')


def weather(city: str) -> str:
    """Says the weather of a city.

    Args:
        city: where
    """
    return f'It rains in {city}.'


def play(harness, answers, branches=4, **episode):
    """Return (observations, result of the harness); the answers are used in order."""
    own, server = Episode(branches=branches, **episode), endpoint('127.0.0.1', 0)
    task = Task(3, f'{server.open(own)}/v1', own.secret)

    def run():
        with world_errors(
            lambda error: own.events.put(End(error=f'{type(error).__name__}: {error}'))
        ):
            returned = harness(task)
            if inspect.iscoroutine(returned):
                returned = asyncio.run(returned)
            own.events.put(End(returned))

    threading.Thread(target=run, daemon=True).start()
    shown, left = [], list(answers)
    while not isinstance(event := own.events.get(timeout=60), End):
        shown.append(event.new)
        said = Answer(left.pop(0))
        said.ids, said.logprobs, said.pieces = (1, 2), (-0.5, -1.0), (b'a', b'b')
        own.answer(said)
    server.close(own)
    assert not event.error and not left, (event, left)
    return shown, event.returned


def flow(shown):
    """Return [(branch, opens, roles of new messages)]."""
    return [(x.branch, x.opens, [one['role'] for one in x.messages]) for x in shown]


def chat(task):
    """Play three turns with openai's client, and send its answer objects back."""
    client = openai.OpenAI(base_url=task.base_url, api_key=task.api_key)
    messages, found = [{'role': 'system', 'content': 'S'}], []
    for text in 'abc':
        messages.append({'role': 'user', 'content': text})
        made = client.chat.completions.create(model=task.model, messages=messages, logprobs=True)
        messages.append(made.choices[0].message.model_dump())
        found.append(made.choices[0])
    return found


def test_openai_s_client_goes_on_with_one_conversation():
    shown, found = play(chat, ['A', ' B\n', 'C'])
    assert flow(shown) == [(0, True, ['system', 'user']), *2 * [(0, False, ['user'])]]
    assert [one.message.content for one in found] == ['A', ' B\n', 'C']
    assert [one.logprob for one in found[0].logprobs.content] == [-0.5, -1.0]


def test_the_example_of_the_readme_runs(tmp_path, monkeypatch):
    readme = ROOT / 'agentrl_jax' / 'envs' / 'hosts' / 'harness' / 'README.md'
    (code,) = re.findall(r'```python\n# my_agent.py\n(.*?)```', readme.read_text(), re.DOTALL)
    (tmp_path / 'my_agent.py').write_text(code)
    monkeypatch.syspath_prepend(tmp_path)
    example = importlib.import_module('my_agent')
    calls = [CALL.format('open_box', f'{{"colour": "{colour}"}}') for colour in ('blue', 'red')]
    shown, reward = play(example.play, calls)
    assert reward == 1.0 and flow(shown) == [(0, True, ['user']), (0, False, ['tool'])]
    assert play(example.play, ['I do not know.'])[1] == 0.0


def test_openai_s_client_streams():
    def streaming(task):
        client, messages = openai.OpenAI(base_url=task.base_url, api_key='k'), []
        for text in 'ab':
            messages.append({'role': 'user', 'content': text})
            said = ''
            for chunk in client.chat.completions.create(
                model='m', messages=messages, stream=True, stream_options={'include_usage': True}
            ):
                for choice in chunk.choices:
                    said += choice.delta.content or ''
            messages.append({'role': 'assistant', 'content': said})
        return said

    shown, said = play(streaming, ['A', 'B'])
    assert said == 'B' and flow(shown)[1] == (0, False, ['user'])


def test_openai_s_client_asks_at_once():
    async def at_once(task):
        client = openai.AsyncOpenAI(base_url=task.base_url, api_key='k')

        async def one(text):
            messages = [{'role': 'user', 'content': text}]
            return await client.chat.completions.create(model='m', messages=messages)

        made = await asyncio.gather(*map(one, 'abc'))
        return [one.choices[0].message.content for one in made]

    shown, said = play(at_once, ['A', 'B', 'C'])
    assert sorted(said) == ['A', 'B', 'C'] and {x.branch for x in shown} == {0, 1, 2}


def test_openai_s_client_does_not_try_again_what_is_over():
    own, server = Episode(), endpoint('127.0.0.1', 0)
    address = server.open(own)
    server.close(own)
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

    shown, said = play(run_agents(build), [WEATHER, 'Rain.'])
    assert said == 'Rain.'
    assert flow(shown) == [(0, True, ['system', 'user']), (0, False, ['tool'])]
    assert shown[1].messages[0]['content'] == 'It rains in Oslo.'
    assert shown[0].tools[0]['function']['name'] == 'weather'


def test_a_hand_off_of_the_agents_sdk_is_another_conversation():
    def build(agents, model):
        poet = agents.Agent('poet', instructions='Answer in verse.', model=model)
        return agents.Agent('triage', instructions='Hand off.', handoffs=[poet], model=model)

    shown, said = play(run_agents(build), [CALL.format('transfer_to_poet', '{}'), 'It rains.'])
    assert said == 'It rains.' and [x.branch for x in shown] == [0, 1]
    assert shown[1].opens and shown[1].messages[0]['content'] == 'Answer in verse.'


def test_pydantic_ai_calls_a_tool_and_answers_in_a_type():
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
    shown, out = play(run, [WEATHER, final])
    assert out.rain and flow(shown) == [(0, True, ['system', 'user']), (0, False, ['tool'])]


def run_smolagents(kind, question, tools=()):
    """Return a harness around a smolagents agent; kind: its class."""
    smolagents = pytest.importorskip('smolagents')

    def run(task):
        where = dict(api_base=task.base_url, api_key='k')
        model = smolagents.OpenAIServerModel(model_id=task.model, **where)
        found = [smolagents.tool(one) for one in tools]
        return getattr(smolagents, kind)(found, model, max_steps=4, verbosity_level=0).run(question)

    return run


STOPS = ('Observation:', 'Calling tools:', '</code>')  # of smolagents


def test_smolagents_calls_tools():
    run = run_smolagents('ToolCallingAgent', 'The weather in Oslo?', [weather])
    final = CALL.format('final_answer', '{"answer": "rain"}')
    shown, said = play(run, [WEATHER, final], stops=STOPS)
    assert said == 'rain' and len(shown) == 2


def test_smolagents_runs_code_and_adds_to_answers_that_were_cut():
    code = 'Thought: I count.\n<code>\nx = 6 * 7\nprint(x)\n'
    final = 'Thought: done.\n<code>\nfinal_answer(x)\n'
    run = run_smolagents('CodeAgent', 'What is 6 times 7?')
    shown, said = play(run, [code, final], stops=STOPS)
    assert said == 42 and len(shown) == 2


def test_verifiers_plays_a_taskset_and_its_reward_pays():
    """verifiers 0.4 runs in a separate environment, because it needs an older openai."""
    vf = pytest.importorskip('verifiers.v1')
    loaders = pytest.importorskip('verifiers.v1.utils.loaders')
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

    for said, reward in (('Rain.', 1.0), ('Snow.', 0.0)):
        shown, earned = play(run, [WEATHER, said])
        assert earned == reward
        assert flow(shown) == [(0, True, ['system', 'user']), (0, False, ['tool'])]
        assert shown[1].messages[0]['content'] == 'It rains in Oslo.'


# mini-swe-agent has no rewards: a second program checks its work and posts one
SOLVING = """
import json, os, pathlib, subprocess, sys, urllib.request

item, found = os.environ['AGENTRL_ITEM'], pathlib.Path('found')
command = [sys.executable, '-m', 'minisweagent', '--model', 'openai/' + os.environ['OPENAI_MODEL']]
command += ['--task', f'Write {item} into the file found.', '--yolo', '--exit-immediately']
subprocess.run(command, check=True)
right = found.exists() and found.read_text().strip() == item
body = json.dumps({'reward': float(right), 'success': right}).encode()
urllib.request.urlopen(os.environ['AGENTRL_REWARD_URL'], body)
"""


@pytest.mark.parametrize('written', ['3', '4'])
def test_the_program_mini_swe_agent_works_in_a_shell(written, tmp_path, monkeypatch):
    pytest.importorskip('minisweagent')
    monkeypatch.chdir(tmp_path)
    for name, value in {
        'MSWEA_CONFIGURED': 'true',
        'MSWEA_COST_TRACKING': 'ignore_errors',
        'MSWEA_GLOBAL_CONFIG_DIR': str(tmp_path),
        'LITELLM_LOCAL_MODEL_COST_MAP': 'true',
    }.items():
        monkeypatch.setenv(name, value)
    (tmp_path / 'solve.py').write_text(SOLVING)
    env = HarnessEnvironment(command=(sys.executable, 'solve.py'), start_s=300.0, silent_s=300.0)
    world = env.make()
    shell = CALL.replace('{}', 'bash', 1).format
    try:
        shown = world.reset(3)
        assert [one['role'] for one in shown.messages] == ['system', 'user']
        assert shown.tools[0]['function']['name'] == 'bash'
        reply = world.step(Answer(shell(f'{{"command": "echo {written} | tee found"}}')))
        (result,) = reply.observation.messages
        assert reply.valid and result['role'] == 'tool' and written in result['content']
        done = 'echo COMPLETE_TASK_AND_SUBMIT_FINAL_OUTPUT'
        reply = world.step(Answer(shell(f'{{"command": "{done}"}}')))
        right = written == '3'
        assert reply.done and (reply.reward, reply.success) == (float(right), right)
    finally:
        world.close()
