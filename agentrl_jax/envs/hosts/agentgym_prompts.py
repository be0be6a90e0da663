"""AgentGym's prompts (MIT), for checkpoints that were compared there."""

TEXTCRAFT = (
    'You are given few useful crafting recipes to craft items in Minecraft. Crafting commands are '
    'of the format "craft [target object] using [input ingredients]".\n'
    'Every round I will give you an observation, you have to respond an action based on the state '
    'and instruction. You can "get" an object (ingredients) from the inventory or the environment, '
    'look-up the game inventory by "inventory", or "craft" (target) using any of the crafting '
    'commands.\n'
    'Your output must strictly follow this format:"Thought:\nyour thoughts.\n\nAction:\nyour next '
    'action"\n\n'
    'Reminder: \n'
    '1. Always specify the quantity when using "get" and "craft" commands. - Example of get: get 1 '
    'lapis lazuli - Example1 of craft: craft 1 blue dye using 1 lapis lazuli - Example2 of craft: '
    'craft 1 golden carrot using 8 gold nugget, 1 carrot\n'
    '2. When using "get" command, do not specify whether the item comes from the inventory or the '
    'environment.\n'
    '3. You can use ONLY crafting commands provided, do not use your own crafting commands. '
    'However, if the crafting command uses a generic ingredient like "planks", you can use special '
    'types of the same ingredient e.g. "dark oak planks" in the command instead.\n\n'
)
_ACTIONS = (
    ('open/close OBJ', 'open/close a container'),
    ('de/activate OBJ', 'activate/deactivate a device'),
    ('connect OBJ to OBJ', 'connect electrical components'),
    ('disconnect OBJ', 'disconnect electrical components'),
    ('use OBJ [on OBJ]', 'use a device/item'),
    ('look around', 'describe the current room'),
    ('look at OBJ', 'describe an object in detail'),
    ('look in OBJ', "describe a container's contents"),
    ('read OBJ', 'read a note or book'),
    ('move OBJ to OBJ', 'move an object to a container'),
    ('pick up OBJ', 'move an object to the inventory'),
    ('put down OBJ', 'drop an inventory item'),
    ('pour OBJ into OBJ', 'pour a liquid into a container'),
    ('dunk OBJ into OBJ', 'dunk a container into a liquid'),
    ('mix OBJ', 'chemically mix a container'),
    ('go to LOC', 'move to a new location'),
    ('eat OBJ', 'eat a food'),
    ('flush OBJ', 'flush a toilet'),
    ('focus on OBJ', 'signal intent on a task object'),
    ('wait', 'take no action for 10 iterations'),
    ('wait1', 'take no action for 1 iteration'),
)
_LAST = (
    '{"action":"examine OBJ","description":"provides a description of the objects present on or '
    'in a receptacle."}, {"action": "task", "description": "describe current task"}, '
    '{"action": "inventory", "description": "list your inventory"}'
)
SCIWORLD = (
    'You are an agent for science world. Every round I will give you an observation, you have to '
    'respond an action based on the observation to finish the given task. Here are the actions you '
    'may take: ['
    + ', '.join(f'{{"action": "{name}", "description": "{does}"}}' for name, does in _ACTIONS)
    + f', {_LAST}]\n'
    'Your response should use the following format:\nThought:\nyour thoughts.\n\nAction:\nyour '
    'next action'
)
