"""`CIFARData`: CIFAR-10 as uint8 tensors in memory, from files in the official layout.

::

    data_dir/cifar-10-batches-py/
      data_batch_1 ... data_batch_5   training images, any number of them per file
      test_batch                      validation and test images

Each file is a pickle of ``{"data": uint8 (images, 3072), "labels": list of int}``; a row is an image's red, green and
blue planes. Batches are tuples of images (N, 3, 32, 32), uint8 and channels-last, and labels (N,).
"""

from __future__ import annotations

import pickle
from collections.abc import Mapping
from pathlib import Path
from typing import Any, TypeVar

import lightning.pytorch as pl
import numpy as np
import torch
from lightning.pytorch.utilities import rank_zero_info
from torch import Tensor
from torch.utils.data import DataLoader, Dataset
from torchvision.datasets import CIFAR10

FOLDER = "cifar-10-batches-py"
TRAIN_FILES = tuple(f"data_batch_{i}" for i in range(1, 6))
TEST_FILES = ("test_batch",)

NO_LABEL = -1
"""Label of an image that is not part of the set, and must not be counted."""

Batch = tuple[Tensor, Tensor]
T = TypeVar("T")


class CIFARFileError(RuntimeError):
    """The files of CIFAR-10 are missing, or not what they should be."""


class Images(Dataset[Batch]):
    """Images and their labels, handed out by whole batches: one indexing instead of a loop over images."""

    def __init__(self, images_NHWC: Tensor, labels_N: Tensor) -> None:
        """Keep uint8 ``images`` (N, H, W, 3) and int64 ``labels`` (N,)."""
        self.images_NHWC = images_NHWC
        self.labels_N = labels_N

    def __len__(self) -> int:
        return len(self.labels_N)

    def __getitem__(self, index: int) -> Batch:
        """One image (3, H, W) and its label ()."""
        return self.images_NHWC[index].permute(2, 0, 1), self.labels_N[index]

    def __getitems__(self, indices: list[int]) -> Batch:
        """A batch, which `DataLoader` asks for where there is this method."""
        chosen = torch.tensor(indices)
        return self.images_NHWC[chosen].permute(0, 3, 1, 2), self.labels_N[chosen]

    def filled_up(self, multiple: int) -> Images:
        """The same with black images that carry `NO_LABEL`, up to a multiple of ``multiple``."""
        missing = -len(self) % multiple
        if not missing:
            return self
        black = self.images_NHWC.new_zeros(missing, *self.images_NHWC.shape[1:])
        no_label = self.labels_N.new_full((missing,), NO_LABEL)
        return Images(torch.cat([self.images_NHWC, black]), torch.cat([self.labels_N, no_label]))


def _as_is(batch: T) -> T:
    """`Images.__getitems__` has collated already."""
    return batch


class CIFARData(pl.LightningDataModule):
    """CIFAR-10, downloaded where it is missing. The test images serve for validation and for the test."""

    def __init__(self, data_dir: str = "data", batch_size: int = 64, eval_batch_size: int = 256) -> None:
        """Choose the place and the sizes.

        Args:
            data_dir: folder that holds, or will hold, ``cifar-10-batches-py``.
            batch_size: training images per rank and step.
            eval_batch_size: images per rank in a batch of validation or test.
        """
        super().__init__()
        if min(batch_size, eval_batch_size) < 1:
            raise ValueError(f"batch_size={batch_size}, eval_batch_size={eval_batch_size}: both must be at least 1.")
        self.data_dir = data_dir
        self.batch_size = batch_size
        self.eval_batch_size = eval_batch_size
        self._train: Images | None = None
        self._test: Images | None = None
        self._download_error: Exception | None = None

    def prepare_data(self) -> None:
        """Download what is missing, on one process per node. A failure is raised by `setup`, on all ranks together."""
        if missing_files(self.data_dir):
            try:
                CIFAR10(self.data_dir, download=True)
            except Exception as error:  # of the network, the file system, or torchvision's check sums
                self._download_error = error

    def setup(self, stage: str) -> None:
        """Read the files, once.

        Raises:
            CIFARFileError: files are missing, or not in the official layout.
        """
        if self._train is not None:
            return
        folder = Path(self.data_dir) / FOLDER
        missing = missing_files(self.data_dir)
        if missing:
            error = self._download_error
            why = f"{type(error).__name__}: {error}" if error else "the first rank of this host says why"
            raise CIFARFileError(
                f"{folder.resolve()} lacks {', '.join(missing)}, and the download of {CIFAR10.url} failed ({why}). "
                f"{_cure(self.data_dir)}"
            )
        self._train = read_images(self.data_dir, TRAIN_FILES)
        self._test = read_images(self.data_dir, TEST_FILES)
        rank_zero_info(f"images: {folder}, {len(self._train):,} for training, {len(self._test):,} for the test")

    def train_dataloader(self) -> DataLoader[Batch]:
        """Training images in random order; Lightning splits them among the ranks."""
        assert self._train is not None
        share = len(self._train) // self._num_replicas()
        if share < self.batch_size:
            raise ValueError(
                f"each rank's share of the training set is {share} images, less than one batch of {self.batch_size}. "
                "Lower data.batch_size, or use more images or fewer ranks."
            )
        return self._loader(self._train, self.batch_size, train=True)

    def val_dataloader(self) -> DataLoader[Batch]:
        """Test images in order, filled up so that ranks have equal shares and no image is counted twice."""
        assert self._test is not None
        # Equal shares: at stage 3 a forward is collective, so every rank needs as many batches as the others. Without
        # the filling, the sampler would make them equal by repeating images.
        return self._loader(self._test.filled_up(self._num_replicas()), self.eval_batch_size, train=False)

    def test_dataloader(self) -> DataLoader[Batch]:
        """As `val_dataloader`."""
        return self.val_dataloader()

    def _num_replicas(self) -> int:
        """Ranks among which Lightning splits the data."""
        assert self.trainer is not None
        return (self.trainer.distributed_sampler_kwargs or {}).get("num_replicas", 1)

    def _loader(self, images: Images, batch_size: int, *, train: bool) -> DataLoader[Batch]:
        # Without workers: taking a batch is one indexing, and handing it over would cost more.
        return DataLoader(
            images,
            batch_size=batch_size,
            shuffle=train,
            drop_last=train,
            collate_fn=_as_is,
            pin_memory=torch.cuda.is_available(),
        )


