"""Forward and backward passes: gather parameters before their use, and average gradients when they are ready."""
