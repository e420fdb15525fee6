"""Long-context speculative decoding by draft-augmented sparse verification (Dustin, arXiv 2606.24957)."""

from dustin_compile.compatibility import IncompatibleModelError
from dustin_compile.config import DustinConfig
from dustin_compile.generation import GenerationOutput, Stats
from dustin_compile.layer_skip import layer_skip
from dustin_compile.pair import CompiledPair, compile_pair
from dustin_compile.profile import Profile
from dustin_compile.profiling.pipeline import profile_pair
from dustin_compile.runtime import ExportError, load_exported

__all__ = [
    "CompiledPair",
    "DustinConfig",
    "ExportError",
    "GenerationOutput",
    "IncompatibleModelError",
    "Profile",
    "Stats",
    "compile_pair",
    "layer_skip",
    "load_exported",
    "profile_pair",
]
