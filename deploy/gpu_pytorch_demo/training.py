"""A small training run on the GPU that the pod was given: fails when there is none, or when nothing is learnt."""

import contextlib
import sys

import torch

with contextlib.suppress(ImportError):
    # Before PyTorch 2.5 Intel GPUs came with this.
    import intel_extension_for_pytorch  # noqa: F401


def main() -> int:
    if not torch.xpu.is_available():
        print("PyTorch sees no GPU", file=sys.stderr)
        return 1
    print(f"training on {torch.xpu.get_device_name(0)}")
    torch.manual_seed(1)
    points = torch.rand(4096, 2, device="xpu") * 2 - 1
    inside = (points.norm(dim=1, keepdim=True) < 0.8).float()
    model = torch.nn.Sequential(torch.nn.Linear(2, 64), torch.nn.ReLU(), torch.nn.Linear(64, 1)).to("xpu")
    optimizer = torch.optim.Adam(model.parameters(), lr=0.01)
    for step in range(501):
        optimizer.zero_grad()
        loss = torch.nn.functional.binary_cross_entropy_with_logits(model(points), inside)
        loss.backward()
        optimizer.step()
        if step % 100 == 0:
            print(f"step {step}: loss {loss.item():.4f}")
    right = ((model(points) > 0) == (inside > 0.5)).float().mean().item()
    print(f"{right:.1%} of the points are classified correctly")
    return 0 if right > 0.95 else 1


if __name__ == "__main__":
    sys.exit(main())
