"""Step time of this engine against its peers, on the GPT recipe model, interleaved in one run.

``python -m benchmarks.step_time --ranks 2 --sizes 5M 20M --rounds 12 --record benchmarks/records/step_time.json``

Every contender lives in the same processes and takes turns (`benchmarks.contest`). The baseline is DDP on several
ranks and plain torch on one:

``plain``        no strategy: every rank trains a model of its own, so that nothing is exchanged
``ddp``          torch's DistributedDataParallel
``zero0``-``3``  this engine, without Lightning around it, as the others are
``fsdp2``        torch's ``fully_shard``
``deepspeed1-3`` where DeepSpeed is installed (the ``bench`` extra)

On the CPU everything is fp32, and a turn is one step between two barriers. ``--device cuda`` measures ``--steps`` steps
per turn between two CUDA events, in bf16, each in its own way: autocast for ``plain`` and ``ddp``, 16-bit parameters
with fp32 master weights for the others, all of them with fp32 sums of gradients.
"""

from __future__ import annotations

import contextlib
import importlib.util
import os
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, Literal

import torch
import torch.distributed as dist
from torch import Tensor, nn

from benchmarks import record
from benchmarks.contest import against, turns

if TYPE_CHECKING:
    from ls_strategy.config import ZeROConfig
    from ls_strategy.distributed.comm import Comm
    from ls_strategy.engine import Engine

MINUTES = 8
SPREAD = "quartiles over rounds"
SEEDS = "0 for weights, the rank for data"
QUICK = ("--sizes", "1M", "--rounds", "2", "--batch", "1", "--block", "32")

SIZES: dict[str, dict[str, Any]] = {
    "1M": {"num_layers": 2, "width": 192, "num_heads": 4},
    "5M": {"num_layers": 6, "width": 256, "num_heads": 4},
    "10M": {"num_layers": 8, "width": 320, "num_heads": 5},
    "20M": {"num_layers": 10, "width": 416, "num_heads": 8},
    "30M": {"num_layers": 12, "width": 448, "num_heads": 7},
    "350M": {"num_layers": 24, "width": 1024, "num_heads": 16},
    "1300M": {"num_layers": 24, "width": 2048, "num_heads": 16},
}
LR = 3e-4
UNCOUNTED = 2  # rounds that allocate and build kernels
Step = Callable[[Tensor, Tensor], Tensor]  # trains on tokens and targets (B, T); returns the loss, detached


@dataclass(frozen=True)
class Setting:
    """What all contenders of a run have in common."""

    size: str
    rounds: int
    batch: int
    block: int
    device: Literal["cpu", "cuda"] = "cpu"
    steps: int = 1  # of one turn

    @property
    def bf16(self) -> bool:
        """On GPUs."""
        return self.device == "cuda"

    @property
    def place(self) -> torch.device:
        return torch.device(self.device, torch.cuda.current_device()) if self.device == "cuda" else torch.device("cpu")


Builder = Callable[[nn.Module, Setting], Step]


def build_model(size: str, block_size: int) -> nn.Module:
    from recipes.gpt.network import GPT, GPTConfig

    torch.manual_seed(0)
    return GPT(GPTConfig(vocab_size=256, block_size=block_size, **SIZES[size]))


def loss_of(model: nn.Module, x: Tensor, y: Tensor) -> Tensor:
    """Next-token cross entropy."""
    logits = model(x)
    return nn.functional.cross_entropy(logits.flatten(0, 1).float(), y.flatten())


def adamw(params: Any) -> torch.optim.Optimizer:
    """The same optimizer for everybody: torch's fused AdamW."""
    return torch.optim.AdamW(params, lr=LR, weight_decay=0.1, fused=True)


def _steps(model: nn.Module, *, autocast: bool) -> Step:
    optimizer = adamw(model.parameters())

    def step(x: Tensor, y: Tensor) -> Tensor:
        optimizer.zero_grad()
        with torch.autocast("cuda", dtype=torch.bfloat16) if autocast else contextlib.nullcontext():
            loss = loss_of(model, x, y)
        loss.backward()
        optimizer.step()
        return loss.detach()

    return step


def plain(model: nn.Module, setting: Setting) -> Step:
    """One process, no strategy at all."""
    return _steps(model, autocast=setting.bf16)


def ddp(model: nn.Module, setting: Setting) -> Step:
    """torch's DistributedDataParallel, gradients as bucket views."""
    wrapped = nn.parallel.DistributedDataParallel(model, gradient_as_bucket_view=True)
    return _steps(wrapped, autocast=setting.bf16)


