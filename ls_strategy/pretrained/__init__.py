"""Pretrained weights straight into shards: every rank reads its part of the files while the model is sharded.

Where all ranks need the full model, each reads a part too, and they exchange the parts while the model is loaded.

``safetensors.py``   ranges of files
``recipe.py``        what was done to tensors of files (sliced, transposed, joined, cast), so that a range of the result
                     needs only ranges of the files
``together.py``      the parts of files that ranks read for each other
``huggingface.py``   ``from_pretrained`` of transformers on meta; the only file that knows its internals
``load.py``          the same for any module and any safetensors files, by one call
"""
