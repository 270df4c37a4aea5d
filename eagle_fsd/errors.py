"""Errors that are not plain ValueError or TypeError."""


class UnsupportedModelError(ValueError):
    """The target's architecture, attention or cache is not one that tree decoding is proven right for."""


class NonFiniteLogitsError(RuntimeError):
    """The target gave NaN, +inf or nothing finite where the next token has to be drawn."""
