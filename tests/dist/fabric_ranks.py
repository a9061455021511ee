"""Loops written with Fabric, which run on every rank: the same lines under DDP and under our strategies."""

from __future__ import annotations

import logging
import warnings
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn import functional
from torch.utils.data import DataLoader, TensorDataset

WIDTH = 8
OPTIONS: dict[str, Any] = {
    "ddp": "ddp",
    "zero0": "zero0",
    "zero1": "zero1",
    "zero2": "zero2",
    "zero3": "zero3",
    "zero3_offload": "zero3_offload",
    "zero3, small units": {"stage": 3, "sharding": {"min_unit_numel": 0}, "checkpoint": "sharded"},
    "zero2, folder": {"stage": 2, "checkpoint": "sharded"},
    "zero2, file": {"stage": 2, "checkpoint": "file"},
    "zero3, recompute": {"stage": 3, "sharding": {"min_unit_numel": 0}, "activations": "full"},
}


class Block(nn.Module):
    """A unit; 11 columns make shards that cut parameters anywhere."""

    def __init__(self) -> None:
        super().__init__()
        self.wide, self.narrow = nn.Linear(WIDTH, WIDTH + 3), nn.Linear(WIDTH + 3, WIDTH)

    def forward(self, x: Tensor) -> Tensor:
        return x + self.narrow(torch.tanh(self.wide(x)))


class Net(nn.Module):
    """Linear layers, of which some are repeated blocks, and buffers."""

    def __init__(self) -> None:
        super().__init__()
        self.first = nn.Linear(WIDTH, WIDTH, bias=False)  # the norm would hide a bias, whose gradients are noise
        self.norm = nn.BatchNorm1d(WIDTH)
        self.blocks = nn.ModuleList(Block() for _ in range(3))
        self.unused = nn.Linear(2, 2)

    def forward(self, x: Tensor) -> Tensor:
        x = self.norm(self.first(x))
        for block in self.blocks:
            x = block(x)
        return x

    def loss(self, x: Tensor) -> Tensor:
        """A method that the loop calls."""
        return functional.mse_loss(self(x), x.flip(1))


def quiet() -> None:
    warnings.filterwarnings("ignore")
    for name in ("lightning.pytorch", "lightning.fabric", "pytorch_lightning", "lightning_fabric"):
        logging.getLogger(name).setLevel(logging.ERROR)


def make_fabric(name: str, world_size: int, **options: Any) -> Any:
    """A launched Fabric of the package that this process uses."""
    from ls_strategy import ZeROFabricStrategy, host

    strategy = OPTIONS[name]
    if isinstance(strategy, dict):
        strategy = ZeROFabricStrategy(**strategy)
    elif strategy == "ddp":
        strategy = "ddp_find_unused_parameters_true"
    fabric = host.import_part("fabric").Fabric(accelerator="cpu", devices=world_size, strategy=strategy, **options)
    fabric.launch()
    return fabric


def batches(fabric: Any, micro: int = 4) -> Any:
    data = TensorDataset(torch.randn(160, WIDTH, generator=torch.Generator().manual_seed(7)))
    return fabric.setup_dataloaders(DataLoader(data, batch_size=micro))


def make_optimizer(kind: str, model: nn.Module) -> torch.optim.Optimizer:
    params = [p for p in model.parameters() if p.requires_grad]
    return torch.optim.SGD(params, lr=0.05, momentum=0.9) if kind == "sgd" else torch.optim.AdamW(params, lr=1e-2)


def full_weights(fabric: Any, model: nn.Module) -> dict[str, Tensor]:
    return {name: value.detach().float().clone() for name, value in model.state_dict().items()}


def set_up(fabric: Any, case: dict[str, Any]) -> tuple[Any, Any]:
    """The module and its optimizer, whichever way."""
    torch.manual_seed(fabric.global_rank)  # rank 0's weights count
    model: Any = Net()
    kind, again = case.get("optimizer", "adamw"), {}
    if "compile" in case:
        model = torch.compile(model, backend="eager")  # the back end that compiles nothing
        again = {"_reapply_compile": case["compile"]}
    if not case.get("apart", False):
        return fabric.setup(model, make_optimizer(kind, model), **again)
    model = fabric.setup_module(model, **again)
    return model, fabric.setup_optimizers(make_optimizer(kind, model))


