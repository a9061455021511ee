"""The names of the Trainer's package that this package uses, from the host of this process.

The two branches are equal but for the name of the package; a test compares them. Private names are in
`lightning/_private.py`.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

from ls_strategy import host

if TYPE_CHECKING or host.name() == "lightning":
    import lightning.pytorch as pl
    from lightning.pytorch.accelerators import Accelerator as Accelerator
    from lightning.pytorch.callbacks import BaseFinetuning as BaseFinetuning
    from lightning.pytorch.callbacks import Callback as Callback
    from lightning.pytorch.callbacks import GradientAccumulationScheduler as GradientAccumulationScheduler
    from lightning.pytorch.callbacks import ModelCheckpoint as ModelCheckpoint
    from lightning.pytorch.callbacks import ModelPruning as ModelPruning
    from lightning.pytorch.callbacks import ModelSummary as ModelSummary
    from lightning.pytorch.callbacks import StochasticWeightAveraging as StochasticWeightAveraging
    from lightning.pytorch.callbacks import Timer as Timer
    from lightning.pytorch.callbacks import WeightAveraging as WeightAveraging
    from lightning.pytorch.core.optimizer import LightningOptimizer as LightningOptimizer
    from lightning.pytorch.plugins.precision import Precision as Precision
    from lightning.pytorch.strategies import Strategy as Strategy
    from lightning.pytorch.strategies.ddp import DDPStrategy as DDPStrategy
    from lightning.pytorch.trainer.states import TrainerFn as TrainerFn
    from lightning.pytorch.trainer.states import TrainerStatus as TrainerStatus
    from lightning.pytorch.utilities import GradClipAlgorithmType as GradClipAlgorithmType
    from lightning.pytorch.utilities.data import extract_batch_size as extract_batch_size
    from lightning.pytorch.utilities.exceptions import MisconfigurationException as MisconfigurationException
    from lightning.pytorch.utilities.exceptions import SIGTERMException as SIGTERMException
    from lightning.pytorch.utilities.model_helpers import is_overridden as is_overridden
    from lightning.pytorch.utilities.rank_zero import rank_zero_info as rank_zero_info
    from lightning.pytorch.utilities.rank_zero import rank_zero_warn as rank_zero_warn
    from lightning.pytorch.utilities.signature_utils import is_param_in_hook_signature as is_param_in_hook_signature
    from lightning.pytorch.utilities.types import STEP_OUTPUT as STEP_OUTPUT
else:
    import pytorch_lightning as pl
    from pytorch_lightning.accelerators import Accelerator as Accelerator
    from pytorch_lightning.callbacks import BaseFinetuning as BaseFinetuning
    from pytorch_lightning.callbacks import Callback as Callback
    from pytorch_lightning.callbacks import GradientAccumulationScheduler as GradientAccumulationScheduler
    from pytorch_lightning.callbacks import ModelCheckpoint as ModelCheckpoint
    from pytorch_lightning.callbacks import ModelPruning as ModelPruning
    from pytorch_lightning.callbacks import ModelSummary as ModelSummary
    from pytorch_lightning.callbacks import StochasticWeightAveraging as StochasticWeightAveraging
    from pytorch_lightning.callbacks import Timer as Timer
    from pytorch_lightning.callbacks import WeightAveraging as WeightAveraging
    from pytorch_lightning.core.optimizer import LightningOptimizer as LightningOptimizer
    from pytorch_lightning.plugins.precision import Precision as Precision
    from pytorch_lightning.strategies import Strategy as Strategy
    from pytorch_lightning.strategies.ddp import DDPStrategy as DDPStrategy
    from pytorch_lightning.trainer.states import TrainerFn as TrainerFn
    from pytorch_lightning.trainer.states import TrainerStatus as TrainerStatus
    from pytorch_lightning.utilities import GradClipAlgorithmType as GradClipAlgorithmType
    from pytorch_lightning.utilities.data import extract_batch_size as extract_batch_size
    from pytorch_lightning.utilities.exceptions import MisconfigurationException as MisconfigurationException
    from pytorch_lightning.utilities.exceptions import SIGTERMException as SIGTERMException
    from pytorch_lightning.utilities.model_helpers import is_overridden as is_overridden
    from pytorch_lightning.utilities.rank_zero import rank_zero_info as rank_zero_info
    from pytorch_lightning.utilities.rank_zero import rank_zero_warn as rank_zero_warn
    from pytorch_lightning.utilities.signature_utils import is_param_in_hook_signature as is_param_in_hook_signature
    from pytorch_lightning.utilities.types import STEP_OUTPUT as STEP_OUTPUT

__all__ = ["pl"]
