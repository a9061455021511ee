"""Sums and messages between ranks: their order, their precision, and who waits for them."""

from __future__ import annotations

from tests.mutations import Mutation

_CASTS = "tests/dist/test_autocast_gathers.py"

COLLECTIVES = (
    Mutation(
        "a reduction sums the ranks in reverse order",
        "ls_strategy/distributed/comm.py",
        "for i, term in enumerate(terms):",
        "for i, term in enumerate(reversed(terms)):",
        ("tests/dist/test_comm.py::test_reduce_scatter_is_the_sum_in_rank_order[3]",),
    ),
    Mutation(
        "a reduction does not wait for the other ranks' terms",
        "ls_strategy/distributed/comm.py",
        "        self._comm.wait(self.works)\n        scale = 1.0",
        "        scale = 1.0",
        ("tests/unit/test_comm_parts.py::test_a_reduction_waits_for_its_terms",),
    ),
    Mutation(
        "a gather does not wait for the other ranks' shards",
        "ls_strategy/distributed/comm.py",
        '        """Block until every shard has arrived."""\n        self._comm.wait(self._works)\n',
        '        """Block until every shard has arrived."""\n',
        ("tests/dist/test_comm.py::test_no_work_is_waited_for_twice_after_an_error",),
    ),
    Mutation(
        "16-bit terms are scaled before they are cast, which rounds twice",
        "ls_strategy/distributed/comm.py",
        "out.copy_(term).mul_(scale)",
        "out.copy_(term * scale)",
        ("tests/dist/test_comm.py::test_reduce_scatter_is_the_sum_in_rank_order[3]",),
    ),
    Mutation(
        "NCCL reduces in the compute dtype instead of the one that the options name",
        "ls_strategy/distributed/comm.py",
        "wire = full if dtype in (None, full.dtype) else full.to(dtype)",
        "wire = full",
        ("tests/unit/test_comm_parts.py::test_nccl_sums_in_the_wire_dtype",),
    ),
    Mutation(
        "16-bit sums along an axis of the mesh are not taken in fp32",
        "ls_strategy/distributed/axis.py",
        "total = terms[0].float() if terms[0].dtype in (torch.float16, torch.bfloat16) else terms[0].clone()",
        "total = terms[0].clone()",
        ("tests/unit/test_parallel_regions.py::test_16_bit_terms_are_summed_in_fp32_and_rounded_once",),
    ),
    Mutation(
        "gathers in 16 bits: weights are read in 16 bits where autocast is off",
        "ls_strategy/zero/flat/cast.py",
        "casts = torch.is_autocast_enabled(kind) and torch.get_autocast_dtype(kind) == self.cast_to\n",
        "casts = torch.get_autocast_dtype(kind) == self.cast_to\n",
        (f"{_CASTS}::test_every_other_use_of_a_weight_has_its_fp32_bits",),
    ),
    Mutation(
        "gathers in 16 bits: backward goes through weights of after the step",
        "ls_strategy/zero/flat/cast.py",
        "            self.is_saved = False\n            increment_version(self.views)\n",
        "            self.is_saved = False\n",
        (f"{_CASTS}::test_a_backward_through_weights_of_before_a_step_is_refused",),
    ),
    Mutation(
        "gathers in 16 bits: a shard on NVMe is not read for a use in fp32",
        "ls_strategy/zero/flat/flat_buffer.py",
        "        if self.is_gathered or (self.is_fetched and self.encoded_wire is not None):\n",
        "        if self.is_fetched:\n",
        (f"{_CASTS}::test_every_other_use_of_a_weight_has_its_fp32_bits",),
    ),
    Mutation(
        "gathers in 16 bits: what was gathered is gathered again",
        "ls_strategy/zero/passes/gather.py",
        "            if not flat.resident and not flat.is_fetched and flat.gathering is None:\n"
        "                flat.start_gather()",
        "            if not flat.resident and not flat.is_gathered and flat.gathering is None:\n"
        "                flat.start_gather()",
        (f"{_CASTS}::test_bits_are_those_of_gathers_in_fp32_and_bytes_are_half",),
    ),
)
