"""HoldfastError
└── EmbeddedPostgresError   the private server could not be found, made, started or stopped
"""

from holdfast.errors import HoldfastError


class EmbeddedPostgresError(HoldfastError):
    """The embedded server could not do what was asked; the text says why and what to do."""
