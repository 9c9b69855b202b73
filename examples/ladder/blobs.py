"""What all rungs share: the learning problem, the network, the checks and the snapshot. Needs torch alone."""

from __future__ import annotations

import argparse
import io
import math
import os
import socket
import sys
from pathlib import Path
from typing import Any, NoReturn

import torch
import torch.distributed as dist
from torch import nn
from torch.utils.data import DataLoader, TensorDataset

TRAIN_CASES = 512
TEST_CASES = 256
SIDE = 12  # voxels
CLASSES = ("ball", "long in x", "long in y", "long in z")
MATTERS = ("batch", "lr", "seed")  # a snapshot made with others of these is another training
Loader = DataLoader[tuple[torch.Tensor, ...]]


def make_parser(doc: str) -> argparse.ArgumentParser:
    """The arguments of every rung; the snapshot is by default named after the script, in the current folder."""
    parser = argparse.ArgumentParser(description=doc, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("epochs", type=int, metavar="EPOCHS", help="how long to train")
    parser.add_argument("save_every", type=int, metavar="SAVE_EVERY", help="epochs between snapshots")
    parser.add_argument("--batch", type=int, default=32, help="over all ranks together (default %(default)s)")
    parser.add_argument("--lr", type=float, default=3e-3, help="learning rate of Adam (default %(default)s)")
    parser.add_argument("--seed", type=int, default=0, help="of the data, the weights and the order")
    default = Path(f"{Path(sys.argv[0]).stem}.pt")
    parser.add_argument("--snapshot", type=Path, default=default, help="to write and continue (default %(default)s)")
    return parser


def make_blobs(cases: int, seed: int) -> TensorDataset:
    """Noisy volumes with one blob each, and its class. The same seed gives the same cases on every rank."""
    draw = torch.Generator().manual_seed(seed)
    labels = torch.randint(len(CLASSES), (cases,), generator=draw)
    centres_zyx = SIDE / 2 - 0.5 + 3 * (torch.rand(cases, 3, generator=draw) - 0.5)
    widths_zyx = torch.full((cases, 3), 1.5)
    for axis_from_x in range(3):
        widths_zyx[labels == axis_from_x + 1, 2 - axis_from_x] = 3.0
    grid_zyx = torch.stack(torch.meshgrid(*[torch.arange(SIDE)] * 3, indexing="ij"), dim=-1)
    distances = (grid_zyx - centres_zyx[:, None, None, None]) / widths_zyx[:, None, None, None]
    volumes = torch.exp(-0.5 * distances.square().sum(dim=-1))
    volumes += 0.5 * torch.randn(volumes.shape, generator=draw)
    return TensorDataset(volumes[:, None], labels)


def make_sets(seed: int) -> tuple[TensorDataset, TensorDataset]:
    """Training and test cases. They come from different seeds, so no test case is ever trained on."""
    return make_blobs(TRAIN_CASES, 2 * seed), make_blobs(TEST_CASES, 2 * seed + 1)


def build_model(seed: int) -> nn.Module:
    """A small 3D network whose losses on 1, 2 and 4 ranks agree to six digits.

    No batch norm: its statistics would depend on the number of ranks. Tanh, for it is smooth: across the kink of
    a ReLU, rounding that differs with the number of ranks grew to 2e-3 of the loss within two epochs.
    """
    torch.manual_seed(seed)
    return nn.Sequential(
        nn.Conv3d(1, 8, 5, padding=2),
        nn.Tanh(),
        nn.AvgPool3d(2),
        nn.Conv3d(8, 16, 3, padding=1),
        nn.Tanh(),
        nn.AvgPool3d(2),
        nn.Flatten(),
        nn.Linear(16 * (SIDE // 4) ** 3, len(CLASSES)),
    )


def train_epoch(
    model: nn.Module, loader: Loader, optimizer: torch.optim.Optimizer, device: torch.device
) -> list[float]:
    """Train on what the loader gives; return the sum of the losses and the number of cases."""
    model.train()
    loss_sum, cases = 0.0, 0
    for volumes, labels in loader:
        loss = nn.functional.cross_entropy(model(volumes.to(device)), labels.to(device))
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()
        loss_sum += loss.item() * len(labels)
        cases += len(labels)
    return [loss_sum, cases]


@torch.no_grad()
def count_correct(model: nn.Module, loader: Loader, device: torch.device) -> list[float]:
    """Return the number of cases classified correctly and the number of cases."""
    model.eval()
    correct, cases = 0, 0
    for volumes, labels in loader:
        correct += int((model(volumes.to(device)).argmax(dim=1) == labels.to(device)).sum())
        cases += len(labels)
    return [correct, cases]


def epoch_line(epoch: int, epochs: int, sums: list[float]) -> str:
    """`sums`: loss sum and cases of training, correct and cases of the test, each over all ranks."""
    loss_sum, trained, correct, tested = sums
    return (
        f"epoch {epoch}/{epochs}  loss {loss_sum / trained:.6f}  test accuracy {correct / tested:.4f} of {tested:.0f}"
    )


def check(options: argparse.Namespace, world_size: int) -> None:
    """Leave with every finding about the arguments and the snapshot. To be called by rank 0 alone."""
    findings = [
        f"{name} is {getattr(options, field)}; give a whole number from 1"
        for field, name in (("epochs", "EPOCHS"), ("save_every", "SAVE_EVERY"))
        if getattr(options, field) < 1
    ]
    if not (1 <= options.batch <= TRAIN_CASES and options.batch % world_size == 0):
        rule = f"a multiple of the {world_size} ranks, at most the {TRAIN_CASES} training cases"
        findings.append(f"--batch is {options.batch}; give {rule}")
    if not (math.isfinite(options.lr) and options.lr > 0):
        findings.append(f"--lr is {options.lr}; give a number above 0")
    if not 0 <= options.seed < 2**31:
        findings.append(f"--seed is {options.seed}; give a number from 0 to {2**31 - 1}")
    if not options.snapshot.parent.is_dir():
        findings.append(f"--snapshot: the folder {options.snapshot.parent} is not there; make it")
    if not findings and options.snapshot.exists():
        findings = _unfit(options, _read(options.snapshot))
    if findings:
        _leave("\n".join(findings))


def save_snapshot(
    options: argparse.Namespace, model: nn.Module, optimizer: torch.optim.Optimizer, *, epoch: int
) -> None:
    """Replace the snapshot by the state after `epoch`: whole or not at all. To be called by rank 0 alone.

    Give the model itself, not what DDP wraps around it: the names of the weights then fit every rung.
    """
    arguments = {name: getattr(options, name) for name in MATTERS}
    state = {"epoch": epoch, "arguments": arguments, "model": model.state_dict(), "optimizer": optimizer.state_dict()}
    content = io.BytesIO()
    torch.save(state, content)
    aside = options.snapshot.with_name(f".{options.snapshot.name}.part")
    try:
        with aside.open("wb") as file:
            file.write(content.getbuffer())
            file.flush()
            os.fsync(file.fileno())  # on disk before the name changes, or a power cut leaves an empty file
        aside.rename(options.snapshot)
        _sync_folder(options.snapshot.parent)
    except OSError as failed:
        aside.unlink(missing_ok=True)
        _leave(f"--snapshot {options.snapshot} cannot be written ({failed.strerror}); the one before is kept", code=1)


def load_snapshot(options: argparse.Namespace, model: nn.Module, optimizer: torch.optim.Optimizer) -> int:
    """Return the number of epochs done, 0 without a snapshot. To be called by every rank."""
    if not options.snapshot.exists():
        return 0
    snapshot = _read(options.snapshot)
    if findings := _unfit(options, snapshot):
        _leave("\n".join(findings))
    model.load_state_dict(snapshot["model"])
    optimizer.load_state_dict(snapshot["optimizer"])
    return int(snapshot["epoch"])


def require_same_start(done: int, snapshot: Path, device: torch.device) -> None:
    """Leave unless all ranks continue from the same epoch; else some would wait for the others for ever."""
    bounds = torch.tensor([done, -done], device=device)
    dist.all_reduce(bounds, op=dist.ReduceOp.MAX)
    if bounds[0] != -bounds[1]:
        seen = f"rank {dist.get_rank()} on {socket.gethostname()} finds {done} epochs in {snapshot}, another rank not"
        _leave(f"{seen}; put --snapshot into a folder that all nodes share")


def end_rank() -> NoReturn:
    """Leave the group and end this rank's process. The last call of a rank; all it wrote is on disk by then.

    Not by returning: with torch 2.13, a thread of gloo that still holds a tensor while the interpreter stops aborts
    the rank (seen once), so the group is kept and the process ends at once.
    """
    group = dist.group.WORLD
    dist.destroy_process_group(group)
    sys.stdout.flush()
    os._exit(0)


def describe_start(done: int, options: argparse.Namespace, world_size: int, device: torch.device) -> str:
    ranks = f"{world_size} rank{'s' * (world_size > 1)} on {device.type}"
    if done >= options.epochs:
        return f"{ranks}: {options.snapshot} holds {done} epochs already; give more EPOCHS or another --snapshot"
    return f"{ranks}: {f'continuing {options.snapshot} after epoch {done}' if done else 'starting anew'}"


def _read(path: Path) -> dict[str, Any]:
    try:
        snapshot = torch.load(path, map_location="cpu", weights_only=True)  # never runs code from the file
        if not {"epoch", "arguments", "model", "optimizer"} <= set(snapshot):
            raise ValueError("not written by a rung")
    except Exception as broken:  # torch raises many kinds for a file that is cut or not its own
        why = (str(broken).splitlines() or [type(broken).__name__])[0]
        _leave(f"--snapshot {path} cannot be read ({why}); delete it or name another")
    return dict(snapshot)


def _unfit(options: argparse.Namespace, snapshot: dict[str, Any]) -> list[str]:
    """How the snapshot's training differs from the one asked for."""
    was = snapshot["arguments"]
    return [
        f"--{name} is {getattr(options, name)}, but {options.snapshot} was trained with {was.get(name)}; "
        "use that value, name another --snapshot, or delete the file"
        for name in MATTERS
        if was.get(name) != getattr(options, name)
    ]


def _sync_folder(folder: Path) -> None:
    descriptor = os.open(folder, os.O_RDONLY)
    try:
        os.fsync(descriptor)
    finally:
        os.close(descriptor)


def _leave(message: str, code: int = 2) -> NoReturn:
    for line in message.splitlines():
        print(f"error: {line}", file=sys.stderr, flush=True)
    sys.exit(code)
