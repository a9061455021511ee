"""Figures, without a plotting library."""
