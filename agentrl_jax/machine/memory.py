"""Peak memory of this process and its devices."""

import resource
import sys

import jax

RSS_UNIT = 1 if sys.platform == 'darwin' else 1024  # bytes per unit of getrusage


def peak_memory() -> dict[str, int]:
    """Peak bytes of the process, and of its fullest device if the backend reports them."""
    peak = {'perf/host_peak_bytes': resource.getrusage(resource.RUSAGE_SELF).ru_maxrss * RSS_UNIT}
    known = [device.memory_stats() or {} for device in jax.local_devices()]
    used = [stats['peak_bytes_in_use'] for stats in known if 'peak_bytes_in_use' in stats]
    return peak | ({'perf/device_peak_bytes': max(used)} if used else {})
