"""Steps of training of torch: on a GPU if there is one, otherwise sleeps."""

import importlib.util
import time
from collections.abc import Callable
from typing import Any

STEP = 0.1  # seconds of a step without a GPU


def has_gpu() -> bool:
    """Return whether torch is installed and has a GPU."""
    if importlib.util.find_spec('torch') is None:
        return False
    import torch

    return torch.cuda.is_available()


def torch_step(key: str, *, sleeps: bool) -> Callable[[Any], None]:
    """Return a step over a batch: of images, or of tokens."""
    if sleeps or not has_gpu():
        return lambda batch: time.sleep(STEP)
    import torch
    from torch import nn

    if key == 'image':
        layers: list[nn.Module] = [nn.Conv2d(3, 256, 7, 4), nn.ReLU()]
        for _ in range(8):
            layers += [nn.Conv2d(256, 256, 3, padding=1), nn.ReLU()]
        model = nn.Sequential(*layers, nn.AdaptiveAvgPool2d(1), nn.Flatten(), nn.Linear(256, 1000))
    else:
        layer = nn.TransformerEncoderLayer(1024, 16, 4096, batch_first=True)
        model = nn.Sequential(nn.Embedding(50_000, 1024), nn.TransformerEncoder(layer, 8), nn.Linear(1024, 1000))
    model = model.cuda()
    optimizer = torch.optim.SGD(model.parameters(), 1e-4)

    def step(batch: Any) -> None:
        value = batch[key].permute(0, 3, 1, 2).float() / 255 if key == 'image' else batch[key].long()
        with torch.autocast('cuda', torch.bfloat16):
            loss = model(value).float().square().mean()
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()
        torch.cuda.synchronize()  # what waits after this is the GPU

    return step
