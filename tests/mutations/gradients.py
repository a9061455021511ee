"""From autograd to averages: what is sent when, what counts, and how it is clipped."""

from __future__ import annotations

from tests.mutations import Mutation

GRADIENTS = (
    Mutation(
        "stages 0 and 1 send gradients in every accumulated micro-batch",
        "ls_strategy/zero/passes/reduce.py",
        "self.eager = eager or (self.policy.gradients and not self.holds)",
        "self.eager = eager or not self.holds",
        ("tests/unit/test_zero_reduce.py::test_stage_1_sends_nothing_before_the_last_micro_batch",),
    ),
    Mutation(
        "no gradient is sent before backward is over",
        "ls_strategy/zero/passes/reduce.py",
        "            if self.eager:\n                self._advance()\n",
        "",
        ("tests/unit/test_zero_reduce.py::test_units_are_sent_while_backward_runs",),
    ),
    Mutation(
        "a parameter that only another rank has used is not stepped",
        "ls_strategy/zero/passes/reduce.py",
        "    used, sent, left, written, unwritten = found\n",
        "    used, sent, left, written, unwritten = found\n    used = list(flags[0])\n",
        ("tests/unit/test_zero_reduce.py::test_a_gradient_of_another_rank_counts",),
    ),
    Mutation(
        "slots without a gradient are sent with what was in the buffer",
        "ls_strategy/zero/flat/local_gradients.py",
        "            elif not self.filled[i]:\n                view.zero_()\n",
        "",
        ("tests/unit/test_zero_local_gradients.py::test_slots_without_a_gradient_are_zeros_when_they_are_sent",),
    ),
    Mutation(
        "optimizer.zero_grad() keeps the averages",
        "ls_strategy/zero/passes/reduce.py",
        "flat.averages.forget() if set_to_none else flat.averages.zero()\n",
        "None if set_to_none else flat.averages.zero()\n",
        ("tests/unit/test_zero_reduce.py::test_zero_grad_drops_every_gradient",),
    ),
    Mutation(
        "module.zero_grad() does not clear the averages (stages 2 and 3)",
        "ls_strategy/zero/passes/reduce.py",
        "flat.local.drop(i)\n                    flat.averages.zero(piece.start, piece.stop)\n",
        "flat.local.drop(i)\n",
        ("tests/unit/test_zero_reduce.py::test_gradients_of_single_parameters_are_dropped",),
    ),
    Mutation(
        "zeroing gradients on NVMe leaves their sums of squares stale",
        "ls_strategy/zero/flat/averages.py",
        "            self.change(lambda _: None)  # recomputes the sums\n",
        "",
        ("tests/unit/test_zero_global_norm.py::test_gradients_set_to_zero_leave_the_norm",),
    ),
    Mutation(
        "NVMe: sums of squares of gradients before a change are not reset",
        "ls_strategy/zero/flat/averages.py",
        "        self.recorded_sums = []\n        for lo, hi",
        "        self.recorded_sums = list(self.recorded_sums or [])\n        for lo, hi",
        ("tests/unit/test_zero_global_norm.py::test_scaling_scales_the_norm",),
    ),
    Mutation(
        "the norm of gradients that an update has taken does not wait for it",
        "ls_strategy/zero/flat/averages.py",
        "            self._flat.wait_updated()  # the update sums while it runs, and may run on after the step\n",
        "            pass\n",
        ("tests/unit/test_zero_schedule.py::test_the_norm_of_gradients_that_an_early_update_has_taken_waits_for_it",),
    ),
    Mutation(
        "averages land before the update that still reads the old ones has ended",
        "ls_strategy/zero/flat/averages.py",
        "            flat.wait_updated()  # it may still read the old averages\n",
        "            pass\n",
        ("tests/unit/test_zero_schedule.py::test_a_late_update_reads_the_gradients_of_its_own_step",),
    ),
    Mutation(
        "averages are kept in 16 bit on several ranks too",
        "ls_strategy/zero/flat/averages.py",
        "exact_16_bit and self.folds_factors and reducing.single\n",
        "exact_16_bit and self.folds_factors\n",
        ("tests/unit/test_zero_averages.py::test_an_average_over_several_ranks_is_in_fp32",),
    ),
    Mutation(
        "averages of a 64-bit model are converted to 32 bits from the second micro-batch on",
        "ls_strategy/zero/flat/averages.py",
        "wanted = arrived if narrow and not accumulate else flat.average_dtype",
        "wanted = arrived if narrow and not accumulate else torch.float32 if accumulate else flat.average_dtype",
        ("tests/unit/test_zero_averages.py::test_a_second_micro_batch_is_added_in_fp64_for_fp64",),
    ),
    Mutation(
        "gradients are clipped but those of the first flat buffer",
        "ls_strategy/zero/step/stepper.py",
        "        for flat in state.flats:\n            if state.folded and flat.averages.folds_factors:\n",
        "        for flat in state.flats[1:]:\n            if state.folded and flat.averages.folds_factors:\n",
        ("tests/unit/test_zero_stepper.py", "tests/unit/test_engine.py"),
    ),
    Mutation(
        "the norm for clipping is that of the ZeRO group, not of all ranks",
        "ls_strategy/zero/step/stepper.py",
        "            norm = global_norm.global_norm(state.flats, self._world, norm_type, sums=state.sums)\n"
        "        state.norm = norm if",
        "            norm = global_norm.global_norm(state.flats, self._model.mesh.zero, norm_type, sums=state.sums)\n"
        "        state.norm = norm if",
        ("tests/unit/test_zero_stepper.py::test_gradients_are_clipped_by_the_norm_over_all_ranks",),
    ),
    Mutation(
        "the norm counts what every tensor-parallel rank has a copy of once per rank",
        "ls_strategy/zero/step/global_norm.py",
        "    flats = [flat for flat in flats if flat.counted]\n",
        "",
        ("tests/unit/test_zero_global_norm.py::test_copies_of_an_earlier_rank_count_there",),
    ),
    Mutation(
        "an overflow is agreed on by the ZeRO group only, not by all ranks",
        "ls_strategy/zero/step/stepper.py",
        "return global_norm.any_overflow(state.sums, self._world)",
        "return global_norm.any_overflow(state.sums, self._model.mesh.zero)",
        ("tests/unit/test_zero_stepper.py::test_an_overflow_of_any_rank_skips_the_step",),
    ),
    Mutation(
        "clipping uses the norm of before user code changed the gradients",
        "ls_strategy/zero/step/stepper.py",
        "            state.sharded.take_edits(state.used)\n            state.norm = state.sums = None\n"
        "        read = self.gradients.were_read\n"
        "        if read and any([self.gradients.take(kind, self._used[kind]) for kind in state.kinds]):\n"
        "            state.norm = state.sums = None\n",
        "            state.sharded.take_edits(state.used)\n"
        "        read = self.gradients.were_read\n"
        "        if read and any([self.gradients.take(kind, self._used[kind]) for kind in state.kinds]):\n",
        ("tests/unit/test_zero_stepper.py::test_clipping_is_by_the_norm_of_the_gradients_as_user_code_left_them",),
    ),
    Mutation(
        "the clip factor is not capped at 1, so gradients are enlarged",
        "ls_strategy/zero/step/global_norm.py",
        "(max_norm / (norm + 1e-6)).clamp(max=1.0)",
        "max_norm / (norm + 1e-6)",
        ("tests/unit/test_zero_global_norm.py::test_the_factor_is_that_of_torch[0.5]",),
    ),
    Mutation(
        "an overflow divides the loss scale by 4",
        "ls_strategy/loss_scale.py",
        "self.scale / 2.0",
        "self.scale / 4.0",
        ("tests/unit/test_precision.py",),
    ),
    Mutation(
        "an overflow does not reset the count of good steps",
        "ls_strategy/loss_scale.py",
        "        self.good_steps = 0\n        if self.hysteresis_left > 1:",
        "        if self.hysteresis_left > 1:",
        ("tests/unit/test_precision.py",),
    ),
    Mutation(
        "the hysteresis of the loss scale is not restored after a window of good steps",
        "ls_strategy/loss_scale.py",
        "                self.hysteresis_left = self.config.hysteresis\n                self.scale *= 2.0",
        "                self.scale *= 2.0",
        ("tests/unit/test_precision.py",),
    ),
    Mutation(
        "the loss scale may fall below its minimum",
        "ls_strategy/loss_scale.py",
        "max(self.scale / 2.0, self.config.min_scale)",
        "self.scale / 2.0",
        ("tests/unit/test_precision.py",),
    ),
)
