"""EAGLE-2 tree drafting for stock Hugging Face causal LMs, every node verified exactly or fuzzily.

Shape letters: B batch, P prompt, N tree nodes (root included), K children, D depth, H hidden, V
vocabulary, U draft vocabulary. Divergences and costs are in nats.
"""

from eagle_fsd.acceptance import AcceptanceRule, Exact, Fuzzy, build_rule
from eagle_fsd.config import SamplingConfig, TreeConfig
from eagle_fsd.decoder import GenerationResult, SpeculativeDecoder, Step, Token
from eagle_fsd.errors import NonFiniteLogitsError, UnsupportedModelError

__version__ = "0.1.0"

__all__ = [
    "AcceptanceRule",
    "Exact",
    "Fuzzy",
    "GenerationResult",
    "NonFiniteLogitsError",
    "SamplingConfig",
    "SpeculativeDecoder",
    "Step",
    "Token",
    "TreeConfig",
    "UnsupportedModelError",
    "build_rule",
]
