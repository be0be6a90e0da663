"""A taskset of verifiers 0.4 with a reward, and a harness that plays it in this process."""

import openai
import verifiers.v1 as vf

from agentrl_jax.envs.hosts.harness.clients import FORMATS, PATHS

DIALECT = ['chat']  # of the harness

__all__ = ['Chat', 'Weather']
TOOL = {
    'type': 'function',
    'function': {
        'name': 'weather',
        'description': 'Returns the weather of a city.',
        'parameters': {'type': 'object', 'properties': {'city': {'type': 'string'}}},
    },
}


class WeatherData(vf.TaskData):
    answer: str


class WeatherTask(vf.Task[WeatherData]):
    @vf.reward
    async def right(self, trace) -> float:
        return float(trace.last_reply == self.data.answer)


class Weather(vf.Taskset[WeatherTask]):
    def load(self):
        question = dict(prompt='The weather in Oslo?', system_prompt='Be brief.')
        yield WeatherTask(WeatherData(**question, answer='Rain.'))


class Chat(vf.Harness[vf.HarnessConfig]):
    APPENDS_SYSTEM_PROMPT = True
    EXECUTES_CODE = NEEDS_CONTAINER = False

    async def launch(self, ctx, trace, runtime, endpoint, secret, mcp_urls, data):
        (dialect,) = DIALECT
        write, read = FORMATS[dialect]
        client = openai.AsyncOpenAI(base_url=endpoint, api_key=secret)
        system, prompt = self.resolve_prompt(data)
        messages = [{'role': 'system', 'content': system}, {'role': 'user', 'content': prompt}]
        while True:
            body = write(messages, {'model': ctx.model, 'tools': [TOOL]})
            reply = read(await client.post(f'/{PATHS[dialect]}', cast_to=object, body=body))
            if not reply.get('tool_calls'):
                return vf.ProgramResult(exit_code=0, stdout=reply['content'], stderr='')
            messages.append(reply)
            result = {'tool_call_id': reply['tool_calls'][0]['id'], 'content': 'It rains in Oslo.'}
            messages.append({'role': 'tool', **result})
