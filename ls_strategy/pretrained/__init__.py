"""Pretrained weights straight into shards: every rank reads its part of the files while the model is sharded.

``safetensors.py``   ranges of files
``recipe.py``        what was done to tensors of files (sliced, transposed, joined, cast), so that a range of the result
                     needs only ranges of the files
``huggingface.py``   ``from_pretrained`` of transformers on meta; the only file that knows its internals
``load.py``          the same for any module and any safetensors files, by one call
"""
