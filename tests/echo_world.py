"""A world for tests whose replies depend on all that was said; its file imports no JAX."""

import hashlib

from agentrl_jax.envs.hosts.world import Reply


class Echo:
    """Each reply is a hash of the item and of every word said, 3 to 40 words long; 1 to 8 turns."""

    deterministic, instruction = True, ''

    def reset(self, item):
        self.said = [str(item)]
        return self.words()

    def step(self, action):
        self.said.append(action)
        digest = self.digest()
        done = len(self.said) > 1 + digest[0] % 8
        return Reply(
            self.words(),
            reward=digest[1] / 255 - 0.5,
            done=done,
            success=digest[2] > 127,
            figures=(float(len(self.said) - 1), digest[3] / 255),
        )

    def digest(self):
        return hashlib.sha256('\0'.join(self.said).encode()).digest()

    def words(self):
        digest = self.digest()
        return ' '.join(('up', 'down', 'left', 'a wall')[x % 4] for x in digest * 2)[
            : 9 + digest[3]
        ]

    def close(self):
        pass
