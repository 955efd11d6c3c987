"""kubernetes/*.yaml and docker/Dockerfile, as far as that goes without cluster and daemon.

Manifests against the published schemas, names and numbers against each other, flags against
the scripts; and what the containers run is run here, one process group for each pod.
"""

import contextlib
import copy
import os
import re
import shlex
import shutil
import signal
import subprocess
import sys
import tempfile
from fnmatch import fnmatch
from pathlib import Path

import kubernetes_validate
import pytest
import torch
import yaml
from conftest import ROOT, TINY, environment, processes_of, run, wait_until
from dockerfile_parse import DockerfileParser
from ranks import free_port

import distributed
from common.arguments import build_parser, parse_arguments

FILES = ("torchrun.yaml", "mpijob.yaml")
VERSIONS = ("1.33", "1.37")  # the oldest that has all that is used, and a new one
# Keys of an MPIJob but for its pod templates, as its custom resource definition has them:
# https://github.com/kubeflow/mpi-operator/blob/caa3c47/manifests/base/kubeflow.org_mpijobs.yaml
REPLICA = {"replicas": int, "restartPolicy": ("Never", "OnFailure"), "template": dict}
MPIJOB = {
    "apiVersion": ("kubeflow.org/v2beta1",),
    "kind": ("MPIJob",),
    "metadata": {"name": str, "namespace": str, "labels": dict},
    "spec": {
        "launcherCreationPolicy": ("AtStartup", "WaitForWorkersReady"),
        "mpiImplementation": ("OpenMPI", "Intel", "MPICH"),
        "mpiReplicaSpecs": {"Launcher": REPLICA, "Worker": REPLICA},
        "runLauncherAsWorker": bool,
        "runPolicy": {
            "activeDeadlineSeconds": int,
            "backoffLimit": int,
            "cleanPodPolicy": ("None", "Running", "All"),
            "managedBy": str,
            "schedulingPolicy": dict,
            "suspend": bool,
            "ttlSecondsAfterFinished": int,
        },
        "slotsPerWorker": int,
        "sshAuthMountPath": str,
    },
}


def documents(name):
    return list(yaml.safe_load_all((ROOT / "kubernetes" / name).read_text()))


def check_keys(value, known, where=""):
    """Every key is known, and every value of its type, or one of those allowed."""
    if isinstance(known, dict):
        for key, inner in value.items():
            assert key in known, f"{where}.{key} is unknown"
            check_keys(inner, known[key], f"{where}.{key}")
    elif isinstance(known, tuple):
        assert value in known, f"{where}: {value}"
    else:
        assert type(value) is known, f"{where}: {value!r}"


def validate(document, version):
    if document["kind"] != "MPIJob":
        kubernetes_validate.validate(document, version, strict=True)
        return
    check_keys(document, MPIJOB)
    for replica in document["spec"]["mpiReplicaSpecs"].values():
        pod = {
            "apiVersion": "v1",
            "kind": "PodTemplate",
            "template": replica["template"],
        }
        kubernetes_validate.validate(pod, version, strict=True)


def pods(name):
    """(pod spec, its labels) of every template in a file."""
    found = []
    for document in documents(name):
        spec = document["spec"]
        templates = [spec["template"]] if "template" in spec else []
        templates += [
            one["template"] for one in spec.get("mpiReplicaSpecs", {}).values()
        ]
        for template in templates:
            labels = template.get("metadata", {}).get("labels", {})
            found.append((template["spec"], labels))
    return found


def of_kind(name, kind):
    (document,) = (one for one in documents(name) if one["kind"] == kind)
    return document


# --- the manifests ---


@pytest.mark.parametrize("version", VERSIONS)
@pytest.mark.parametrize("name", FILES)
def test_manifests_fit_the_schemas(name, version):
    for document in documents(name):
        validate(document, version)


@pytest.mark.parametrize(
    "name, kind, change",
    [
        ("torchrun.yaml", "Job", lambda job: job["spec"].update(parallelism="two")),
        ("torchrun.yaml", "Job", lambda job: job["spec"].update(backoffLimits=1)),
        ("torchrun.yaml", "Service", lambda one: one["spec"].update(selectors={})),
        ("mpijob.yaml", "MPIJob", lambda job: job["spec"].update(slotsPerWorkers=4)),
        ("mpijob.yaml", "MPIJob", lambda job: job["spec"].update(slotsPerWorker="4")),
        (
            "mpijob.yaml",
            "MPIJob",
            lambda job: job["spec"]["runPolicy"].update(cleanPodPolicy="Never"),
        ),
        (
            "mpijob.yaml",
            "MPIJob",
            lambda job: job["spec"]["mpiReplicaSpecs"]["Worker"]["template"][
                "spec"
            ].update(volume=[]),
        ),
    ],
)
def test_the_schemas_see_mistakes(name, kind, change):
    document = copy.deepcopy(of_kind(name, kind))
    validate(document, VERSIONS[0])
    change(document)
    with pytest.raises((kubernetes_validate.ValidationError, AssertionError)):
        validate(document, VERSIONS[0])


