"""python FILE: Lightning, which starts the second process itself."""

import lightning
import torch
from torch import nn
from torch.utils.data import DataLoader


class Net(lightning.LightningModule):
    def __init__(self):
        super().__init__()
        self.net = nn.Sequential(nn.Linear(8, 16), nn.ReLU(), nn.Linear(16, 3))

    def training_step(self, batch, index: int):
        return nn.functional.cross_entropy(self.net(batch[0]), batch[1])

    def validation_step(self, batch, index: int):
        right = (self.net(batch[0]).argmax(1) == batch[1]).float().mean()
        self.log("accuracy", right, sync_dist=True)  # exact: all batches are equal

    def configure_optimizers(self):
        optimizer = torch.optim.Adam(self.parameters())
        steps = self.trainer.estimated_stepping_batches
        scheduler = torch.optim.lr_scheduler.OneCycleLR(optimizer, 0.1, steps)
        return [optimizer], [{"scheduler": scheduler, "interval": "step"}]


lightning.seed_everything(0)
data = [(one, one[:3].argmax()) for one in torch.randn(128, 8)]
options = {"accelerator": "cpu", "devices": 2, "strategy": "ddp", "logger": False}
options |= {"enable_progress_bar": False, "enable_checkpointing": False}
trainer = lightning.Trainer(max_epochs=2, **options)
trainer.fit(Net(), DataLoader(data[:96], 8, shuffle=True), DataLoader(data[96:], 8))
if trainer.is_global_zero:
    print(f"epoch 1: accuracy {trainer.callback_metrics['accuracy']:.4f}")
trainer.save_checkpoint("checkpoint.pt")
