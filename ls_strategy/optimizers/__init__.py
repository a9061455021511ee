"""Optimizers that torch does not have and that need whole tensors: Muon with AdamW groups, LAMB and LARS.

They are plain `torch.optim.Optimizer`s. Above stage 0 every tensor is stepped by one rank
(`ls_strategy.zero.step.owner.owner_updater`), which their attribute ``whole_tensors`` asks for.
"""
