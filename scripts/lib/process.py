"""What a process takes."""

import os
import resource
import subprocess
import tempfile
import time
from pathlib import Path


class Failed(Exception):
    pass


def timed(command, memory_limit=None):
    """Seconds and peak resident bytes of a process."""
    limit = (lambda: resource.setrlimit(resource.RLIMIT_DATA, (memory_limit, memory_limit))) if memory_limit else None
    with tempfile.TemporaryFile() as said:
        start = time.perf_counter()
        process = subprocess.Popen(command, stdout=subprocess.DEVNULL, stderr=said, preexec_fn=limit)
        _, status, usage = os.wait4(process.pid, 0)
        seconds = time.perf_counter() - start
        process.returncode = os.waitstatus_to_exitcode(status)
        if process.returncode != 0:
            said.seek(0)
            lines = said.read().decode(errors="replace").strip().splitlines() or [f"exit code {process.returncode}"]
            if memory_limit and "memory" in lines[-1]:
                raise Failed(f"needs more than {memory_limit / 1e9:.0f} GB of memory")
            raise Failed(f"{Path(command[0]).name}: {lines[-1]}")
    return {"seconds": seconds, "cpu_seconds": usage.ru_utime + usage.ru_stime, "peak": usage.ru_maxrss * 1024}