@pytest.mark.parametrize("name", FILES)
def test_volumes_and_mounts_are_the_same(name):
    for spec, _ in pods(name):
        (container,) = spec["containers"]
        volumes = {volume["name"]: volume for volume in spec.get("volumes", [])}
        mounts = {
            one["name"]: one["mountPath"] for one in container.get("volumeMounts", [])
        }
        assert set(volumes) == set(mounts)
        if "nvidia.com/gpu" in container["resources"]["limits"]:
            assert mounts == {"shm": "/dev/shm", "data": "/data", "runs": "/runs"}
            assert volumes["shm"]["emptyDir"]["medium"] == "Memory"


@pytest.mark.parametrize("name", FILES)
def test_pods_have_no_rights_that_they_do_not_need(name):
    stages = dockerfile_stages()
    for spec, _ in pods(name):
        (container,) = spec["containers"]
        assert spec["securityContext"]["runAsNonRoot"] is True
        user = spec["securityContext"]["runAsUser"]
        stage = container["image"].rsplit(":", 1)[1]
        assert [v for i, v in stages[stage] if i == "USER"][-1] == f"{user}:{user}"
        assert container["securityContext"]["allowPrivilegeEscalation"] is False
        assert container["securityContext"]["capabilities"] == {"drop": ["ALL"]}
        assert spec["automountServiceAccountToken"] is False


@pytest.mark.parametrize("name", FILES)
def test_what_depends_on_the_cluster_is_marked(name):
    lines = (ROOT / "kubernetes" / name).read_text().splitlines()
    keys = r"image|claimName|completions|parallelism|slotsPerWorker|sizeLimit"
    marked = [line for line in lines if re.match(rf" *({keys}):", line)]
    assert len(marked) >= 5 and all("# EDIT" in line for line in marked)
    gpus = next(i for i, line in enumerate(lines) if "nvidia.com/gpu:" in line)
    assert "limits: # EDIT" in lines[gpus - 1]


def test_names_and_numbers_of_the_job_agree():
    service, policy, job = documents("torchrun.yaml")
    ((spec, labels),) = pods("torchrun.yaml")
    selector = service["spec"]["selector"].items()
    assert selector and selector <= labels.items()
    assert policy["spec"]["podSelector"]["matchLabels"].items() <= labels.items()
    (peer,) = policy["spec"]["ingress"][0]["from"]
    assert peer["podSelector"]["matchLabels"].items() <= labels.items()
    assert spec["subdomain"] == service["metadata"]["name"]
    assert service["spec"]["clusterIP"] == "None"
    (container,) = spec["containers"]
    variables = {one["name"]: one["value"] for one in container["env"]}
    names = job["metadata"]["name"], service["metadata"]["name"]
    assert variables["MASTER_ADDR"] == "{}-0.{}".format(*names)
    nodes = job["spec"]["completions"]
    assert nodes == job["spec"]["parallelism"] == int(variables["NNODES"])
    assert container["resources"]["limits"]["nvidia.com/gpu"] == variables["NPROC"]
    rule = job["spec"]["podFailurePolicy"]["rules"][0]
    assert rule["action"] == "FailJob" and rule["onExitCodes"]["values"] == [2]


def test_variables_of_the_command_are_defined():
    ((spec, _),) = pods("torchrun.yaml")
    (container,) = spec["containers"]
    (script,) = container["args"]
    used = set(re.findall(r"\$\{?([A-Za-z_]\w*)", script))
    assert of_kind("torchrun.yaml", "Job")["spec"]["completionMode"] == "Indexed"
    assert used == {"flags", "JOB_COMPLETION_INDEX"}
    launcher = (ROOT / "scripts" / "distributed.sh").read_text()
    for name in {one["name"] for one in container["env"]}:
        assert f"{name}=" in launcher or name.startswith("TORCH_ELASTIC_"), name
    assert "NODE_RANK=" in launcher


