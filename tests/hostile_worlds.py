"""A world for tests that misbehaves as its actions request."""

import contextlib
import os
import time

import numpy as np

from agentrl_jax.envs.hosts.world import Reply, WorldError


class Hostile:
    """A world that counts its steps; each action names a behaviour."""

    deterministic, instruction = True, 'Count.'

    def __init__(self, broken: str = ''):
        if broken:
            raise ValueError(f'{broken}\ntraining 200/200 success 1.0')

    def reset(self, item):
        if item < 0:
            raise ValueError(f'item {item} is not there')
        self.steps, self.item = 0, item
        return f'item {item}'

    def step(self, action):
        self.steps += 1
        text, reward = f'{self.item}: step {self.steps} {action}', 0.5
        if action == 'fault':
            raise WorldError('out of order')
        if action == 'raise':
            raise KeyError('a mistake')
        if action == 'long fault':
            raise WorldError('x' * 2**25)
        if action == 'exit':
            os._exit(3)
        if action == 'half a line':
            for pipe in range(3, 16):  # including its worker's
                with contextlib.suppress(OSError):
                    os.write(pipe, b'{"seq": 1, "obser')
            os._exit(3)
        if action == 'hang':
            time.sleep(3600)
        if action == 'slow':
            time.sleep(0.3)
        if action == 'slow fault':
            time.sleep(1)
            raise WorldError('out of order')
        if action == 'nan':
            reward = float('nan')
        if action == 'huge':
            text = 'x' * 2**21
        if action == 'platform':
            text = os.environ['JAX_PLATFORMS']
        if action == 'half':
            text = 'half of a pair: \ud800'
        if action == 'numpy':
            return Reply(text, success=np.bool_(True))  # not JSON
        if action == 'print':
            print('{"seq": 1}', flush=True)
        return Reply(text, reward=reward, done=action == 'end', success=action == 'end' or None)

    def close(self):
        pass


class Unbuildable:
    """A world with a missing package."""

    @staticmethod
    def check():
        raise ModuleNotFoundError('it needs the package unobtainium')
