"""Figures and charts for loggers, without a plotting library."""
