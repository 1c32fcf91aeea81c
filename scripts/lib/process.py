"""Measurement of processes, and the end of scripts that run some."""

import contextlib
import json
import signal
import subprocess
import sys
import tempfile
from pathlib import Path


class Failed(Exception):
    pass


def say(text):
    """Print progress, which is not a result."""
    print(text, file=sys.stderr, flush=True)


@contextlib.contextmanager
def exits(name):
    """Ends the script with a message that begins with its name if a process or a file fails, and with the exit code of an
    interruption."""
    try:
        yield
    except (Failed, subprocess.CalledProcessError, OSError) as error:
        sys.exit(f"{name}: {error}")
    except KeyboardInterrupt:
        sys.exit(130)


# An intermediate process, because the initial memory of a process is a copy of its parent and counts for its
# peak.
STARTER = """
import json, os, resource, sys, time
limit, most, out, command = int(sys.argv[1]), int(sys.argv[2]), sys.argv[3], sys.argv[4:]
if limit:
    resource.setrlimit(resource.RLIMIT_DATA, (limit, limit))
if most:
    resource.setrlimit(resource.RLIMIT_CPU, (most, most + 5))
start = time.perf_counter()
child = os.posix_spawnp(command[0], command, os.environ)
_, status, used = os.wait4(child, 0)
figures = {"seconds": time.perf_counter() - start, "cpu_seconds": used.ru_utime + used.ru_stime, "peak": used.ru_maxrss * 1024}
with open(out, "w") as file:
    json.dump([os.waitstatus_to_exitcode(status), figures], file)
"""


def timed(command, memory_limit=None, processor_limit=None):
    """Seconds and peak resident bytes of a process, with optional limits on memory and processor time."""
    command = [str(word) for word in command]
    with tempfile.TemporaryFile() as said, tempfile.NamedTemporaryFile() as out:
        subprocess.run([sys.executable, "-ISc", STARTER, str(memory_limit or 0), str(processor_limit or 0), out.name, *command], stdout=subprocess.DEVNULL, stderr=said)
        said.seek(0)
        lines = said.read().decode(errors="replace").strip().splitlines()
        text = Path(out.name).read_text()
        if not text:
            raise OSError(f"{command[0]}: {(lines or ['cannot be started'])[-1]}")
        code, figures = json.loads(text)
        if code != 0:
            last = (lines or [f"exit code {code}"])[-1]
            if processor_limit and code == -signal.SIGXCPU:
                raise Failed(f"takes more than {processor_limit} s of processor time")
            if memory_limit and "memory" in last.lower():
                raise Failed(f"needs more than {memory_limit / 1e9:.0f} GB of memory")
            raise Failed(f"{Path(command[0]).name}: {last}")
    return figures
