"""voxscale: train 3D medical-imaging models from one config, unchanged from a laptop to a cluster.

For a training loop of your own there are building blocks, described in docs/building-blocks.md. They are imported when
they are first asked for: `import voxscale` alone loads next to nothing.
"""

from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from voxscale.blocks import (
        World,
        cox_loss,
        distributed_loader,
        gather_rows,
        leave,
        load_checkpoint,
        open_store,
        patch_loader,
        save_checkpoint,
        survival_cases,
    )

__version__ = "0.1.0"
__all__ = [
    "World",
    "cox_loss",
    "distributed_loader",
    "gather_rows",
    "leave",
    "load_checkpoint",
    "open_store",
    "patch_loader",
    "save_checkpoint",
    "survival_cases",
]


def __getattr__(name: str) -> Any:
    if name not in __all__:
        raise AttributeError(f"module 'voxscale' has no attribute {name!r}")
    from voxscale import blocks

    return getattr(blocks, name)


def __dir__() -> list[str]:
    return sorted({*globals(), *__all__})
