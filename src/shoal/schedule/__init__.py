"""Schedules, which submit jobs by the clock: `timing` has the arithmetic, `book` stores them."""
