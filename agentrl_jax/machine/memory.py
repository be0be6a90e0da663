"""The most memory that this process and its devices have used."""

import resource
import sys

import jax

RSS_UNIT = 1 if sys.platform == 'darwin' else 1024  # bytes, of what getrusage counts


def peaks() -> dict[str, int]:
    """Bytes since the start: of the process, and of its fullest device where the backend knows."""
    found = {'perf/host_peak_bytes': resource.getrusage(resource.RUSAGE_SELF).ru_maxrss * RSS_UNIT}
    known = [device.memory_stats() or {} for device in jax.local_devices()]
    used = [stats['peak_bytes_in_use'] for stats in known if 'peak_bytes_in_use' in stats]
    return found | ({'perf/device_peak_bytes': max(used)} if used else {})
