"""Images of a step in every kind of run: each is logged, shows every rank, and no rank waits for it."""

from __future__ import annotations

import io
from pathlib import Path
from typing import Any

import pytest
import torch
from lightning.pytorch.loggers import TensorBoardLogger

from ls_strategy import Monitor, ZeROStrategy
from ls_strategy.config import nested
from ls_strategy.extras.callbacks.step_figures import KINDS, PHASES
from ls_strategy.extras.report.run import read
from ls_strategy.spans import BACKWARD, FORWARD, OPTIMIZER
from tests.dist.parallel_runs import Module as GPTModule
from tests.dist.parallel_runs import Run
from tests.dist.ranks import on_ranks, trainer_of
from tests.marks import slow

pytest.importorskip("tensorboard")
pytest.importorskip("matplotlib")
Image = pytest.importorskip("PIL.Image")

pytestmark = pytest.mark.wide

PIPELINE = {"parallel.pipeline.size": 2, "parallel.pipeline.micro_batches": 4}
EXPERTS: dict[str, Any] = {"num_experts": 4, "k": 2, "drop_tokens": False}
CASES: dict[str, tuple[dict[str, Any], dict[str, Any]]] = {
    "tensor": ({"stage": 3, "parallel.tensor.size": 2}, {}),
    "context": ({"stage": 2, "parallel.context": 2}, {}),
    "pipeline": ({"stage": 1, **PIPELINE}, {}),
    "pipeline, zero bubble": ({"stage": 3, **PIPELINE, "parallel.pipeline.schedule": "zero_bubble"}, {}),
    "pipeline, offload": ({"stage": 2, **PIPELINE, "offload.optimizer": "cpu"}, {}),
    "expert": ({"stage": 2, "parallel.expert": 2}, {"experts": EXPERTS}),
    "virtual ranks": ({"stage": 2, "parallel.virtual_ranks": 4}, {}),
    "virtual ranks, stage 3, offload": (
        {"stage": 3, "parallel.virtual_ranks": 4, "offload.optimizer": "cpu", "offload.parameters": "cpu"}, {},
    ),
    "virtual ranks, unequal": (
        {"stage": 2, "parallel.virtual_ranks": 4, "parallel.virtual_ranks_per_rank": [3, 1]}, {},
    ),
    "offload": ({"stage": 3, "offload.optimizer": "cpu", "offload.parameters": "cpu"}, {}),
    "offload, accumulation, clipping": (
        {"stage": 2, "offload.optimizer": "cpu"},
        {"trainer": {"accumulate_grad_batches": 2, "gradient_clip_val": 0.5}},
    ),
    "nvme": ({"stage": 3, "offload.optimizer": "nvme", "offload.parameters": "nvme"}, {}),
    "recompute": ({"stage": 3, "activations": "full"}, {}),
    "groups": ({"stage": 3, "sharding.shard_size": 1}, {}),
}  # fmt: skip
DEFAULT = ("tensor", "pipeline", "expert", "virtual ranks, unequal", "offload", "nvme")


def colors(image: torch.Tensor) -> set[tuple[int, ...]]:
    return {tuple(c) for c in image.flatten(0, 1).unique(dim=0).tolist()}


def decoded(data: bytes) -> torch.Tensor:
    """An image, ``(H, W, 3)`` uint8."""
    picture = Image.open(io.BytesIO(data)).convert("RGB")
    return torch.frombuffer(bytearray(picture.tobytes()), dtype=torch.uint8).view(picture.height, picture.width, 3)


@pytest.mark.parametrize("name", [name if name in DEFAULT else slow(name) for name in CASES])
@on_ranks(2, timeout_s=120)
def test_a_run_logs_the_images_of_a_step(rank: int, world_size: int, name: str, tmp_path: Path) -> None:
    options, run = CASES[name]
    if name == "nvme":
        options = {**options, "offload.nvme_path": str(tmp_path / "drive"), "offload.nvme_allow_ram": True}
    trainer = trainer_of(
        ZeROStrategy(**nested(options)), max_epochs=1, log_every_n_steps=2,
        logger=TensorBoardLogger(tmp_path, name="run", version=0),
        callbacks=[Monitor(picture_every_n_steps=2)], **run.get("trainer", {}),
    )  # fmt: skip
    steps = 8
    trainer.fit(GPTModule(Run(options, experts=run.get("experts"), steps=steps, batch=8)))
    if rank:
        return
    images = read(tmp_path / "run" / "version_0", "run").images
    assert set(images) >= {"zero_time/step", "zero_memory/step"}
    time = decoded(images["zero_time/step"].data)
    found = colors(time)
    for phase in (FORWARD, BACKWARD, OPTIMIZER):
        assert PHASES[phase][0] in found, phase
    for row in _rows_of_forward(time, world_size):
        assert row > 0, "a rank is missing"
    memory = colors(decoded(images["zero_memory/step"].data))
    assert {color for color, _ in KINDS.values()} & memory


def _rows_of_forward(image: torch.Tensor, ranks: int) -> list[int]:
    """Pixels of forward by rank: lines with this color, in groups, but for the key below the figure."""
    color = torch.tensor(PHASES[FORWARD][0], dtype=torch.uint8)
    lines = (image == color).all(2).sum(1)
    groups: list[int] = []
    before = 0
    for count in lines.tolist():
        if count and not before:
            groups.append(count)
        before = count
    assert len(groups) >= ranks, groups
    return groups[:ranks]


@on_ranks(2, timeout_s=90)
def test_a_logger_without_images_and_a_missing_package_are_named_once(
    rank: int, world_size: int, tmp_path: Path
) -> None:
    """Without matplotlib, the run says what to install, and trains."""
    import logging
    import sys
    from unittest import mock

    lines: list[str] = []

    class Handler(logging.Handler):
        def emit(self, record: logging.LogRecord) -> None:
            lines.append(record.getMessage())

    log = logging.getLogger("lightning.pytorch.utilities.rank_zero")
    log.setLevel(logging.INFO)
    log.addHandler(handler := Handler())
    try:
        with mock.patch.dict(sys.modules, {"matplotlib": None}):
            trainer = trainer_of(
                ZeROStrategy(3), max_epochs=1, log_every_n_steps=2,
                logger=TensorBoardLogger(tmp_path, name="run", version=0), callbacks=[Monitor()],
            )  # fmt: skip
            trainer.fit(GPTModule(Run({}, steps=4)))
    finally:
        log.removeHandler(handler)
    assert trainer.global_step == trainer.num_training_batches > 0
    if rank == 0:
        assert sum('matplotlib is missing. Run pip install "ls_strategy[report]"' in line for line in lines) == 1
        assert not read(tmp_path / "run" / "version_0", "run").images