def train(rank: int, world_size: int, name: str, case: dict[str, Any]) -> dict[str, Any]:
    """A loop with everything that ``case`` names; returns what is compared."""
    fabric = make_fabric(name, world_size, precision=case.get("precision"))
    model, optimizer = set_up(fabric, case)
    accumulate, steps = case.get("accumulate", 1), case.get("steps", 8)
    if case.get("method"):
        model.mark_forward_method("loss")
    schedule = torch.optim.lr_scheduler.StepLR(optimizer, 3, 0.5)
    losses, norms = [], []

    def backward(x: Tensor) -> Tensor:
        loss = model.loss(x) if case.get("method") else functional.mse_loss(model(x).float(), x.flip(1))
        fabric.backward(loss / accumulate)
        losses.append(loss.item())
        return loss

    data = iter(batches(fabric))
    for _ in range(steps):
        for i in range(accumulate):
            last = i == accumulate - 1
            (x,) = next(data)
            if case.get("closure"):
                optimizer.step(lambda x=x: (optimizer.zero_grad(), backward(x))[1])
                continue
            with fabric.no_backward_sync(model, enabled=case.get("no_sync", True) and not last):
                backward(x)
        if "max_norm" in case:
            order = case.get("norm_type", 2.0)
            norms.append(fabric.clip_gradients(model, optimizer, max_norm=case["max_norm"], norm_type=order).item())
        if "clip_val" in case:
            fabric.clip_gradients(model, optimizer, clip_val=case["clip_val"])
        if not case.get("closure"):
            optimizer.step()
            (model if case.get("zero_by_module") else optimizer).zero_grad()
        schedule.step()
    model.eval()
    with torch.no_grad():
        evaluated = model(fabric.to_device(torch.ones(2, WIDTH))).float().sum().item()
    return {"losses": losses, "norms": norms, "weights": full_weights(fabric, model), "evaluated": evaluated}


def adversarial(rank: int, world_size: int, name: str) -> dict[str, Any]:
    """Two modules with an optimizer each; losses flow through both."""
    fabric = make_fabric(name, world_size)
    torch.manual_seed(3)
    generator, critic = nn.Sequential(nn.Linear(4, 8), nn.Tanh(), nn.Linear(8, WIDTH)), nn.Linear(WIDTH, 1)
    generator, of_generator = fabric.setup(generator, torch.optim.AdamW(generator.parameters(), lr=1e-2))
    critic, of_critic = fabric.setup(critic, torch.optim.AdamW(critic.parameters(), lr=1e-2))
    losses = []
    noise = torch.Generator().manual_seed(rank)
    for i, (x,) in enumerate(batches(fabric)):
        if i == 6:
            break
        fake = generator(fabric.to_device(torch.randn(4, 4, generator=noise)))
        loss = critic(fake.detach()).mean() - critic(x).mean() + (critic(x) ** 2).mean()
        of_critic.zero_grad()
        fabric.backward(loss)
        of_critic.step()
        of_generator.zero_grad()
        other = -critic(fake).mean()
        fabric.backward(other)
        of_generator.step()
        losses += [loss.item(), other.item()]
    weights = {f"{n}.{k}": v for n, m in (("g", generator), ("c", critic)) for k, v in full_weights(fabric, m).items()}
    return {"losses": losses, "weights": weights}


def distillation(rank: int, world_size: int, name: str) -> dict[str, Any]:
    """A teacher without an optimizer whose forward is part of the loss, and a LightningModule as the student."""
    import lightning.pytorch as pl

    class Student(pl.LightningModule):
        def __init__(self) -> None:
            super().__init__()
            self.net = Net()

        def training_step(self, x: Tensor) -> Tensor:
            return self.net(x)

    fabric = make_fabric(name, world_size)
    torch.manual_seed(3)
    teacher, student = Net().requires_grad_(False).eval(), Student()
    teacher = fabric.to_device(teacher) if name == "ddp" else fabric.setup_module(teacher)  # DDP refuses it
    student, optimizer = fabric.setup(student, make_optimizer("adamw", student))
    losses = []
    for i, (x,) in enumerate(batches(fabric)):
        if i == 6:
            break
        y = student.training_step(x)
        loss = functional.mse_loss(teacher(y), teacher(x)) + functional.mse_loss(y, x)
        fabric.backward(loss)
        torch.nn.utils.clip_grad_norm_(student.parameters(), 0.3)
        optimizer.step()
        optimizer.zero_grad()
        losses.append(loss.item())
    held = 0 if name == "ddp" else fabric.strategy.memory_bytes(teacher)["optimizer"]
    same = all(value.equal(before) for value, before in zip(teacher.state_dict().values(), of_seed_3(), strict=True))
    return {"losses": losses, "weights": full_weights(fabric, student), "held": held, "teacher": same}


