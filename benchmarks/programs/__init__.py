"""Whole programs, as users write them: `start` measures how long each takes to its first event."""
