"""Two hosts on one machine, made of network namespaces; root and iproute2 make them.

A host has its own network, host name, /etc/hosts and ssh settings; files and process ids
are the machine's. Outside the scratch folder there are, until the hosts are gone, two
namespaces in /run/netns and Open MPI's folders, and from then on the empty /run/sshd.
"""

import contextlib
import functools
import os
import shutil
import signal
import subprocess
import tempfile
from functools import partial
from pathlib import Path

from conftest import wait_until

NAMES = ("hosta", "hostb")
ADDRESSES = {"hosta": "10.77.0.1", "hostb": "10.77.0.2"}
SSH_PORT = 2222
NAMED = "/run/netns"  # where ip-netns keeps them

# Runs "$@" as if on another host. `ip netns exec` would mount /sys again, which slurmd
# does not survive.
ENTER = """
scratch=$1 namespace=$2 host=$3
shift 3
mount --bind "$scratch/hosts.$host" /etc/hosts
[ ! -e "$scratch/ssh_config" ] || mount --bind "$scratch/ssh_config" /etc/ssh/ssh_config
hostname "$host"
exec nsenter --net=/run/netns/"$namespace" -- "$@"
"""


@functools.cache
def hosts_missing() -> str | None:
    """Why hosts cannot be made here."""
    if os.geteuid() != 0:
        return "making hosts of network namespaces takes root"
    probe = f"ip netns add probe{os.getpid()} && ip netns delete probe{os.getpid()}"
    probe += " && unshare --mount --uts mount --bind /etc/hosts /etc/hosts"
    ended = subprocess.run(["sh", "-c", probe], capture_output=True, text=True)
    return ended.stderr.strip() or None


def programs_missing(*programs: str) -> str | None:
    """Which of the programs that a service needs are not installed."""
    path = os.environ["PATH"] + ":/usr/sbin"
    missing = [name for name in programs if not shutil.which(name, path=path)]
    if missing:
        return f"no {', '.join(missing)} (bash scripts/test.sh --system installs them)"
    return None


