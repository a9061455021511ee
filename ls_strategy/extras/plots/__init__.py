"""Figures by matplotlib for loggers, the planner and the report, and which scalars a logger gets."""