def of_seed_3() -> list[Tensor]:
    torch.manual_seed(3)
    return list(Net().state_dict().values())


def run(rank: int, world_size: int, jobs: list[tuple[str, str, dict[str, Any]]]) -> list[Any]:
    """Run several loops in one start of the ranks."""
    quiet()
    work = {
        "train": train,
        "adversarial": adversarial,
        "distillation": distillation,
        "saves": saves,
        "resumes": resumes,
        "train_fp16": train_fp16,
    }
    return [work[what](rank, world_size, name, **options) for what, name, options in jobs]


def begin(fabric: Any, seed: int) -> tuple[Any, Any]:
    torch.manual_seed(seed)
    model = Net()
    return fabric.setup(model, make_optimizer("adamw", model))


def steps_of(fabric: Any, model: Any, optimizer: Any, first: int, last: int) -> list[float]:
    """The mean loss of all ranks per step, on batches of 6 rows of all ranks together."""
    rows = torch.randn(96, WIDTH, generator=torch.Generator().manual_seed(9)).view(-1, 6, WIDTH)
    losses = []
    model.eval()  # statistics of batches depend on how a batch is divided over ranks
    for x in rows[first:last]:
        mine = fabric.to_device(x.chunk(fabric.world_size)[fabric.global_rank])
        loss = functional.mse_loss(model(mine), mine.flip(1))
        fabric.backward(loss)
        optimizer.step()
        optimizer.zero_grad()
        losses.append(float(fabric.all_reduce(loss.detach())))
    return losses


def saves(rank: int, world_size: int, name: str, *, path: str) -> dict[str, Any]:
    """Train, save, go on."""
    fabric = make_fabric(name, world_size)
    model, optimizer = begin(fabric, 1)
    steps_of(fabric, model, optimizer, 0, 4)
    fabric.save(path, {"model": model, "optimizer": optimizer, "step": 4, "notes": {"a": torch.arange(3)}})
    only = {"model": lambda key, _: key.startswith("first")}
    fabric.save(f"{path}.part", {"model": model}, filter=only)
    return {"losses": steps_of(fabric, model, optimizer, 4, 8), "weights": full_weights(fabric, model)}


def resumes(rank: int, world_size: int, name: str, *, path: str, raw: str | None = None) -> dict[str, Any]:
    """Load into another model, go on."""
    fabric = make_fabric(name, world_size)
    model, optimizer = begin(fabric, 2)
    state = {"model": model, "optimizer": optimizer, "step": 0}
    rest = fabric.load(path, state)
    result = {"step": state["step"], "rest": sorted(rest), "notes": rest["notes"]["a"].tolist()}
    result["losses"] = steps_of(fabric, model, optimizer, 4, 8)
    result["weights"] = full_weights(fabric, model)
    try:
        fabric.load(path, {"nonsense": 1})
    except KeyError as error:
        result["missing"] = str(error)
    other, _ = begin(fabric, 3)
    before = full_weights(fabric, other)
    fabric.load(f"{path}.part", {"model": other}, strict=False)
    after = full_weights(fabric, other)
    result["changed"] = sorted({key.partition(".")[0] for key in after if not after[key].equal(before[key])})
    if raw is not None:
        if rank == 0:
            torch.manual_seed(5)
            torch.save(Net().state_dict(), raw)
        fabric.barrier()
        fabric.load_raw(raw, other)
        torch.manual_seed(5)
        result["raw"] = all(value.equal(full_weights(fabric, other)[key]) for key, value in Net().state_dict().items())
    return result


def train_fp16(rank: int, world_size: int, name: str) -> dict[str, Any]:
    """One step that overflows on rank 1, one that does not."""
    from ls_strategy import ZeROFabricPrecision, ZeROFabricStrategy, host

    strategy = ZeROFabricStrategy(OPTIONS_OF[name], precision={"loss_scale": {"initial_power": 8, "hysteresis": 1}})
    plugin = ZeROFabricPrecision("16-mixed")
    fabric = host.import_part("fabric").Fabric(accelerator="cpu", devices=world_size, strategy=strategy, plugins=plugin)
    fabric.launch()
    model, optimizer = begin(fabric, 1)
    model.eval()
    scales, moved, refused = [strategy.require_model().engine.scaler.scale], [], ""
    for factor in (float("inf") if rank == 1 else 1.0, 1.0):
        before = full_weights(fabric, model)
        fabric.backward(factor * model(fabric.to_device(torch.ones(2, WIDTH))).square().mean())
        try:
            fabric.clip_gradients(model, optimizer, max_norm=1.0)
        except RuntimeError as error:
            refused = str(error)
        optimizer.step()
        optimizer.zero_grad()
        moved.append(any(not value.equal(before[key]) for key, value in full_weights(fabric, model).items()))
        scales.append(strategy.require_model().engine.scaler.scale)
    return {"scale": scales, "moved": moved, "refused": refused}


