"""Habits of libraries and published programs, see `tests.dist.test_habits_of_libraries`."""
