"""Errors that are not plain ValueError or TypeError."""


class UnsupportedModelError(ValueError):
    """The target is of a kind that tree decoding is not proven right for."""


class NonFiniteLogitsError(RuntimeError):
    """The target gave NaN, +inf or nothing finite where the next token has to be drawn."""