def sharded_by_fsdp2(model: nn.Module, setting: Setting) -> nn.Module:
    """The same model under torch's fully_shard, one group per block."""
    from torch.distributed.device_mesh import init_device_mesh
    from torch.distributed.fsdp import MixedPrecisionPolicy, fully_shard

    mesh = init_device_mesh(setting.device, (dist.get_world_size(),))
    half = MixedPrecisionPolicy(param_dtype=torch.bfloat16, reduce_dtype=torch.float32)
    policy = half if setting.bf16 else MixedPrecisionPolicy()
    for block in model.blocks:  # type: ignore[union-attr]
        fully_shard(block, mesh=mesh, mp_policy=policy)
    fully_shard(model, mesh=mesh, mp_policy=policy)
    return model


def fsdp2(model: nn.Module, setting: Setting) -> Step:
    """torch's fully_shard, one group per block."""
    return _steps(sharded_by_fsdp2(model, setting), autocast=False)


def engine_of(
    model: nn.Module, optimizer: torch.optim.Optimizer, config: ZeROConfig, setting: Setting, comm: Comm | None = None
) -> Engine:
    """This engine around a model and its optimizer, as in a fit. ``comm``: the ranks; default: those of the world."""
    from ls_strategy.distributed.comm import make_comm
    from ls_strategy.distributed.mesh import Mesh
    from ls_strategy.engine import Engine
    from ls_strategy.precision import resolve_precision

    engine = Engine(
        model,
        [optimizer],
        config=config,
        precision=resolve_precision("bf16-true" if setting.bf16 else "32-true"),
        mesh=Mesh.data_only(comm or make_comm()),
        device=setting.place,
    )
    engine.gatherer.overlap = True
    return engine


def ours(stage: int) -> Builder:
    """This engine, without Lightning around it, as the others are."""

    def build(model: nn.Module, setting: Setting) -> Step:
        from ls_strategy.config import ZeROConfig

        optimizer = adamw(model.parameters())
        engine = engine_of(model, optimizer, ZeROConfig(stage=stage), setting)  # type: ignore[arg-type]

        def step(x: Tensor, y: Tensor) -> Tensor:
            engine.begin_step()
            loss = loss_of(model, x, y)
            engine.end_forward()
            engine.zero_grad(0)
            engine.begin_backward(eager=True)
            loss.backward()
            engine.end_backward()
            engine.step(0, optimizer.step)
            return loss.detach()

        return step

    return build


def deepspeed(stage: int) -> Builder:
    """DeepSpeed's engine, the same torch optimizer, clipping off."""

    def build(model: nn.Module, setting: Setting) -> Step:
        import deepspeed as ds  # pyright: ignore[reportMissingImports]

        engine, *_ = ds.initialize(
            model=model,
            optimizer=adamw(model.parameters()),
            config={
                "train_micro_batch_size_per_gpu": 1,
                "gradient_clipping": 0.0,
                "zero_allow_untested_optimizer": True,
                "bf16": {"enabled": setting.bf16},
                "communication_data_type": "fp32",
                "zero_optimization": {"stage": stage, "overlap_comm": True, "reduce_bucket_size": 10_000_000},
            },
            dist_init_required=False,
        )

        def step(x: Tensor, y: Tensor) -> Tensor:
            loss = loss_of(engine, x, y)
            engine.backward(loss)
            engine.step()
            return loss.detach()

        return step

    return build


CONTENDERS: dict[str, Builder] = {
    "plain": plain,
    "ddp": ddp,
    **{f"zero{s}": ours(s) for s in range(4)},
    "fsdp2": fsdp2,
    **{f"deepspeed{s}": deepspeed(s) for s in (1, 2, 3)},
}


def installed() -> list[str]:
    """Contenders that can take part here."""
    has_deepspeed = importlib.util.find_spec("deepspeed") is not None
    return [name for name in CONTENDERS if has_deepspeed or not name.startswith("deepspeed")]


def _seconds(step: Step, batches: Sequence[tuple[Tensor, Tensor]], setting: Setting) -> tuple[float, list[Tensor]]:
    """Of one step, from when all ranks begin to when all have ended; and the losses."""
    if setting.device == "cuda":
        dist.barrier()
        torch.cuda.synchronize()
        begin, end = (torch.cuda.Event(enable_timing=True) for _ in range(2))
        begin.record()
        losses = [step(x, y) for x, y in batches]
        dist.barrier()  # a collective on the current stream
        end.record()
        torch.cuda.synchronize()
        return begin.elapsed_time(end) / 1e3 / len(batches), losses
    dist.barrier()
    start = time.perf_counter()
    losses = [step(x, y) for x, y in batches]
    dist.barrier()
    return (time.perf_counter() - start) / len(batches), losses


