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
"""Label of padding images, which must not be counted."""

Batch = tuple[Tensor, Tensor]
T = TypeVar("T")


class CIFARFileError(RuntimeError):
    """The files of CIFAR-10 are missing or invalid."""


class Images(Dataset[Batch]):
    """Images and labels, returned in full batches: one indexing operation instead of a loop."""

    def __init__(self, images_NHWC: Tensor, labels_N: Tensor) -> None:
        """Store uint8 ``images`` (N, H, W, 3) and int64 ``labels`` (N,)."""
        self.images_NHWC = images_NHWC
        self.labels_N = labels_N

    def __len__(self) -> int:
        return len(self.labels_N)

    def __getitem__(self, index: int) -> Batch:
        """Return one image (3, H, W) and its label ()."""
        return self.images_NHWC[index].permute(2, 0, 1), self.labels_N[index]

    def __getitems__(self, indices: list[int]) -> Batch:
        """Return a batch; `DataLoader` calls this method if it exists."""
        chosen = torch.tensor(indices)
        return self.images_NHWC[chosen].permute(0, 3, 1, 2), self.labels_N[chosen]

    def filled_up(self, multiple: int) -> Images:
        """Pad with black images labeled `NO_LABEL` to a multiple of ``multiple``."""
        missing = -len(self) % multiple
        if not missing:
            return self
        black = self.images_NHWC.new_zeros(missing, *self.images_NHWC.shape[1:])
        no_label = self.labels_N.new_full((missing,), NO_LABEL)
        return Images(torch.cat([self.images_NHWC, black]), torch.cat([self.labels_N, no_label]))


def _as_is(batch: T) -> T:
    """Return the batch that `Images.__getitems__` has collated."""
    return batch


class CIFARData(pl.LightningDataModule):
    """CIFAR-10, downloaded if it is missing. The test images are used for validation and test."""

    def __init__(self, data_dir: str = "data", batch_size: int = 64, eval_batch_size: int = 256) -> None:
        """Set folder and batch sizes.

        Args:
            data_dir: folder that contains, or will contain, ``cifar-10-batches-py``.
            batch_size: training images per rank and step.
            eval_batch_size: images per rank in a batch of validation or test.
        """
        super().__init__()
        if min(batch_size, eval_batch_size) < 1:
            raise ValueError(
                f"Got batch_size={batch_size} and eval_batch_size={eval_batch_size}, but both must be at least 1."
            )
        self.data_dir = data_dir
        self.batch_size = batch_size
        self.eval_batch_size = eval_batch_size
        self._train: Images | None = None
        self._test: Images | None = None
        self._download_error: Exception | None = None

    def prepare_data(self) -> None:
        """Download missing files, on one process per node. `setup` raises a failure on all ranks."""
        if missing_files(self.data_dir):
            try:
                CIFAR10(self.data_dir, download=True)
            except Exception as error:  # from the network, the file system, or torchvision's checksums
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
        """Return training images in random order; Lightning distributes them over the ranks."""
        assert self._train is not None
        share = len(self._train) // self._num_replicas()
        if share < self.batch_size:
            raise ValueError(
                f"each rank's share of the training set is {share} images, less than one batch of {self.batch_size}. "
                "Lower data.batch_size, or use more images or fewer ranks."
            )
        return self._loader(self._train, self.batch_size, train=True)

    def val_dataloader(self) -> DataLoader[Batch]:
        """Return test images in order, padded so that all ranks have equally many and no image is counted twice."""
        assert self._test is not None
        # At stage 3 a forward is collective, so every rank needs the same number of batches. Without padding, the
        # sampler would repeat images.
        return self._loader(self._test.filled_up(self._num_replicas()), self.eval_batch_size, train=False)

    def test_dataloader(self) -> DataLoader[Batch]:
        """See `val_dataloader`."""
        return self.val_dataloader()

    def _num_replicas(self) -> int:
        """Return the ranks over which Lightning distributes the data."""
        assert self.trainer is not None
        return (self.trainer.distributed_sampler_kwargs or {}).get("num_replicas", 1)

    def _loader(self, images: Images, batch_size: int, *, train: bool) -> DataLoader[Batch]:
        # No workers: a batch is one indexing operation, and copying it between processes would cost more.
        return DataLoader(
            images,
            batch_size=batch_size,
            shuffle=train,
            drop_last=train,
            collate_fn=_as_is,
            pin_memory=torch.cuda.is_available(),
        )


def missing_files(data_dir: str) -> list[str]:
    """Return the names of the files that are not in ``data_dir/cifar-10-batches-py``."""
    folder = Path(data_dir) / FOLDER
    return [name for name in (*TRAIN_FILES, *TEST_FILES) if not (folder / name).is_file()]


def _cure(data_dir: str) -> str:
    return (
        "Delete damaged files and run the command again with network access; or download "
        f"{CIFAR10.url} elsewhere and unpack it with `tar xzf cifar-10-python.tar.gz -C {Path(data_dir).resolve()}`; "
        f"or set data.data_dir to a folder that contains {FOLDER}/."
    )


def read_images(data_dir: str, names: tuple[str, ...]) -> Images:
    """Return the images of the files ``names`` of ``data_dir/cifar-10-batches-py``, in order.

    Raises:
        CIFARFileError: a file is missing, or not in the official layout.
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
    """Rebuilds arrays, and rejects everything else, because a pickle can run any code."""

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
        """Return the named object if arrays need it."""
        if (module, name) not in self.ALLOWED:
            raise pickle.UnpicklingError(f"it refers to {module}.{name}, which no file of CIFAR-10 does")
        return super().find_class(module, name)


def _checked(content: Mapping[str, Any]) -> tuple[np.ndarray, np.ndarray]:
    """Return pixels (N, 3072) uint8 and labels (N,) int64 of an unpickled file."""
    pixels, labels = content["data"], np.asarray(content["labels"], dtype=np.int64)
    if not isinstance(pixels, np.ndarray) or pixels.dtype != np.uint8 or pixels.ndim != 2 or pixels.shape[1] != 3072:
        raise ValueError("`data` is not an array of uint8 with 3072 columns")
    if labels.shape != pixels.shape[:1]:
        raise ValueError(f"{len(pixels)} images, but labels of shape {labels.shape}")
    if len(labels) and not 0 <= labels.min() <= labels.max() <= 9:
        raise ValueError(f"labels run from {labels.min()} to {labels.max()}, not from 0 to 9")
    return pixels, labels
