"""A stand-in for CIFAR-10 where there is no network: stripes in ten directions, in files of the official layout."""

from __future__ import annotations

import pickle
from pathlib import Path

import numpy as np

from recipes.cifar.data import FOLDER, TEST_FILES, TRAIN_FILES

NAMES = tuple(f"{18 * k} degrees" for k in range(10))
"""Of the classes: the direction of the stripes."""


def stripes(labels_N: np.ndarray, random: np.random.Generator) -> np.ndarray:
    """Return an image (N, 3, 32, 32) uint8 for each label: stripes of random width, phase and color, with noise."""
    count = len(labels_N)
    angle = (labels_N * np.pi / 10)[:, None, None]
    period = random.uniform(5, 9, count)[:, None, None]
    phase = random.uniform(0, 2 * np.pi, count)[:, None, None]
    y, x = np.mgrid[0:32, 0:32]
    wave = np.sin(2 * np.pi * (x * np.cos(angle) + y * np.sin(angle)) / period + phase)
    colors = random.uniform(30, 225, (2, count, 3))[..., None, None]
    images = np.where(wave[:, None] > 0, colors[0], colors[1]) + random.normal(0, 25, (count, 3, 32, 32))
    return images.clip(0, 255).astype(np.uint8)


def write(data_dir: str | Path, *, per_file: int = 200, seed: int = 1) -> Path:
    """Write ``per_file`` images to each of the files below ``data_dir`` that `CIFARData` reads.

    Raises:
        FileExistsError: there is something already, such as the real images.
    """
    folder = Path(data_dir) / FOLDER
    folder.mkdir(parents=True, exist_ok=False)
    random = np.random.default_rng(seed)
    for name in (*TRAIN_FILES, *TEST_FILES):
        labels = random.permutation(np.arange(per_file) % 10)
        content = {"data": stripes(labels, random).reshape(per_file, 3072), "labels": labels.tolist()}
        (folder / name).write_bytes(pickle.dumps(content, protocol=2))
    return folder
