"""Folders that ``from_pretrained`` opens, from a run or from its checkpoints.

======================  ==============================================================================================
``contents.py``         what such a folder holds; knows how transformers and peft name and convert weights
``target.py``           a save of weights that ends as such a folder
``from_checkpoint.py``  such a folder of a checkpoint
``hub.py``              uploads of such a folder to the Hugging Face Hub
======================  ==============================================================================================
"""
