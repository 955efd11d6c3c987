"""Simulate two hosts on one machine with network namespaces, which need root and iproute2.

Each host has its own network, host name, /etc/hosts and ssh settings, but shares the machine's
files and process ids. Outside the scratch folder, the hosts create two namespaces in /run/netns and
Open MPI's folders, and remove both at the end. An empty /run/sshd remains.
"""

import contextlib
import os
import shutil
import signal
import subprocess
import tempfile
from pathlib import Path

from conftest import wait_until

ADDRESSES = {"hosta": "10.77.0.1", "hostb": "10.77.0.2"}
NAMES = tuple(ADDRESSES)
PROGRAMS = "ip sshd ssh ssh-keygen munged slurmctld slurmd sbatch srun scontrol".split()

# Runs "$@" as if on another host. `ip netns exec` would mount /sys again, which slurmd
# does not survive.
ENTER = """
scratch=$1 namespace=$2
hostname "$3"
shift 3
mount --bind "$scratch/hosts" /etc/hosts
mount --bind "$scratch/ssh_config" /etc/ssh/ssh_config
export SLURM_CONF="$scratch/slurm.conf"
exec nsenter --net=/run/netns/"$namespace" -- "$@"
"""
SSH = """
Port 2222
IdentityFile {folder}/user_key
IdentityAgent none
IdentitiesOnly yes
StrictHostKeyChecking no
UserKnownHostsFile /dev/null
LogLevel ERROR
"""
SSHD = """
Port 2222
HostKey {folder}/host_key
AuthorizedKeysFile {folder}/user_key.pub
StrictModes no
PidFile none
UsePAM no
PermitRootLogin prohibit-password
"""
# Slurm must not use cgroups, because these would belong to the machine
SLURM = """
ClusterName=test
SlurmctldHost=hosta(10.77.0.1)
SlurmUser=root
AuthInfo=socket={folder}/munge/socket
ProctrackType=proctrack/linuxproc
SchedulerParameters=batch_sched_delay=0,sched_interval=1
StateSaveLocation={folder}/state
SlurmdSpoolDir={folder}/spool.%n
SlurmctldPidFile={folder}/slurmctld.pid
SlurmdPidFile={folder}/slurmd.%n.pid
SlurmdParameters=config_overrides
NodeName=hosta NodeAddr=10.77.0.1 CPUs=4 RealMemory=4000
NodeName=hostb NodeAddr=10.77.0.2 CPUs=4 RealMemory=4000
PartitionName=all Nodes=hosta,hostb Default=YES State=UP
"""


def hosts_missing() -> str | None:
    """Return why hosts cannot be created here."""
    path = os.environ["PATH"] + ":/usr/sbin"
    missing = [name for name in PROGRAMS if not shutil.which(name, path=path)]
    if missing:
        return f"no {', '.join(missing)} (bash scripts/test.sh --system installs them)"
    probe = f"ip netns add probe{os.getpid()} && ip netns delete probe{os.getpid()}"
    probe += " && unshare --mount --uts mount --bind /etc/hosts /etc/hosts"
    ended = subprocess.run(["sh", "-c", probe], capture_output=True, text=True)
    return ended.stderr.strip() or None


