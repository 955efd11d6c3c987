"""The fixes of docs/pitfalls.md run."""

from conftest import ROOT, environment
from played import Played, python

# Runs each fix, and checks what the page says about it, in one process
CURES = '''
import os, re, sys
import numpy
import torch
from torch.optim.lr_scheduler import OneCycleLR

page = open(sys.argv.pop()).read()
os.chdir(os.path.dirname(sys.argv[0]))
calls = {
    1: "assert paths[0].decode() == 'train/cat/1.JPEG';"
        "loader = torch.utils.data.DataLoader([], **options);"
        "assert loader.multiprocessing_context.get_start_method() == 'fork'",
    2: "assert content['epoch'] == 3 and {*parts} < {*content}",
    3: "assert (scheduler.last_epoch, scheduler.total_steps) == (6, 10)",
    4: "assert torch.load(path) == content",
    5: """
losses[1] = float("nan")
try:
    exec(block)
except SystemExit as problem:
    assert str(problem) == "rank 1, step 7: samples [6]"
else:
    raise ValueError("a NaN was not seen")
""",
}
for count, block in enumerate(re.findall(r"```python\\n(.*?)```", page, re.DOTALL), 1):
    net = torch.nn.Linear(4, 3)
    sgd = torch.optim.SGD(net.parameters(), 0.1)
    names = {
        **globals(), "raw_model": net, "optimizer": sgd,
        "scheduler": OneCycleLR(sgd, 0.1, total_steps=7), "scaler": torch.amp.GradScaler("cpu"),
        "epoch": 3, "best": 0.5, "path": "a.pt", "content": {"a": 1},
        "paths": ["train/cat/1.JPEG", "b"], "rank": 1, "loader": [1, 2], "epochs": 5,
        "losses": torch.ones(4), "step": 7, "indices": torch.arange(5, 9),
        "block": block,
    }
    exec(block, names)
    exec(calls.pop(count), names)
print(count, "cures", sorted(calls))
'''


def test_the_cures_run_as_they_stand(tmp_path):
    (tmp_path / "cures.py").write_text(CURES)
    page = ROOT / "docs" / "pitfalls.md"
    with Played(tmp_path / "logs") as played:
        played.start(python, (tmp_path / "cures.py", page), environment())
        assert played.end() == [0], played.text()
        assert played.log(0).endswith("5 cures []\n"), played.text()
