"""deploy/: manifests and Dockerfile, without cluster and daemon."""

import re

import kubernetes_validate
import pytest
import yaml
from conftest import ROOT, run
from dockerfile_parse import DockerfileParser

pytestmark = pytest.mark.cluster

VERSIONS = ("1.33", "1.37")  # the oldest that has all that is used, and a new one


def documents(name):
    return list(yaml.safe_load_all((ROOT / "deploy/kubernetes" / name).read_text()))


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
    flags = dict(re.findall(r"--([a-z-]+)=(\S+)", trainer["args"][0]))
    names = job["metadata"]["name"], service["metadata"]["name"]
    assert flags["master-addr"] == "{}-0.{}".format(*names)
    nodes = job["spec"]["completions"]
    assert nodes == job["spec"]["parallelism"] == int(flags["nnodes"])
    limits = trainer["resources"]["limits"]
    assert limits["nvidia.com/gpu"] == flags["nproc-per-node"]
    spec, launcher, worker = replicas()
    words, slots = container(launcher)["args"], spec["slotsPerWorker"]
    assert int(words[words.index("-np") + 1]) == slots * worker["replicas"]
    limits = container(worker)["resources"]["limits"]
    assert limits["nvidia.com/gpu"] == str(slots)


def test_the_image_has_what_the_scripts_need(tmp_path):
    for line in DockerfileParser(path=str(ROOT / "deploy/docker/Dockerfile")).structure:
        words = line["value"].split()
        if line["instruction"] == "COPY" and not words[0].startswith("--from"):
            for source in words[:-1]:
                (tmp_path / source).parent.mkdir(parents=True, exist_ok=True)
                run("cp", "-r", ROOT / source, tmp_path / source)
    script = "dataparallel.py --synthetic 4 -b 4 --image-size 32 --epochs 1".split()
    ended = run("env", "-C", tmp_path, "-u", "PYTHONPATH", "python", *script)
    assert ended.returncode == 0 and "epoch 1/1: " in ended.stdout, ended.stderr
