"""AgentGym's wrapper around BabyAI in plain Python, on a live minigrid environment.

The reference for the macro actions. It was rewritten from a description of agentenv-babyai (commit
48d77a0), including its quirks, and shares no code with ours: cells are absolute, paths are searched
with a queue, and texts are built along the way.
"""

import collections

DIRECTIONS = ((1, 0), (0, 1), (-1, 0), (0, -1))
KINDS = {2: 'wall', 4: 'door', 5: 'key', 6: 'ball', 7: 'box'}
COLOURS = ('red', 'green', 'blue', 'purple', 'yellow', 'grey')
STATES = ('open', 'closed', 'locked')
SOLID = ('wall', 'box', 'ball', 'key')
UNKNOWN = 'The action is not recognized. Please check valid actions.'

Thing = collections.namedtuple('Thing', 'name cell distance forward right')


class Wrapper:
    """One game: observation, reward, score and done after each text action."""

    def __init__(self, env, seed):
        self.env = env
        image = env.reset(seed=seed)[0]['image']
        goal = env.mission.replace('then', 'and').replace('after you', 'and')
        self.reward, self.score, self.done = 0.0, 0.0, False
        self.look(image)
        self.observation = f'Your goal: {goal}\n{self.description}{self.menu()}'

    def menu(self):
        return '\nAvailable actions: [' + ', '.join(f'"{name}"' for name in self.actions) + ']'

    def step(self, text):
        text = text.lower().strip()
        if 'check' in text:
            reply = 'You can take the following actions: ' + ', '.join(self.actions)
        elif text == '':
            reply = 'No change in state.'
        elif text not in self.actions:
            reply = self.errors[text] if text in self.errors else UNKNOWN
        elif not self.actions[text]:
            reply = 'No change in state.'
        else:
            reply = self.execute(self.actions[text])
        self.score += self.reward
        self.observation = reply + self.menu()

    def execute(self, primitives):
        for primitive in primitives:
            obs, reward, terminated, _, _ = self.env.step(primitive)
            same = (obs['image'] == self.image).all()
            self.image = obs['image']
            if same:
                break
        self.look(self.image)
        self.reward = float(reward)
        self.done = bool(terminated) and self.reward > 0.5
        return self.description + ('\n The task is completed.' if terminated else '')

    def look(self, image):
        """Return the description, actions and errors of the visible image."""
        self.image = image
        self.here = tuple(map(int, self.env.agent_pos))
        self.heading = int(self.env.agent_dir)
        self.ahead = DIRECTIONS[self.heading]
        self.side = DIRECTIONS[(self.heading + 1) % 4]
        self.things = sorted(self.visible(image), key=lambda thing: thing.distance)
        straight = [
            t for t in self.things if t.right == 0 and t.name.split()[-1] in ('wall', 'box')
        ]
        self.barrier = min(straight, key=lambda t: t.forward) if straight else None
        self.description = self.describe()
        self.list_actions()

    def visible(self, image):
        for row in range(7):
            for column in range(7):
                code, colour, state = (int(x) for x in image[column, row])
                forward, right = 6 - row, column - 3
                cell = tuple(
                    p + a * forward + s * right
                    for p, a, s in zip(self.here, self.ahead, self.side, strict=True)
                )
                if code not in KINDS or (forward, right) == (0, 0) or min(cell) < 0:
                    continue
                middle = f'{STATES[state]} ' if code == 4 else ''
                name = f'{COLOURS[colour]} {middle}{KINDS[code]}'
                yield Thing(name, cell, forward + abs(right), forward, right)

    def describe(self):
        text = 'You cannot see any objects within sight.'
        if self.things:
            text = 'In front of you in this room, you can see several objects: '
        count = collections.Counter()
        for thing in self.objects():
            count[thing.name] += 1
            text += f'There is a {thing.name} {count[thing.name]} '
            if thing.right == 0:
                text += f'right in front of you {thing.forward} steps away.  '
            else:
                side = 'right' if thing.right > 0 else 'left'
                text += f'{thing.forward} steps in front of you and {abs(thing.right)} steps to '
                text += f'your {side}.  '
        text += 'The room has walls around you. '
        if self.barrier:
            what = self.barrier.name.split()[-1]
            text += f'You are facing a {what} {self.barrier.forward} steps away. '
        held = self.env.carrying
        if held is None:
            return text + 'You are not carrying anything.'
        return text + f'You are carrying a {held.color} {held.type}.'

    def objects(self):
        return [thing for thing in self.things if 'wall' not in thing.name]

    def list_actions(self):
        self.actions, self.errors = {'turn left': [0], 'turn right': [1]}, {}
        if self.barrier is None or self.barrier.forward > 1:
            self.actions['move forward'] = [2]
        else:
            self.errors['move forward'] = (
                "There is a barrier in front of you, you can't move forward."
            )
        if self.env.carrying is None:
            things = [thing for thing in self.objects() if 'door' not in thing.name]
            self.list_numbered('pickup', things, [3])
        self.list_drop()
        self.list_doors()
        self.list_numbered('go to', self.objects(), [])
        self.actions['check available actions'] = []

    def list_numbered(self, verb, things, tail):
        """Number only the reachable things."""
        count = collections.Counter()
        for thing in things:
            name = f'{verb} {thing.name} {count[thing.name] + 1}'
            way = self.way(thing.cell, enter=False)
            if way is None:
                self.errors[name] = f'You cannot {name}, as there is no path leading to it.'
            else:
                count[thing.name] += 1
                self.actions[name] = way + tail

    def list_drop(self):
        front = tuple(p + a for p, a in zip(self.here, self.ahead, strict=True))
        blocked = any(t.cell == front and t.name.split()[-1] in SOLID for t in self.things)
        if self.env.carrying is None:
            self.errors['drop'] = 'You cannot drop the object, as you are not carrying anything.'
        elif blocked:
            self.errors['drop'] = (
                'You cannot drop the object, as there is already an object in front of you.'
            )
        else:
            self.actions['drop'] = [4]

    def list_doors(self):
        count, held = collections.Counter(), self.env.carrying
        for door in self.objects():
            if 'door' not in door.name:
                continue
            count[door.name] += 1
            name = f'{door.name} {count[door.name]}'
            colour, state, _ = door.name.split()
            if state == 'open':
                way = self.way(door.cell, enter=True)
                self.offer(f'go through {name}', way, [])
                continue
            toggle = f'toggle and go through {name}'
            if state == 'closed':
                self.errors[f'go through {name}'] = (
                    f'You cannot go through {name}, as it is closed. You should toggle it first.'
                )
            elif held is None or held.type != 'key':
                self.errors[toggle] = f'You cannot {toggle}, as you are not carrying a key.'
                continue
            elif held.color != colour:
                self.errors[toggle] = (
                    f'You cannot {toggle}, as the color of the key you are carrying does not match '
                    'the color of door.'
                )
                continue
            way = self.way(door.cell, enter=False)
            # The original prints a dict of counts here instead of the number.
            self.offer(toggle, way, [5, 2])
            if way == []:
                self.actions['toggle'] = [5]

    def offer(self, name, way, tail):
        if way is None:
            self.errors[name] = f'You cannot {name}, as there is no path leading to it.'
        else:
            self.actions[name] = way + tail

    def ranges(self):
        """Return the cells of paths: the view, and one more line for some headings."""
        (ax, ay), (sx, sy) = self.ahead, self.side
        corner = [
            p + 6 * a - 3 * s for p, a, s in zip(self.here, self.ahead, self.side, strict=True)
        ]
        other = [corner[0] + 7 * (sx - ax), corner[1] + 7 * (sy - ay)]
        return [
            range(b, a + 1) if b < a else range(a, b) for a, b in zip(corner, other, strict=True)
        ]

    def way(self, target, enter):
        """Return the primitives to a cell, or to the cell before it (not enter); None = no path."""
        solid = {t.cell for t in self.things if t.name.split()[-1] in SOLID}
        xs, ys = self.ranges()
        start = (self.here, self.heading)
        queue, visited, parent = collections.deque([start]), set(), {}
        while queue:
            (cell, heading) = pose = queue.popleft()
            visited.add(pose)
            step = DIRECTIONS[heading]
            front = (cell[0] + step[0], cell[1] + step[1])
            if (cell if enter else front) == target:
                actions = []
                while pose != start:
                    pose, action = parent[pose]
                    actions.append(action)
                return actions[::-1]
            for action, after in (
                (2, (front, heading)),
                (0, (cell, (heading - 1) % 4)),
                (1, (cell, (heading + 1) % 4)),
            ):
                inside = after[0][0] in xs and after[0][1] in ys
                if inside and after not in visited and after[0] not in solid:
                    queue.append(after)
                    parent[after] = (pose, action)
        return None
