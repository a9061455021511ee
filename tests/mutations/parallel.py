"""Models that are divided between ranks: pipelines, experts, sequences and vocabularies."""

from __future__ import annotations

from tests.mutations import Mutation

PARALLEL = (
    Mutation(
        "a pipeline computes the first micro-batch of a batch again instead of the last one",
        "ls_strategy/parallel/pipeline/batches.py",
        "return list(leaf.tensor_split(number)) if has_rows(leaf, samples) else [leaf] * number",
        "parts = leaf.tensor_split(number) if has_rows(leaf, samples) else [leaf] * number\n"
        "        return [*parts[:-1], parts[0]]",
        ("tests/unit/test_pipeline_batches.py::test_micro_batches_hold_all_rows_in_order",),
    ),
    Mutation(
        "uneven micro-batches of a pipeline have equal weights",
        "ls_strategy/parallel/pipeline/shares.py",
        "self._trained = factor or self._of_means(means)",
        "self._trained = [1 / len(self.samples) for _ in self.samples]",
        (
            "tests/unit/test_lightning_pipeline.py"
            "::test_loss_and_gradients_of_unequal_micro_batches_are_those_of_the_batch[gpipe-None]",
        ),
    ),
    Mutation(
        "the loss of a pipeline is not divided by accumulate_grad_batches",
        "ls_strategy/lightning/pipeline/step.py",
        "[weight * scale / accumulate for weight in weights]",
        "[weight * scale for weight in weights]",
        (
            "tests/unit/test_lightning_pipeline.py"
            "::test_gradients_carry_the_loss_scale_and_the_share_of_the_accumulation",
        ),
    ),
    Mutation(
        "the loss scale is not applied to the micro-batches of a pipeline",
        "ls_strategy/lightning/pipeline/step.py",
        "[weight * scale / accumulate for weight in weights]",
        "[weight / accumulate for weight in weights]",
        (
            "tests/unit/test_lightning_pipeline.py"
            "::test_gradients_carry_the_loss_scale_and_the_share_of_the_accumulation",
        ),
    ),
    Mutation(
        "gradients of weights that two stages share are not summed",
        "ls_strategy/zero/step/stepper.py",
        "                flat.averages.change(self._model.share.sum_tied)\n",
        "                pass\n",
        ("tests/unit/test_zero_stepper.py::test_gradients_of_parameters_that_two_stages_share_are_summed_once",),
    ),
    Mutation(
        "the weights of a token's experts are normalised before pairs are dropped",
        "ls_strategy/moe/router.py",
        "            if kept is not None:\n                weights = weights * kept\n"
        "            if o.normalizes:\n"
        "                weights = weights / weights.sum(-1, keepdim=True).clamp(min=torch.finfo(dtype).eps)\n",
        "            if o.normalizes:\n"
        "                weights = weights / weights.sum(-1, keepdim=True).clamp(min=torch.finfo(dtype).eps)\n"
        "            if kept is not None:\n                weights = weights * kept\n",
        ("tests/unit/test_moe_router.py::test_two_choices_are_gshard",),
    ),
    Mutation(
        "a recomputed forward leaves losses and counts of the router again",
        "ls_strategy/moe/router.py",
        "        if current_backward_pass() >= 0:\n",
        "        if False:\n",
        ("tests/unit/test_moe_layer.py::test_recomputed_forwards",),
    ),
    Mutation(
        "replicas of a router draw noise of their own",
        "ls_strategy/moe/router.py",
        "    if replicas is not None:\n        replicas.broadcast_(noise)\n",
        "",
        ("tests/unit/test_moe_router.py::test_replicas_draw_the_same",),
    ),
    Mutation(
        "the capacity of an expert is rounded down",
        "ls_strategy/moe/capacity.py",
        "math.ceil(even)",
        "math.floor(even)",
        ("tests/unit/test_planner_experts.py::test_a_capacity_is_that_of_fp32",),
    ),
    Mutation(
        "the balance loss of two choices counts both",
        "ls_strategy/moe/router.py",
        "first_only=o.k <= 2",
        "first_only=o.k < 2",
        ("tests/unit/test_moe_router.py::test_two_choices_are_gshard",),
    ),
    Mutation(
        "divided cross-entropy: ignored tokens get a gradient",
        "ls_strategy/parallel/cross_entropy.py",
        "result *= torch.where(target == loss.ignore_index, 0, grad)[:, None]",
        "result *= grad[:, None]",
        ("tests/unit/test_parallel_cross_entropy.py::test_the_loss_and_the_gradient_of_shards",),
    ),
    Mutation(
        "sequence parallelism: the gradient of tokens that were joined is not scaled by the number of ranks",
        "ls_strategy/parallel/dim_shard.py",
        "return grad * scale if scale > 1 else grad",
        "return grad",
        ("tests/unit/test_parallel_ulysses.py::test_the_loss_and_averaged_gradients_are_those_of_one_process[False]",),
    ),
)
