"""Where the counts of a status end: one that equals its limit means "or more"."""

from holdfast.postgres.reads import MOST, MOST_IN_LANE, MOST_LANES

__all__ = ["MOST", "MOST_IN_LANE", "MOST_LANES"]