def test_names_and_numbers_of_the_mpijob_agree():
    spec = of_kind("mpijob.yaml", "MPIJob")["spec"]
    launcher, worker = (
        spec["mpiReplicaSpecs"][role]["template"]["spec"]["containers"][0]
        for role in ("Launcher", "Worker")
    )
    slots, workers = (
        spec["slotsPerWorker"],
        spec["mpiReplicaSpecs"]["Worker"]["replicas"],
    )
    arguments = launcher["args"]
    assert int(arguments[arguments.index("-np") + 1]) == slots * workers
    assert worker["resources"]["limits"]["nvidia.com/gpu"] == str(slots)
    handed_on = {arguments[i + 1] for i, word in enumerate(arguments) if word == "-x"}
    image = " ".join(
        value for i, value in dockerfile_stages()["torchrun"] if i == "ENV"
    )
    set_in_image = set(re.findall(r"(\w+)=", image))
    assert handed_on <= set_in_image | {one["name"] for one in launcher["env"]}
    server, client = (ROOT / "docker" / name for name in ("sshd_config", "ssh_config"))
    port = worker["readinessProbe"]["tcpSocket"]["port"]
    for file in (server, client):
        assert re.search(rf"^ *Port {port}$", file.read_text(), re.MULTILINE)
    for name in ("HostKey", "AuthorizedKeysFile"):
        path = re.search(rf"^{name} (.*)$", server.read_text(), re.MULTILINE)[1]
        assert os.path.dirname(path) == spec["sshAuthMountPath"]
    copied = " ".join(v for i, v in dockerfile_stages()["horovod"] if i == "COPY")
    assert worker["args"][-1] in copied.split()


def training_flags():
    """The flags that each file trains with."""
    (script,) = pods("torchrun.yaml")[0][0]["containers"][0]["args"]
    array = re.search(r"flags=\((.*?)\)", script, re.DOTALL)[1]
    arguments = pods("mpijob.yaml")[0][0]["containers"][0]["args"]
    start = arguments.index("horovod_distributed.py") + 1
    return {"torchrun.yaml": shlex.split(array), "mpijob.yaml": arguments[start:]}


@pytest.mark.parametrize("name", FILES)
def test_flags_are_those_of_the_script(name):
    flags = training_flags()[name]
    if name == "torchrun.yaml":
        args = distributed.arguments(flags)
    else:
        args = parse_arguments(build_parser(""), "horovod_distributed", flags)
    assert (args.data, args.resume) == ("/data", "auto")
    assert str(args.output).startswith("/runs/")
    assert "--lrr" not in flags
    with pytest.raises(SystemExit):
        distributed.arguments([*flags, "--lrr", "1"])


# --- what the containers run ---


def job_script(data, output, port, *flags):
    """The script of the Job, on a tiny run."""
    (script,) = pods("torchrun.yaml")[0][0]["containers"][0]["args"]
    changes = {
        "--data /data": f"--data {data}",
        "--output /runs/first": f"--output {output}",
        "--checkpoint-steps 1000": shlex.join(map(str, flags)),
        "exec bash ": f"MASTER_PORT={port} exec bash ",
    }
    for old, new in changes.items():
        assert script.count(old) == 1
        script = script.replace(old, new)
    return script


# The last one, as this machine's name may lead to loopback
TWO_PODS = {"NNODES": "2", "NPROC": "1", "MASTER_ADDR": "127.0.0.1"}
TWO_PODS["GLOO_SOCKET_IFNAME"] = "lo"


class Pods:
    """The Job's script twice, as in two pods."""

    def __init__(self, script, log):
        self.name = f"{log}-pod-"  # marks the processes of each
        self.log = open(log, "ab")
        self.processes = [
            subprocess.Popen(
                ["bash", "-c", script],
                cwd=ROOT,
                env=environment(
                    TEST_RUN=f"{self.name}{index}",
                    JOB_COMPLETION_INDEX=str(index),
                    **TWO_PODS,
                ),
                stdin=subprocess.DEVNULL,
                stdout=self.log,
                stderr=self.log,
                start_new_session=True,
            )
            for index in range(2)
        ]

    def __enter__(self):
        return self

    def __exit__(self, *_):
        for index in range(2):
            self.lose(index)
        self.log.close()

    def lose(self, index):
        """SIGKILL for every process of a pod."""
        while found := processes_of(f"{self.name}{index}"):
            for pid in found:
                with contextlib.suppress(ProcessLookupError):
                    os.kill(pid, signal.SIGKILL)
        self.processes[index].wait()

    def end(self, seconds=60):
        return [process.wait(seconds) for process in self.processes]