class Hosts:
    """hosta and hostb, joined by a cable; leave the block to remove them."""

    def __init__(self, folder: Path):
        self.folder = folder
        self.namespaces = {name: f"{name}-{os.getpid()}" for name in NAMES}
        self.daemons: set[int] = set()  # as if they were no processes of the hosts

    def __enter__(self) -> "Hosts":
        self.folder.mkdir(parents=True)
        self.folder.chmod(0o755)
        for name, namespace in self.namespaces.items():
            call("ip", "netns", "add", namespace)
            self.name_hosts(name)
        a, b = self.namespaces.values()
        link = ("ip", "link", "add", "eth0", "netns", a, "type", "veth")
        call(*link, "peer", "name", "eth0", "netns", b)
        for name, namespace in self.namespaces.items():
            ip = ("ip", "-n", namespace)
            call(*ip, "link", "set", "lo", "up")
            call(*ip, "addr", "add", f"{ADDRESSES[name]}/24", "dev", "eth0")
            call(*ip, "link", "set", "eth0", "up")
        return self

    def __exit__(self, *_) -> None:
        self.daemons.clear()
        for name in NAMES:
            self.kill(name)
        for namespace in self.namespaces.values():
            subprocess.run(["ip", "netns", "delete", namespace], capture_output=True)
        for name in NAMES:  # of mpirun and its daemons that were killed
            for left in Path(tempfile.gettempdir()).glob(f"ompi.{name}.*"):
                shutil.rmtree(left, ignore_errors=True)

    def name_hosts(self, host: str) -> None:
        """Write the host's /etc/hosts."""
        names = "".join(f"{ADDRESSES[name]} {name}\n" for name in NAMES)
        file = self.folder / f"hosts.{host}"
        file.write_text(f"127.0.0.1 localhost\n{names}")

    def command(self, host: str, *command) -> list[str]:
        """What runs `command` on `host`."""
        enter = "unshare --mount --uts --propagation private bash -ec".split()
        where = [str(self.folder), self.namespaces[host], host]
        return [*enter, ENTER, "enter", *where, *map(str, command)]

    def processes(self, host: str) -> list[int]:
        """Ids of all processes of a host but its daemons."""
        try:
            own = os.stat(f"{NAMED}/{self.namespaces[host]}").st_ino
        except OSError:
            return []
        found = []
        for folder in Path("/proc").glob("[0-9]*"):
            with contextlib.suppress(OSError):
                state = (folder / "stat").read_text().rsplit(")", 1)[1].split()[0]
                if os.stat(folder / "ns" / "net").st_ino == own and state != "Z":
                    found.append(int(folder.name))
        return [pid for pid in found if pid not in self.daemons]

    def kill(self, host: str) -> None:
        """SIGKILL to every process of a host but its daemons."""

        def gone() -> bool:
            for pid in (found := self.processes(host)):
                with contextlib.suppress(ProcessLookupError):
                    os.kill(pid, signal.SIGKILL)
            return not found

        wait_until(gone, 20, f"the end of {host}'s processes", interval=0.02)

    # --- services ---

    def start_ssh(self) -> None:
        """One sshd on each host, with keys of its own; ssh finds both without options."""
        os.makedirs("/run/sshd", 0o755, exist_ok=True)
        folder = self.folder / "ssh"
        folder.mkdir(mode=0o700)
        for key in ("host_key", "user_key"):
            call("ssh-keygen", "-q", "-t", "ed25519", "-N", "", "-f", folder / key)
        shutil.copy(folder / "user_key.pub", folder / "authorized_keys")
        (folder / "sshd_config").write_text(
            f"Port {SSH_PORT}\nHostKey {folder}/host_key\nPidFile none\n"
            f"AuthorizedKeysFile {folder}/authorized_keys\nStrictModes no\nUsePAM no\n"
            "PasswordAuthentication no\nPermitRootLogin prohibit-password\n"
        )
        (self.folder / "ssh_config").write_text(
            "StrictHostKeyChecking no\nUserKnownHostsFile /dev/null\nLogLevel ERROR\n"
            "IdentityAgent none\nIdentitiesOnly yes\n"
            f"Port {SSH_PORT}\nIdentityFile {folder}/user_key\n"
        )
        for host in NAMES:
            log = folder / f"{host}.log"
            daemon = ("/usr/sbin/sshd", "-f", folder / "sshd_config", "-E", log)
            call(*self.command(host, *daemon))

    def start_slurm(self) -> None:
        """Slurm over both hosts: munged, slurmctld on hosta, a slurmd on each."""
        folder = self.folder / "slurm"
        folder.mkdir(mode=0o755)
        (folder / "munge").mkdir(mode=0o711)
        key = folder / "munge" / "key"
        key.write_bytes(os.urandom(128))
        key.chmod(0o600)
        # No cgroups: they would be the machine's
        lines = f"""
            ClusterName=test
            SlurmctldHost=hosta({ADDRESSES["hosta"]})
            SlurmUser=root
            SlurmdUser=root
            AuthType=auth/munge
            AuthInfo=socket={folder}/munge/socket
            CryptoType=crypto/munge
            MpiDefault=none
            ProctrackType=proctrack/linuxproc
            TaskPlugin=task/none
            JobAcctGatherType=jobacct_gather/none
            SelectType=select/cons_tres
            SelectTypeParameters=CR_CPU
            SchedulerParameters=batch_sched_delay=0,sched_interval=1,bf_interval=1
            StateSaveLocation={folder}/state
            SlurmdSpoolDir={folder}/spool.%n
            SlurmctldPidFile={folder}/slurmctld.pid
            SlurmdPidFile={folder}/slurmd.%n.pid
            SlurmctldLogFile={folder}/slurmctld.log
            SlurmdLogFile={folder}/slurmd.%n.log
            SlurmdParameters=config_overrides
            ReturnToService=2
            SlurmdTimeout=15
            KillWait=10
        """.split()
        nodes = [
            f"NodeName={host} NodeAddr={address} CPUs=4 RealMemory=4000"
            for host, address in ADDRESSES.items()
        ]
        partition = f"PartitionName=all Nodes={','.join(NAMES)} Default=YES State=UP"
        (folder / "slurm.conf").write_text("\n".join([*lines, *nodes, partition, ""]))
        munged = ["munged", "--force", f"--key-file={key}", "--num-threads=2"]
        for option in ("socket", "pid-file", "seed-file", "log-file"):
            munged.append(f"--{option}={folder}/munge/{option.split('-')[0]}")
        call(*self.command("hosta", *munged))
        call(*self.command("hosta", "slurmctld"), **self.slurm_variables)
        for host in NAMES:
            call(*self.command(host, "slurmd", "-N", host), **self.slurm_variables)
        states = partial(self.slurm, "sinfo", "-h", "-N", "-o", "%t")
        wait_until(lambda: states().split() == ["idle"] * 2, 60, states, interval=0.2)

    @property
    def slurm_variables(self) -> dict[str, str]:
        """How Slurm's commands find its settings."""
        return {"SLURM_CONF": str(self.folder / "slurm" / "slurm.conf")}

    def slurm(self, *command, check: bool = True) -> str:
        """Run one of Slurm's commands on hosta; its output."""
        return call(
            *self.command("hosta", *command), check=check, **self.slurm_variables
        )


def call(*command, check: bool = True, **variables: str) -> str:
    """Run a command that ends soon; its output, or all it said where it failed."""
    ended = subprocess.run(
        [str(word) for word in command],
        env=os.environ | {"PATH": f"{os.environ['PATH']}:/usr/sbin:/sbin"} | variables,
        stdin=subprocess.DEVNULL,
        capture_output=True,
        text=True,
        timeout=60,
    )
    assert not check or ended.returncode == 0, f"{command}\n{ended.stderr}"
    return ended.stdout
