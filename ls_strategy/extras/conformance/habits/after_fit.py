"""What people do with a Trainer and a module when a fit is over."""

from __future__ import annotations

import copy
import pickle

import torch
from torch.utils.data import DataLoader, TensorDataset

from ls_strategy.extras.conformance.case import AdamNet, Case, Net
from ls_strategy.extras.conformance.habit import habit


@habit(right="the metrics and outputs of one process")
def test_validate_predict(case: Case) -> None:
    """Calls test, validate and predict after the fit."""
    model = case.module(Net)
    trainer = case.fit(model)
    held_out = case.loader(2, seed=1)
    case.note("test_loss", trainer.test(model, held_out, verbose=False)[0]["test_loss"])
    case.note("val_loss", trainer.validate(model, held_out, verbose=False)[0]["val_loss"])
    rows = DataLoader(TensorDataset(torch.arange(16), case.probe()), batch_size=16)
    case.note("outputs", trainer.predict(model, rows)[0])  # type: ignore[index]


@habit(right="the outputs of one process")
def calls_module(case: Case) -> None:
    """Calls the module after the fit, without a Trainer."""
    model = case.module(AdamNet)
    case.fit(model)
    case.note_outputs(model)


@habit()
def fit_twice(case: Case) -> None:
    """Fits, and fits the same module again with a new Trainer."""
    model = case.module(AdamNet)
    case.fit(model)
    case.note_losses(model, "first fit, ")
    case.fit(model, case.loader(seed=3))
    case.note_losses(model, "second fit, ")


@habit(right="the weights of one process, in full, on every rank")
def module_state_dict(case: Case) -> None:
    """Reads module.state_dict() after the fit."""
    model = case.module(AdamNet)
    case.fit(model)
    for name, value in model.state_dict().items():
        case.note(name, value)


@habit(right="the moments of one process, in full, under torch's numbers, on every rank")
def optimizer_state_dict(case: Case) -> None:
    """Reads optimizer.state_dict() after the fit."""
    model = case.module(AdamNet)
    trainer = case.fit(model)
    states = trainer.optimizers[0].state_dict()["state"]
    for index, state in states.items():
        for name in ("step", "exp_avg", "exp_avg_sq"):
            case.note(f"{name} of parameter {index}", state[name])


@habit(right="the outputs of one process")
def deepcopied(case: Case) -> None:
    """Copies the module with copy.deepcopy after the fit, and calls the copy."""
    model = case.module(AdamNet)
    case.fit(model)
    copied = copy.deepcopy(model)
    case.note_outputs(copied)


@habit(right="the outputs of one process")
def pickled(case: Case) -> None:
    """Pickles the module after the fit, and calls what is unpickled."""
    model = case.module(AdamNet)
    case.fit(model)
    again = pickle.loads(pickle.dumps(model))
    case.note_outputs(again)
