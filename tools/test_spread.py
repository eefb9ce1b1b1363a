#!/usr/bin/env python3
"""Tests `kvlab run --on mpi` with OpenMPI, and `--on slurm` with a Slurm of its own on this machine.

The Slurm is munged, slurmctld and slurmd with all of their files in a temporary folder. What is not installed, or does
not start here, is skipped by name. Usage: test_spread.py
"""
import getpass
import os
import re
import shutil
import signal
import socket
import subprocess
import sys
import tempfile
import time
import unittest
from pathlib import Path

ROOT = Path(__file__).resolve().parent.parent
FAST = """model: {synthetic: tiny}
tasks: [random_prompts: {prompt: [40, 60], answer: 4, samples: 2}]
policies: [full, streaming_llm: {budget: {tokens: [16, 24]}}]
metrics: [score, memory, fidelity]
backend: cpu
threads: 1
page_size: 4
"""
SLOW = """model: {path: bundled/recall}
tasks: [niah: {context: 256, samples: 1, max_new_tokens: 8}]
policies: [full, streaming_llm: {budget: {tokens: [32, 40, 48, 56, 64]}}]
metrics: [score, memory]
backend: cpu
threads: 1
"""
CELLS = 6  # of each
PIPES = {"stdout": subprocess.DEVNULL, "stderr": subprocess.PIPE, "text": True}


def kvlab():
    builds = [os.environ.get("KVLAB"), ROOT / "build/ci/bin/kvlab", ROOT / "build/release/bin/kvlab"]
    return next((str(b) for b in builds if b and Path(b).exists()), None)


def program(name):
    return shutil.which(name) or next((p for p in (f"/usr/sbin/{name}", f"/sbin/{name}") if Path(p).exists()), None)


def wait_for(there, seconds=60):
    end = time.monotonic() + seconds
    while time.monotonic() < end:
        if found := there():
            return found
        time.sleep(0.05)
    return None


@unittest.skipUnless(kvlab(), "no kvlab is built: KVLAB names it")
class Spread(unittest.TestCase):
    """What the tests of both engines share. It has none of its own."""

    how, environment = [], dict(os.environ, OMP_NUM_THREADS="1")

    def setUp(self):
        folder = tempfile.TemporaryDirectory(prefix="kvlab-spread-")
        self.addCleanup(folder.cleanup)
        self.folder = Path(folder.name)
        self.out, self.log = self.folder / "out.h5", self.folder / "log"
        self.parts = self.folder / "out.h5.parts"

    def words(self, text, *more, out=None):
        file = self.folder / "e.yaml"
        file.write_text(text)
        return [kvlab(), "run", str(file), "-o", str(out or self.out), "-v", "--log", str(self.log), *more]

    def run_kvlab(self, text, *more, out=None):
        return subprocess.run(self.words(text, *more, out=out), env=self.environment, capture_output=True, text=True, timeout=300)

    def report(self, out):
        words = [kvlab(), "report", str(out), "--format", "csv"]
        return subprocess.run(words, capture_output=True, text=True, check=True).stdout

    def at_work(self):
        """The processes that run a cell. They have told of the cells before it."""
        texts = []
        for path in self.parts.glob("*.claim"):
            try:
                texts += [path.read_text()] * (not path.with_suffix(".h5").exists())
            except FileNotFoundError:
                pass
        return [int(found[1]) for text in texts if (found := re.search(r"^process (\d+)$", text, re.MULTILINE))]

    def stopped_at_work(self):
        """A process that runs a cell, stopped. One that has finished it at this moment goes on, and tells of it."""
        process = next(iter(self.at_work()), None)
        if process is None or not self.finished():
            return None
        try:
            os.kill(process, signal.SIGSTOP)
            time.sleep(0.005)
            if process in self.at_work():
                return process
            os.kill(process, signal.SIGCONT)
        except ProcessLookupError:
            pass
        return None

    def finished(self):
        return len(list(self.parts.glob("*.h5")))

    def written(self):
        """How often each cell was written, by the messages of all workers."""
        times = {}
        for cell in re.findall(r"cell (\w+): written to ", self.log.read_text()):
            times[cell] = times.get(cell, 0) + 1
        return times

    def check_whole(self, said, text):
        alone = self.folder / "alone.h5"
        log, self.log = self.log, self.folder / "alone.log"
        one = self.run_kvlab(text, out=alone)
        self.log = log
        self.assertEqual(one.returncode, 0, one.stderr)
        self.assertEqual(self.report(self.out), self.report(alone), said)
        self.assertEqual(sorted(self.written().values()), [1] * CELLS, said)
        self.assertEqual([p.name for p in self.parts.iterdir() if p.suffix not in (".h5", ".log")], [])

    def check_same_result(self):
        run = self.run_kvlab(FAST, *self.how)
        self.assertEqual(run.returncode, 0, run.stderr)
        self.assertNotIn("error", run.stderr)
        self.check_whole(run.stderr, FAST)

    def check_killed_worker(self):
        with subprocess.Popen(self.words(SLOW, *self.how), env=self.environment, **PIPES) as run:
            process = wait_for(self.stopped_at_work)
            if process:
                os.kill(process, signal.SIGKILL)
            said = run.communicate(timeout=300)[1]
        self.assertTrue(process, said)
        self.assertEqual(run.returncode, 0, said)
        self.check_whole(said, SLOW)

    def check_reproduce(self):
        task = "tasks=[{random_prompts: {prompt: [64, 100], samples: 1, answer: 4}}]"
        sets = ["backend=cpu", "threads=1", "metrics=[score]", task]
        words = [kvlab(), "reproduce", "freekv/figure8", "--model", "synthetic/tiny", "-o", str(self.folder / "made")]
        words += [*(word for one in sets for word in ("--set", one)), "-v", "--log", str(self.log), *self.how]
        run = subprocess.run(words, env=self.environment, capture_output=True, text=True, timeout=300)
        self.assertEqual(run.returncode, 0, run.stderr)
        parts = [part for part in self.folder.glob("made/*.parts/*") if part.suffix != ".log"]
        self.assertEqual({part.suffix for part in parts}, {".h5"})
        written = re.findall(r": written to (\S+)", self.log.read_text())
        self.assertEqual(sorted(written), sorted(map(str, parts)))
        self.assertEqual(len(list(self.folder.glob("made/*.h5"))), 2)  # that the paper's file names
        return run.stderr


