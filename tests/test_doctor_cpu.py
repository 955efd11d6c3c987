"""doctor --cpu emulates CUDA: right numbers, an error for code that needs a GPU."""

import re
import sys

from conftest import ROOT, run

TORCHRUN = "-m torch.distributed.run --standalone --nproc-per-node 2".split()
OWN = """import torch, threading
with torch.device("cuda"):
    x = torch.ones(2)
cpu = x.to("cpu")
cpu += 1
assert x.is_cuda and x.tolist() == [1, 1] and x.cuda() is x and x.to(1).get_device() == 1
torch.save(x, "x.pt")
places = {None: "cuda:0", "cpu": "cpu", "cuda:1": "cuda:1"}
assert all(torch.load("x.pt", map_location=a).device == torch.device(b) for a, b in places.items())
assert torch.load("x.pt", map_location=lambda one, _: one.cuda(1)).device.index == 1
seen = []
thread = threading.Thread(target=lambda: seen.append((x * 2).device.type))
thread.start(), thread.join()
weight = torch.ones(2, device="cuda", requires_grad=True)
weight.register_hook(lambda gradient: seen.append(torch.ones(1).cuda().device.type))
(weight * 2).sum().backward()
assert seen == ["cuda", "cuda"] and weight.grad.is_cuda
torch.manual_seed(0)
on_cpu = torch.rand(2)
torch.manual_seed(0)
torch.rand(2, device="cuda")
assert torch.equal(torch.rand(2), on_cpu)
"""


def played(folder, *command):
    """Run a command under doctor --cpu in a folder."""
    words = [sys.executable, "-m", "doctor", "--cpu", "--", sys.executable, *command]
    line = f"cd {folder} && {' '.join(map(str, words))}"
    return run("bash", "-c", line, PYTHONPATH=str(ROOT), OMP_NUM_THREADS="1")


def test_numbers(tmp_path):
    """SyncBatchNorm, AVG, autocast and GradScaler give the values that we computed by hand."""
    ended = played(tmp_path, *TORCHRUN, ROOT / "tests/doctor/played_numbers.py")
    assert ended.stdout.count("all numbers are right") == 2, ended.stderr[-3000:]
    page = " ".join(ended.stderr.split())
    assert re.search(r"2 processes trained .* on CPU, emulated GPU; ", page), page


def test_devices_and_the_line(tmp_path):
    """One process uses several devices; the script's last call needs a GPU, and ends the run."""
    (tmp_path / "own.py").write_text(f"{OWN}graph = torch.cuda.CUDAGraph()\n")
    text = f"cannot emulate `graph = torch.cuda.CUDAGraph()` [own.py:{OWN.count(chr(10)) + 1}]"
    assert text in played(tmp_path, "own.py").stderr.partition("=====")[0]


def test_workflow(tmp_path):
    """The workflow in docs/doctor.md conforms to the public schema of GitHub's workflows."""
    page = (ROOT / "docs/doctor.md").read_text()
    (text,) = re.findall(r"```yaml\n(name: doctor.*?)```", page, re.S)
    for number, one in enumerate((text, text.replace("runs-on", "runs-at"))):
        (tmp_path / "doctor.yml").write_text(one)
        check = ["check_jsonschema", "--builtin-schema", "vendor.github-workflows"]
        ended = run(sys.executable, "-m", *check, tmp_path / "doctor.yml")
        assert ended.returncode == number, ended.stdout + ended.stderr
