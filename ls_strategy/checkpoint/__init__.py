"""Checkpoints: what they contain, how they are written, and how they are read.

==================  ===============================================================================================
``commit.py``       atomic saves of a folder: temporary names, rename, recovery; ``claim.py`` holds the lock
``manifest.py``     sizes and checksums of a checkpoint's files; ``target.py`` decides what a save may replace
``save.py``         one save of all ranks, up to the commit; ``background.py`` runs it while training continues
``reshard.py``      which boxes of a tensor this rank writes, and which it reads
``files.py``        one rank's file in the format of ``torch.distributed.checkpoint``, and a reader that verifies
``shared_file.py``  one file in the format of ``torch.save``, which all ranks write together
``metadata.py``     the index of a folder: which file holds which box of which tensor
``random.py``       states of the random number generators
``full.py``         full state dicts, gathered on rank 0 or on all ranks
``source.py``       any checkpoint, folder or file, read by one process
``continued.py``    the newest checkpoint that can be read without running code in it
``consolidate.py``  a folder to one file; ``torch_file.py`` streams it to disk
``safetensors.py``  export of weights for Hugging Face
``output.py``       atomic output files of the command-line tools
``describe.py``     what ``ls-strategy inspect`` prints
==================  ===============================================================================================
"""