@unittest.skipUnless(shutil.which("mpirun"), "mpirun is not installed (openmpi-bin)")
class Mpi(Spread):
    how = ["--on", "mpi", "--jobs", "2", "--mpi-args", "--oversubscribe" + " --allow-run-as-root" * (os.getuid() == 0)]

    def test_the_result_is_that_of_one_process(self):
        self.check_same_result()

    def test_a_killed_rank_costs_no_cell(self):
        self.check_killed_worker()

    def test_after_the_run_was_killed_its_ranks_end_and_the_next_run_repeats_nothing(self):
        with subprocess.Popen(self.words(SLOW, *self.how), env=self.environment, **PIPES) as run:
            ranks = wait_for(lambda: self.finished() and self.at_work())
            run.kill()
            said = run.communicate(timeout=120)[1]
        self.assertTrue(ranks, said)
        self.assertTrue(wait_for(lambda: not any(Path(f"/proc/{rank}").exists() for rank in ranks), 20), ranks)
        again = self.run_kvlab(SLOW, *self.how)
        self.assertEqual(again.returncode, 0, again.stderr)
        self.check_whole(again.stderr, SLOW)

    def test_reproduce_runs_the_cells_of_each_experiment_on_ranks(self):
        self.check_reproduce()

    def test_ranks_started_by_hand_are_workers_too(self):
        words = ["mpirun", "-n", "2", *self.how[-1].split(), *self.words(FAST, "--worker")]
        ranks = subprocess.run(words, env=self.environment, capture_output=True, text=True, timeout=300)
        self.assertEqual(ranks.returncode, 0, ranks.stderr)
        self.assertEqual(self.finished(), CELLS)
        self.assertFalse(self.out.exists())
        collected = self.run_kvlab(FAST)
        self.assertEqual(collected.returncode, 0, collected.stderr)
        self.check_whole(collected.stderr, FAST)


class PrivateSlurm:
    """munged, slurmctld and slurmd of this user in a folder."""

    def __init__(self, folder):
        self.folder, self.running = folder, []
        host, user = socket.gethostname().split(".")[0], getpass.getuser()
        for name in ("state", "spool"):
            (folder / name).mkdir()
        key = folder / "munge.key"
        key.write_bytes(os.urandom(128))
        key.chmod(0o600)
        cpus = os.cpu_count()
        (folder / "cgroup.conf").write_text("CgroupPlugin=cgroup/v1\n")
        (folder / "slurm.conf").write_text(f"""ClusterName=kvlab
SlurmctldHost={host}(127.0.0.1)
SlurmctldPort={self.free_port()}
SlurmdPort={self.free_port()}
SlurmUser={user}
SlurmdUser={user}
AuthType=auth/munge
AuthInfo=socket={folder}/munge.socket
CredType=cred/munge
ProctrackType=proctrack/linuxproc
TaskPlugin=task/none
JobAcctGatherType=jobacct_gather/none
AccountingStorageType=accounting_storage/none
SelectType=select/cons_tres
SelectTypeParameters=CR_Core
MpiDefault=none
ReturnToService=2
KillWait=5
StateSaveLocation={folder}/state
SlurmdSpoolDir={folder}/spool
SlurmctldPidFile={folder}/slurmctld.pid
SlurmdPidFile={folder}/slurmd.pid
SchedulerParameters=sched_interval=1,batch_sched_delay=0
NodeName={host} NodeAddr=127.0.0.1 CPUs={cpus} State=UNKNOWN
PartitionName=all Nodes={host} Default=YES MaxTime=INFINITE State=UP OverSubscribe=FORCE:4
""")
        self.environment = dict(os.environ, SLURM_CONF=str(folder / "slurm.conf"), OMP_NUM_THREADS="1")
        munge = ["--key-file", key, "--socket", folder / "munge.socket", "--pid-file", folder / "munged.pid"]
        self.start("munged", "-F", "--force", *munge, "--seed-file", folder / "munged.seed", "--log-file", folder / "munged.log")
        wait_for((folder / "munge.socket").exists, 10)
        self.start("slurmctld", "-D", "-c")
        self.start("slurmd", "-D")
        if not wait_for(lambda: self.tell("sinfo", "-h", "-o", "%T") == "idle", 30):
            said = "; ".join(f"{p.name}: {' '.join(p.read_text().split()[-30:])}" for p in sorted(folder.glob("*.said")))
            self.stop()
            raise unittest.SkipTest(f"Slurm does not start here: {said}")

    @staticmethod
    def free_port():
        with socket.socket() as s:
            s.bind(("127.0.0.1", 0))
            return s.getsockname()[1]

    def start(self, name, *words):
        with open(self.folder / f"{name}.said", "w") as said:
            self.running.append(
                subprocess.Popen([program(name), *map(str, words)], env=self.environment, stdout=said, stderr=said)
            )

    def tell(self, *words):
        return subprocess.run(words, env=self.environment, capture_output=True, text=True).stdout.strip()

    def stop(self):
        for process in reversed(self.running):
            process.terminate()
        for process in self.running:
            process.wait()


