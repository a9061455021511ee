"""Loads modules from checkpoints, folders or files, without a second copy of the weights in memory."""

from __future__ import annotations

import os
import warnings
from functools import partial
from typing import Any, TypeVar, cast

from ls_strategy.checked import checked
from ls_strategy.checkpoint.source import device_of, is_folder, open_folder, read_checkpoint
from ls_strategy.checkpoint.web import as_on_disk
from ls_strategy.errors import CheckpointError
from ls_strategy.host.fabric import TorchCheckpointIO
from ls_strategy.host.pytorch import pl
from ls_strategy.lightning._private import load_state, migrate_checkpoint
from ls_strategy.lightning.checkpointing.contents import read_file

Module = TypeVar("Module", bound=pl.LightningModule)


@checked()
def load_from_checkpoint(
    module_class: type[Module],
    path: str | os.PathLike[str],
    *,
    map_location: Any = None,
    strict: bool | None = None,
    weights_only: bool | None = None,
    **kwargs: Any,
) -> Module:
    """Load a module from a checkpoint, also from a folder. No process group is needed.

    The module is built from the saved hyperparameters, and each parameter is read straight from the files, in the
    module's dtype. Everything that is read is compared with its checksum.

    Args:
        module_class: the class of the module.
        path: a checkpoint folder, or a single file.
        map_location: device of the module, as for ``torch.load``. None: the CPU for a folder.
        strict: whether missing and unexpected names are errors. None: as ``module_class.strict_loading``. Frozen
            parameters that the checkpoint omits on purpose are never missing.
        weights_only: restrict ``torch.load`` to types it considers safe. None: torch's own default.
        kwargs: arguments of ``module_class`` that replace saved hyperparameters.

    Raises:
        CheckpointError: the checkpoint is incomplete or damaged, or does not fit the module.
    """
    if not is_folder(path):
        weights_only = as_on_disk(path, weights_only)
        load = partial(
            module_class.load_from_checkpoint,
            os.fspath(path), map_location=map_location, strict=strict, weights_only=weights_only, **kwargs,
        )  # fmt: skip
        return cast("Module", read_file(path, TorchCheckpointIO(), weights_only, load, mapped=False))
    checkpoint = read_checkpoint(path, weights_only=weights_only)
    _, manifest = open_folder(path)
    left_out = set(manifest.left_out if manifest is not None else [])
    checkpoint = migrate_checkpoint(checkpoint, os.fspath(path))
    key = module_class.CHECKPOINT_HYPER_PARAMS_KEY
    checkpoint[key] = {**checkpoint.get(key, {}), **kwargs}
    if left_out and strict is not False:
        module = _load_without(left_out, module_class, checkpoint, path, kwargs)
    else:
        module = cast("Module", load_state(module_class, checkpoint, strict=strict, **kwargs))
    return module.to(device_of(map_location))


def _load_without(
    left_out: set[str], module_class: type[Module], checkpoint: dict[str, Any], path: Any, kwargs: dict[str, Any]
) -> Module:
    with warnings.catch_warnings():
        warnings.filterwarnings("ignore", message="Found keys that are")
        module = cast("Module", load_state(module_class, checkpoint, strict=False, **kwargs))
    expected, found = set(module.state_dict()), set(checkpoint["state_dict"])
    problems = [
        f"{what}: {', '.join(sorted(names))}"
        for what, names in (("missing", expected - found - left_out), ("unexpected", found - expected))
        if names
    ]
    if module.strict_loading and problems:
        raise CheckpointError(
            f"{path} does not fit {module_class.__name__}: {'; '.join(problems)}. Load it into the class it was saved "
            "from, or pass strict=False."
        )
    return module
