"""The CIFAR recipe: its files, its data, its networks, and two ranks of it."""

from __future__ import annotations

import doctest
import json
import pickle
import sys
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
import yaml

pytest.importorskip("jsonargparse")
pytest.importorskip("tensorboard")
pytest.importorskip("torchvision")

import torchvision

from ls_strategy.checkpoint.consolidate import consolidate
from ls_strategy.checkpoint.source import read_checkpoint
from ls_strategy.testing import spawn
from recipes.cifar import accuracy, model
from recipes.cifar.augment import augment
from recipes.cifar.data import FOLDER, NO_LABEL, TEST_FILES, TRAIN_FILES, CIFARData, CIFARFileError, read_images
from recipes.cifar.main import main
from recipes.cifar.model import CIFARModule
from tests.recipes.programs import assert_names_no_place, flatten, stem

ROOT = Path(__file__).parents[2]
CONFIGS = ROOT / "recipes" / "cifar" / "configs"
FILES = sorted(CONFIGS.glob("*.yaml"))
OVERLAYS = [f for f in FILES if f.name != "base.yaml"]
REAL_DATA = ROOT.parent / "shared" / "data"
PER_TRAIN_FILE, PER_TEST_FILE = 33, 27  # odd: ranks have unequal shares
QUIET = ["--trainer.enable_progress_bar=false", "--trainer.enable_model_summary=false"]


def config_args(file: Path) -> list[str]:
    files = [CONFIGS / "base.yaml"] + ([] if file.name == "base.yaml" else [file])
    return [f"--config={f}" for f in files]