MISSING = [name for name in ("munged", "slurmctld", "slurmd", "sbatch", "squeue", "scancel") if not program(name)]


@unittest.skipIf(MISSING, f"{', '.join(MISSING)} not installed (slurm-wlm, munge)")
class Slurm(Spread):
    how = ["--on", "slurm", "--jobs", "2", "--slurm-args", "--ntasks=1 --comment='two words'"]

    @classmethod
    def setUpClass(cls):
        folder = tempfile.TemporaryDirectory(prefix="kvlab-slurm-")
        cls.addClassCleanup(folder.cleanup)
        cls.slurm = PrivateSlurm(Path(folder.name).resolve())
        cls.addClassCleanup(cls.slurm.stop)
        cls.environment = cls.slurm.environment

    def jobs(self):
        return self.slurm.tell("squeue", "-h", "-o", "%i")

    def test_the_result_is_that_of_one_process(self):
        self.check_same_result()

    def test_a_killed_worker_costs_no_cell(self):
        self.check_killed_worker()

    def test_without_waiting_the_same_command_collects_the_job(self):
        sent = self.run_kvlab(SLOW, *self.how, "--no-wait")
        self.assertEqual(sent.returncode, 0, sent.stderr)
        job = re.search(r"job (\d+) of Slurm: 2 workers", sent.stderr)
        self.assertTrue(job, sent.stderr)
        self.assertIn(job[1], self.jobs())
        self.assertFalse(self.out.exists())
        self.assertIn("#SBATCH --ntasks=1 --comment='two words'\n", (self.parts / "slurm.sh").read_text())
        collected = self.run_kvlab(SLOW, *self.how)
        self.assertEqual(collected.returncode, 0, collected.stderr)
        self.assertIn(f"job {job[1]} of Slurm, which an earlier run submitted", collected.stderr)
        self.check_whole(collected.stderr, SLOW)

    def test_a_stopped_run_cancels_its_job_and_the_next_one_goes_on(self):
        with subprocess.Popen(self.words(SLOW, *self.how), env=self.environment, **PIPES) as run:
            there = wait_for(lambda: self.finished() and self.at_work())
            run.send_signal(signal.SIGTERM)
            said = run.communicate(timeout=120)[1]
        self.assertTrue(there, said)
        self.assertEqual(run.returncode, 128 + signal.SIGTERM, said)
        self.assertEqual(self.jobs(), "")
        again = self.run_kvlab(SLOW, *self.how)
        self.assertEqual(again.returncode, 0, again.stderr)
        self.check_whole(again.stderr, SLOW)

    def test_reproduce_runs_the_cells_of_every_experiment_as_one_job(self):
        said = self.check_reproduce()
        self.assertEqual(len(re.findall(r"job \d+ of Slurm: 2 workers", said)), 1, said)

    def test_a_job_that_sbatch_refuses_is_an_error_with_its_words(self):
        run = self.run_kvlab(FAST, "--on", "slurm", "--slurm-args", "--partition=nowhere")
        self.assertEqual(run.returncode, 2, run.stderr)
        self.assertIn("invalid partition specified: nowhere", run.stderr)
        self.assertFalse(self.parts.exists())
        self.assertFalse(self.out.exists())


if __name__ == "__main__":
    tests = unittest.main(exit=False)
    for test, reason in tests.result.skipped:
        print(f"skipped: {test}: {reason}")
    sys.exit(not tests.result.wasSuccessful())