def missing_files(data_dir: str) -> list[str]:
    """Names of the files that are not in ``data_dir/cifar-10-batches-py``."""
    folder = Path(data_dir) / FOLDER
    return [name for name in (*TRAIN_FILES, *TEST_FILES) if not (folder / name).is_file()]


def _cure(data_dir: str) -> str:
    return (
        "Delete what is damaged and repeat the command with a network; or fetch "
        f"{CIFAR10.url} elsewhere and unpack it with `tar xzf cifar-10-python.tar.gz -C {Path(data_dir).resolve()}`; "
        f"or point data.data_dir to a folder that holds {FOLDER}/."
    )


def read_images(data_dir: str, names: tuple[str, ...]) -> Images:
    """Images of the files ``names`` of ``data_dir/cifar-10-batches-py``, in their order.

    Raises:
        CIFARFileError: a file is not there, or is not in the official layout.
    """
    pixels: list[np.ndarray] = []
    labels: list[np.ndarray] = []
    for name in names:
        path = Path(data_dir) / FOLDER / name
        try:
            with path.open("rb") as file:
                content = _PlainUnpickler(file, encoding="latin1").load()
            p, y = _checked(content)
        except Exception as error:  # a damaged pickle can raise anything
            raise CIFARFileError(
                f"{path.resolve()} cannot be read as a batch of CIFAR-10 ({type(error).__name__}: {error}). "
                f"{_cure(data_dir)}"
            ) from error
        pixels.append(p)
        labels.append(y)
    images_NCHW = torch.from_numpy(np.concatenate(pixels)).view(-1, 3, 32, 32)
    return Images(images_NCHW.permute(0, 2, 3, 1).contiguous(), torch.from_numpy(np.concatenate(labels)))


class _PlainUnpickler(pickle.Unpickler):
    """Rebuilds arrays, and refuses everything else: a pickle can run any code."""

    ALLOWED = frozenset(
        {
            ("numpy", "dtype"),
            ("numpy", "ndarray"),
            ("numpy.core.multiarray", "_reconstruct"),
            ("numpy._core.multiarray", "_reconstruct"),
            ("numpy.core.numeric", "_frombuffer"),
            ("numpy._core.numeric", "_frombuffer"),
            ("_codecs", "encode"),
        }
    )

    def find_class(self, module: str, name: str) -> Any:
        """What the pickle names, if it is one of the few things that arrays are made of."""
        if (module, name) not in self.ALLOWED:
            raise pickle.UnpicklingError(f"it refers to {module}.{name}, which no file of CIFAR-10 does")
        return super().find_class(module, name)


def _checked(content: Mapping[str, Any]) -> tuple[np.ndarray, np.ndarray]:
    """Pixels (N, 3072) uint8 and labels (N,) int64 of an unpickled file."""
    pixels, labels = content["data"], np.asarray(content["labels"], dtype=np.int64)
    if not isinstance(pixels, np.ndarray) or pixels.dtype != np.uint8 or pixels.ndim != 2 or pixels.shape[1] != 3072:
        raise ValueError("`data` is not an array of uint8 with 3072 columns")
    if labels.shape != pixels.shape[:1]:
        raise ValueError(f"{len(pixels)} images, but labels of shape {labels.shape}")
    if len(labels) and not 0 <= labels.min() <= labels.max() <= 9:
        raise ValueError(f"labels run from {labels.min()} to {labels.max()}, not from 0 to 9")
    return pixels, labels