OPTIONS_OF = {"zero1": 1, "zero3": 3}


def refusals(rank: int, world_size: int) -> dict[str, str]:
    """The messages of what cannot work; every rank must raise the same."""
    quiet()
    from lightning import Fabric
    from lightning.pytorch import Trainer

    from ls_strategy import ZeROFabricPrecision, ZeROFabricStrategy, ZeROStrategy

    found: dict[str, str] = {}

    def attempt(what: str, call: Any) -> None:
        try:
            call()
        except Exception as error:
            found[what] = str(error)

    options: dict[str, Any] = {"accelerator": "cpu", "devices": world_size}
    attempt("zero_auto", lambda: Fabric(strategy="zero_auto", **options))
    attempt("trainer's", lambda: Fabric(strategy=ZeROStrategy(), **options))
    attempt("fabric's", lambda: Trainer(strategy=ZeROFabricStrategy(), **options))  # type: ignore[arg-type]
    attempt("misspelt", lambda: Fabric(strategy="zero_3", **options))
    attempt("parallel", lambda: ZeROFabricStrategy(parallel={"tensor": 2}))  # type: ignore[call-arg]
    fabric = make_fabric("zero2, folder", world_size)
    model, optimizer = begin(fabric, 1)
    bare = optimizer.optimizer
    other = nn.Linear(2, 2)
    attempt("foreign optimizer", lambda: fabric.setup_optimizers(torch.optim.AdamW(other.parameters())))
    attempt("bare step", bare.step)
    attempt("loss.backward", lambda: model(fabric.to_device(torch.ones(2, WIDTH))).sum().backward())
    strategy = fabric.strategy
    control = strategy._backward_sync_control
    attempt("no_sync of a bare module", lambda: control.no_backward_sync(other, True).__enter__())
    second, _ = fabric.setup(other, torch.optim.AdamW(other.parameters()))
    attempt("two modules in a folder", lambda: fabric.save("nowhere", {"a": model, "b": second}))
    fabric = Fabric(strategy=ZeROFabricStrategy(2), plugins=ZeROFabricPrecision("16-mixed"), **options)
    fabric.launch()
    begin(fabric, 1)
    kept = begin  # the first module must live
    first = fabric.setup(model_1 := Net(), make_optimizer("adamw", model_1))
    attempt("two modules in fp16", lambda: kept(fabric, 2))
    assert first
    return found


def built_on_meta(rank: int, world_size: int) -> dict[str, Any]:
    """Modules built in ``init_module(empty_init=True)``, and weights that a file then gives them."""
    quiet()
    result: dict[str, Any] = {"meta": {}, "losses": []}
    torch.manual_seed(4)
    weights = Net().state_dict()
    for name in ("zero2", "zero3"):
        fabric = make_fabric(name, world_size)
        with fabric.init_module(empty_init=True):
            model = Net()
        result["meta"][name] = next(model.parameters()).is_meta
        model = fabric.setup_module(model)
        model.load_state_dict(weights)
        optimizer = fabric.setup_optimizers(make_optimizer("adamw", model))
        result["losses"].append(steps_of(fabric, model, optimizer, 0, 4))
    result["held"] = fabric.strategy.memory_bytes(model)["masters"]
    result["full"] = 4 * sum(p.numel() for p in Net().parameters())
    return result


if __name__ == "__main__":  # a program that imports lightning_fabric alone: python THIS FOLDER
    import json
    import os
    import sys

    import lightning_fabric  # noqa: F401

    quiet()
    strategies = ("ddp", "zero1", "zero3_offload")
    found = {name: train(0, 2, name, {"accumulate": 2, "max_norm": 0.3, "steps": 4})["losses"] for name in strategies}
    found["other"] = "lightning" in sys.modules
    (Path(sys.argv[1]) / f"rank_{os.environ.get('LOCAL_RANK', 0)}.json").write_text(json.dumps(found))
