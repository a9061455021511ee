"""Checkpoints: what is in them, how they reach the disk, and how they come back.

==================  ===============================================================================================
``commit.py``       a folder is there in full or not at all: temporary names, manifest, checksums, rename, recovery
``save.py``         one save of all ranks, from the first byte to the commit
``background.py``   the same while training goes on
``reshard.py``      what this rank has of a checkpoint, and what of a checkpoint it needs
``files.py``        one rank's file in the format of ``torch.distributed.checkpoint``, and a reader that verifies
``random.py``       states of the random number generators
``full.py``         one file in Lightning's own format, gathered on rank 0
``source.py``       any checkpoint, folder or file, read by one process
``consolidate.py``  a folder to one file; ``torch_file.py`` writes it without holding it
``safetensors.py``  weights for Hugging Face
``output.py``       files of the tools: whole or not there
``describe.py``     what ``ls-strategy inspect`` prints
==================  ===============================================================================================
"""
