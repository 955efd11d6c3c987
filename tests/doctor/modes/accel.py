"""accelerate launch --multi_gpu --num_processes 2 FILE: accelerate, on the CPU."""

import torch
from accelerate import Accelerator
from torch import nn
from torch.utils.data import DataLoader

accelerator = Accelerator(cpu=True, gradient_accumulation_steps=2)
torch.manual_seed(0)
data = [(one, one[:3].argmax()) for one in torch.randn(129, 8)]
loader = DataLoader(data[:96], 4, shuffle=True)
val_loader = DataLoader(data[96:], 8)
net = nn.Sequential(nn.Linear(8, 16), nn.ReLU(), nn.Linear(16, 3))
optimizer = torch.optim.SGD(net.parameters(), 0.3, momentum=0.9)
scheduler = torch.optim.lr_scheduler.CosineAnnealingLR(optimizer, 3 * len(loader) // 2)
model, optimizer, scheduler = accelerator.prepare(net, optimizer, scheduler)
loader, val_loader = accelerator.prepare(loader, val_loader)
for epoch in range(3):
    for inputs, labels in loader:
        with accelerator.accumulate(model):
            loss = nn.functional.cross_entropy(model(inputs), labels)
            accelerator.backward(loss)
            if accelerator.sync_gradients:
                accelerator.clip_grad_norm_(model.parameters(), 0.5)
            optimizer.step()
            scheduler.step()
            optimizer.zero_grad()
    gather = accelerator.gather_for_metrics
    right = torch.cat([gather(net(a).argmax(1) == b) for a, b in val_loader])
    accelerator.print(f"epoch {epoch}: accuracy {right.float().mean():.4f}")
accelerator.save(accelerator.unwrap_model(model).state_dict(), "weights.pt")
accelerator.end_training()