def write_file(path: Path, count: int, random: np.random.Generator) -> None:
    """A batch in the official layout; the brightness of a quarter of the image tells the class."""
    labels = np.arange(count) % 10
    images = random.integers(0, 100, (count, 3, 32, 32))
    for image, label in zip(images, labels, strict=True):
        top, left = 16 * (label % 2), 16 * (label // 2 % 2)
        image[label // 4, top : top + 16, left : left + 16] += 150
    content = {"data": images.reshape(count, 3072).astype(np.uint8), "labels": labels.tolist()}
    path.write_bytes(pickle.dumps(content, protocol=2))


@pytest.fixture(scope="module")
def data_dir(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("cifar")
    (folder / FOLDER).mkdir()
    random = np.random.default_rng(0)
    for name in TRAIN_FILES:
        write_file(folder / FOLDER / name, PER_TRAIN_FILE, random)
    for name in TEST_FILES:
        write_file(folder / FOLDER / name, PER_TEST_FILE, random)
    return folder


@pytest.fixture
def no_arguments(monkeypatch: pytest.MonkeyPatch) -> None:
    """The program's arguments are the test's alone, and not those of pytest."""
    monkeypatch.setattr(sys, "argv", ["recipes.cifar"])


# --- configurations -------------------------------------------------------------------------------------------------


@pytest.mark.wide
@pytest.mark.sample(2)
@pytest.mark.parametrize("file", FILES, ids=stem)
def test_configuration_builds_what_it_names(file: Path, tmp_path: Path, no_arguments: None) -> None:
    args = [*config_args(file), f"--trainer.logger.init_args.save_dir={tmp_path}"]
    if yaml.safe_load(file.read_text())["trainer"].get("accelerator") == "gpu" and not torch.cuda.is_available():
        args += ["--trainer.accelerator=cpu", "--trainer.devices=2"]
    cli = main(args, run=False)
    says_ddp = file.stem == "ddp"
    assert type(cli.trainer.strategy).__name__ == ("DDPStrategy" if says_ddp else "ZeROStrategy")
    names = [type(c).__name__ for c in cli.trainer.callbacks]  # type: ignore[attr-defined]
    assert {"LearningRateMonitor", "ModelCheckpoint"} <= set(names)
    assert ("Monitor" in names) == (not says_ddp)  # it reads shards, and refuses other strategies
    assert cli.model.network == ("tutorial" if file.stem in ("tutorial", "moe") else "resnet")


@pytest.mark.parametrize("file", OVERLAYS, ids=stem)
def test_overlay_says_only_what_it_changes(file: Path) -> None:
    base = flatten(yaml.safe_load((CONFIGS / "base.yaml").read_text()))
    overlay = flatten(yaml.safe_load(file.read_text()))
    assert not [key for key, value in overlay.items() if key in base and base[key] == value]


@pytest.mark.parametrize("file", FILES, ids=stem)
def test_configuration_names_no_place_on_this_machine(file: Path) -> None:
    assert_names_no_place(file)


@pytest.mark.wide
def test_help_shows_the_docstrings_of_options(capsys: pytest.CaptureFixture[str], no_arguments: None) -> None:
    with pytest.raises(SystemExit):
        main(["fit", "--help"])
    shown = " ".join(capsys.readouterr().out.split())
    assert "Fraction of the optimizer steps in which the learning rate rises" in shown
    assert "training images per rank and step" in shown


# --- data -----------------------------------------------------------------------------------------------------------


def test_reads_every_image_of_every_file_in_order(data_dir: Path) -> None:
    train = read_images(str(data_dir), TRAIN_FILES)
    assert len(train) == 5 * PER_TRAIN_FILE
    content = pickle.loads((data_dir / FOLDER / TRAIN_FILES[1]).read_bytes())
    images, labels = train.__getitems__(list(range(PER_TRAIN_FILE, 2 * PER_TRAIN_FILE)))
    assert images.dtype == torch.uint8
    assert torch.equal(images, torch.from_numpy(content["data"]).view(-1, 3, 32, 32))
    assert labels.tolist() == content["labels"]


def test_a_batch_is_its_images_one_by_one(data_dir: Path) -> None:
    train = read_images(str(data_dir), TRAIN_FILES)
    images, labels = train.__getitems__([4, 2, 9])
    assert torch.equal(images, torch.stack([train[i][0] for i in (4, 2, 9)]))
    assert torch.equal(labels, torch.stack([train[i][1] for i in (4, 2, 9)]))


@pytest.mark.parametrize("multiple", [1, 2, 4, 27])
def test_filling_up_adds_images_without_a_label(data_dir: Path, multiple: int) -> None:
    test = read_images(str(data_dir), TEST_FILES)
    filled = test.filled_up(multiple)
    assert len(filled) % multiple == 0
    assert 0 <= len(filled) - len(test) < multiple
    assert torch.equal(filled.labels_N[: len(test)], test.labels_N)
    assert filled.labels_N[len(test) :].eq(NO_LABEL).all()


def test_existing_files_are_not_downloaded(data_dir: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(torchvision.datasets.CIFAR10, "download", lambda self: pytest.fail("download"))
    CIFARData(str(data_dir)).prepare_data()


def test_a_rank_that_did_not_download_raises_too(tmp_path: Path) -> None:
    """So that it does not wait for the one that did."""
    with pytest.raises(CIFARFileError, match="first rank of this host"):
        CIFARData(str(tmp_path)).setup("fit")


def test_missing_files_while_offline_tell_what_to_do(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def offline(self: Any) -> None:
        raise OSError("Name or service not known")

    monkeypatch.setattr(torchvision.datasets.CIFAR10, "download", offline)
    data = CIFARData(str(tmp_path))
    data.prepare_data()
    with pytest.raises(CIFARFileError) as caught:
        data.setup("fit")
    message = str(caught.value)
    for part in (FOLDER, "test_batch", "Name or service not known", "cifar-10-python.tar.gz", "data.data_dir"):
        assert part in message


DAMAGED = {
    "cut_off": lambda whole: whole[:1000],
    "empty": lambda whole: b"",
    "not_a_pickle": lambda whole: b"<html>not found</html>",
    "another_pickle": lambda whole: pickle.dumps([1, 2, 3]),
    "too_few_labels": lambda whole: pickle.dumps({"data": np.zeros((2, 3072), np.uint8), "labels": [1]}),
    "label_10": lambda whole: pickle.dumps({"data": np.zeros((1, 3072), np.uint8), "labels": [10]}),
    "small_images": lambda whole: pickle.dumps({"data": np.zeros((2, 768), np.uint8), "labels": [1, 2]}),
    "code": lambda whole: pickle.dumps(print),
}


@pytest.mark.parametrize("damage", DAMAGED)
def test_a_damaged_file_is_named_with_the_cure(data_dir: Path, tmp_path: Path, damage: str) -> None:
    (tmp_path / FOLDER).mkdir()
    whole = (data_dir / FOLDER / "test_batch").read_bytes()
    (tmp_path / FOLDER / "test_batch").write_bytes(DAMAGED[damage](whole))
    with pytest.raises(CIFARFileError, match=r"test_batch cannot be read.*tar xzf"):
        read_images(str(tmp_path), TEST_FILES)


# --- model ----------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("dtype", [torch.uint8, torch.float32])
def test_augmentation_keeps_shape_and_dtype_and_follows_the_seed(dtype: torch.dtype) -> None:
    images = torch.randint(0, 256, (16, 3, 32, 32)).to(dtype)
    first, again, other = (augment(images, generator=torch.Generator().manual_seed(s)) for s in (1, 1, 2))
    assert first.shape == images.shape
    assert first.dtype == dtype
    assert torch.equal(first, again)
    assert not torch.equal(first, other)


def test_augmentation_is_pad_crop_and_flip() -> None:
    """Every image it makes is one of the 2 x 9 x 9 that padding, cropping and flipping can make."""
    images = torch.randint(0, 256, (8, 3, 32, 32)).float()
    made = augment(images, generator=torch.Generator().manual_seed(0))
    padded = torch.nn.functional.pad(images, (4, 4, 4, 4), mode="reflect")
    for i in range(len(images)):
        crops = [padded[i, :, y : y + 32, x : x + 32] for y in range(9) for x in range(9)]
        assert any(torch.equal(made[i], c) or torch.equal(made[i], c.flip(2)) for c in crops)


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize("network", ["tutorial", "resnet"])
def test_networks_take_bytes_in_every_precision(network: model.Network, dtype: torch.dtype) -> None:
    module = CIFARModule(network, 8 if network == "resnet" else None).to(dtype)
    logits = module(torch.randint(0, 256, (4, 3, 32, 32), dtype=torch.uint8))
    assert logits.shape == (4, 10)
    assert logits.dtype == dtype
    assert logits.isfinite().all()


def test_the_tutorial_network_is_the_published_one() -> None:
    assert sum(p.numel() for p in CIFARModule("tutorial").parameters()) == 62_006


def test_width_is_refused_where_nothing_would_read_it() -> None:
    with pytest.raises(ValueError, match="width"):
        CIFARModule("tutorial", 32)


def test_flops_are_counted_by_hand() -> None:
    """Multiply-adds of a forward, by layer: output pixels x kernel x channels in x channels out."""
    convolutions = 28 * 28 * 25 * 3 * 6 + 10 * 10 * 25 * 6 * 16
    matrices = 400 * 120 + 120 * 84 + 84 * 10
    assert CIFARModule("tutorial").flops_per_sample() == 3 * 2 * (convolutions + matrices)


def test_doctests() -> None:
    assert doctest.testmod(model).attempted > 0
    assert doctest.testmod(model).failed == 0


# --- two ranks ------------------------------------------------------------------------------------------------------


def small_run(strategy: str, data_dir: Path, folder: Path, *extra: str) -> list[str]:
    return [
        *accuracy.overlay_args(strategy),
        *QUIET,
        f"--data.data_dir={data_dir}",
        "--data.batch_size=8",
        f"--trainer.logger.init_args.save_dir={folder}",
        "--trainer.log_every_n_steps=1",
        *extra,
    ]


def fit_and_follow(rank: int, world_size: int, runs: list[list[str]]) -> list[dict[str, Any]]:
    """Run the recipe, once per list of arguments; losses of this rank, and what it logged last."""
    losses: list[float] = []

    class Following(CIFARModule):
        def training_step(self, batch: tuple[torch.Tensor, torch.Tensor], batch_idx: int) -> torch.Tensor:
            loss = super().training_step(batch, batch_idx)
            losses.append(float(loss))
            return loss

    results = []
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(sys, "argv", ["recipes.cifar"])
        patch.setattr("recipes.cifar.main.CIFARModule", Following)
        for args in runs:
            losses.clear()
            trainer = main(["fit", f"--trainer.devices={world_size}", *args]).trainer
            metrics = {name: float(value) for name, value in trainer.callback_metrics.items()}
            results.append({"losses": list(losses), "metrics": metrics, "folder": trainer.log_dir})
    return results


EPOCHS = 3
RUNS = {
    "bf16-mixed": ["--model.width=8", "--model.augmentation=false", "--model.optim.lr=0.05"],
    "bf16-true": ["--model.width=8", "--model.augmentation=false", "--model.optim.lr=0.05"],
    "32-true": ["--model.network=tutorial", "--model.width=null", "--model.optim.lr=0.02"],
}
"""Options by precision."""


@pytest.fixture(scope="module")
def two_ranks(data_dir: Path, tmp_path_factory: pytest.TempPathFactory) -> dict[str, list[dict[str, Any]]]:
    """Every run of `RUNS` under zero3: results of both ranks. One start of the ranks, which costs more than a run."""
    folder = tmp_path_factory.mktemp("runs")
    common = [f"--trainer.max_epochs={EPOCHS}"]
    runs = [
        small_run("zero3", data_dir, folder, *common, *options, f"--trainer.precision={precision}")
        for precision, options in RUNS.items()
    ]
    ranks = spawn(fit_and_follow, 2, runs, init_process_group=False, timeout_s=150)
    return dict(zip(RUNS, map(list, zip(*ranks, strict=True)), strict=True))


@pytest.mark.wide
def test_the_last_checkpoint_is_of_the_last_step(two_ranks: dict[str, list[dict[str, Any]]]) -> None:
    for precision in RUNS:
        first, _ = two_ranks[precision]
        folder = Path(first["folder"]) / "checkpoints"
        assert {f.name for f in folder.iterdir()} == {"best.ckpt", "last.ckpt"}
        assert read_checkpoint(folder / "last.ckpt", weights_only=False)["global_step"] == len(first["losses"])


@pytest.mark.wide
@pytest.mark.parametrize("precision", ["bf16-mixed", "bf16-true"])
def test_two_ranks_of_zero3_learn(two_ranks: dict[str, list[dict[str, Any]]], precision: str) -> None:
    first, second = two_ranks[precision]
    for each in (first, second):
        assert len(each["losses"]) == EPOCHS * ((5 * PER_TRAIN_FILE + 1) // 2 // 8)
        assert sum(each["losses"][-5:]) < 0.7 * sum(each["losses"][:5])
    assert first["losses"] != second["losses"]  # they see different images
    assert first["metrics"]["val/accuracy"] == second["metrics"]["val/accuracy"] > 0.5


@pytest.mark.wide
@pytest.mark.filterwarnings("ignore:The dirpath has changed")
def test_accuracy_over_ranks_is_that_of_one_rank(
    two_ranks: dict[str, list[dict[str, Any]]], data_dir: Path, tmp_path: Path, no_arguments: None
) -> None:
    """Trusted run: one process that loads the checkpoint. The 27 images do not divide by two, and none counts twice."""
    first, _ = two_ranks["32-true"]
    checkpoint = tmp_path / "one.ckpt"
    consolidate(Path(first["folder"]) / "checkpoints" / "last.ckpt", checkpoint)
    one = ["--trainer.devices=1", "--trainer.strategy=auto", "--trainer.precision=32-true", f"--ckpt_path={checkpoint}"]
    trusted = main(["test", *small_run("zero0", data_dir, tmp_path, *RUNS["32-true"]), *one]).trainer.callback_metrics
    assert first["metrics"]["val/accuracy"] == float(trusted["test/accuracy"])
    assert first["metrics"]["val/loss"] == pytest.approx(float(trusted["test/loss"]), rel=1e-5)


@pytest.mark.slow
def test_two_stages_of_a_pipeline_train_as_one_process(data_dir: Path, tmp_path: Path) -> None:
    """Trusted run: plain Lightning, which adds up gradients of as many small batches, since norms see one at a time."""
    # In fp64, so that no activation is so near a kink (a ReLU's zero, two equal maxima) that rounding decides.
    common = [*RUNS["bf16-mixed"], "--trainer.precision=64-true", "--trainer.max_epochs=1"]
    steps, parts, size = 3, 4, 4
    pipeline = [f"--data.batch_size={parts * size}", f"--trainer.limit_train_batches={steps}"]
    one = [f"--data.batch_size={size}", f"--trainer.limit_train_batches={steps * parts}"]
    one += [f"--trainer.accumulate_grad_batches={parts}", "--trainer.devices=1"]
    runs = [small_run("pp2", data_dir, tmp_path, *common, *pipeline)]
    (first,), (last,) = spawn(fit_and_follow, 2, runs, init_process_group=False, timeout_s=100)
    runs = [small_run("ddp", data_dir, tmp_path, *common, *one)]
    ((trusted,),) = spawn(fit_and_follow, 1, runs, init_process_group=False, timeout_s=100)
    assert first["losses"] == []  # its steps end where the second stage begins
    assert last["losses"] == pytest.approx(trusted["losses"], rel=1e-6)
    assert first["metrics"] == last["metrics"]
    assert last["metrics"]["val/accuracy"] == trusted["metrics"]["val/accuracy"]
    assert last["metrics"]["val/loss"] == pytest.approx(trusted["metrics"]["val/loss"], rel=1e-5)


@pytest.mark.slow
@pytest.mark.timeout(3600)
@pytest.mark.skipif(not (REAL_DATA / FOLDER).is_dir(), reason=f"no real images in {FOLDER} beside the repository")
def test_the_strong_network_learns_real_images() -> None:
    assert accuracy.measure("zero3", 1, str(REAL_DATA), QUIET, timeout_s=3500) >= 0.76


# --- records --------------------------------------------------------------------------------------------------------


@pytest.fixture
def recorded(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> Any:
    """Records what `accuracy.measure` would return, which is 0.5."""
    monkeypatch.setattr(accuracy, "measure", lambda *_, **__: 0.5)

    def record(path: Path, *words: str) -> None:
        arguments = ["--strategies", "ddp", "--record", str(path), *words]
        monkeypatch.setattr("sys.argv", ["accuracy", *arguments])
        accuracy.main()

    return record


@pytest.mark.parametrize("text", ["", "notes", "[1]", '{"name": "a package"}', "[" * 100_000])
def test_a_file_that_is_no_record_is_kept(recorded: Any, tmp_path: Path, text: str) -> None:
    path = tmp_path / "package.json"
    path.write_text(text)
    with pytest.raises(SystemExit):
        recorded(path)
    assert path.read_text() == text


def test_results_are_added_and_those_of_another_machine_kept(recorded: Any, tmp_path: Path) -> None:
    path = tmp_path / "record.json"
    recorded(path, "--seeds", "1")
    recorded(path, "--seeds", "2")
    found = json.loads(path.read_text())
    assert found["results"] == {"ddp": {"1": 0.5, "2": 0.5}}
    path.write_text(json.dumps({**found, "cpu": "another"}))
    before = path.read_text()
    with pytest.raises(SystemExit):
        recorded(path, "--seeds", "3")
    assert path.read_text() == before
