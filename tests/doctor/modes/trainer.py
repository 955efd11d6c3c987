"""torchrun --standalone --nproc-per-node 2 FILE: Hugging Face's Trainer."""

import torch
from torch import nn
from transformers import Trainer, TrainingArguments


class Net(nn.Module):
    def __init__(self):
        super().__init__()
        self.net = nn.Sequential(nn.Linear(8, 16), nn.ReLU(), nn.Linear(16, 3))

    def forward(self, x, labels):
        outputs = self.net(x)
        return {"loss": nn.functional.cross_entropy(outputs, labels), "logits": outputs}


def metrics(found):
    return {"accuracy": (found.predictions.argmax(1) == found.label_ids).mean()}


torch.manual_seed(0)
data = [{"x": one, "labels": one[:3].argmax()} for one in torch.randn(129, 8)]
options = {"use_cpu": True, "ddp_backend": "gloo", "report_to": "none"}
options |= {"eval_strategy": "epoch", "save_strategy": "epoch", "disable_tqdm": True}
options |= {"per_device_train_batch_size": 4, "gradient_accumulation_steps": 2}
options |= {"ddp_find_unused_parameters": False, "learning_rate": 0.05}
arguments = TrainingArguments("out", num_train_epochs=2, **options)
trainer = Trainer(Net(), arguments, None, data[:96], data[96:], compute_metrics=metrics)
trainer.train()
