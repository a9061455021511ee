"""`RayEnvironment`: the ranks of a train function, as Ray knows them."""

from __future__ import annotations

from ls_strategy.extras.ray.train import RayLightningEnvironment


class RayEnvironment(RayLightningEnvironment):
    """Ray's own environment for Lightning, in a run whose processes Ray has started.

    Ranks and world size come from ``ray.train.get_context()``; what Lightning sets is ignored.
    """

    @property
    def creates_processes_externally(self) -> bool:
        """Return True: Lightning must not start ranks."""
        return True

    @property
    def main_port(self) -> int:
        """Return the port of this run's process group, which changes when the strategy makes its own."""
        self._main_port = -1  # Lightning keeps the first one
        return super().main_port
