"""Checkpoints: what is in them, how they reach the disk, and how they come back.

``full.py``      one file in Lightning's own format, gathered on rank 0
``commit.py``    a folder is there in full or not at all: temporary names, manifest, checksums, atomic rename
"""
