"""Schedules: when a job is submitted again. `timing` is arithmetic, `book` is where they are kept."""
