"""Check deploy/'s manifests and Dockerfile, without a cluster or a daemon."""

import re
from itertools import chain

import jsonschema
import kubernetes_validate
import pytest
import yaml
from conftest import ROOT, run
from dockerfile_parse import DockerfileParser

pytestmark = pytest.mark.cluster

MANIFESTS = ("torchrun.yaml", "trainjob.yaml", "trainjob-horovod.yaml")
VERSIONS = ("1.33", "1.37")  # the oldest with all features used here, and a recent one


def documents(name):
    return list(yaml.safe_load_all((ROOT / "deploy/kubernetes" / name).read_text()))


def container(template):
    (only,) = template["template"]["spec"]["containers"]
    return only


def pods(node):
    """Return all pods in a document: a Job, a TrainingRuntime, or a TrainJob's patches."""
    if "containers" in node:
        yield {"apiVersion": "v1", "kind": "PodTemplate", "template": {"spec": node}}
    for part in node.values() if isinstance(node, dict) else node:
        yield from pods(part) if isinstance(part, dict | list) else ()


@pytest.mark.parametrize("version", VERSIONS)
def test_manifests_fit_the_schemas(version):
    """Manifests conform to the schemas; Kubeflow Trainer's schema is our excerpt, trainer.yaml."""
    ours = yaml.safe_load((ROOT / "tests/cluster/trainer.yaml").read_text())
    for document in chain(*map(documents, MANIFESTS)):
        if document["kind"] in ours:
            jsonschema.validate(document, ours[document["kind"]])
        for one in pods(document) if document["kind"] in ours else [document]:
            kubernetes_validate.validate(one, version, strict=True)


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
    assert flags["nproc-per-node"] == "gpu"  # fails if PyTorch cannot use the GPUs
    for name in MANIFESTS[1:]:
        policy, *runtimes, job = documents(name)
        trainer, (pod, *_) = job["spec"]["trainer"], pods([*runtimes, job])
        labels = {"jobset.sigs.k8s.io/jobset-name": job["metadata"]["name"]}
        assert policy["spec"]["podSelector"]["matchLabels"] == labels
        if not runtimes:
            assert trainer["command"][1] == "--nproc-per-node=gpu"
        for runtime in runtimes:
            assert "'targetReplicatedJobs': ['launcher']" in str(runtime["spec"])
            processes = trainer["numProcPerNode"]
            limits = container(pod)["resources"]["limits"]
            assert limits["nvidia.com/gpu"] == str(processes)
            assert job["spec"]["runtimeRef"]["name"] == runtime["metadata"]["name"]
            assert trainer["args"][1] == str(processes * trainer["numNodes"])


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
