import pytest
import torch

from ls_strategy.ops import native


@pytest.fixture(scope="session", autouse=True)
def compiler_of_torch():
    """The first optimizer imports torch's compiler, which sets environment variables."""
    torch.optim.SGD([torch.zeros(1)])


@pytest.fixture(scope="session")
def compiled():
    """The CPU kernels; tests of them need a compiler."""
    if not native.available("cpu"):
        pytest.skip(f"no kernels: {native._build.status()['cpu']}")


@pytest.fixture
def isa(request, compiled):
    """Instruction set in use, by its number; the best one again afterwards."""
    yield from limited(native, request.param)


def limited(library, number):
    """A fixture's body: kernels of a library use this instruction set, and the best one again afterwards."""
    if library.limit_isa(number) != number:
        library.limit_isa(2)
        pytest.skip("this CPU lacks the instruction set")
    yield number
    library.limit_isa(2)
