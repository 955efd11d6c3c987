"""deploy/kubernetes/*.yaml and deploy/docker/Dockerfile, without cluster and daemon."""

import shlex
import sys

import kubernetes_validate
import pytest
import yaml
from conftest import ROOT, TINY, run
from dockerfile_parse import DockerfileParser
from ranks import free_port

pytestmark = pytest.mark.cluster

VERSIONS = ("1.33", "1.37")  # the oldest that has all that is used, and a new one


def documents(name):
    return list(yaml.safe_load_all((ROOT / "deploy" / "kubernetes" / name).read_text()))


def replicas():
    """The MPIJob's own part, as launcher and worker."""
    (job,) = documents("mpijob.yaml")
    parts = job["spec"]["mpiReplicaSpecs"]
    return job["spec"], parts["Launcher"], parts["Worker"]


def container(template):
    (only,) = template["template"]["spec"]["containers"]
    return only


@pytest.mark.parametrize("version", VERSIONS)
def test_manifests_fit_the_schemas(version):
    """The MPIJob's own keys have no published schema; its pods have."""
    for document in documents("torchrun.yaml"):
        kubernetes_validate.validate(document, version, strict=True)
    for part in replicas()[1:]:
        pod = {"apiVersion": "v1", "kind": "PodTemplate", "template": part["template"]}
        kubernetes_validate.validate(pod, version, strict=True)


def test_names_and_numbers_agree():
    service, policy, job = documents("torchrun.yaml")
    labels = job["spec"]["template"]["metadata"]["labels"]
    assert service["spec"]["selector"] == labels
    assert policy["spec"]["podSelector"]["matchLabels"] == labels
    trainer = container(job["spec"])
    variables = {one["name"]: one["value"] for one in trainer["env"]}
    names = job["metadata"]["name"], service["metadata"]["name"]
    assert variables["MASTER_ADDR"] == "{}-0.{}".format(*names)
    nodes = job["spec"]["completions"]
    assert nodes == job["spec"]["parallelism"] == int(variables["NNODES"])
    assert trainer["resources"]["limits"]["nvidia.com/gpu"] == variables["NPROC"]
    rule = job["spec"]["podFailurePolicy"]["rules"][0]
    assert rule["action"] == "FailJob" and rule["onExitCodes"]["values"] == [2]
    spec, launcher, worker = replicas()
    words, slots = container(launcher)["args"], spec["slotsPerWorker"]
    assert int(words[words.index("-np") + 1]) == slots * worker["replicas"]
    limits = container(worker)["resources"]["limits"]
    assert limits["nvidia.com/gpu"] == str(slots)


# --- what the containers run ---


def job_script(data, output, *flags):
    """The script of the Job, on a tiny run."""
    (script,) = container(documents("torchrun.yaml")[2]["spec"])["args"]
    changes = {
        "--data /data": f"--data {data}",
        "--output /runs/first": f"--output {output}",
        "--checkpoint-steps 1000": shlex.join(map(str, flags)),
        "exec bash ": f"MASTER_PORT={free_port()} exec bash ",
    }
    for old, new in changes.items():
        assert script.count(old) == 1
        script = script.replace(old, new)
    return script


def two_pods(script):
    """The Job's script twice, as in two pods; exit statuses and what was printed."""
    pod = {"NNODES": "2", "NPROC": "1", "MASTER_ADDR": "127.0.0.1"}
    pod["GLOO_SOCKET_IFNAME"] = "lo"  # this machine's name may lead elsewhere
    both = f"(JOB_COMPLETION_INDEX=0; {script}) & (JOB_COMPLETION_INDEX=1; {script})"
    ended = run("bash", "-c", f"{both}; other=$?; wait $!; echo $? $other", **pod)
    return ended.stdout.splitlines()[-1], ended.stdout + ended.stderr


def test_the_jobs_command_trains_and_ends_with_2_at_bad_input(pictures, tmp_path):
    """So that podFailurePolicy ends the Job."""
    flags = [*TINY, "--device", "cpu", "-j", 0, "--epochs", 1]
    statuses, text = two_pods(job_script(pictures, tmp_path / "good", *flags))
    assert statuses == "0 0" and (tmp_path / "good" / "report.json").exists(), text
    image = pictures / "train" / "dog" / "3.JPEG"
    image.write_bytes(image.read_bytes()[:200])
    statuses, text = two_pods(job_script(pictures, tmp_path / "damaged", *flags))
    assert statuses == "2 2", text
    assert text.count(f"cannot read the image {image}") == 1, text


@pytest.mark.mpi
def test_the_launchers_command_trains_and_saves_when_it_is_drained(pictures, tmp_path):
    """As the kubelet does: SIGTERM to the container's first process."""
    mpirun, output = container(replicas()[1]), tmp_path / "out"
    places = {"8": "2", "/app": ROOT, "/opt/venv/bin/python": sys.executable}
    places |= {"/data": pictures, "/runs/horovod": output}
    words = [*mpirun["command"], *(places.get(one, one) for one in mpirun["args"])]
    flags = [*TINY, "--epochs", "1000", "-j", "0", "--device", "cpu"]
    kubelet = f'"$@" & until [ -e {output}/checkpoint.pt ]; do sleep 0.1; done; '
    command = ("bash", "-c", kubelet + "kill $!; wait $!", "kubelet", *words, *flags)
    ended = run(*command, OMPI_MCA_rmaps_base_oversubscribe="1")
    assert ended.returncode == 143, ended.stderr
    assert "horovod_distributed.py: stopped after" in ended.stdout + ended.stderr


def test_the_image_has_what_the_scripts_need(tmp_path):
    """What is copied exists, and is enough to check a command line."""
    for line in DockerfileParser(path=str(ROOT / "deploy/docker/Dockerfile")).structure:
        words = line["value"].split()
        if line["instruction"] == "COPY" and not words[0].startswith("--from"):
            for source in words[:-1]:
                (tmp_path / source).parent.mkdir(parents=True, exist_ok=True)
                run("cp", "-r", ROOT / source, tmp_path / source)
    flags = ("--synthetic", "64", "-b", "8", "--output", str(tmp_path / "out"))
    words = ("python", "-m", "launch.check", "--nproc-per-node", "1", "distributed.py")
    command = f"cd {tmp_path} && env -u PYTHONPATH {shlex.join((*words, *flags))}"
    ended = run("bash", "-c", command)
    assert (ended.returncode, ended.stdout.strip()) == (0, "1 1"), ended.stderr
