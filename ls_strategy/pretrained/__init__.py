"""Pretrained weights straight into shards: every rank reads its part of the files while the model is sharded.

Where all ranks need the full model, each reads a part too, and they exchange the parts while the model is loaded.

``header.py``        what the header of a file says, checked
``safetensors.py``   ranges of files, and the index that says which file has which tensor
``together.py``      the parts of files that ranks read for each other
``huggingface.py``   ``from_pretrained`` of transformers on meta; the only file that knows its internals
``load.py``          the same for any module and any safetensors files, by one call

What a program does to the tensors meanwhile (slices, casts, ``cat``) is recorded by `ls_strategy.meta_init`.
"""