@pytest.mark.full
def test_the_jobs_command_trains_and_goes_on_after_a_pod_was_lost(digits, tmp_path):
    """As the Job does: all pods end, and all start again."""
    output, log = tmp_path / "out", tmp_path / "log"
    flags = [*TINY, "--device", "cpu", "--epochs", 2, "--max-steps", 100, "-j", 0]
    flags += ["--checkpoint-steps", 5]
    port = str(free_port())
    with Pods(job_script(digits, output, port, *flags), log) as running:
        wait_until((output / "checkpoint.pt").exists, 60, "a checkpoint")
        running.lose(1)
        assert running.processes[0].wait(45) == 1, log.read_text()
    flags[flags.index("--epochs") + 1] = 1
    flags[flags.index("--checkpoint-steps") + 1] = 100
    with Pods(job_script(digits, output, port, *flags), log) as running:
        assert running.end() == [0, 0], log.read_text()
    assert log.read_text().count("resumed at epoch 1, after step ") == 1
    assert len((output / "epochs.jsonl").read_text().splitlines()) == 1


def test_the_jobs_command_ends_with_2_where_trying_again_is_of_no_use(tmp_path):
    script = job_script(
        tmp_path / "nowhere", tmp_path / "out", 1, *TINY, "--device", "cpu"
    )
    ended = run("bash", "-c", script, JOB_COMPLETION_INDEX="1", **TWO_PODS)
    assert ended.returncode == 2 and ended.stdout == ""
    assert len(ended.stderr.splitlines()) == 1 and "nowhere/train" in ended.stderr


def test_a_pod_that_meets_a_damaged_image_ends_with_2(pictures, tmp_path):
    """So that podFailurePolicy ends the Job. The other pod says that it lost this one."""
    image = pictures / "train" / "dog" / "3.JPEG"
    image.write_bytes(image.read_bytes()[:200])
    flags = [*TINY, "--device", "cpu", "-j", 0]
    script = job_script(pictures, tmp_path / "out", free_port(), *flags)
    with Pods(script, tmp_path / "log") as running:
        assert sorted(running.end(120)) == [1, 2], (tmp_path / "log").read_text()
    text = (tmp_path / "log").read_text()
    assert text.count(f"cannot read the image {image}") == 1, text


@pytest.mark.mpi
def test_the_launchers_command_trains_and_saves_when_it_is_drained(pictures, tmp_path):
    """As the kubelet does: SIGTERM to the container's first process."""
    container = pods("mpijob.yaml")[0][0]["containers"][0]
    places = {
        "8": "2",
        "/app": ROOT,
        "/opt/venv/bin/python": sys.executable,
        "/data": pictures,
        "/runs/horovod": tmp_path / "out",
    }
    assert set(places) <= set(container["args"])
    command = [
        *container["command"],
        *(places.get(one, one) for one in container["args"]),
    ]
    flags = [*TINY, "--epochs", "1000", "-j", "0", "--device", "cpu"]
    with open(tmp_path / "log", "wb") as log:
        pod = subprocess.Popen(
            [str(word) for word in (*command, *flags)],
            env=environment(OMPI_MCA_rmaps_base_oversubscribe="1"),
            stdin=subprocess.DEVNULL,
            stdout=log,
            stderr=log,
            start_new_session=True,
        )
    try:
        wait_until((tmp_path / "out" / "checkpoint.pt").exists, 90, "a checkpoint")
        pod.terminate()
        status = pod.wait(60)
    finally:
        with contextlib.suppress(ProcessLookupError):
            os.killpg(pod.pid, signal.SIGKILL)
    text = (tmp_path / "log").read_text()
    assert status == 143 and "horovod_distributed.py: stopped after" in text, text


@pytest.fixture
def open_folder():
    """A folder that another user can look into."""
    with tempfile.TemporaryDirectory() as folder:
        os.chmod(folder, 0o755)
        yield Path(folder)


@pytest.mark.skipif(not Path("/usr/sbin/sshd").exists(), reason="no OpenSSH server")
def test_the_ssh_server_takes_its_configuration(open_folder):
    """As an ordinary user, with a key that is mounted for it."""
    key, config = open_folder / "id_rsa", open_folder / "config"
    run("ssh-keygen", "-q", "-t", "rsa", "-N", "", "-f", key)
    if os.getuid() == 0:
        key.chmod(0o644)
    user = ("setpriv", "--reuid=65534", "--regid=65534", "--clear-groups")
    server = (*(user if os.getuid() == 0 else ()), "/usr/sbin/sshd", "-T", "-f", config)
    text = (ROOT / "docker" / "sshd_config").read_text()
    assert text.count("/home/trainer/.ssh/id_rsa") == 1
    config.write_text(text.replace("/home/trainer/.ssh/id_rsa", str(key)))
    ended = run(*server)
    assert ended.returncode == 0, ended.stderr
    assert "port 2222" in ended.stdout and "passwordauthentication no" in ended.stdout
    config.write_text(config.read_text() + "Prot 2222\n")
    assert run(*server).returncode != 0
    ended = run("ssh", "-G", "-F", ROOT / "docker" / "ssh_config", "pod")
    assert "port 2222" in ended.stdout and "stricthostkeychecking false" in ended.stdout


