"""Saves, their commit, and what is read again."""

from __future__ import annotations

from tests.mutations import Mutation

CHECKPOINTS = (
    Mutation(
        "files are flushed and never synced",
        "ls_strategy/checkpoint/place.py",
        "        descriptor = file.fileno()\n        os.fsync(descriptor)\n",
        "        file.fileno()\n",
        ("tests/unit/test_commit.py::test_everything_is_on_the_disk_before_the_name_is",),
    ),
    Mutation(
        "the files of the ranks are not synced before the commit",
        "ls_strategy/checkpoint/files.py",
        "        sync_file(self._file)\n        self._file.close()\n        return",
        "        self._file.close()\n        return",
        ("tests/unit/test_checkpoint_save.py::test_every_file_is_on_the_disk_before_the_commit",),
    ),
    Mutation(
        "the index of a folder is not synced before the commit",
        "ls_strategy/checkpoint/metadata.py",
        "sync_file(file)",
        "file.flush()",
        ("tests/unit/test_checkpoint_save.py::test_every_file_is_on_the_disk_before_the_commit",),
    ),
    Mutation(
        "a commit does not check that rank 0 sees every file",
        "ls_strategy/checkpoint/commit.py",
        "if new.size(name) != record.bytes:",
        "if False:",
        ("tests/unit/test_commit.py::test_a_file_that_rank_0_does_not_see_stops_the_commit",),
    ),
    Mutation(
        "rank 0 commits although another rank has reported a failure",
        "ls_strategy/checkpoint/save.py",
        "outcome = _SaveReport(error=_first_error([begun, *reports]))",
        "outcome = _SaveReport(error=_first_error([begun, mine]))",
        ("tests/unit/test_checkpoint_save.py::test_a_failure_is_raised_on_all_ranks",),
    ),
    Mutation(
        "the folder around a checkpoint is not synced after the rename",
        "ls_strategy/checkpoint/commit.py",
        "        place.parent.sync()\n",
        "",
        ("tests/unit/test_commit.py::test_everything_is_on_the_disk_before_the_name_is",),
    ),
    Mutation(
        "without an atomic exchange the old folder is removed before the new one has its name",
        "ls_strategy/checkpoint/commit.py",
        "        place.rename(old)\n        try:\n            new.rename(place)\n",
        "        place.remove()\n        try:\n            new.rename(place)\n",
        (
            "tests/unit/test_commit.py::test_without_an_exchange_of_names_the_one_before_is_not_removed_before_the_new_one_has_its_name",
        ),
    ),
    Mutation(
        "of checkpoints that lost their name, the oldest gets it",
        "ls_strategy/checkpoint/commit.py",
        "found = latest([saved for each in _lost(place) if (saved := _saved(each, each.path)) is not None])",
        "lost = [saved for each in _lost(place) if (saved := _saved(each, each.path)) is not None]\n"
        "    found = min(lost, key=lambda saved: saved.saved_at, default=None)",
        ("tests/unit/test_commit.py::test_of_those_that_lost_their_name_the_newest_whole_one_gets_it",),
    ),
    Mutation(
        "a background save keeps references to states instead of copies",
        "ls_strategy/checkpoint/background.py",
        "self.memory[number].view(values.dtype).copy_(values, non_blocking=True)",
        "values",
        ("tests/unit/test_checkpoint_background.py::test_what_may_change_without_a_notice_is_copied_at_the_call",),
    ),
    Mutation(
        "a step does not copy aside what a save in flight has not read",
        "ls_strategy/checkpoint/background.py",
        "        self._copy_left(self._note_arrival)\n",
        "",
        ("tests/unit/test_checkpoint_background.py::test_a_guarded_state_is_copied_before_it_changes[device]",),
    ),
    Mutation(
        "a step does not wait for what a save in flight is copying",
        "ls_strategy/checkpoint/background.py",
        "lambda: not self._copying and not self._to_read",
        "lambda: not self._to_read",
        ("tests/unit/test_checkpoint_background.py::test_a_step_waits_for_the_box_that_the_thread_copies",),
    ),
    Mutation(
        "a background save takes masters that are the parameters for private",
        "ls_strategy/zero/flat/flat_states.py",
        "not self.master_is_shown and (self.steps_in_background or not self.master_is_slice)",
        "not self.master_is_shown",
        ("tests/unit/test_checkpoint_held.py::test_a_save_that_is_overtaken_is_that_of_its_call[stage 2]",),
    ),
    Mutation(
        "states are given away while a background save still has to copy them",
        "ls_strategy/zero/state_offload.py",
        "        for flat in self._flats:\n            flat.before_change()\n",
        "",
        ("tests/unit/test_checkpoint_held.py::test_a_save_that_is_overtaken_is_that_of_its_call[stage 3]",),
    ),
    Mutation(
        "errors of a background save are swallowed",
        "ls_strategy/checkpoint/background.py",
        "        if errors:\n            raise errors[0]\n",
        "",
        ("tests/unit/test_checkpoint_background.py::test_a_failure_is_raised_by_wait_once",),
    ),
    Mutation(
        "every tensor-parallel rank saves the values of which all have copies",
        "ls_strategy/checkpoint/reshard.py",
        "        if not flat.counted:\n            return\n",
        "",
        ("tests/unit/test_checkpoint_reshard.py::test_a_replica_that_is_not_counted_saves_nothing",),
    ),
    Mutation(
        "what is read from a checkpoint is not compared with its checksum",
        "ls_strategy/checkpoint/files.py",
        "            check(self.place, info.relative_path, info.offset, data, crc)\n",
        "",
        ("tests/unit/test_checkpoint_files.py::test_a_damaged_chunk_is_an_error",),
    ),
    Mutation(
        "a snapshot is served although a newer one is complete",
        "ls_strategy/extras/snapshots/find.py",
        "sorted(manifests, key=age_of, reverse=True)",
        "sorted(manifests, key=age_of)",
        ("tests/unit/test_snapshots.py::test_the_newest_complete_snapshot_counts",),
    ),
    Mutation(
        "the state of a module is assigned without its load_state_dict",
        "ls_strategy/checkpoint/full.py",
        "            model.load_state_dict(state, strict=strict)\n",
        "            nn.Module.load_state_dict(model, state, strict=strict)\n",
        ("tests/dist/test_module_protocol.py::test_what_a_module_does_when_it_is_loaded_is_done",),
    ),
)