def run_rank(rank: int, world_size: int, setting: Setting, names: list[str]) -> Any:
    """Measure on one rank; returns seconds per step by contender and round, losses, and parameters."""
    torch.set_num_threads(1)
    if setting.device == "cuda":
        torch.cuda.set_device(rank)
        dist.init_process_group("nccl", device_id=setting.place)
    steps = {n: CONTENDERS[n](build_model(setting.size, setting.block).to(setting.place), setting) for n in names}
    generator = torch.Generator().manual_seed(rank)
    times: dict[str, list[float]] = {n: [] for n in names}
    losses: dict[str, list[Tensor]] = {n: [] for n in names}
    batches: list[tuple[Tensor, Tensor]] = []
    for turn, (counts, name) in enumerate(turns(names, setting.rounds, uncounted=UNCOUNTED)):
        if turn % len(names) == 0:  # a new round: the same tokens for everybody
            shape = (setting.steps, setting.batch, setting.block + 1)
            tokens = torch.randint(256, shape, generator=generator).to(setting.place)
            batches = [(t[:, :-1].contiguous(), t[:, 1:].contiguous()) for t in tokens]
        seconds, found = _seconds(steps[name], batches, setting)
        losses[name] += found
        if counts:
            times[name].append(seconds)
    numel = sum(p.numel() for p in build_model(setting.size, setting.block).parameters())
    return times, {n: torch.stack(each).tolist() for n, each in losses.items()}, numel


def measure(setting: Setting, ranks: int, names: list[str]) -> dict[str, Any]:
    """A size's part of the record."""
    from ls_strategy.testing import spawn

    environment = {"DS_ACCELERATOR": setting.device, "OMP_NUM_THREADS": "1"}
    times, losses, numel = spawn(
        run_rank, ranks, setting, names,
        timeout_s=3600, env=environment, init_process_group=setting.device == "cpu",
    )[0]  # fmt: skip
    baseline = baseline_of(names, ranks)
    rows: dict[str, Any] = against(times, baseline)
    for name, row in rows.items():
        if name != "plain" or ranks == 1:  # on several ranks it sees a part of the data
            pairs = zip(losses[name], losses[baseline], strict=True)
            row["loss_difference"] = max(abs(a - b) / abs(b) for a, b in pairs)
    return {"parameters": numel, "batch": setting.batch, "block": setting.block, "contenders": rows}


def baseline_of(names: Sequence[str], ranks: int) -> str:
    """With which times are compared."""
    wanted = "plain" if ranks == 1 else "ddp"
    return wanted if wanted in names else names[0]


def show(size: str, result: dict[str, Any], baseline: str) -> None:
    print(f"\n{size}: {result['parameters']:,} parameters, {result['batch']} x {result['block']} tokens per rank")
    print(f"{'':12}{'median s':>10}{'x ' + baseline:>10}{'q1':>8}{'q3':>8}{'loss diff':>12}")
    for name, row in result["contenders"].items():
        difference = f"{row['loss_difference']:>12.1e}" if "loss_difference" in row else ""
        print(
            f"{name:12}{row['median_s']:>10.4f}{row['ratio']:>10.3f}{row['ratio_q1']:>8.3f}{row['ratio_q3']:>8.3f}"
            f"{difference}"
        )


def main() -> None:
    parser = record.parser(__doc__, rounds=12, rounds_help="counted turns of each contender")
    parser.add_argument("--device", choices=("cpu", "cuda"), default="cpu", help="default: %(default)s")
    parser.add_argument("--ranks", type=int, default=None, help="on this machine; default: 2, or the GPUs there are")
    parser.add_argument("--sizes", nargs="+", default=["5M", "20M"], choices=list(SIZES), help="model sizes")
    parser.add_argument("--batch", type=int, default=8, help="sequences per rank and step")
    parser.add_argument("--block", type=int, default=128, help="tokens per sequence")
    parser.add_argument("--steps", type=int, default=None, help="per turn; default: 1 on the CPU, 10 on GPUs")
    parser.add_argument("--peers", nargs="*", choices=list(CONTENDERS), default=None, help="default: all installed")
    args = parser.parse_args()
    on_cuda = args.device == "cuda"
    ranks = args.ranks or (torch.cuda.device_count() if on_cuda else 2)
    if on_cuda and not 1 <= ranks <= torch.cuda.device_count():
        raise SystemExit(f"{ranks} ranks on {torch.cuda.device_count()} GPUs: give every rank one.")
    os.environ["DS_ACCELERATOR"] = args.device
    names = args.peers or installed()
    found: dict[str, Any] = {
        **record.header("step_time"), "ranks": ranks, "device": args.device,
        "precision": "bf16" if on_cuda else "fp32", "baseline": baseline_of(names, ranks), "results": {},
    }  # fmt: skip
    for size in args.sizes:
        steps = args.steps or (10 if on_cuda else 1)
        setting = Setting(size, args.rounds, args.batch, args.block, args.device, steps)
        found["results"][size] = measure(setting, ranks, names)
        show(size, found["results"][size], found["baseline"])
    record.write(args.record, found)


if __name__ == "__main__":
    main()