class Hosts:
    """The hosts hosta and hostb, connected by a cable; they are removed when the block ends."""

    def __init__(self, folder: Path):
        self.folder = folder
        self.namespaces = {name: f"{name}-{os.getpid()}" for name in NAMES}
        self.daemons: set[int] = set()  # not counted as the hosts' processes

    def __enter__(self) -> "Hosts":
        self.folder.mkdir(parents=True)
        self.folder.chmod(0o755)
        for namespace in self.namespaces.values():
            call("ip", "netns", "add", namespace)
        a, b = self.namespaces.values()
        link = ("ip", "link", "add", "eth0", "netns", a, "type", "veth")
        call(*link, "peer", "name", "eth0", "netns", b)
        for name, namespace in self.namespaces.items():
            ip = ("ip", "-n", namespace)
            call(*ip, "link", "set", "lo", "up")
            call(*ip, "addr", "add", f"{ADDRESSES[name]}/24", "dev", "eth0")
            call(*ip, "link", "set", "eth0", "up")
        lines = [f"{address} {name}\n" for name, address in ADDRESSES.items()]
        (self.folder / "hosts").write_text(f"127.0.0.1 localhost\n{''.join(lines)}")
        files = {"ssh_config": SSH, "sshd_config": SSHD, "slurm.conf": SLURM}
        for name, text in files.items():
            (self.folder / name).write_text(text.format(folder=self.folder))
        return self

    def __exit__(self, *_) -> None:
        self.daemons.clear()
        for name, namespace in self.namespaces.items():
            self.kill(name)
            call("ip", "netns", "delete", namespace)
            for left in Path(tempfile.gettempdir()).glob(f"ompi.{name}.*"):
                shutil.rmtree(left, ignore_errors=True)  # a killed mpirun leaves this

    def start_ssh(self) -> None:
        """Start an sshd with its own keys on each host; ssh reaches both hosts without options."""
        os.makedirs("/run/sshd", 0o755, exist_ok=True)
        for key in ("host_key", "user_key"):
            file = self.folder / key
            call("ssh-keygen", "-q", "-t", "ed25519", "-N", "", "-f", file)
        for host in NAMES:
            settings = self.folder / "sshd_config"
            call(*self.command(host, "/usr/sbin/sshd", "-f", settings))

    def start_slurm(self) -> None:
        """Start Slurm on both hosts: munged, slurmctld on hosta, and a slurmd on each."""
        munge = self.folder / "munge"
        munge.mkdir(mode=0o711)
        (munge / "key").write_bytes(os.urandom(128))
        (munge / "key").chmod(0o600)
        munged = ["munged", "--force", f"--key-file={munge}/key"]
        for option in ("socket", "pid-file", "seed-file", "log-file"):
            munged.append(f"--{option}={munge}/{option.split('-')[0]}")
        call(*self.command("hosta", *munged))
        call(*self.command("hosta", "slurmctld"))
        for host in NAMES:
            call(*self.command(host, "slurmd", "-N", host))

        def states() -> str:
            return call(*self.command("hosta", "sinfo", "-h", "-N", "-o", "%t"))

        wait_until(lambda: states().split() == ["idle"] * 2, 60, states, interval=0.2)
        self.daemons = {pid for host in NAMES for pid in self.processes(host)}

    def command(self, host: str, *command) -> list[str]:
        """Return the command line that runs `command` on `host`."""
        enter = "unshare --mount --uts --propagation private bash -ec".split()
        where = [str(self.folder), self.namespaces[host], host]
        return [*enter, ENTER, "enter", *where, *map(str, command)]

    def processes(self, host: str) -> set[int]:
        """Return the ids of all processes of a host except its daemons."""
        found = call("ip", "netns", "pids", self.namespaces[host]).split()
        return {*map(int, found)} - self.daemons

    def kill(self, host: str) -> None:
        """Send SIGKILL to every process of a host except its daemons."""

        def gone() -> bool:
            for pid in (found := self.processes(host)):
                with contextlib.suppress(ProcessLookupError):
                    os.kill(pid, signal.SIGKILL)
            return not found

        wait_until(gone, 20, f"the end of {host}'s processes", interval=0.02)


def call(*command) -> str:
    """Run a short command; return its output, or fail and show the output."""
    ended = subprocess.run(
        [str(word) for word in command],
        env={**os.environ, "PATH": f"{os.environ['PATH']}:/usr/sbin:/sbin"},
        stdin=subprocess.DEVNULL,
        capture_output=True,
        text=True,
        timeout=60,
    )
    assert ended.returncode == 0, f"{command}\n{ended.stderr}"
    return ended.stdout