# --- the images ---


def dockerfile_stages():
    """{name of a stage: its (instruction, value) pairs}, those of its base first."""
    parser = DockerfileParser(path=str(ROOT / "docker" / "Dockerfile"))
    stages, lines = {}, []
    for line in parser.structure:
        if line["instruction"] == "FROM":
            base, _, name = line["value"].split()
            lines = stages[name] = list(stages.get(base, []))
        if line["instruction"] != "COMMENT":
            lines.append((line["instruction"], line["value"]))
    return stages


def sources(value):
    """What a COPY takes from the project's folder; nothing where it is another stage."""
    words = value.split()
    return [] if words[0].startswith("--from") else words[:-1]


def test_the_images_stages():
    stages = dockerfile_stages()
    assert list(stages) == ["torchrun", "horovod-build", "horovod"]
    bases = [
        value.split()[0]
        for lines in stages.values()
        for i, value in lines
        if i == "FROM"
    ]
    pinned = {base for base in bases if base not in stages}
    tags = {base.removeprefix("nvidia/cuda:") for base in pinned}
    versions = {
        re.fullmatch(r"(\d+\.\d+)\.\d+-\w+-ubuntu\d\d\.\d\d", tag)[1] for tag in tags
    }
    assert len(pinned) == 2 and len(versions) == 1
    if (
        torch.version.cuda is not None
        and f"torch=={torch.__version__.split('+')[0]};"
        in (ROOT / "constraints.txt").read_text()
    ):
        assert versions == {torch.version.cuda}
    for name, lines in stages.items():
        used = re.findall(r"from=([\w-]+)", " ".join(value for _, value in lines))
        assert set(used) <= set(stages) - {name}
    for target in ("torchrun", "horovod"):
        assert [v for i, v in stages[target] if i == "USER"][-1] == "1000:1000"


def test_the_image_has_what_the_scripts_need(tmp_path):
    """What is copied exists, is not ignored, and is enough to check a command line."""
    ignored = (ROOT / "docker" / "Dockerfile.dockerignore").read_text().splitlines()
    kept = [line[1:].rstrip("/") for line in ignored if line.startswith("!")]
    for lines in dockerfile_stages().values():
        for value in (value for i, value in lines if i == "COPY"):
            for source in sources(value):
                assert (ROOT / source).exists(), source
                assert any(fnmatch(source.split("/")[0], one) for one in kept), source
    for value in (v for i, v in dockerfile_stages()["torchrun"] if i == "COPY"):
        for source in sources(value):
            if (ROOT / source).is_dir():
                shutil.copytree(ROOT / source, tmp_path / source)
            else:
                shutil.copy(ROOT / source, tmp_path / source)
    flags = ("--synthetic", "64", "-b", "8", "--output", str(tmp_path / "out"))
    command = shlex.join(
        ("python", "-m", "launch.check", "distributed.py", "1", "--", *flags)
    )
    ended = run("bash", "-c", f"cd {tmp_path} && env -u PYTHONPATH {command}")
    assert (ended.returncode, ended.stdout.strip()) == (0, "1"), ended.stderr


def test_the_image_installs_what_the_project_names():
    installs = [
        v for i, v in dockerfile_stages()["horovod"] if i == "RUN" and "pip" in v
    ]
    assert any(
        "-c constraints.txt" in one and "-r requirements.txt" in one for one in installs
    )
    for one in installs:
        for word in shlex.split(one):
            if word.endswith(".txt"):
                assert (ROOT / word).exists()


def test_the_page_names_what_is_there():
    page = (ROOT / "docs" / "kubernetes.md").read_text()
    for link in re.findall(r"\]\(([^)#]+)\)", page):
        assert link.startswith("http") or (ROOT / "docs" / link).exists(), link
    for path in set(re.findall(r"\b(?:kubernetes|docker)/[\w.*/-]+\w", page)):
        assert list(ROOT.glob(path)), path
    assert "validated, not run" in page
