"""Waits of ranks for each other: reported while they last, explained, and ended when they can never end."""
