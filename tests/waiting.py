"""Wait for another process or thread."""

import time


def until(condition, seconds=240):
    """Wait until condition() is true; fail after this many seconds."""
    deadline = time.monotonic() + seconds
    while not condition():
        assert time.monotonic() < deadline, f'not true within {seconds} seconds'
        time.sleep(0.02)
