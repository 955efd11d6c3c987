"""Test the model of docs/understand.md."""

import pytest
import torch.distributed as dist
import torchvision

from benchmarks.scaling_model import MIB, Cluster, Link, buckets


def hosts(**changes):
    """Return hosts with eight GPUs each; a step of 100 ms sends 100 MB in two calls."""
    links = Link(1e-5, 1e11), Link(1e-4, 1e10)
    return Cluster(0.1, 256, 100e6, 8, *links, bucket=1e9)._replace(**changes)


def test_hosts_by_hand():
    inside = 2 * 14 * 1e-5 + 14 / 8 * 1e-3  # two calls: the first bucket and the rest
    between = 2 * 6 * 1e-4 + 6 / 4 * 1e-2
    assert hosts().all_reduce(8) == pytest.approx(inside)
    assert hosts().all_reduce(32) == pytest.approx(inside + between)
    # A host with one GPU uses only its network
    assert hosts(gpus_per_host=1).all_reduce(4) == pytest.approx(between)
    with pytest.raises(ValueError, match="12 GPUs do not fill hosts of 8"):
        hosts().all_reduce(12)


def test_buckets_are_those_of_ddp():
    for name in ("resnet18", "resnet50"):
        parameters = list(torchvision.models.get_model(name).parameters())
        limits = [dist._DEFAULT_FIRST_BUCKET_BYTES, 25 * MIB]
        given = parameters[::-1], limits, [False] * len(parameters)
        assigned, _ = dist._compute_bucket_assignment_by_size(*given)
        assert buckets(sum(4 * one.numel() for one in parameters)) == len(assigned)
