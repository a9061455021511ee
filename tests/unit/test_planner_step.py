"""Batches and steps of a module without its Trainer."""

from __future__ import annotations

import pytest
import torch
from torch import nn
from torch.utils.data import DataLoader, IterableDataset, TensorDataset

from ls_strategy.errors import PlanError
from ls_strategy.extras.planner.step import first_batch, training_step, without_trainer


class Random(torch.utils.data.Dataset):
    def __len__(self):
        return 10

    def __getitem__(self, index):
        return torch.rand(3)


class Stream(IterableDataset):
    def __iter__(self):
        return iter(torch.arange(7.0))


def test_first_batches_draw_no_random_numbers():
    state = torch.get_rng_state()
    assert first_batch(DataLoader(Random(), batch_size=4, shuffle=True)).shape == (4, 3)
    assert first_batch(DataLoader(Stream(), batch_size=3)).shape == (3,)
    both = {"a": DataLoader(Random(), batch_size=2), "b": [torch.ones(5)]}
    assert first_batch(both)["a"].shape == (2, 3)
    assert torch.equal(torch.get_rng_state(), state)


class Batched(Random):
    """Returns a batch at once, which its ``collate_fn`` passes on."""

    def __getitems__(self, indices):
        assert isinstance(indices, list)
        return torch.stack([torch.full((3,), float(i)) for i in indices])


def test_datasets_that_fetch_a_batch_at_once_are_asked_as_in_training():
    loader = DataLoader(Batched(), batch_size=4, collate_fn=lambda batch: batch)
    assert torch.equal(first_batch(loader), next(iter(loader)))


def test_an_empty_loader_is_refused():
    with pytest.raises(PlanError, match="without a batch"):
        first_batch(DataLoader(TensorDataset(torch.empty(0, 3)), batch_size=4))


class Module(nn.Module):
    def __init__(self, result):
        super().__init__()
        self.layer = nn.Linear(2, 1)
        self.result = result

    def log(self, *args):
        raise AssertionError("log reached the Trainer")

    def training_step(self, batch, batch_idx):
        self.log("loss", 1.0)
        return self.result(self.layer(batch).sum())


@pytest.mark.parametrize("result", [lambda loss: loss, lambda loss: {"loss": loss}])
def test_backward_gets_the_loss_and_logging_goes_nowhere(result):
    module, losses = Module(result), []
    training_step(module, [])(torch.ones(3, 2), losses.append)
    assert torch.equal(losses[0], module.layer(torch.ones(3, 2)).sum())


def test_a_step_without_a_loss_is_refused():
    with pytest.raises(PlanError, match="returned NoneType for the first batch, but it must return a loss"):
        training_step(Module(lambda loss: None), [])(torch.ones(3, 2), print)


def test_the_modules_own_methods_come_back_after_an_error():
    module = Module(lambda loss: loss)
    with pytest.raises(ZeroDivisionError), without_trainer(module, []):
        module.log("loss", 1 / 0)
    assert "log" not in vars(module)
