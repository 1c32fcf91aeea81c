"""Run a compression in parts as job arrays of a real Slurm on this machine, kill one part, repeat it, and merge
the parts.

    scripts/check cluster [--binary PATH] [--parts N]

Needs Slurm and munge (`apt-get install slurm-wlm munge`) and root. Starts its own slurmctld and slurmd with
separate files in a temporary folder. The output must have the same bytes as a run in one process, with a
threshold per tensor and with a global threshold.
"""

import argparse
import filecmp
import os
import shutil
import signal
import socket
import subprocess
import sys
import tempfile
import time
from pathlib import Path

from lib import GOLDEN, ROOT

CLUSTER = ROOT / "configs" / "cluster"
PROGRAMS = ["slurmctld", "slurmd", "sbatch", "squeue", "munged"]
SLURM = """
ClusterName=check
SlurmctldHost={host}(127.0.0.1)
SlurmctldPort={control}
SlurmdPort={node}
AuthType=auth/munge
AuthInfo=socket={folder}/munge.socket
CryptoType=crypto/munge
ProctrackType=proctrack/linuxproc
TaskPlugin=task/none
SelectType=select/cons_tres
SelectTypeParameters=CR_Core
SchedulerParameters=sched_interval=2
SlurmdParameters=config_overrides
ReturnToService=2
SlurmUser=root
StateSaveLocation={folder}/state
SlurmdSpoolDir={folder}/spool
SlurmctldPidFile={folder}/slurmctld.pid
SlurmdPidFile={folder}/slurmd.pid
SlurmctldLogFile={folder}/slurmctld.log
SlurmdLogFile={folder}/slurmd.log
NodeName={host} NodeAddr=127.0.0.1 CPUs=16 RealMemory=16000 State=UNKNOWN
PartitionName=all Nodes=ALL Default=YES MaxTime=INFINITE State=UP
"""


def free_port():
    with socket.socket() as place:
        place.bind(("127.0.0.1", 0))
        return place.getsockname()[1]


class Cluster:
    """Private munged, slurmctld and slurmd processes."""

    def __init__(self, folder):
        self.folder, self.started = folder, []
        for name in ("state", "spool"):
            (folder / name).mkdir()
        key = folder / "munge.key"
        key.write_bytes(os.urandom(128))
        key.chmod(0o400)
        values = {"host": socket.gethostname().split(".")[0], "control": free_port(), "node": free_port(), "folder": folder}
        (folder / "slurm.conf").write_text(SLURM.format(**values))
        self.environment = os.environ | {"SLURM_CONF": str(folder / "slurm.conf")}
        own = [f"--{what}={folder}/munge.{end}" for what, end in (("socket", "socket"), ("key-file", "key"), ("pid-file", "pid"), ("log-file", "log"), ("seed-file", "seed"))]
        self.start(["munged", "--foreground", "--force", *own])
        self.wait(lambda: (folder / "munge.socket").exists(), "munged")
        self.start(["slurmctld", "-D"])
        self.start(["slurmd", "-D"])
        self.wait(lambda: "idle" in self.ask("sinfo", "-h", "-o", "%T"), "slurmd")

    def start(self, command):
        log = open(self.folder / f"{command[0]}.out", "w")
        self.started.append(subprocess.Popen(command, env=self.environment, stdout=log, stderr=log, start_new_session=True))

    def wait(self, done, what, seconds=60):
        end = time.monotonic() + seconds
        while not done():
            if time.monotonic() > end:
                logs = "".join(path.read_text(errors="replace")[-2000:] for path in self.folder.glob("*.log"))
                raise SystemExit(f"timeout while waiting for {what}\n{logs}")
            time.sleep(0.3)

    def ask(self, *command):
        return subprocess.run(command, env=self.environment, stdout=subprocess.PIPE, text=True, check=False).stdout

    def drain(self):
        """Waits until all jobs have ended."""
        self.wait(lambda: not self.ask("squeue", "-h").strip(), "the end of the last job", 120)

    def stop(self):
        for process in reversed(self.started):
            os.killpg(process.pid, signal.SIGTERM)
            process.wait()


def main():
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--binary", type=Path, default=ROOT / "target" / "debug" / "compress")
    parser.add_argument("--parts", type=int, default=5)
    args = parser.parse_args()
    missing = [program for program in PROGRAMS if shutil.which(program, path=os.environ["PATH"] + ":/usr/sbin") is None]
    if missing or os.geteuid() != 0:
        sys.exit(f"needs root and {', '.join(PROGRAMS)}; missing: {', '.join(missing) or 'root'}. apt-get install slurm-wlm munge")
    os.environ["PATH"] = f"{args.binary.resolve().parent}:{os.environ['PATH']}:/usr/sbin"
    with tempfile.TemporaryDirectory() as name:
        folder = Path(name)
        shutil.copytree(GOLDEN / "models/llama", folder / "model")
        cluster = Cluster(folder)
        try:
            failed = [job for job in ("tensor", "global") if not check(cluster, folder, job, args)]
        finally:
            cluster.stop()
    sys.exit(f"failed: {', '.join(failed)}" if failed else None)


def check(cluster, folder, scope, args):
    recipe, whole, out = (folder / f"{scope}{end}" for end in (".yaml", "-whole", "-out"))
    recipe.write_text(f"model: model\nmeasure: false\npasses:\n  - prune-unstructured: {{ amount: 0.5, scope: {scope} }}\n  - quantize-dynamic\n")
    subprocess.run([args.binary, "run", recipe, "-o", whole, "--quiet"], check=True, stdout=subprocess.DEVNULL)
    rounds = {"tensor": 1, "global": 3}[scope]
    submit = [CLUSTER / "submit.sh", recipe, out, str(args.parts), str(rounds)]
    if scope == "tensor":
        # A part that is lost before the merge is computed again by submitting the whole array again.
        array = ["sbatch", "--parsable", f"--array=1-{args.parts}", f"--export=ALL,PARTS={args.parts}", CLUSTER / "parts.sbatch", recipe, out]
        subprocess.run(array, env=cluster.environment, cwd=folder, check=True, stdout=subprocess.DEVNULL)
        cluster.drain()
        parts = sorted(Path(f"{out}.parts").glob("0*"))
        shutil.rmtree(parts[1])
        kept = parts[0].stat().st_ino
    subprocess.run(submit, env=cluster.environment, cwd=folder, check=True, stdout=subprocess.DEVNULL)
    if scope == "tensor":
        time.sleep(1)
        untouched = not parts[0].exists() or parts[0].stat().st_ino == kept
    cluster.drain()
    same = out.exists() and all(filecmp.cmp(whole / name, out / name, shallow=False) for name in ("model.safetensors", "config.json"))
    good = same and not Path(f"{out}.parts").exists() and (scope != "tensor" or untouched)
    print(f"{scope:8} {args.parts} parts, {rounds} rounds: {'same bytes as one process' if good else 'FAILED'}")
    if not good:
        print("".join(path.read_text() for path in folder.glob("slurm-*.out")))
    return good


if __name__ == "__main__":
    main()
