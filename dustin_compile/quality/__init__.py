"""How much is lost by reading part of the cache: one engine and one set of prompts, where only the selector differs."""
